"""Healthy programs with unusual losses, which `healthy.py` trains plain and guarded.

Their author had not seen the library. They were first run after the rules were final, so the first
run was held out. Now they are in sample.

Plain Keras trains each of them to a normal result. All data are made here or come with
scikit-learn. The docstring of a program describes what is unusual about it, and why that is normal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import diverging_programs
import keras
import numpy as np
from diverging_programs import CROSSENTROPY, fresh, half_precision
from keras import layers, ops, optimizers
from keras.optimizers import schedules

__all__ = ["PROGRAMS", "Program", "Training"]


@dataclass(frozen=True)
class Training:
    """One or several new models with their data.

    Attributes:
        models: the models.
        train: trains them, with these callbacks in each fit.
        metric: returns their result.
    """

    models: tuple[Any, ...]
    train: Callable[[Sequence[Any]], object]
    metric: Callable[[], float]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: its name.
        make: returns the training; the seed is set.
        better: `lower` or `higher`, which metric is the better one.
        tensorflow_only: whether it needs TensorFlow.
    """

    name: str
    make: Callable[[], Training]
    better: str
    tensorflow_only: bool

    def build(self, seed: int = 0) -> Training:
        """Return new models from this seed; the data are always the same."""
        fresh(seed)
        return self.make()


PROGRAMS: list[Program] = []
"""The programs, in the order of this file."""


def program(
    better: str = "lower", tensorflow_only: bool = False
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Add a function to `PROGRAMS`, under its own name."""

    def add(make: Callable[[], Training]) -> Callable[[], Training]:
        PROGRAMS.append(Program(make.__name__, make, better, tensorflow_only))
        return make

    return add


def fitted(
    model: Any,
    metric: Callable[[], float],
    x: Any,
    y: Any = None,
    *,
    first: Sequence[Any] = (),
    **fit: Any,
) -> Training:
    """Return the training of one model by one fit; the callbacks `first` run before the others."""

    def train(callbacks: Sequence[Any]) -> None:
        model.fit(x, y, verbose=0, callbacks=[*first, *callbacks], **fit)

    return Training((model,), train, metric)


# Data and metrics


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def f32(values: Any) -> Any:
    return np.asarray(values, "float32")


def digits() -> tuple[Any, Any]:
    """Return the 1797 digits in random order: pixels (n, 64) from 0 to 1, labels (n,)."""
    x, y = diverging_programs.digits()
    order = rng(1).permutation(len(y))
    return x[order], y[order].astype("int32")


def jittered(draw: np.random.Generator, x: Any) -> Any:
    """Return digits with other contrast, a fifth of the pixels missing, and noise."""
    scaled = x * draw.uniform(0.7, 1.3, (len(x), 1)) * (draw.random(x.shape) > 0.2)
    return f32(scaled + 0.1 * draw.normal(size=x.shape))


def moons(n: int, seed: int = 0, noise: float = 0.06) -> Any:
    """Return points (n, 2) on two half circles."""
    draw = rng(seed)
    t = np.pi * draw.random(n)
    side = draw.integers(0, 2, n)
    first = np.where(side, 1 - np.cos(t), np.cos(t)) - 0.5
    second = np.where(side, 0.5 - np.sin(t), np.sin(t)) - 0.25
    x = np.stack([first, second], 1)
    return f32(x + noise * draw.normal(size=x.shape))


def wasserstein(a: Any, b: Any, directions: int = 64) -> float:
    """Return the sliced Wasserstein-1 distance of two samples of the same size."""
    along = rng(7).normal(size=(a.shape[1], directions))
    along /= np.linalg.norm(along, axis=0)
    return float(np.mean(np.abs(np.sort(a @ along, 0) - np.sort(b @ along, 0))))


def nearest_accuracy(known: Any, labels: Any, points: Any, truth: Any) -> float:
    """Return the accuracy of the label of the nearest known point by cosine."""

    def unit(a: Any) -> Any:
        return a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-9)

    return float(np.mean(labels[np.argmax(unit(points) @ unit(known).T, 1)] == truth))


def accuracy(model: Any, x: Any, y: Any) -> Callable[[], float]:
    def metric() -> float:
        predicted = model.predict(x, verbose=0, batch_size=512)
        return float(np.mean(np.argmax(predicted, -1) == y))

    return metric


def evaluated(model: Any, x: Any, y: Any) -> Callable[[], float]:
    """Return a function that measures the loss on these data."""

    def metric() -> float:
        return float(np.ravel(model.evaluate(x, y, verbose=0, batch_size=256))[0])

    return metric


def mlp(
    inputs: int,
    *sizes: int,
    activation: str = "relu",
    norm: bool = False,
    output: str | None = None,
    dropout: float = 0.0,
    name: str | None = None,
    kernel: str = "glorot_uniform",
) -> Any:
    stack: list[Any] = [keras.Input((inputs,))]
    for size in sizes[:-1]:
        stack.append(layers.Dense(size, kernel_initializer=kernel))
        if norm:
            stack.append(layers.BatchNormalization())
        stack.append(layers.Activation(activation))
        if dropout:
            stack.append(layers.Dropout(dropout))
    stack.append(layers.Dense(sizes[-1], activation=output))
    return keras.Sequential(stack, name=name)


# Adversarial networks


@functools.cache
def gan_classes() -> tuple[Any, Any]:
    """Return a GAN and a Wasserstein GAN with gradient penalty, each with its own train step."""
    import tensorflow as tf

    class GAN(keras.Model):
        def __init__(self, generator: Any, critic: Any, noise: int):
            super().__init__()
            self.generator, self.critic, self.noise = generator, critic, noise

        def compile(self, generator_optimizer: Any, critic_optimizer: Any) -> None:
            super().compile()
            self.generator_optimizer = generator_optimizer
            self.critic_optimizer = critic_optimizer

        def call(self, z: Any) -> Any:
            return self.generator(z)

        def descend(self, tape: Any, loss: Any, network: Any, optimizer: Any) -> None:
            variables = network.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

        def train_step(self, real: Any) -> Any:
            def bce(label: float, logits: Any) -> Any:
                labels = label * tf.ones_like(logits)
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
                return tf.reduce_mean(losses)

            z = tf.random.normal((tf.shape(real)[0], self.noise))
            with tf.GradientTape() as tape:
                of_real = bce(0.9, self.critic(real, training=True))
                fake = self.generator(z, training=True)
                d_loss = of_real + bce(0.0, self.critic(fake, training=True))
            self.descend(tape, d_loss, self.critic, self.critic_optimizer)
            with tf.GradientTape() as tape:
                fake = self.generator(z, training=True)
                g_loss = bce(1.0, self.critic(fake, training=True))
            self.descend(tape, g_loss, self.generator, self.generator_optimizer)
            return {"d_loss": d_loss, "g_loss": g_loss}

    class WGAN(GAN):
        critic_steps, penalty = 3, 10.0

        def train_step(self, real: Any) -> Any:
            n = tf.shape(real)[0]
            for _ in range(self.critic_steps):
                fake = self.generator(tf.random.normal((n, self.noise)), training=True)
                part = tf.random.uniform((n, 1))
                with tf.GradientTape() as tape:
                    x = part * real + (1 - part) * fake
                    with tf.GradientTape() as inner:
                        inner.watch(x)
                        score = self.critic(x, training=True)
                    norm = tf.sqrt(tf.reduce_sum(inner.gradient(score, x) ** 2, 1) + 1e-12)
                    of_fake = tf.reduce_mean(self.critic(fake, training=True))
                    distance = of_fake - tf.reduce_mean(self.critic(real, training=True))
                    d_loss = distance + self.penalty * tf.reduce_mean((norm - 1) ** 2)
                self.descend(tape, d_loss, self.critic, self.critic_optimizer)
            with tf.GradientTape() as tape:
                fake = self.generator(tf.random.normal((n, self.noise)), training=True)
                g_loss = -tf.reduce_mean(self.critic(fake, training=True))
            self.descend(tape, g_loss, self.generator, self.generator_optimizer)
            return {"loss": d_loss, "g_loss": g_loss, "wasserstein": -distance}

    return GAN, WGAN


@program(tensorflow_only=True)
def gan_ring8_bce() -> Training:
    """Neither loss keeps falling: generator and discriminator balance each other."""
    gan, _ = gan_classes()
    draw = rng(0)
    k = draw.integers(0, 8, 8000)
    ring = 2 * np.stack([np.cos(k * np.pi / 4), np.sin(k * np.pi / 4)], 1)
    x = f32(ring + 0.05 * draw.normal(size=(8000, 2)))
    model = gan(mlp(8, 64, 64, 2), mlp(2, 64, 64, 1, activation="leaky_relu"), 8)
    model.compile(optimizers.Adam(1e-3, beta_1=0.5), optimizers.Adam(1e-3, beta_1=0.5))
    z = f32(rng(5).normal(size=(2000, 8)))
    model(z[:2])

    def metric() -> float:
        return wasserstein(ops.convert_to_numpy(model.generator(z)), x[:2000])

    return fitted(model, metric, x, batch_size=128, epochs=20)


@program(tensorflow_only=True)
def wgan_gp_digits() -> Training:
    """The loss is below zero and may rise: it is minus a distance, plus a penalty."""
    _, wgan = gan_classes()
    x, _ = digits()
    generator = mlp(16, 128, 128, 64, output="sigmoid")
    model = wgan(generator, mlp(64, 128, 128, 1, activation="leaky_relu"), 16)
    betas = {"beta_1": 0.0, "beta_2": 0.9}
    model.compile(optimizers.Adam(1e-3, **betas), optimizers.Adam(1e-3, **betas))
    z = f32(rng(5).normal(size=(1700, 16)))
    model(z[:2])

    def metric() -> float:
        return wasserstein(ops.convert_to_numpy(model.generator(z)), x[:1700])

    return fitted(model, metric, x, batch_size=64, epochs=22)


@program(better="higher", tensorflow_only=True)
def dann_adversarial_ramp() -> Training:
    """The domain loss rises to log 2: this is the aim of the reversed gradient, which a callback
    raises.
    """
    import tensorflow as tf

    strength = keras.Variable(0.0, trainable=False, name="lam")

    class Reverse(layers.Layer):
        def call(self, x: Any) -> Any:
            @tf.custom_gradient
            def reversed_gradient(v: Any) -> Any:
                return tf.identity(v), lambda d: -strength.value * d

            return reversed_gradient(x)

    x, y = digits()
    draw = rng(2)
    shift = f32(draw.normal(size=64) * 0.3)
    mixing = f32(np.eye(64) + 0.10 * draw.normal(size=(64, 64)))
    source, source_labels = x[:900], y[:900]
    target, target_labels = x[900:] @ mixing + shift, y[900:]
    inputs = keras.Input((64,))
    h = layers.Dense(96, activation="relu")(inputs)
    h = layers.Dense(48, activation="tanh")(h)
    classes = layers.Dense(10, name="cls")(h)
    domain = layers.Dense(1, name="dom")(layers.Dense(48, activation="relu")(Reverse()(h)))
    model = keras.Model(inputs, {"cls": classes, "dom": domain})
    losses = {"cls": CROSSENTROPY, "dom": keras.losses.BinaryCrossentropy(from_logits=True)}
    model.compile(optimizers.Adam(1e-3), losses, loss_weights={"cls": 2.0, "dom": 1.0})
    both = np.concatenate([source, target])
    n = len(both)
    of_source = f32(np.arange(n) < 900)
    labels = np.concatenate([source_labels, np.zeros(n - 900, "int32")])

    def raise_strength(epoch: int, logs: Any = None) -> None:
        strength.assign(0.2 * (2 / (1 + np.exp(-10 * epoch / 30)) - 1))

    def metric() -> float:
        def right(x: Any, y: Any) -> Any:
            return np.mean(np.argmax(model.predict(x, verbose=0)["cls"], 1) == y)

        return float(right(source, source_labels) + right(target, target_labels)) / 2

    return fitted(
        model,
        metric,
        both,
        {"cls": labels, "dom": of_source[:, None]},
        first=[keras.callbacks.LambdaCallback(on_epoch_begin=raise_strength)],
        sample_weight={"cls": of_source, "dom": np.ones(n, "float32")},
        batch_size=64,
        epochs=30,
    )


# Generative models


@program()
def ddpm_moons() -> Training:
    """The loss stays near 0.33 for the whole run: noise cannot be predicted any better."""
    steps = 50
    beta = np.linspace(1e-3, 0.15, steps)
    kept = np.cumprod(1 - beta)
    x = moons(8000)

    def embedded(t: Any) -> Any:
        angle = t[:, None] / steps * 2 ** np.arange(5)
        return f32(np.concatenate([np.sin(angle), np.cos(angle)], 1))

    model = mlp(12, 128, 128, 2, activation="silu")
    model.compile(optimizers.Adam(2e-3), "mse")

    def batches() -> Iterator[Any]:
        draw = rng(1)
        while True:
            batch = x[draw.integers(0, len(x), 128)]
            t = draw.integers(0, steps, 128)
            noise = draw.normal(size=batch.shape)
            noisy = np.sqrt(kept[t])[:, None] * batch + np.sqrt(1 - kept[t])[:, None] * noise
            yield f32(np.concatenate([noisy, embedded(t)], 1)), f32(noise)

    def metric() -> float:
        draw = rng(9)
        z = draw.normal(size=(1500, 2))
        for t in range(steps)[::-1]:
            inputs = f32(np.concatenate([z, embedded(np.full(1500, t))], 1))
            noise = model.predict_on_batch(inputs)
            z = (z - beta[t] / np.sqrt(1 - kept[t]) * noise) / np.sqrt(1 - beta[t])
            z = z + (np.sqrt(beta[t]) * draw.normal(size=z.shape) if t else 0)
        return wasserstein(np.clip(z, -9, 9), x[:1500])

    return fitted(model, metric, batches(), steps_per_epoch=150, epochs=12)


@program()
def realnvp_flow_negative_nll() -> Training:
    """The loss goes well below zero: on narrow data the log-density is above zero."""

    class Flow(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.nets = [mlp(1, 32, 32, 2, activation="tanh") for _ in range(8)]
            zero = keras.initializers.Constant(0.0)
            self.scale = self.add_weight(shape=(2,), initializer=zero, name="ls")

        def call(self, x: Any) -> Any:
            x = x * ops.exp(self.scale)
            log_det = ops.sum(self.scale)
            for k, net in enumerate(self.nets):
                a, b = (x[:, :1], x[:, 1:]) if k % 2 else (x[:, 1:], x[:, :1])
                s, t = ops.split(net(a), 2, axis=1)
                s = 2 * ops.tanh(s)
                b = b * ops.exp(s) + t
                log_det = log_det + s
                x = ops.concatenate([a, b] if k % 2 else [b, a], 1)
            return ops.concatenate([x, log_det * ops.ones_like(x[:, :1])], 1)

    def nll(y: Any, z: Any) -> Any:
        return 0.5 * ops.sum(z[:, :2] ** 2, 1) + 1.8379 - z[:, 2]

    x = moons(6000, noise=0.03) * 0.1
    model = Flow()
    model(x[:2])
    model.compile(optimizers.Adam(2e-3), nll)
    y = np.zeros((len(x), 1), "float32")
    held_out = moons(2000, 3, 0.03) * 0.1
    return fitted(model, evaluated(model, held_out, y[:2000]), x, y, batch_size=100, epochs=18)


@program()
def betavae_kl_annealing() -> Training:
    """The loss doubles after eight epochs: the weight of the KL term is raised from zero."""

    class VAE(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = mlp(64, 128, 16)
            self.decoder = mlp(8, 128, 64, output="sigmoid")
            self.beta = self.add_weight(shape=(), initializer="zeros", trainable=False, name="beta")
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x: Any, training: bool = False) -> Any:
            mean, log_var = ops.split(self.encoder(x), 2, axis=1)
            z = mean
            if training:
                noise = keras.random.normal(ops.shape(mean), seed=self.seed)
                z = mean + ops.exp(0.5 * log_var) * noise
            kl = ops.sum(0.5 * (mean**2 + ops.exp(log_var) - 1 - log_var), 1)
            self.add_loss(self.beta * ops.mean(kl))
            return self.decoder(z)

    x, _ = digits()
    train, held_out = x[:1500], x[1500:]
    model = VAE()
    model(x[:2])
    model.compile(optimizers.Adam(2e-3), lambda y, p: ops.sum((y - p) ** 2, 1) / 0.1)

    def anneal(epoch: int, logs: Any = None) -> None:
        model.beta.assign(0.0 if epoch < 8 else min(4.0, 0.5 * (epoch - 7)))

    def metric() -> float:
        return float(np.mean((model.predict(held_out, verbose=0) - held_out) ** 2))

    first = [keras.callbacks.LambdaCallback(on_epoch_begin=anneal)]
    return fitted(model, metric, train, train, first=first, batch_size=32, epochs=25)


# Contrastive and metric learning


@program(better="higher")
def simclr_ntxent_digits() -> Training:
    """The loss begins near log 127 and stays above 1: each view has 126 others to differ from."""
    x, y = digits()
    encoder = mlp(96, 128, 64)
    head = mlp(64, 64, 32)
    inputs = keras.Input((2, 96))  # 32 of the features are noise, drawn afresh for each view

    def view(draw: np.random.Generator, batch: Any) -> Any:
        return f32(np.concatenate([jittered(draw, batch), draw.normal(size=(len(batch), 32))], 1))

    def projected(v: Any) -> Any:
        return head(ops.relu(encoder(v)))

    seen = view(rng(6), x)
    first, second = projected(inputs[:, 0]), projected(inputs[:, 1])
    model = keras.Model(inputs, layers.Concatenate()([first, second]))

    def nt_xent(_: Any, z: Any) -> Any:
        a, b = ops.split(z, 2, axis=1)
        z = ops.normalize(ops.concatenate([a, b], 0), axis=1)
        n = ops.shape(a)[0]
        logits = ops.matmul(z, ops.transpose(z)) / 0.1 - 1e4 * ops.eye(2 * n)
        row = ops.arange(n)
        partner = ops.concatenate([row + n, row], 0)
        return ops.mean(ops.sparse_categorical_crossentropy(partner, logits, from_logits=True))

    model.compile(optimizers.Adam(1e-3), nt_xent)

    def batches() -> Iterator[Any]:
        draw = rng(1)
        while True:
            batch = x[draw.integers(0, 1200, 64)]
            views = np.stack([view(draw, batch), view(draw, batch)], 1)
            yield views, np.zeros((64, 1), "float32")

    def metric() -> float:
        """Return the accuracy on the other digits, from 100 labels."""
        code = np.maximum(encoder.predict(seen, verbose=0), 0)
        return nearest_accuracy(code[:100], y[:100], code[1200:], y[1200:])

    return fitted(model, metric, batches(), steps_per_epoch=60, epochs=15)


@program(better="higher")
def triplet_batchhard_margin() -> Training:
    """The loss stays near its margin of 0.3 for a long time: the hardest triplets separate late."""
    x, y = digits()
    draw = rng(4)
    x = f32(np.concatenate([x, 1.5 * draw.normal(size=(len(x), 64))], 1))  # half of it is noise
    model = mlp(128, 128, 32)

    def batch_hard(labels: Any, z: Any) -> Any:
        labels = ops.reshape(labels, (-1,))
        z = ops.normalize(z, axis=1)
        distance = ops.sqrt(ops.maximum(2 - 2 * ops.matmul(z, ops.transpose(z)), 1e-8))
        same = ops.cast(labels[:, None] == labels[None], "float32")
        apart = ops.max(distance * same, 1) - ops.min(distance + 1e3 * same, 1)
        return ops.mean(ops.relu(apart + 0.3))

    model.compile(optimizers.Adam(1e-3), batch_hard)

    def metric() -> float:
        code = model.predict(x, verbose=0)
        return nearest_accuracy(code[:1200], y[:1200], code[1200:], y[1200:])

    return fitted(model, metric, x[:1200], y[:1200], batch_size=60, epochs=40)


# Physics


@program(tensorflow_only=True)
def pinn_damped_oscillator() -> Training:
    """The loss contains second derivatives and begins at 26: initial values have weights of up to
    100.
    """
    import tensorflow as tf

    class PINN(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(1, 32, 32, 32, 1, activation="tanh")

        def call(self, t: Any) -> Any:
            with tf.GradientTape() as second:
                second.watch(t)
                with tf.GradientTape() as first:
                    first.watch(t)
                    u = self.net(t)
                du = first.gradient(u, t)
            ddu = second.gradient(du, t)
            start = tf.zeros((1, 1))
            with tf.GradientTape() as tape:
                tape.watch(start)
                u0 = self.net(start)
            self.add_loss(tf.reduce_mean((ddu + 0.6 * du + 9.0 * u) ** 2))
            self.add_loss(100 * tf.reduce_mean((u0 - 1) ** 2))
            self.add_loss(10 * tf.reduce_mean(tape.gradient(u0, start) ** 2))
            return u

    t = f32(3 * rng(0).random((2000, 1)))
    model = PINN()
    model(tf.constant(t[:2]))
    model.compile(optimizers.Adam(schedules.CosineDecay(5e-3, 1600)))
    grid = f32(np.linspace(0, 3, 200)[:, None])
    w = np.sqrt(9 - 0.09)
    exact = np.exp(-0.3 * grid) * (np.cos(w * grid) + 0.3 / w * np.sin(w * grid))

    def metric() -> float:
        return float(np.sqrt(np.mean((model.net.predict(grid, verbose=0) - exact) ** 2)))

    return fitted(model, metric, t, batch_size=50, epochs=40)


# Continual learning, transfer, curricula


@program(better="higher")
def continual_permuted_digits_five_fits() -> Training:
    """The loss jumps four times: five tasks in five fits, and the last one counts."""
    x, y = digits()
    orders = [rng(10 + k).permutation(64) for k in range(5)]
    model = mlp(64, 128, 64, 10)
    model.compile(optimizers.SGD(0.1, momentum=0.9), CROSSENTROPY)

    def train(callbacks: Sequence[Any]) -> None:
        for order in orders:
            model.fit(
                x[:1400][:, order],
                y[:1400],
                batch_size=32,
                epochs=6,
                verbose=0,
                callbacks=[*callbacks],
            )

    return Training((model,), train, accuracy(model, x[1400:][:, orders[-1]], y[1400:]))


@program(better="higher")
def freeze_unfreeze_bn_batch4() -> Training:
    """The loss jumps twice, then in batches of 4: a new head, and a base that is unfrozen."""
    x, y = digits()
    base = mlp(64, 96, 48, 48, norm=True, output="relu", name="base")
    first = y < 5
    inputs = keras.Input((64,))
    pretrained = keras.Model(inputs, layers.Dense(5)(base(inputs)))
    inputs = keras.Input((64,))
    model = keras.Model(inputs, layers.Dense(5)(base(inputs)))
    others, labels = x[~first], y[~first] - 5
    small, small_labels = others[:400], labels[:400]

    def train(callbacks: Sequence[Any]) -> None:
        quiet: dict[str, Any] = {"verbose": 0, "callbacks": [*callbacks]}
        pretrained.compile(optimizers.Adam(2e-3), CROSSENTROPY)
        pretrained.fit(x[first], y[first], batch_size=32, epochs=5, **quiet)
        base.trainable = False
        model.compile(optimizers.Adam(1e-2), CROSSENTROPY)
        model.fit(small, small_labels, batch_size=4, epochs=4, **quiet)
        base.trainable = True
        model.compile(optimizers.Adam(1e-3), CROSSENTROPY)
        model.fit(small, small_labels, batch_size=4, epochs=6, **quiet)

    return Training((pretrained, model), train, accuracy(model, others[400:], labels[400:]))


@program(better="higher")
def hard_first_then_easy_curriculum() -> Training:
    """The loss begins at its ceiling: the noisiest examples come first, unshuffled."""
    x, y = digits()
    noise = np.linspace(1.6, 0.05, 1400)[:, None] * rng(3).normal(size=(1400, 64))
    model = mlp(64, 128, 64, 10)
    model.compile(optimizers.Adam(1e-3), CROSSENTROPY)
    return fitted(
        model,
        accuracy(model, x[1400:], y[1400:]),
        f32(x[:1400] + noise),
        y[:1400],
        batch_size=16,
        epochs=14,
        shuffle=False,
    )


@program(better="higher")
def distill_dropout90_teacher() -> Training:
    """Dropout of 0.9 makes a teacher's loss noisy; that of its student is scaled by 16."""
    x, y = digits()
    train_x, train_y = x[:1400], y[:1400]
    teacher = mlp(64, 512, 256, 10, dropout=0.9)
    student = mlp(64, 32, 10)
    temperature = 4.0

    def distilled(q: Any, logits: Any) -> Any:
        terms = q * (ops.log(q + 1e-8) - ops.log_softmax(logits / temperature))
        return temperature * temperature * ops.mean(ops.sum(terms, -1))

    def train(callbacks: Sequence[Any]) -> None:
        fit: dict[str, Any] = {"batch_size": 32, "epochs": 20, "verbose": 0}
        teacher.compile(optimizers.Adam(1e-3), CROSSENTROPY)
        teacher.fit(train_x, train_y, callbacks=[*callbacks], **fit)
        soft = ops.softmax(teacher.predict(train_x, verbose=0) / temperature)
        student.compile(optimizers.Adam(2e-3), distilled)
        student.fit(train_x, ops.convert_to_numpy(soft), callbacks=[*callbacks], **fit)

    return Training((teacher, student), train, accuracy(student, x[1400:], y[1400:]))


# Sequences


@program()
def gru_adding_task_plateau() -> Training:
    """The loss stays near 1/6, the variance of the target, and then drops at once."""
    draw = rng(0)
    n, length = 3200, 32
    values = draw.random((n, length))
    marks = np.zeros((n, length))
    row = np.arange(n)
    a = draw.integers(0, length // 2, n)
    b = draw.integers(length // 2, length, n)
    marks[row, a] = 1
    marks[row, b] = 1
    x = f32(np.stack([values, marks], 2))
    y = f32(values[row, a] + values[row, b])[:, None]
    model = keras.Sequential([keras.Input((length, 2)), layers.GRU(32), layers.Dense(1)])
    model.compile(optimizers.Adam(4e-3, clipnorm=1.0), "mse")
    metric = evaluated(model, x[2800:], y[2800:])
    return fitted(model, metric, x[:2800], y[:2800], batch_size=50, epochs=12)


@program(better="higher")
def parity3_of_20_sudden_drop() -> Training:
    """The loss stays at log 2 and then drops at once: two of three bits contain no information."""
    draw = rng(0)
    x = f32(2 * draw.integers(0, 2, (6000, 20)) - 1)
    y = ((x[:, 2] * x[:, 7] * x[:, 11]) > 0).astype("int32")
    model = mlp(20, 128, 2)
    model.compile(optimizers.SGD(0.03, momentum=0.8), CROSSENTROPY)
    metric = accuracy(model, x[5000:], y[5000:])
    return fitted(model, metric, x[:5000], y[:5000], batch_size=50, epochs=25)


@program()
def ragged_gru_batch1() -> Training:
    """The loss jumps from step to step: a batch is one sequence, of 3 to 20 steps."""
    draw = rng(0)
    w = np.array([1.0, -0.7, 0.4])
    sequences = [f32(draw.normal(size=(1, draw.integers(3, 21), 3))) for _ in range(440)]
    targets = [f32([[np.sum(np.tanh(s[0] @ w))]]) for s in sequences]
    model = keras.Sequential([keras.Input((None, 3)), layers.GRU(16), layers.Dense(1)])
    model.compile(optimizers.RMSprop(3e-3), "mse")

    def batches() -> Iterator[Any]:
        while True:
            yield from zip(sequences[:400], targets[:400])

    def metric() -> float:
        pairs = zip(sequences[400:], targets[400:])
        return float(
            np.mean([(ops.convert_to_numpy(model(s))[0, 0] - t[0, 0]) ** 2 for s, t in pairs])
        )

    data: Any = batches()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        shapes = (tf.TensorSpec((1, None, 3)), tf.TensorSpec((1, 1)))
        data = tf.data.Dataset.from_generator(batches, output_signature=shapes)
    return fitted(model, metric, data, steps_per_epoch=400, epochs=4)


@program(better="higher")
def masked_lm_tiny_transformer() -> Training:
    """The loss stays at that of word frequencies until attention learns to copy."""
    draw = rng(0)
    words, length = 24, 16
    chances = 1 / np.arange(1, words)
    chances /= chances.sum()
    pattern = draw.choice(np.arange(1, words), size=(4000, 4), p=chances)
    text = np.tile(pattern, (1, 4))
    masked = draw.random(text.shape) < 0.2
    given = np.where(masked, 0, text).astype("int32")
    inputs = keras.Input((length,), dtype="int32")
    tokens = layers.Embedding(words, 32)(inputs)
    places = layers.Embedding(length, 32)(ops.arange(length))  # random, and not trained
    h = tokens + ops.stop_gradient(places)
    for _ in range(2):
        normed = layers.LayerNormalization()(h)
        h = h + layers.MultiHeadAttention(2, 16)(normed, normed)
        normed = layers.LayerNormalization()(h)
        h = h + layers.Dense(32)(layers.Dense(64, activation="gelu")(normed))
    model = keras.Model(inputs, layers.Dense(words)(layers.LayerNormalization()(h)))
    model.compile(optimizers.AdamW(2e-3), CROSSENTROPY)
    text = text.astype("int32")

    def metric() -> float:
        guess = np.argmax(model.predict(given[3600:], verbose=0), -1)
        return float(np.mean((guess == text[3600:])[masked[3600:]]))

    weight = f32(masked)[:3600]
    return fitted(
        model,
        metric,
        given[:3600],
        text[:3600],
        sample_weight=weight,
        batch_size=40,
        epochs=5,
    )


@program()
def growing_series_in_order_raw_1e6() -> Training:
    """The loss is 1e9 and grows within an epoch: sales grow forty-fold, read in order."""
    draw = rng(0)
    n = 4000
    t = np.arange(n)
    season = 1 + 0.2 * np.sin(2 * np.pi * t / 30)
    sales = 5e4 * np.exp(3.7 * t / n) * season * np.exp(0.05 * draw.normal(size=n))
    x = f32(np.stack([sales[k : n - 30 + k] for k in range(30)], 1) / 1e6)
    y = f32(sales[30:][:, None])
    hidden = layers.Dense(32, activation="relu")
    model = keras.Sequential([keras.Input((30,)), hidden, layers.Dense(1), layers.Rescaling(1e6)])
    model.compile(optimizers.Adam(1e-3), "mse")

    def metric() -> float:
        return float(np.sqrt(np.mean((model.predict(x[3600:], verbose=0) - y[3600:]) ** 2)))

    return fitted(model, metric, x[:3600], y[:3600], batch_size=16, epochs=5, shuffle=False)


# Rare, censored and counted targets


@program(better="higher")
def rare_1_in_2000_focal() -> Training:
    """Most losses are tiny and few are large: one example in 2000 is positive."""
    draw = rng(0)
    n = 60000
    y = (draw.random(n) < 1 / 2000).astype("float32")
    y[:15] = 1
    y[40000:40015] = 1
    direction = draw.normal(size=12)
    x = f32(draw.normal(size=(n, 12)) + 1.4 * y[:, None] * direction)
    model = mlp(12, 32, 1, output="sigmoid")
    loss = keras.losses.BinaryFocalCrossentropy(apply_class_balancing=True, alpha=0.9, gamma=2.0)
    model.compile(optimizers.Adam(2e-3), loss)

    def metric() -> float:
        from sklearn.metrics import average_precision_score

        score = model.predict(x[40000:], verbose=0, batch_size=1000)[:, 0]
        return float(average_precision_score(y[40000:], score))

    return fitted(model, metric, x[:40000], y[:40000], batch_size=64, epochs=3)


@program(better="higher")
def survival_weibull_90pct_censored() -> Training:
    """The loss hardly falls: nine in ten times are censored and contain little information."""
    draw = rng(0)
    n = 4000
    x = f32(draw.normal(size=(n, 8)))
    scale = np.exp(3 + 0.8 * x[:, 0] - 0.6 * x[:, 1] * x[:, 2] + 0.4 * x[:, 3])
    times = scale * draw.weibull(1.5, n)
    censored = draw.exponential(4.0, n)
    y = f32(np.stack([np.minimum(times, censored) + 1e-3, times < censored], 1))

    def nll(y: Any, p: Any) -> Any:
        log_scale, shape = 1.0 + p[:, 0], ops.softplus(p[:, 1] + 0.5)
        u = ops.log(y[:, 0]) - log_scale
        hazard = ops.exp(ops.clip(shape * u, -30, 20))
        return hazard - y[:, 1] * (ops.log(shape) - log_scale + (shape - 1) * u)

    model = mlp(8, 48, 48, 2)
    model.compile(optimizers.Adam(2e-3), nll)

    def metric() -> float:
        """Return the concordance: the share of pairs in the right order."""
        p, t = model.predict(x[3000:], verbose=0)[:, 0], times[3000:]
        return float(np.mean((p[:500] > p[500:]) == (t[:500] > t[500:])))

    return fitted(model, metric, x[:3000], y[:3000], batch_size=32, epochs=8)


@program()
def zero_inflated_poisson_exposure_rmsprop() -> Training:
    """The loss is below zero and hardly falls: the likelihood of counts has no constant."""
    draw = rng(0)
    n = 8000
    x = f32(draw.normal(size=(n, 6)))
    exposure = np.exp(draw.normal(size=n))
    rate = exposure * np.exp(0.5 + 0.8 * x[:, 0] - 0.5 * x[:, 1])
    empty = draw.random(n) < 1 / (1 + np.exp(-1.5 - x[:, 2]))
    y = f32(np.where(empty, 0, draw.poisson(rate)))
    x = np.concatenate([x, f32(np.log(exposure))[:, None]], 1)

    def nll(y: Any, p: Any) -> Any:
        y = ops.reshape(y, (-1,))
        log_rate, q = ops.clip(p[:, 0], -10, 6), p[:, 1]
        mean = ops.exp(log_rate)
        zero = -ops.logaddexp(q, -mean) + ops.softplus(q)
        return ops.where(y > 0, ops.softplus(q) + mean - y * log_rate, zero)

    model = mlp(7, 48, 48, 2)
    model.compile(optimizers.RMSprop(2e-3), nll)
    metric = evaluated(model, x[7000:], y[7000:])
    return fitted(model, metric, x[:7000], y[:7000], batch_size=32, epochs=8)


@program()
def quantile_pinball_weights_1e4() -> Training:
    """The loss of a batch jumps a hundredfold: importance weights go from 0.01 to 10000."""
    draw = rng(0)
    n = 6000
    x = f32(draw.uniform(-2, 2, (n, 4)))
    noise = np.exp(0.5 * x[:, 2]) * draw.gamma(1.5, 0.5, n)
    y = f32(np.sin(2 * x[:, 0]) + x[:, 1] + noise)[:, None]
    weight = f32(10 ** np.clip(draw.normal(0.5, 1.2, n), -2, 4))
    weight[::1000] = 1e4
    quantiles = np.array([0.05, 0.5, 0.95], "float32")

    def pinball(y: Any, p: Any) -> Any:
        q = ops.convert_to_tensor(quantiles)
        return ops.sum(ops.maximum(q * (y - p), (q - 1) * (y - p)), -1)

    model = mlp(4, 64, 64, 3)
    model.compile(optimizers.Adam(schedules.CosineDecay(3e-3, 1560)), pinball)
    return fitted(
        model,
        evaluated(model, x[5000:], y[5000:]),
        x[:5000],
        y[:5000],
        sample_weight=weight[:5000],
        batch_size=32,
        epochs=10,
    )


@program()
def cauchy_targets_huber_mse_shown() -> Training:
    """The MSE in the logs is huge: noise is Cauchy, but gradients of the Huber loss are bounded."""
    draw = rng(0)
    n = 6000
    x = f32(draw.uniform(-2, 2, (n, 5)))
    clean = f32(2 * np.sin(x[:, 0]) + x[:, 1] * x[:, 2])
    y = f32(clean + 0.5 * draw.standard_cauchy(n))
    model = mlp(5, 64, 64, 1)
    model.compile(optimizers.Adam(2e-3), keras.losses.Huber(1.0), metrics=["mse"])

    def metric() -> float:
        predicted = model.predict(x, verbose=0, batch_size=500)[:, 0]
        return float(np.mean(np.abs(predicted - clean)))

    return fitted(model, metric, x, y, batch_size=32, epochs=8)


# Rates and optimizers


class TriangularRate(keras.callbacks.Callback):
    """The rate goes from 1e-4 to 2e-2 and back within 300 steps, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        part = (self.step % 300) / 300
        self.step += 1
        height = 2 * part if part < 0.5 else 2 - 2 * part
        self.model.optimizer.learning_rate = 1e-4 + (2e-2 - 1e-4) * height

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if keras.backend.backend() == "jax":  # else Keras overwrites the next rate
            self.model.jax_state_sync()


@program()
def adam_cyclic_rate_loss_10x_up_down() -> Training:
    """The loss rises manyfold and comes back, five times: a callback cycles the rate."""
    draw = rng(0)
    x = f32(draw.uniform(-1, 1, (4000, 4)))
    y = f32(np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3])[:, None]
    model = mlp(4, 64, 64, 1, activation="tanh")
    model.compile(optimizers.Adam(1e-4), "mse")
    return fitted(
        model,
        evaluated(model, x[3200:], y[3200:]),
        x[:3200],
        y[:3200],
        first=[TriangularRate()],
        batch_size=32,
        epochs=15,
    )


@program()
def sgd_warm_restarts_large_peak() -> Training:
    """The loss rises at each restart: the peak rate is a few times below one that diverges."""
    draw = rng(0)
    x = f32(draw.uniform(-1, 1, (4000, 6)))
    y = f32(np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * np.cos(2 * x[:, 3]))[:, None]
    model = mlp(6, 64, 64, 1, activation="tanh")
    rate = schedules.CosineDecayRestarts(0.1, 300, t_mul=1.0, m_mul=1.0)
    model.compile(optimizers.SGD(rate, momentum=0.9), "mse")
    metric = evaluated(model, x[3200:], y[3200:])
    return fitted(model, metric, x[:3200], y[:3200], batch_size=32, epochs=15)


@program(better="higher")
def returns_r2_1pct_lion_ordered() -> Training:
    """The loss hardly falls, and follows volatility: an R2 of 1 or 2 % is all there is."""
    draw = rng(0)
    n = 30000
    x = f32(draw.normal(size=(n, 10)))
    volatility = np.exp(0.6 * np.sin(np.arange(n) / 400))
    signal = 0.13 * x[:, 0] + 0.07 * x[:, 1]
    y = f32(0.01 * (volatility * draw.standard_t(4, n) + signal * 1.4))
    hidden = layers.Dense(8, activation="tanh")
    wide = keras.initializers.RandomNormal(stddev=0.2)
    output = layers.Dense(1, kernel_initializer=wide)
    model = keras.Sequential([keras.Input((10,)), hidden, output, layers.Rescaling(0.01)])
    rate = schedules.CosineDecay(1e-3, 980)
    model.compile(optimizers.Lion(rate, weight_decay=0.1), "mse")

    def metric() -> float:
        """Return R2 in per cent."""
        p = model.predict(x[25000:], verbose=0, batch_size=500)[:, 0]
        truth = y[25000:]
        return float(100 * (1 - np.mean((truth - p) ** 2) / np.mean(truth**2)))

    return fitted(
        model,
        metric,
        x[:25000],
        y[:25000, None],
        batch_size=128,
        epochs=5,
        shuffle=False,
    )


@program()
def pure_noise_targets_nadam() -> Training:
    """The loss stays above log 10: labels are random, and nothing can be learned."""
    draw = rng(0)
    x = f32(draw.normal(size=(6000, 12)))
    y = draw.integers(0, 10, 6000).astype("int32")
    model = mlp(12, 24, 10, kernel="he_normal")
    model.compile(optimizers.Nadam(schedules.CosineDecay(2e-3, 620)), CROSSENTROPY)
    metric = evaluated(model, x[5000:], y[5000:])
    return fitted(model, metric, x[:5000], y[:5000], batch_size=32, epochs=4)


@program(better="higher")
def thousand_classes_8_each_adafactor() -> Training:
    """The loss begins at 6.9, which is log 1000: each class has only 8 examples."""
    draw = rng(0)
    centre = draw.normal(size=(1000, 32))
    y = np.tile(np.arange(1000), 10).astype("int32")
    x = f32(centre[y] + 0.5 * draw.normal(size=(10000, 32)))
    model = mlp(32, 128, 1000)
    model.compile(optimizers.Adafactor(2e-2), CROSSENTROPY)
    metric = accuracy(model, x[8000:], y[8000:])
    return fitted(model, metric, x[:8000], y[:8000], batch_size=64, epochs=10)


@program()
def sparse_autoencoder_adagrad_large_rate() -> Training:
    """The rate is 0.3 on sparse and large inputs: Adagrad divides it by the root of the summed
    squares.
    """
    draw = rng(0)
    n, size, parts = 4000, 200, 12
    part = (draw.random((parts, size)) < 0.08) * draw.gamma(2, 2, (parts, size))
    use = (draw.random((n, parts)) < 0.08) * draw.gamma(2, 1, (n, parts))
    x = f32(use @ part)
    train, held_out = x[:3500], x[3500:]
    sparse = keras.regularizers.L1(1e-4)
    model = keras.Sequential(
        [
            keras.Input((size,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(24, activation="relu", activity_regularizer=sparse),
            layers.Dense(size),
        ]
    )
    model.compile(optimizers.Adagrad(0.3, initial_accumulator_value=0.1), "mse")

    def metric() -> float:
        """Return the share of the variance that is not explained."""
        error = np.mean((model.predict(held_out, verbose=0) - held_out) ** 2)
        return float(error / np.var(held_out))

    return fitted(model, metric, train, train, batch_size=32, epochs=8)


@program()
def ftrl_hashed_clicks() -> Training:
    """Some batches contain no click and many weights stay zero: clicks are rare, Ftrl has L1."""
    draw = rng(0)
    n, size = 12000, 300
    chances = 1 / np.arange(1, size + 1)
    chances /= chances.sum()
    x = np.zeros((n, size), "float32")
    active = draw.choice(size, size=(n, 8), p=chances)
    x[np.arange(n)[:, None], active] = 1
    w = 1.3 * draw.normal(size=size)
    y = f32(draw.random(n) < 1 / (1 + np.exp(5.0 - x @ w)))[:, None]
    output = layers.Dense(1, activation="sigmoid", kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((size,)), output])
    model.compile(optimizers.Ftrl(0.2, l1_regularization_strength=1e-3), "binary_crossentropy")
    metric = evaluated(model, x[10000:], y[10000:])
    return fitted(model, metric, x[:10000], y[:10000], batch_size=32, epochs=4)


# Outputs, precision, labels, recommenders


@program(better="higher")
def multi_output_one_dominates_1e6() -> Training:
    """One loss is 1e10 times the other: this does not affect Adam, because the heads share no
    layer.
    """
    x, y = digits()
    price = f32(2e5 + 3e4 * y + 1e4 * x.sum(1))[:, None]
    inputs = keras.Input((64,))
    for_price = layers.Dense(64, activation="relu")(inputs)
    for_digit = layers.Dense(64, activation="relu")(inputs)
    estimate = layers.Rescaling(1e5)(layers.Dense(1)(for_price))
    model = keras.Model(inputs, {"price": estimate, "digit": layers.Dense(10)(for_digit)})
    model.compile(optimizers.Adam(2e-3), {"price": "mse", "digit": CROSSENTROPY})

    def metric() -> float:
        logits = model.predict(x[1400:], verbose=0)["digit"]
        return float(np.mean(np.argmax(logits, 1) == y[1400:]))

    targets = {"price": price[:1400], "digit": y[:1400]}
    return fitted(model, metric, x[:1400], targets, batch_size=32, epochs=15)


@program(better="higher", tensorflow_only=True)
def mixed_float16_loss_scaling() -> Training:
    """The first gradients are Inf: the loss scale begins at 2**24 and skipped steps lower it."""
    x, y = digits()
    with half_precision():
        hidden = [layers.Dense(size, activation="relu") for size in (96, 64)]
        output = [layers.Dense(10), layers.Activation("linear", dtype="float32")]
        model = keras.Sequential([keras.Input((64,)), *hidden, *output])
        scaled = optimizers.LossScaleOptimizer(
            optimizers.Adam(1e-3), initial_scale=2.0**24, dynamic_growth_steps=100
        )
        model.compile(scaled, CROSSENTROPY)
    metric = accuracy(model, x[1400:], y[1400:])
    return fitted(model, metric, x[:1400], y[:1400], batch_size=16, epochs=8)


@program(better="higher")
def noisy_labels_60pct() -> Training:
    """The loss stays above 2.0 of 2.3: most labels are random, but the others are enough."""
    x, y = digits()
    draw = rng(3)
    images = np.concatenate([jittered(draw, x[:1400]) for _ in range(4)])
    labels = np.tile(y[:1400], 4)
    random = draw.random(len(labels)) < 0.6
    labels = np.where(random, draw.integers(0, 10, len(labels)), labels).astype("int32")
    model = mlp(64, 64, 10, dropout=0.3)
    model.compile(optimizers.Adam(1e-3), CROSSENTROPY)
    metric = accuracy(model, x[1400:], y[1400:])
    return fitted(model, metric, images, labels, batch_size=32, epochs=6)


@program(better="higher")
def recommender_negative_sampling() -> Training:
    """Some pairs have both labels: negatives are drawn at random, again in each fit."""
    draw = rng(0)
    users, items = 300, 400
    a, b = draw.normal(size=(users, 4)), draw.normal(size=(items, 4))
    score = a @ b.T + 0.7 * draw.normal(size=items)
    liked = score > np.quantile(score, 0.93)
    positive = np.argwhere(liked)
    draw.shuffle(positive)
    known, held_out = positive[:-1000], positive[-1000:]
    user = keras.Input((1,), dtype="int32")
    item = keras.Input((1,), dtype="int32")

    def embedded(count: int, size: int, index: Any) -> Any:
        return layers.Flatten()(layers.Embedding(count, size)(index))

    match = layers.Dot(1)([embedded(users, 12, user), embedded(items, 12, item)])
    model = keras.Model([user, item], layers.Add()([match, embedded(items, 1, item)]))
    model.compile(optimizers.Adam(1e-2), keras.losses.BinaryCrossentropy(from_logits=True))
    n = len(known)

    def train(callbacks: Sequence[Any]) -> None:
        all_users = np.concatenate([known[:, 0], np.repeat(known[:, 0], 4)])[:, None]
        y = f32(np.r_[np.ones(n), np.zeros(4 * n)])[:, None]
        for k in range(4):
            negative = rng(20 + k).integers(0, items, 4 * n)
            all_items = np.concatenate([known[:, 1], negative])[:, None]
            model.fit(
                [all_users, all_items],
                y,
                batch_size=128,
                epochs=1,
                verbose=0,
                callbacks=[*callbacks],
            )

    def metric() -> float:
        from sklearn.metrics import roc_auc_score

        others = np.argwhere(score <= np.quantile(score, 0.93))
        others = others[rng(8).permutation(len(others))[:3000]]
        pairs = np.concatenate([held_out, others])
        scores = model.predict([pairs[:, :1], pairs[:, 1:]], verbose=0, batch_size=500)[:, 0]
        return float(roc_auc_score(np.r_[np.ones(1000), np.zeros(3000)], scores))

    return Training((model,), train, metric)
