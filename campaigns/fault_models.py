"""The networks, data and configurations of the fault campaign: small networks that learn digits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

__all__ = ["BATCH", "MODES", "Configuration", "accuracy", "build", "configurations", "digits", "targets"]

BATCH, TRAINED = 32, 1280

Array = np.ndarray[Any, Any]

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "tensorflow": {
        "graph": {"jit_compile": False},
        "XLA": {"jit_compile": True},
        "eager": {"run_eagerly": True},
        "steps": {"jit_compile": False, "steps_per_execution": 4},
    },
    "jax": {"XLA": {}, "eager": {"run_eagerly": True}, "steps": {"steps_per_execution": 4}},
    "torch": {"eager": {}},
}
"""Modes of a step on each backend, as arguments of `compile`. `steps`: several per execution, which
Keras does not support on PyTorch.
"""

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(5e-3),
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "RMSprop": lambda: keras.optimizers.RMSprop(3e-3),
    "AdamW": lambda: keras.optimizers.AdamW(5e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
    "Nadam": lambda: keras.optimizers.Nadam(5e-3),
    "Adamax": lambda: keras.optimizers.Adamax(1e-2),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-2),
}


@dataclass(frozen=True)
class Configuration:
    """A model, and how it is trained."""

    backend: str
    model: str
    mode: str
    precision: str
    optimizer: str

    @property
    def ways(self) -> tuple[str, ...]:
        """Return how its faults are injected. Compiling a step takes longer than running dozens, so
        a compiled one has `inject` or the other two.
        """
        if self.mode == "eager":
            return ("data", "inject", "flip")
        number = list(MODELS).index(self.model) + list(MODES[self.backend]).index(self.mode)
        return ("inject",) if number % 2 else ("data", "flip")

    @property
    def with_stock(self) -> bool:
        """Whether it is also run without a guard: if both steps round alike, and not all faults are
        made by `inject`.
        """
        return self.mode == "eager" or (self.backend == "tensorflow" and self.mode != "XLA" and "data" in self.ways)

    @property
    def name(self) -> str:
        """Return it as one word for a log."""
        return "/".join(asdict(self).values())


INSTEAD: dict[Configuration, dict[str, str]] = {
    Configuration("tensorflow", "multi-output", "XLA", "mixed_bfloat16", "Adafactor"): {"optimizer": "Adam"},
    Configuration("jax", "transformer", "steps", "mixed_float16", "AdamW"): {"precision": "mixed_bfloat16"},
}
"""Replacements for configurations that stock Keras cannot train: weights of NaN after the first
step; no float16 attention on CPUs.
"""


def configurations(backend: str) -> list[Configuration]:
    """Return every model in every mode of a backend, with precisions and optimizers that cover as
    many pairs as possible.
    """
    chosen, seen = [], set[tuple[str, str]]()
    for model, mode in itertools.product(MODELS, MODES[backend]):
        candidates = [
            Configuration(backend, model, mode, precision, optimizer)
            for precision in _precisions(backend, model)
            for optimizer in OPTIMIZERS
        ]
        if backend == "torch":  # with one mode each precision is a separate configuration
            groups = [[c for c in candidates if c.precision == precision] for precision in _precisions(backend, model)]
        else:
            groups = [candidates]
        for group in groups:
            best = max(group, key=lambda c: len(_pairs(c) - seen))
            seen |= _pairs(best)
            chosen.append(replace(best, **INSTEAD.get(best, {})))
    return chosen


def _pairs(c: Configuration) -> set[tuple[str, str]]:
    return set(itertools.combinations((c.model, c.mode, c.precision, c.optimizer), 2))


def _precisions(backend: str, model: str) -> tuple[str, ...]:
    """Return the precisions of a model; a custom train step with two optimizers does not scale the
    loss.
    """
    return ("float32", "mixed_bfloat16") if model == "GAN" and backend != "jax" else PRECISIONS


# Data


def digits() -> tuple[Array, Array, Array, Array]:
    """Return training and held-out digits, the classes one-hot."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype("float32"), np.eye(10, dtype="float32")[data.target[order]]
    return x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:]


def targets(model: str, x: Array, y: Array) -> Any:
    """Return the targets of a model for these digits."""
    if model == "VAE":
        return {"digit": y, "image": x.copy()}
    if model == "multi-output":
        odd = y @ (np.arange(10, dtype="float32") % 2)
        return {"digit": y, "odd": odd[:, None], "ink": x.mean(1, keepdims=True)}
    return y


# Networks


def head(name: str = "digit") -> Any:
    return layers.Dense(10, dtype="float32", name=name)


def classifier(*body: Any) -> Any:
    return keras.Sequential([keras.Input((64,)), *body, head()])


def mlp() -> Any:
    return classifier(layers.Dense(16, activation="relu"), layers.Dropout(0.1))


def cnn() -> Any:
    convolution = layers.Conv2D(4, 3, use_bias=False)
    return classifier(
        layers.Reshape((8, 8, 1)), convolution, layers.BatchNormalization(momentum=0.9), layers.ReLU(), layers.Flatten()
    )


def rnn() -> Any:
    return classifier(layers.Reshape((8, 8)), layers.GRU(12))


def transformer() -> Any:
    rows = keras.Input((64,))
    tokens = layers.Dense(8)(layers.Reshape((8, 8))(rows))
    attended = layers.LayerNormalization()(tokens + layers.MultiHeadAttention(2, 4)(tokens, tokens))
    return keras.Model(rows, head()(layers.Flatten()(layers.Dense(8, activation="gelu")(attended))))


class Latent(layers.Layer):
    """Samples from the distribution of an encoder, and adds its divergence from the normal one to
    the loss.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        mean, spread = inputs
        spread = ops.tanh(spread)
        self.add_loss(0.01 * ops.mean(ops.cast(ops.exp(spread) + ops.square(mean) - 1.0 - spread, "float32")))
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seeds)
        return mean + ops.exp(0.5 * spread) * noise if training else mean


def vae() -> Any:
    pixels = keras.Input((64,))
    hidden = layers.Dense(16, activation="tanh")(pixels)
    drawn = Latent()([layers.Dense(8)(hidden), layers.Dense(8)(hidden)])
    image = layers.Dense(64, activation="sigmoid", dtype="float32", name="image")(layers.Dense(16, activation="relu")(drawn))
    return keras.Model(pixels, {"digit": head()(drawn), "image": image})


def multi_output() -> Any:
    pixels = keras.Input((64,))
    hidden = layers.Dense(16, activation="relu")(pixels)
    odd = layers.Dense(1, activation="sigmoid", dtype="float32", name="odd")(hidden)
    return keras.Model(pixels, {"digit": head()(hidden), "odd": odd, "ink": layers.Dense(1, dtype="float32", name="ink")(hidden)})


class Gan(keras.Model):
    """A discriminator of ten digits and generated images, and a generator. On JAX one optimizer
    trains both, through a reversed gradient. Elsewhere two optimizers do so in a custom step, in
    which the generator learns from the updated discriminator.
    """

    two_optimizers = keras.backend.backend() != "jax"

    def __init__(self) -> None:
        super().__init__()
        last = layers.Dense(11, dtype="float32", name="digit")
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(12, activation="relu"), layers.Dense(64, activation="sigmoid")])
        self.discriminator = keras.Sequential([keras.Input((64,)), layers.Dense(16, activation="relu"), last])
        self.seeds = keras.random.SeedGenerator(5)
        self.entropy = keras.losses.CategoricalCrossentropy(from_logits=True)
        self.tracker = keras.metrics.Mean("loss")
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.tracker] if self.two_optimizers else super().metrics

    def call(self, x: Any, training: bool = False) -> Any:
        logits = self.discriminator(x)
        if training and not self.two_optimizers:
            drawn = self.draw(x)
            self.add_loss(self.entropy(self.is_drawn(x), self.discriminator(2 * ops.stop_gradient(drawn) - drawn)))
        return logits[:, :10] if not training else logits

    def draw(self, x: Any) -> Any:
        return self.generator(keras.random.normal((ops.shape(x)[0], 4), seed=self.seeds))

    def is_drawn(self, x: Any) -> Any:
        return ops.one_hot(ops.full((ops.shape(x)[0],), 10, "int32"), 11)

    def train_step(self, *args: Any) -> Any:
        if not self.two_optimizers:
            return super().train_step(*args)
        (x, y), = args
        truth = ops.pad(y, [[0, 0], [0, 1]])

        def told_apart() -> Any:
            return self.compute_loss(x, truth, self.discriminator(x)) + self.entropy(self.is_drawn(x), self.discriminator(self.draw(x)))

        def caught() -> Any:
            return -self.entropy(self.is_drawn(x), self.discriminator(self.draw(x)))

        loss = self._update(told_apart, self.discriminator, self.optimizer)
        self._update(caught, self.generator, self.second)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def _update(self, loss_of: Callable[[], Any], network: Any, optimizer: Any) -> Any:
        weights = network.trainable_variables
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_of()
            optimizer.apply(tape.gradient(loss, [v.value for v in weights]), weights)
            return loss
        import torch

        loss = loss_of()
        gradients = torch.autograd.grad(loss, [v.value for v in weights])
        with torch.no_grad():
            optimizer.apply(list(gradients), weights)
        return loss.detach()


MODELS: dict[str, Callable[[], Any]] = {
    "MLP": mlp,
    "CNN+BN": cnn,
    "RNN": rnn,
    "transformer": transformer,
    "GAN": Gan,
    "VAE": vae,
    "multi-output": multi_output,
}


def _padded(y: Any, logits: Any) -> Any:
    """Return the cross entropy of ten classes in eleven logits, the last of which is for generated
    images.
    """
    missing = ops.shape(logits)[-1] - ops.shape(y)[-1]
    return keras.losses.categorical_crossentropy(ops.pad(y, [[0, 0], [0, missing]]), logits, from_logits=True)


def build(c: Configuration) -> Any:
    """Return the compiled model of a configuration, with seeded weights."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(c.precision)
    try:
        model = MODELS[c.model]()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = OPTIMIZERS[c.optimizer]()
    if c.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**12)
    entropy: Any = keras.losses.CategoricalCrossentropy(from_logits=True)
    losses = {
        "GAN": _padded,
        "VAE": {"digit": entropy, "image": "mse"},
        "multi-output": {"digit": entropy, "odd": "binary_crossentropy", "ink": "mse"},
    }
    model.compile(optimizer, losses.get(c.model, entropy), auto_scale_loss=False, **MODES[c.backend][c.mode])
    if isinstance(model, Gan) and model.two_optimizers:
        model.second = OPTIMIZERS[c.optimizer]()
        model.second.build(model.generator.trainable_variables)
        model.optimizer.build(model.discriminator.trainable_variables)
    elif not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


def accuracy(model: Any, x: Array, y: Array) -> float:
    """Return the share of digits that a model classifies correctly."""
    outputs = model(x, training=False)
    logits = keras.ops.convert_to_numpy(outputs["digit"] if isinstance(outputs, dict) else outputs)
    return float(np.mean(logits.argmax(1) == y.argmax(1)))
