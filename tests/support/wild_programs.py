"""Healthy training with unusual losses; each program claims bounds for `measure`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from support import zoo

Opt = keras.optimizers
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Wild:
    """One program.

    Attributes:
        build: returns the compiled model and the arguments of `fit`.
        claims: bounds for the results of `measure`.
        not_on: backends that cannot express it, each with the reason.
        overflows: why the measurements of a step are not compared, or `""`.
    """

    build: Callable[[], tuple[Any, dict[str, Any]]]
    claims: dict[str, Bounds]
    not_on: dict[str, str] = field(default_factory=dict)
    overflows: str = ""


REFUSED = "a step that overflows is refused whole; Keras commits its moving statistics, and counts its loss"

WILD: dict[str, Wild] = {}


def wild(name: str, **more: Any) -> Callable[[Any], Any]:
    """Add a program to the table; bounds among the arguments are its claims."""
    claims = {key: value for key, value in more.items() if isinstance(value, tuple)}

    def enter(build: Any) -> Any:
        WILD[name] = Wild(build, claims, **{key: value for key, value in more.items() if key not in claims})
        return build

    return enter


def at_least(low: float) -> Bounds:
    return low, math.inf


def at_most(high: float) -> Bounds:
    return -math.inf, high


# Running and measuring


class Trace(keras.callbacks.Callback):
    """Records the loss of each step, computed from the running means that Keras logs."""

    def __init__(self):
        super().__init__()
        self.losses: list[float] = []
        self._sum, self._count = 0.0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self._sum, self._count = 0.0, 0

    def on_train_batch_end(self, batch, logs=None):
        self._count += 1
        total = float(logs["loss"]) * self._count
        self.losses.append(total - self._sum)
        self._sum = total


def train(program: Wild, guarded: bool) -> tuple[zoo.Run, dict[str, float]]:
    """Train from a fixed seed; return the results and, of a plain run, measurements."""
    keras.utils.set_random_seed(0)
    model, fit = program.build()
    before, trace = _norms(model), Trace()
    fit = {"shuffle": False, **fit, "callbacks": [*([] if guarded else [trace]), *fit.get("callbacks", [])]}
    data = fit.pop("x")
    run = zoo.run(lambda: model, lambda: data, guard=guarded or None, rewritten=True, **fit)
    return run, {} if guarded else measure(trace.losses, before, _norms(model))


def _norms(model: Any) -> list[float]:
    kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
    return [float(np.linalg.norm(ops.convert_to_numpy(v.value).astype("float64"))) for v in kernels]


def measure(losses: list[float], before: list[float], after: list[float]) -> dict[str, float]:
    """Return measurements of a run: ratios of its losses to the median of the first three, and of
    its kernels' norms.

    `peak` is the largest loss, `late` that of the second half, `early` that of the first tenth; `settled` is the median of the last
    fifth, `saddle` that at a fifth of the way; `spike` is the largest loss over the median of all. `negative` and `zero` are shares of
    the steps. `growth` is that of the kernel that grows most, `shrinking` that of the one that does
    least; kernels that begin at 0 do not count. `back` is `settled` in units of the lowest median of a tenth.
    """
    every, count = np.array(losses), len(losses)
    medians = [float(np.median(part)) for part in np.array_split(every, 10)]
    first = max(abs(float(np.median(every[:3]))), 1e-30)
    fifth = max(count // 5, 1)
    ratios = [b / a for a, b in zip(before, after) if a > 0] or [1.0]
    return {
        "steps": count,
        "peak": every.max() / first,
        "late": every[count // 2 :].max() / first,
        "early": every[: max(count // 10, 2)].max() / first,
        "saddle": float(np.median(every[fifth - 3 : fifth + 3])) / first,
        "settled": float(np.median(every[-fifth:])) / first,
        "back": float(np.median(every[-fifth:])) / max(abs(min(medians)), 1e-30),
        "spike": every.max() / max(float(np.median(np.abs(every))), 1e-30),
        "negative": float(np.mean(every < 0)),
        "zero": float(np.mean(np.abs(every) <= 1e-5 * np.abs(every).max())),
        "growth": max(ratios),
        "shrinking": min(ratios),
    }


# Data and parts


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def digits(rows: int = 320) -> tuple[np.ndarray, np.ndarray]:
    """Return images of 8 x 8 pixels between 0 and 1, and their classes."""
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    return (bunch.images[:rows, ..., None] / 16).astype("float32"), bunch.target[:rows]


def arrays(x: Any, y: Any = None, *, batch: int = 16, epochs: int = 5, **more: Any) -> dict[str, Any]:
    """Return the arguments of a fit on arrays."""
    return {"x": x, **({} if y is None else {"y": y}), "batch_size": batch, "epochs": epochs, **more}


def network(features: int, *sizes: int, activation: str = "relu", last: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return dense layers, the last one without an activation."""
    hidden = [layers.Dense(size, activation, **more) for size in sizes[:-1]]
    return keras.Sequential([keras.Input((features,)), *hidden, layers.Dense(sizes[-1], **{**more, **(last or {})})])


def crossentropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def linear_data(rows: int = 320, features: int = 6) -> tuple[np.ndarray, np.ndarray]:
    x = draw(rows, features)
    return x, (x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * draw(rows, 1, seed=1)).astype("float32")


class AtEpoch(keras.callbacks.Callback):
    """Calls a function with the number of the epoch that begins."""

    def __init__(self, act: Callable[[int], None]):
        super().__init__()
        self.act = act

    def on_epoch_begin(self, epoch, logs=None):
        self.act(epoch)


class Added(layers.Layer):
    """Adds a loss of its inputs; has a number that a callback may change, and noise."""

    def __init__(self, objective: Callable[..., Any], number: float = 1.0):
        super().__init__()
        self.objective = objective
        self.number = self.add_weight(shape=(), initializer=keras.initializers.Constant(number), trainable=False, name="number")
        self.noise = keras.random.SeedGenerator(5)

    def call(self, *inputs):
        self.add_loss(self.objective(self, *inputs))
        return inputs[0]


# Losses of either sign, and losses that rise because an agent acts


class Clipped(keras.constraints.Constraint):
    """Weights between two bounds, as in the first Wasserstein GAN."""

    def __call__(self, w):
        return ops.clip(w, -0.1, 0.1)


@wild("wgan-critic-at-its-bounds", negative=at_least(0.8), settled=at_most(-3.0))
def critic_at_bounds():
    """Weights reach their bounds and do not change, while the loss falls."""
    y = np.sign(draw(320, 1, seed=1))
    model = network(6, 16, 1, kernel_constraint=Clipped())
    model.compile(Opt.RMSprop(5e-3), loss=lambda y, scores: ops.mean(y * scores, -1))
    return model, arrays(draw(320, 6) + 0.5 * y, y, epochs=8)


class Rewarded(keras.utils.PyDataset):
    """States, actions of the policy at the start of the epoch, advantages as weights."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.states = model, draw(160, 4)
        self.best = self.states[:, :3].argmax(1)
        self.act(0)

    def act(self, epoch: int) -> None:
        rng = np.random.default_rng(epoch)
        first, bias, last, other = self.model.get_weights()
        logits = np.maximum(self.states @ first + bias, 0) @ last + other
        self.actions = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        self.advantages = (np.where(self.actions == self.best, 2.0, -1.0) + rng.standard_normal(len(logits))).astype("float32")

    def __len__(self):
        return 10

    def __getitem__(self, i):
        rows = slice(16 * i, 16 * i + 16)
        return self.states[rows], self.actions[rows], self.advantages[rows]


@wild("reinforce-sample-weight", negative=at_least(0.2), peak=at_least(1.1))
def reinforce():
    """A policy gradient as Keras users write it: the crossentropy of the action, weighted by an advantage of either sign."""
    model = network(4, 16, 3)
    model.compile(Opt.Adam(1e-2), crossentropy())
    episodes = Rewarded(model)
    return model, {"x": episodes, "epochs": 12, "callbacks": [AtEpoch(episodes.act)]}


@wild("q-learning", peak=at_least(2.0), growth=at_least(3.0))
def q_learning():
    """Targets from a slow copy of the network: values and errors grow towards a distant limit."""
    x, after = keras.Input((4,)), keras.Input((4,))
    fast, slow = network(4, 16, 1), network(4, 16, 1)
    slow.trainable = False
    reward = lambda x: 1.0 + 3.0 * x[:, :1]  # noqa: E731
    loss = lambda _, value, later, x: ops.mean(ops.square(reward(x) + 0.97 * later - value))  # noqa: E731
    model = keras.Model([x, after], Added(loss)(fast(x), slow(after), x))
    model.compile(Opt.Adam(3e-2))
    copied = AtEpoch(lambda epoch: slow.set_weights(fast.get_weights()))
    states = draw(160, 4)
    return model, arrays([states, np.abs(states)], epochs=15, callbacks=[copied])


# Losses that grow by design


def _vae(number: float) -> tuple[Any, Any]:
    x = keras.Input((6,))
    hidden = layers.Dense(12, "relu")(x)
    mean, spread = layers.Dense(2)(hidden), layers.Dense(2)(hidden)

    def kl(layer, mean, spread):
        return layer.number * ops.mean(ops.sum(ops.exp(spread) + ops.square(mean) - 1.0 - spread, -1)) / 2

    annealed = Added(kl, number)
    sampled = layers.Lambda(lambda z: z[0] + ops.exp(z[1] / 2) * keras.random.normal(ops.shape(z[0]), seed=7))
    decoded = layers.Dense(12, "relu")(sampled([annealed(mean, spread), spread]))
    return keras.Model(x, layers.Dense(6)(decoded)), annealed.number


def _correlated() -> np.ndarray:
    return (draw(320, 2) @ draw(2, 6, seed=1)).astype("float32")


@wild("vae-kl-annealed", back=at_least(2.0))
def vae():
    """The weight of the KL term is raised until the code contains no information."""
    model, beta = _vae(0.0)
    model.compile(Opt.Adam(2e-2), "mse")
    return model, arrays(_correlated(), _correlated(), epochs=7, callbacks=[AtEpoch(lambda epoch: beta.assign(1e-3 * 5.0**epoch))])


@wild("weight-untracked-variable", settled=at_least(50.0), not_on={"jax": "a compiled step takes no variable that the model does not hold"})
def untracked():
    """The loss reads a variable that is tracked nowhere, raised a hundredfold."""
    weight = keras.Variable(1.0, trainable=False, name="weight")
    model = network(6, 8, 1)
    model.compile(Opt.Adam(1e-3), lambda y, p: weight * ops.mean(ops.square(y - p), -1))
    x, y = linear_data()
    return model, arrays(x, y + 3 * draw(320, 1, seed=3), callbacks=[AtEpoch(lambda epoch: weight.assign(4.0**epoch))])


# Data that changes


@wild("curriculum", settled=at_least(100.0))
def curriculum():
    """Data of a generator becomes harder in the middle: from a loss of 1 to one of thousands."""

    def batches():
        for step in range(120):
            x = draw(16, 6, seed=step)
            yield x, ((1.0 if step < 60 else 60.0) * (x[:, :1] + draw(16, 1, seed=1000 + step))).astype("float32")

    model = network(6, 8, 1)
    model.compile(Opt.Adam(1e-2), "mse")
    return model, {"x": batches(), "steps_per_epoch": 30, "epochs": 4}


# Losses that do not move


def _triplets(embed: Any, margin: float = 0.5) -> Any:
    inputs = [keras.Input((6,)) for _ in range(3)]
    far = lambda a, b: ops.sum(ops.square(a - b), -1)  # noqa: E731
    loss = Added(lambda _, a, p, n: ops.mean(ops.relu(far(a, p) - far(a, n) + margin)))
    return keras.Model(inputs, loss(*map(embed, inputs)))


@wild("triplet-collapsed", settled=(0.999, 1.001), late=at_most(1.001))
def triplet():
    """All embeddings are one point: the loss is its margin, and every gradient is exactly zero."""
    model = _triplets(network(6, 8, 4, last={"kernel_initializer": "zeros"}))
    model.compile(Opt.Adam(1e-3))
    return model, arrays([draw(320, 6, seed=i) for i in range(3)])


# Batches of one


@wild("batch-of-one", spike=at_least(100.0))
def batch_of_one():
    """Targets with a heavy tail, one at a time."""
    y = np.random.default_rng(3).standard_t(1.5, (200, 1))
    model = network(6, 8, 1)
    model.compile(Opt.Adam(1e-3), "mse")
    return model, arrays(draw(200, 6), y.astype("float32"), batch=1, epochs=1)


@wild("batch-of-one-memorised", spike=at_least(1e5), settled=at_most(1e-2))
def memorised():
    """A few wrong labels cost a million times as much as right ones; batches of one."""
    x = 3 * draw(300, 6)
    y = (x[:, :1] > 0).astype("float32")
    x[:, 0] += 15 * np.sign(x[:, 0])
    y[230::33] = 1 - y[230::33]
    model = network(6, 1, last={"kernel_initializer": "zeros"})
    model.compile(Opt.Adam(0.2), keras.losses.BinaryCrossentropy(from_logits=True))
    return model, arrays(x, y, batch=1, epochs=1)


# Weights that grow or shrink


@wild("deep-linear-saddle", growth=at_least(5.0), saddle=at_least(0.4))
def deep_linear():
    """Small weights in four linear layers: a long plateau, then everything at once."""
    small = keras.initializers.RandomNormal(stddev=0.03)
    model = network(6, 6, 6, 6, 1, activation="linear", kernel_initializer=small, use_bias=False)
    model.compile(Opt.Adam(3e-3), "mse")
    return model, arrays(*linear_data(), epochs=10)


@wild("tiny-features", growth=at_least(300.0), settled=at_most(0.5))
def tiny_features():
    """Features of 0.001 need weights of a thousand."""
    x, y = linear_data()
    model = network(6, 1)
    model.compile(Opt.Adam(10.0), "mse")
    return model, arrays(1e-3 * x, y)


@wild("normalised-adam", growth=at_least(10.0), settled=at_most(0.7))
def normalised_adam():
    """A kernel below BatchNormalization grows at a high rate, and the network learns."""
    images, y = digits()
    conv = lambda: layers.Conv2D(6, 3, strides=2, padding="same", use_bias=False)  # noqa: E731
    norm, pool = layers.BatchNormalization, layers.GlobalAveragePooling2D()
    model = keras.Sequential([keras.Input((8, 8, 1)), conv(), norm(), layers.ReLU(), conv(), norm(), layers.ReLU(), pool, layers.Dense(10)])
    model.compile(Opt.Adam(0.2), crossentropy(), metrics=["accuracy"])
    return model, arrays(images, y, batch=32, epochs=10)


@wild("strong-decay", shrinking=at_most(0.2))
def decay():
    """Weight decay exceeds the gradient of noisy targets, and the weights go to 0."""
    model = network(6, 16, 1)
    model.compile(Opt.AdamW(1e-2, weight_decay=3.0), "mse")
    return model, arrays(draw(320, 6), draw(320, 1, seed=1))


# A rate above the sharpness limit


@wild("catapult", early=at_least(20.0), settled=at_most(0.1))
def catapult():
    """Two linear layers: the loss grows a hundredfold in six steps, then falls."""
    model = network(1, 256, 1, activation="linear", use_bias=False)
    model.set_weights([0.3 * draw(1, 256, seed=1), 0.3 * draw(256, 1, seed=2)])
    model.compile(Opt.SGD(0.033), "mse")
    return model, arrays(np.ones((640, 1), "float32"), np.zeros((640, 1), "float32"), batch=8, epochs=1)


# Losses through zero and at zero


@wild("hinge-satisfied", zero=at_least(0.3))
def hinge():
    """The loss of a support vector machine is zero, and sometimes slightly above."""
    x = draw(320, 6)
    x[:, 0] += 2 * np.sign(x[:, 0])
    model = network(6, 1)
    model.compile(Opt.SGD(0.1), "hinge")
    return model, arrays(x, np.sign(x[:, :1]), batch=4, epochs=3)


# Arithmetic and ways to apply an update


@wild("float16-overflows-at-the-start", settled=at_most(0.5), overflows=REFUSED)
def float16():
    """The loss scale begins too high and is halved until nothing overflows."""
    images, y = digits()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        hidden = [layers.Dense(16), layers.BatchNormalization(), layers.ReLU()]
        model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, dtype="float32")])
        optimizer = Opt.LossScaleOptimizer(Opt.Adam(1e-2), initial_scale=2.0**22, dynamic_growth_steps=50)
        model.compile(optimizer, crossentropy())
    finally:
        keras.config.set_dtype_policy("float32")
    return model, arrays(images.reshape(-1, 64), y)


@wild("rate-reduced-to-nothing", spike=at_least(5.0))
def reduced():
    """A plateau reduces the rate until an update is smaller than the last bit of a weight."""
    reduce = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.01, patience=0, min_delta=10.0, min_lr=1e-11
    )
    model = network(6, 8, 1)
    model.compile(Opt.Adam(1e-2), "mse")
    return model, arrays(*linear_data(30), batch=1, epochs=10, callbacks=[reduce])
