"""Typical programs of keras.io, rewritten: small networks, synthetic data, train steps and losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from support import zoo

ROWS = zoo.BATCH * zoo.BATCHES
KINDS: dict[str, Kind] = {}


@dataclass(frozen=True)
class Kind:
    """One program: the constructor of its compiled model, its data, the argument of `fit` with the
    fault, and its backends.
    """

    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    bad: str = "x"
    on: tuple[str, ...] = ("tensorflow", "jax", "torch")


def kind(name: str, data: Callable[[], dict[str, Any]], **more: Any) -> Callable[[Any], Any]:
    """Add a program to the table."""

    def enter(build: Any) -> Any:
        KINDS[name] = Kind(build, data, **more)
        return build

    return enter


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, *shape)).astype("float32")


def whole(high: int, *shape: int, low: int = 0) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, (ROWS, *shape)).astype("int32")


def alone(*shape: int) -> Callable[[], dict[str, Any]]:
    """Return a constructor of data without labels."""
    return lambda: {"x": normal(*shape), "y": np.zeros((ROWS, 1), "float32")}


class Loss(keras.Model):
    """A model whose loss is one of its methods: `loss_of(x, y, y_pred)`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss_of(x, y, y_pred)


def mlp(*sizes: int, features: int = 6) -> Any:
    hidden = [layers.Dense(size, activation="relu") for size in sizes[:-1]]
    return keras.Sequential([keras.Input((features,)), *hidden, layers.Dense(sizes[-1])])


def compiled(model: Any, loss: Any = None, rate: float = 1e-3) -> Any:
    model.compile(keras.optimizers.Adam(rate), loss)
    return model


# Generative


class Critic(keras.Model):
    """WGAN-GP: a critic with a gradient penalty, and a generator, each with its optimizer."""

    def __init__(self):
        super().__init__()
        self.critic, self.maker, self.seeds = mlp(8, 1), mlp(8, 6, features=2), keras.random.SeedGenerator(1)
        self.tracked = keras.metrics.Mean("critic_loss")

    def compile(self, critic_optimizer, maker_optimizer):
        super().compile()
        self.critic_optimizer, self.maker_optimizer = critic_optimizer, maker_optimizer

    @property
    def metrics(self):
        return [self.tracked]

    def train_step(self, data):
        import tensorflow as tf

        real, _ = keras.utils.unpack_x_y_sample_weight(data)[:2]
        noise = keras.random.normal((zoo.BATCH, 2), seed=self.seeds)
        with tf.GradientTape() as tape:
            fake = self.maker(noise, training=True)
            with tf.GradientTape() as inner:
                mixed = 0.5 * (real + fake)
                inner.watch(mixed)
                judged = self.critic(mixed, training=True)
            norm = ops.sqrt(ops.sum(ops.square(inner.gradient(judged, mixed)), 1) + 1e-12)
            loss = ops.mean(self.critic(fake)) - ops.mean(self.critic(real)) + 10.0 * ops.mean(ops.square(norm - 1.0))
        weights = self.critic.trainable_variables
        self.critic_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        with tf.GradientTape() as tape:
            made = -ops.mean(self.critic(self.maker(noise, training=True)))
        weights = self.maker.trainable_variables
        self.maker_optimizer.apply_gradients(zip(tape.gradient(made, weights), weights))
        self.tracked.update_state(loss)
        return {"critic_loss": self.tracked.result()}


@kind("WGAN-GP", alone(6), on=("tensorflow",))
def wgan_gp() -> Any:
    model = Critic()
    model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
    return model


class Autoencoder(Loss):
    """A variational autoencoder; the divergence from the prior is part of its loss."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.seeds = mlp(8, 4), mlp(8, 6, features=2), keras.random.SeedGenerator(2)

    def call(self, x):
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        code = mean + ops.exp(0.5 * log_variance) * keras.random.normal((zoo.BATCH, 2), seed=self.seeds)
        return ops.concatenate([self.decoder(code), mean, log_variance], -1)

    def loss_of(self, x, y, y_pred):
        made, mean, log_variance = y_pred[:, :6], y_pred[:, 6:8], y_pred[:, 8:]
        prior = -0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        return ops.mean(ops.square(x - made)) + 0.1 * prior


@kind("VAE", alone(6))
def vae() -> Any:
    return compiled(Autoencoder())


class Denoiser(Loss):
    """DDIM: predicts the noise in its input at a random time of the schedule."""

    def __init__(self):
        super().__init__()
        self.network, self.seeds = mlp(16, 6, features=7), keras.random.SeedGenerator(3)

    def call(self, x):
        noise = keras.random.normal((zoo.BATCH, 6), seed=self.seeds)
        angle = keras.random.uniform((zoo.BATCH, 1), 0.1, 1.4, seed=self.seeds)
        mixed = ops.cos(angle) * x + ops.sin(angle) * noise
        return self.network(ops.concatenate([mixed, angle], -1)) - noise

    def loss_of(self, x, y, y_pred):
        return ops.mean(ops.abs(y_pred))


@kind("DDIM", alone(6))
def ddim() -> Any:
    return compiled(Denoiser())


# Sequences, graphs


@kind("CTC", lambda: {"x": normal(10, 4), "y": whole(5, 3, low=1)})
def ctc() -> Any:
    inputs = keras.Input((10, 4))
    return compiled(keras.Model(inputs, layers.Dense(6)(layers.GRU(8, return_sequences=True)(inputs))), keras.losses.CTC())


def sentences() -> dict[str, Any]:
    return {"x": [whole(12, 5), whole(12, 4)], "y": whole(12, 4), "sample_weight": np.ones((ROWS, 4), "float32")}


@kind("translation transformer", sentences, bad="sample_weight")
def translation() -> Any:
    source, target = keras.Input((5,), dtype="int32"), keras.Input((4,), dtype="int32")
    encoded = layers.Embedding(12, 8)(source)
    encoded = layers.LayerNormalization()(encoded + layers.MultiHeadAttention(2, 4)(encoded, encoded))
    decoded = layers.Embedding(12, 8)(target)
    decoded = layers.LayerNormalization()(decoded + layers.MultiHeadAttention(2, 4)(decoded, decoded, use_causal_mask=True))
    decoded = layers.LayerNormalization()(decoded + layers.MultiHeadAttention(2, 4)(decoded, encoded))
    return compiled(keras.Model([source, target], layers.Dense(12)(decoded)), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class GraphConvolution(layers.Layer):
    """Means over the neighbours of each node, given features and adjacency, then a Dense layer."""

    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units, activation="relu")

    def call(self, features, adjacency):
        degree = ops.sum(adjacency, -1, keepdims=True)
        return self.dense(ops.matmul(adjacency, features) / ops.maximum(degree, 1.0))


def graphs() -> dict[str, Any]:
    return {"x": [normal(5, 3), (normal(5, 5, seed=2) > 0).astype("float32")], "y": normal(1, seed=3)}


@kind("graph network", graphs)
def graph_network() -> Any:
    features, adjacency = keras.Input((5, 3)), keras.Input((5, 5))
    found = GraphConvolution(4)(GraphConvolution(8)(features, adjacency), adjacency)
    return compiled(keras.Model([features, adjacency], layers.Dense(1)(layers.GlobalAveragePooling1D()(found))), "mse")


@kind("time series", lambda: {"x": normal(12, 3), "y": normal(1, seed=5)})
def time_series() -> Any:
    model = keras.Sequential([keras.Input((12, 3)), layers.Normalization(axis=-1, mean=0.0, variance=1.0), layers.LSTM(8), layers.Dense(1)])
    return compiled(model, "mae")
