"""Programs in which only the learning rate is wrong, for `diverges.py` and, in short form, tests.

The rate of each is 10 to 1000 times too high. `Program.build(rate, seed)` returns everything that a
fit needs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, optimizers
from sklearn.datasets import load_diabetes, load_digits

__all__ = ["PROGRAMS", "Fit", "Program"]

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
STEPS_PER_EPOCH = 57  # of the digits in batches of 32


@dataclass(frozen=True)
class Fit:
    """A compiled model and its training data.

    Attributes:
        steps: steps per epoch, if `x` is an endless pipeline.
        tested: the data to evaluate on, if `x` is a pipeline.
    """

    model: Any
    x: Any
    y: Any
    epochs: int
    batch_size: int | None = 32
    callbacks: Sequence[Any] = ()
    steps: int | None = None
    tested: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: its name.
        rate: its too high learning rate; the factor 1 if the rate is a schedule.
        figure: `accuracy` or `loss`, the measure of its runs.
        make: returns the fit at a rate; the seed is set.
        lowers: the divisors of the rate in the sweep for the best one.
    """

    name: str
    rate: float
    figure: str
    make: Callable[[float], Fit]
    lowers: tuple[int, ...] = field(default=(1, 10, 100, 1000))

    def build(self, rate: float, seed: int) -> Fit:
        """Return a new model with the data, at this rate and seed."""
        fresh(seed)
        return self.make(rate)


def fresh(seed: int) -> None:
    """Clear earlier models, and set all seeds."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)


def finite(model: Any) -> bool:
    """Return whether every weight of a model is finite."""
    return all(np.isfinite(keras.ops.convert_to_numpy(v)).all() for v in model.weights)


@functools.cache
def digits() -> tuple[Any, Any]:
    data = load_digits()
    return (data.data / 16).astype("float32"), data.target


@functools.cache
def language() -> tuple[Any, Any]:
    """Return sequences of a random Markov chain of order 2 over 16 symbols, and the same shifted by one."""
    draw = np.random.default_rng(3)
    table = draw.dirichlet(np.full(16, 0.1), (16, 16))
    text = np.zeros((512, 33), int)
    text[:, :2] = draw.integers(16, size=(512, 2))
    for t in range(2, 33):
        chances = table[text[:, t - 2], text[:, t - 1]].cumsum(1)
        text[:, t] = (draw.random((512, 1)) > chances).sum(1).clip(max=15)
    return text[:, :-1], text[:, 1:]


@functools.cache
def ratings() -> tuple[Any, Any]:
    draw = np.random.default_rng(5)
    users, items = draw.normal(size=(80, 4)), draw.normal(size=(60, 4))
    pairs = draw.integers((80, 60), size=(4000, 2))
    return pairs, (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1, keepdims=True).astype("float32")


@functools.cache
def unscaled() -> tuple[Any, Any]:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(1500, 20)).astype("float32")
    return x, (x @ draw.normal(size=(20, 1)) * 50 + 300).astype("float32")


@functools.cache
def diabetes() -> tuple[Any, Any]:
    data = load_diabetes()
    return (data.data * 20).astype("float32"), ((data.target[:, None] - 150) / 75).astype("float32")


def classified(model: Any, optimizer: Any, x: Any, y: Any, epochs: int = 12, callbacks: Sequence[Any] = (), **compiled: Any) -> Fit:
    model.compile(optimizer, CROSSENTROPY, metrics=["accuracy"], **compiled)
    return Fit(model, x, y, epochs, callbacks=callbacks)


def mlp(optimizer: Callable[[float], Any], activation: str = "relu", depth: int = 2) -> Callable[[float], Fit]:
    def make(rate: float) -> Fit:
        hidden = [layers.Dense(64, activation) for _ in range(depth)]
        return classified(keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)]), optimizer(rate), *digits())

    return make


@contextlib.contextmanager
def half_precision() -> Iterator[None]:
    """Make all layers that are created in this context mixed_float16."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")


def cnn(optimizer: Callable[[float], Any]) -> Callable[[float], Fit]:
    def make(rate: float) -> Fit:
        x, y = digits()
        blocks = [
            layer
            for filters in (8, 16)
            for layer in (layers.Conv2D(filters, 3, padding="same"), layers.BatchNormalization(momentum=0.9), layers.ReLU())
        ]
        model = keras.Sequential([keras.Input((8, 8, 1)), *blocks, layers.GlobalAveragePooling2D(), layers.Dense(10)])
        return classified(model, optimizer(rate), x.reshape(-1, 8, 8, 1), y, 8)

    return make


def recurrent(layer: Any, optimizer: Callable[[float], Any]) -> Callable[[float], Fit]:
    def make(rate: float) -> Fit:
        x, y = digits()
        model = keras.Sequential([keras.Input((8, 8)), layer(32), layers.Dense(10)])
        return classified(model, optimizer(rate), x.reshape(-1, 8, 8), y, 10)

    return make


def transformer(optimizer: Callable[[float], Any]) -> Callable[[float], Fit]:
    def make(rate: float) -> Fit:
        x, y = language()
        inputs = keras.Input((32,), dtype="int32")
        places = layers.Embedding(32, 32)(keras.ops.cumsum(keras.ops.ones_like(inputs), 1) - 1)
        h = layers.Embedding(16, 32)(inputs) + places
        for _ in range(2):
            normed = layers.LayerNormalization()(h)
            h = h + layers.MultiHeadAttention(2, 16)(normed, normed, use_causal_mask=True)
            h = h + layers.Dense(32)(layers.Dense(64, "gelu")(layers.LayerNormalization()(h)))
        model = keras.Model(inputs, layers.Dense(16)(layers.LayerNormalization()(h)))
        model.compile(optimizer(rate), CROSSENTROPY)
        return Fit(model, x, y, 20)

    return make


def factorisation(optimizer: Callable[[float], Any]) -> Callable[[float], Fit]:
    def make(rate: float) -> Fit:
        pairs, y = ratings()
        inputs = keras.Input((2,), dtype="int32")
        user, item = layers.Embedding(80, 8)(inputs[:, 0]), layers.Embedding(60, 8)(inputs[:, 1])
        model = keras.Model(inputs, layers.Dot(1)([user, item]))
        model.compile(optimizer(rate), "mse")
        return Fit(model, pairs, y, 8)

    return make


def autoencoder(optimizer: Callable[[float], Any]) -> Callable[[float], Fit]:
    def make(rate: float) -> Fit:
        x, _ = digits()
        sizes = [layers.Dense(size, "relu") for size in (32, 16, 32)]
        model = keras.Sequential([keras.Input((64,)), *sizes, layers.Dense(64)])
        model.compile(optimizer(rate), "mse")
        return Fit(model, x, x, 12)

    return make


def regression(optimizer: Callable[[float], Any], data: Callable[[], Any] = unscaled, hidden: int = 32) -> Callable[[float], Fit]:
    def make(rate: float) -> Fit:
        x, y = data()
        first = [layers.Dense(hidden, "relu")] if hidden else []
        model = keras.Sequential([keras.Input(x.shape[1:]), *first, layers.Dense(1)])
        model.compile(optimizer(rate), "mse")
        return Fit(model, x, y, 12)

    return make


class Finder(keras.callbacks.Callback):
    """A rate finder without an end: the rate grows by 2% with every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 1.02)


def found(rate: float) -> Fit:
    fit = mlp(momentum)(rate)
    return Fit(fit.model, fit.x, fit.y, 12, callbacks=[Finder()])


def momentum(rate: float) -> Any:
    return optimizers.SGD(rate, momentum=0.9)


def rising(rate: float) -> Any:
    schedule = optimizers.schedules.CosineDecay(rate / 100, 600, warmup_target=rate, warmup_steps=200)
    return optimizers.SGD(schedule, momentum=0.9)


def steps_up(rate: float) -> Any:
    return optimizers.SGD(optimizers.schedules.PiecewiseConstantDecay([150, 300], [rate / 100, rate / 10, rate]), momentum=0.9)


def warmed(rate: float) -> Any:
    return optimizers.Adam(optimizers.schedules.CosineDecay(rate / 100, 400, warmup_target=rate, warmup_steps=100))


PROGRAMS = tuple(
    Program(name, rate, figure, make)
    for name, rate, figure, make in (
        ("mlp-sgd", 30.0, "accuracy", mlp(optimizers.SGD)),
        ("mlp-momentum", 3.0, "accuracy", mlp(momentum)),
        ("mlp-nesterov-x10", 1.0, "accuracy", mlp(lambda rate: optimizers.SGD(rate, momentum=0.9, nesterov=True))),
        ("mlp-adam", 3.0, "accuracy", mlp(optimizers.Adam)),
        ("mlp-adam-x10", 0.1, "accuracy", mlp(optimizers.Adam)),
        ("mlp-rmsprop", 1.0, "accuracy", mlp(optimizers.RMSprop)),
        ("mlp-deep-tanh", 3.0, "accuracy", mlp(momentum, "tanh", 4)),
        ("mlp-float16", 3.0, "accuracy", half_precision()(mlp(momentum))),
        ("mlp-rising", 3.0, "accuracy", mlp(rising)),
        ("mlp-steps-up", 5.0, "accuracy", mlp(steps_up)),
        ("mlp-rate-finder", 0.01, "accuracy", found),
        ("cnn-sgd", 30.0, "accuracy", cnn(optimizers.SGD)),
        ("cnn-momentum", 10.0, "accuracy", cnn(momentum)),
        ("cnn-adam", 3.0, "accuracy", cnn(optimizers.Adam)),
        ("cnn-float16", 30.0, "accuracy", half_precision()(cnn(optimizers.SGD))),
        ("rnn-momentum", 3.0, "accuracy", recurrent(layers.SimpleRNN, momentum)),
        ("lstm-adam", 1.0, "accuracy", recurrent(layers.LSTM, optimizers.Adam)),
        ("gru-rmsprop", 1.0, "accuracy", recurrent(layers.GRU, optimizers.RMSprop)),
        ("transformer-adam", 0.3, "loss", transformer(optimizers.Adam)),
        ("transformer-warmup", 0.3, "loss", transformer(warmed)),
        ("transformer-momentum", 10.0, "loss", transformer(momentum)),
        ("factors-sgd", 300.0, "loss", factorisation(optimizers.SGD)),
        ("factors-adam", 3.0, "loss", factorisation(optimizers.Adam)),
        ("autoencoder-momentum", 30.0, "loss", autoencoder(momentum)),
        ("autoencoder-adam", 1.0, "loss", autoencoder(optimizers.Adam)),
        ("unscaled-sgd", 0.1, "loss", regression(optimizers.SGD)),
        ("unscaled-momentum", 0.01, "loss", regression(momentum)),
        ("linear-sgd", 10.0, "loss", regression(optimizers.SGD, diabetes, 0)),
        ("regression-rmsprop", 1.0, "loss", regression(optimizers.RMSprop, diabetes)),
    )
)
"""The programs, by model and training."""
