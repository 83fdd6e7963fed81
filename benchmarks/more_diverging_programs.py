"""More programs in which only the learning rate is wrong, with other networks and optimizers.

They were written after the detector. They showed three faults in it, which have been corrected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from diverging_programs import Fit, Program, digits
from keras import layers, optimizers
from sklearn.datasets import load_breast_cancer, load_wine

__all__ = ["MORE"]

SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
schedules = optimizers.schedules


def scaled(x: Any) -> Any:
    return ((x - x.mean(0)) / x.std(0)).astype("float32")


@functools.cache
def wine() -> tuple[Any, Any]:
    data = load_wine()
    return scaled(data.data), data.target


@functools.cache
def cancer() -> tuple[Any, Any]:
    data = load_breast_cancer()
    return scaled(data.data), data.target[:, None].astype("float32")


@functools.cache
def reviews() -> tuple[Any, Any]:
    """Return 'texts' of 20 words out of 200; each of 4 subjects has its own words."""
    draw = np.random.default_rng(11)
    subjects = draw.integers(4, size=1600)
    common, own = (
        draw.integers(160, size=(1600, 20)),
        160 + 10 * subjects[:, None] + draw.integers(10, size=(1600, 20)),
    )
    return np.where(draw.random((1600, 20)) < 0.15, own, common), subjects


@functools.cache
def waves() -> tuple[Any, Any]:
    """Return noisy sines of 6 frequencies and any phase."""
    draw = np.random.default_rng(12)
    kinds = draw.integers(6, size=1500)
    at = np.arange(40)[None, :]
    clean = np.sin(0.25 * (kinds[:, None] + 1) * at + draw.uniform(0, 6.3, (1500, 1)))
    return (clean + 0.3 * draw.normal(size=(1500, 40)))[..., None].astype("float32"), kinds


@functools.cache
def additions() -> tuple[Any, Any]:
    """Return sequences of 12 numbers of which two are marked, and the sum of these two."""
    draw = np.random.default_rng(13)
    x = np.zeros((1600, 12, 2), "float32")
    x[..., 0] = draw.random((1600, 12))
    for row in x:
        row[draw.choice(12, 2, replace=False), 1] = 1.0
    return x, (x[..., 0] * x[..., 1]).sum(1, keepdims=True)


@functools.cache
def tags() -> tuple[Any, Any]:
    """Return sequences of 10 out of 20 symbols; the previous one changes the tag of each."""
    draw = np.random.default_rng(14)
    symbols = draw.integers(20, size=(1200, 10))
    before = np.concatenate([np.zeros((1200, 1), int), symbols[:, :-1]], 1)
    return symbols, (symbols + before // 10 * 2) % 5


@functools.cache
def surface() -> tuple[Any, Any]:
    """Return 8 features and a smooth function of 4 of them."""
    draw = np.random.default_rng(15)
    x = draw.uniform(-1, 1, (2400, 8)).astype("float32")
    y = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3] ** 2 + 0.05 * draw.normal(size=2400)
    return x, y[:, None].astype("float32")


@functools.cache
def uncertain() -> tuple[Any, Any]:
    """Return 12 features and one of 24 classes; the features explain about half of its entropy."""
    draw = np.random.default_rng(16)
    x = draw.normal(size=(4000, 12)).astype("float32")
    scores = 1.5 * x @ draw.normal(size=(12, 24)) / 2 + draw.gumbel(size=(4000, 24))
    return x, scores.argmax(1)


@functools.cache
def bags() -> tuple[Any, Any]:
    """Return sets of 9 points in the plane; the class is the quadrant of the largest."""
    draw = np.random.default_rng(17)
    x = draw.normal(size=(1600, 9, 2)).astype("float32")
    far = x[np.arange(1600), (x**2).sum(-1).argmax(1)]
    return x, (far[:, 0] > 0) * 2 + (far[:, 1] > 0)


@functools.cache
def letters() -> tuple[Any, Any]:
    """Return a text of nested repetitions in pieces of 24, and the same shifted by one."""
    draw = np.random.default_rng(18)
    words = ["".join(draw.choice(list("abcdefgh"), draw.integers(3, 6))) for _ in range(8)]
    text = np.array([ord(c) - 97 for c in "i".join(draw.choice(words, 4000))])[: 25 * 500].reshape(
        500, 25
    )
    return text[:, :-1], text[:, 1:]


def stack(data: Any, *hidden: Any, outputs: int = 10, last: Any = None) -> Any:
    return keras.Sequential([keras.Input(data[0].shape[1:]), *hidden, layers.Dense(outputs, last)])


def dense(width: int, depth: int, activation: str = "relu", **more: Any) -> list[Any]:
    return [layers.Dense(width, activation, **more) for _ in range(depth)]


def fitted(
    model: Any,
    optimizer: Any,
    data: Any,
    epochs: int,
    loss: Any = SPARSE,
    batch: int = 32,
    callbacks: Any = (),
    **compiled: Any,
) -> Fit:
    metrics = {} if isinstance(loss, (str, dict)) else {"metrics": ["accuracy"]}
    if isinstance(loss, keras.losses.BinaryCrossentropy):
        metrics = {"metrics": [keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)]}
    model.compile(optimizer, loss, **metrics, **compiled)
    return Fit(model, *data, epochs, batch, callbacks)


class Batches(keras.utils.PyDataset):
    """Batches in another order in each epoch, with a little noise on the inputs."""

    def __init__(self, data: Any, size: int):
        super().__init__()
        self.data, self.size, self.draw = data, size, np.random.default_rng(0)
        self.on_epoch_end()

    def __len__(self) -> int:
        return len(self.data[0]) // self.size

    def __getitem__(self, number: int) -> Any:
        rows = self.order[number * self.size : (number + 1) * self.size]
        x = self.data[0][rows]
        return (x + 0.05 * self.draw.normal(size=x.shape)).astype("float32"), self.data[1][rows]

    def on_epoch_end(self) -> None:
        self.order = self.draw.permutation(len(self.data[0]))


def endless(data: Any, size: int) -> Iterator[Any]:
    draw = np.random.default_rng(1)
    while True:
        rows = draw.integers(len(data[0]), size=size)
        yield data[0][rows], data[1][rows]


def piped(data: Any, size: int) -> Any:
    """Return the data in the usual pipeline of a backend."""
    if keras.backend.backend() == "torch":
        import torch

        whole = torch.utils.data.TensorDataset(*map(torch.as_tensor, data))
        return torch.utils.data.DataLoader(whole, size, shuffle=True)
    try:
        import tensorflow as tf
    except ImportError:
        return Batches(data, size)
    return tf.data.Dataset.from_tensor_slices(data).shuffle(4096).batch(size).prefetch(2)


def with_source(fit: Fit, source: Any, steps: int | None = None) -> Fit:
    return Fit(fit.model, source, None, fit.epochs, None, fit.callbacks, steps, (fit.x, fit.y))


def momentum(rate: Any, **more: Any) -> Any:
    return optimizers.SGD(rate, momentum=0.9, **more)


def wine_relu(rate: float) -> Fit:
    return fitted(
        stack(wine(), *dense(32, 3), outputs=3), optimizers.Adam(rate), wine(), 60, batch=16
    )


def cancer_logistic(rate: float) -> Fit:
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return fitted(stack(cancer(), *dense(24, 2), outputs=1), momentum(rate), cancer(), 40, loss)


def words_mean(rate: float) -> Fit:
    hidden = [layers.Embedding(200, 16), layers.GlobalAveragePooling1D(), layers.Dense(32, "relu")]
    return fitted(stack(reviews(), *hidden, outputs=4), optimizers.Adam(rate), reviews(), 14)


def words_adagrad(rate: float) -> Fit:
    hidden = [layers.Embedding(200, 16), layers.GlobalMaxPooling1D(), layers.Dense(16, "relu")]
    return fitted(stack(reviews(), *hidden, outputs=4), optimizers.Adagrad(rate), reviews(), 20)


def waves_conv(rate: float) -> Fit:
    hidden = [
        layers.Conv1D(16, 5, 2, activation="relu"),
        layers.Conv1D(16, 5, 2, activation="relu"),
        layers.GlobalMaxPooling1D(),
    ]
    fit = fitted(stack(waves(), *hidden, outputs=6), optimizers.AdamW(rate), waves(), 14)
    return with_source(fit, Batches(waves(), 32))


def adding_gru(rate: float) -> Fit:
    return fitted(
        stack(additions(), layers.GRU(24), outputs=1), optimizers.Adam(rate), additions(), 14, "mse"
    )


def tags_lstm(rate: float) -> Fit:
    hidden = [
        layers.Embedding(20, 12),
        layers.Bidirectional(layers.LSTM(16, return_sequences=True)),
    ]
    return fitted(stack(tags(), *hidden, outputs=5), optimizers.RMSprop(rate), tags(), 10)


def surface_huber(rate: float) -> Fit:
    return fitted(
        stack(surface(), *dense(48, 2), outputs=1), optimizers.Nadam(rate), surface(), 12, "huber"
    )


def surface_mae(rate: float) -> Fit:
    return fitted(
        stack(surface(), *dense(48, 2, "elu"), outputs=1),
        optimizers.Adamax(rate),
        surface(),
        12,
        "mae",
    )


def residual_lion(rate: float) -> Fit:
    x, y = digits()
    inputs = keras.Input((64,))
    h = layers.Dense(48)(inputs)
    for _ in range(3):
        h = h + layers.Dense(48)(layers.Dense(48, "gelu")(layers.LayerNormalization()(h)))
    model = keras.Model(inputs, layers.Dense(10)(layers.LayerNormalization()(h)))
    return fitted(model, optimizers.Lion(rate), (x, y), 8)


def pixels_coded(rate: float) -> Fit:
    x, _ = digits()
    conv = [
        layers.Reshape((8, 8, 1)),
        layers.Conv2D(8, 3, 2, "same", activation="relu"),
        layers.Flatten(),
        layers.Dense(12, "relu"),
    ]
    return fitted(
        stack((x,), *conv, outputs=64, last="sigmoid"),
        optimizers.Adam(rate),
        (x, x),
        10,
        "binary_crossentropy",
    )


def endless_stream(rate: float) -> Fit:
    fit = fitted(
        stack(surface(), *dense(32, 2), outputs=1), momentum(rate), surface(), 4, "mse", 16
    )
    return with_source(fit, endless(surface(), 16), 320)


def long_epochs(rate: float) -> Fit:
    return fitted(stack(digits(), *dense(32, 2)), momentum(rate), digits(), 4, batch=4)


def decayed_adam(rate: float) -> Fit:
    return fitted(
        stack(digits(), *dense(48, 3)),
        optimizers.Adam(schedules.ExponentialDecay(rate, 100, 0.9)),
        digits(),
        12,
    )


def restarts(rate: float) -> Fit:
    return fitted(
        stack(digits(), *dense(48, 2)),
        optimizers.SGD(schedules.CosineDecayRestarts(rate, 80)),
        digits(),
        12,
    )


def polynomial(rate: float) -> Fit:
    return fitted(
        stack(waves(), layers.Flatten(), *dense(64, 2), outputs=6),
        optimizers.RMSprop(schedules.PolynomialDecay(rate, 700, rate / 10)),
        waves(),
        16,
    )


def high_floor(rate: float) -> Fit:
    return fitted(
        stack(uncertain(), *dense(48, 2), outputs=24), optimizers.Adam(rate), uncertain(), 8
    )


def two_heads(rate: float) -> Fit:
    x, y = digits()
    inputs = keras.Input((64,))
    h = layers.Dense(48, "relu")(layers.Dense(48, "relu")(inputs))
    model = keras.Model(
        inputs, {"kind": layers.Dense(10, name="kind")(h), "ink": layers.Dense(1, name="ink")(h)}
    )
    targets = {"kind": y, "ink": x.mean(1, keepdims=True)}
    return fitted(model, optimizers.Adam(rate), (x, targets), 10, {"kind": SPARSE, "ink": "mse"})


def half_gelu(rate: float) -> Fit:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        hidden = dense(48, 3, "gelu")
        return fitted(stack(digits(), *hidden), optimizers.Adam(rate), digits(), 10)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def bag_attention(rate: float) -> Fit:
    inputs = keras.Input((9, 2))
    h = layers.Dense(24, "relu")(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 12)(h, h))
    model = keras.Model(
        inputs, layers.Dense(4)(layers.Dense(24, "relu")(layers.GlobalMaxPooling1D()(h)))
    )
    return fitted(model, optimizers.Adam(rate), bags(), 14)


def separable(rate: float) -> Fit:
    x, y = digits()
    blocks = [
        layers.Reshape((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
    ]
    blocks += [
        layers.SeparableConv2D(24, 3, 2, "same", use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
    ]
    return fitted(stack((x,), *blocks), momentum(rate, nesterov=True), (x, y), 8)


def softmax_raw(rate: float) -> Fit:
    x, y = digits()
    return fitted(stack((x,)), optimizers.Adam(rate), (16 * x, y), 12)


def deep_elu(rate: float) -> Fit:
    return fitted(
        stack(cancer(), *dense(32, 6, "elu", kernel_initializer="he_normal"), outputs=1),
        optimizers.Adam(rate),
        cancer(),
        30,
        keras.losses.BinaryCrossentropy(from_logits=True),
    )


def penalised(rate: float) -> Fit:
    hidden = dense(48, 2, kernel_regularizer=keras.regularizers.L2(1e-4))
    return fitted(stack(waves(), layers.Flatten(), *hidden, outputs=6), momentum(rate), waves(), 14)


def clipped_tanh(rate: float) -> Fit:
    return fitted(
        stack(digits(), *dense(48, 3, "tanh")), optimizers.Adam(rate, clipnorm=1.0), digits(), 10
    )


def averaged(rate: float) -> Fit:
    return fitted(
        stack(surface(), *dense(32, 2, "swish"), outputs=1),
        optimizers.RMSprop(rate, use_ema=True, ema_momentum=0.9),
        surface(),
        10,
        "mse",
    )


def letters_rnn(rate: float) -> Fit:
    hidden = [layers.Embedding(9, 8), layers.SimpleRNN(32, return_sequences=True)]
    return fitted(
        stack(letters(), *hidden, outputs=9), optimizers.SGD(rate, clipnorm=5.0), letters(), 30
    )


def smoothed(rate: float) -> Fit:
    x, y = digits()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return fitted(
        stack((x,), *dense(48, 2), layers.Dropout(0.2)),
        momentum(rate),
        (x, np.eye(10, dtype="float32")[y]),
        12,
        loss,
    )


def pipeline(rate: float) -> Fit:
    x, y = digits()
    fit = fitted(
        stack((x,), *dense(64, 2, "leaky_relu")), optimizers.Nadam(rate), (x, y.astype("int32")), 12
    )
    return with_source(fit, piped((x, y.astype("int32")), 32))


def eight_at_once(rate: float) -> Fit:
    several = {} if keras.backend.backend() == "torch" else {"steps_per_execution": 8}
    return fitted(
        stack(surface(), *dense(32, 2), outputs=1), momentum(rate), surface(), 14, "mse", **several
    )


def by_callback(rate: float) -> Fit:
    lower = keras.callbacks.LearningRateScheduler(lambda epoch, now: float(rate) * 0.9**epoch)
    return fitted(
        stack(waves(), layers.Flatten(), *dense(48, 2), outputs=6),
        optimizers.Adam(rate),
        waves(),
        14,
        callbacks=[lower],
    )


def on_plateau(rate: float) -> Fit:
    lower = keras.callbacks.ReduceLROnPlateau("loss", factor=0.7, patience=4)
    return fitted(
        stack(cancer(), *dense(32, 3), outputs=1),
        optimizers.Adam(rate),
        cancer(),
        40,
        keras.losses.BinaryCrossentropy(from_logits=True),
        callbacks=[lower],
    )


MORE = tuple(
    Program(name, rate, figure, make)
    for name, rate, figure, make in (
        ("wine-relu", 1.0, "accuracy", wine_relu),
        ("cancer-logistic", 30.0, "accuracy", cancer_logistic),
        ("words-mean", 3.0, "accuracy", words_mean),
        ("words-adagrad", 100.0, "accuracy", words_adagrad),
        ("waves-conv", 1.0, "accuracy", waves_conv),
        ("adding-gru", 1.0, "loss", adding_gru),
        ("tags-lstm", 1.0, "accuracy", tags_lstm),
        ("surface-huber", 3.0, "loss", surface_huber),
        ("surface-mae", 10.0, "loss", surface_mae),
        ("residual-lion", 0.3, "accuracy", residual_lion),
        ("pixels-coded", 1.0, "loss", pixels_coded),
        ("endless-stream", 3.0, "loss", endless_stream),
        ("long-epochs", 1.0, "accuracy", long_epochs),
        ("decayed-adam", 1.0, "accuracy", decayed_adam),
        ("restarts", 30.0, "accuracy", restarts),
        ("polynomial", 0.3, "accuracy", polynomial),
        ("high-floor", 1.0, "loss", high_floor),
        ("two-heads", 1.0, "loss", two_heads),
        ("half-gelu", 1.0, "accuracy", half_gelu),
        ("bag-attention", 1.0, "accuracy", bag_attention),
        ("separable", 30.0, "accuracy", separable),
        ("softmax-raw", 30.0, "accuracy", softmax_raw),
        ("deep-elu", 1.0, "accuracy", deep_elu),
        ("penalised", 10.0, "accuracy", penalised),
        ("clipped-tanh", 1.0, "accuracy", clipped_tanh),
        ("averaged", 1.0, "loss", averaged),
        ("letters-rnn", 100.0, "loss", letters_rnn),
        ("smoothed", 10.0, "accuracy", smoothed),
        ("pipeline", 1.0, "accuracy", pipeline),
        ("eight-at-once", 3.0, "loss", eight_at_once),
        ("by-callback", 1.0, "accuracy", by_callback),
        ("on-plateau", 1.0, "accuracy", on_plateau),
    )
)
"""The programs, by their name and rate."""
