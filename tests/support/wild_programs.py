"""Healthy training with unusual losses: they rise by design or by chance, weights grow, or nothing
changes.

Each program claims bounds for the results of `measure`, which tests/recovery/test_wild_runs.py
checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from support import zoo
from support.programs import differentiated

Opt = keras.optimizers
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Wild:
    """One program.

    Attributes:
        build: returns the compiled model and the arguments of `fit`.
        claims: bounds for the results of `measure`.
        watch: the log that is used as its loss.
        not_on: backends that cannot express it, each with the reason.
        found: backends on which the current guard acts on it, each with the action.
        overflows: why the measurements of a step are not compared, or `""`.
    """

    build: Callable[[], tuple[Any, dict[str, Any]]]
    claims: dict[str, Bounds]
    watch: str = "loss"
    not_on: dict[str, str] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    overflows: str = ""


REFUSED = "a step that overflows is refused whole; Keras commits its moving statistics, and counts its loss"
FUSED = "oneDNN computes a tanh right behind a Dense layer in one operation with it, unless somebody reads what is between them"

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

    def __init__(self, watch: str):
        super().__init__()
        self.watch = watch
        self.losses: list[float] = []
        self._sum, self._count = 0.0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self._sum, self._count = 0.0, 0

    def on_train_batch_end(self, batch, logs=None):
        self._count += 1
        total = float(logs[self.watch]) * self._count
        self.losses.append(total - self._sum)
        self._sum = total


def train(program: Wild, guarded: bool) -> tuple[zoo.Run, dict[str, float]]:
    """Train a program from a fixed seed; return its results and, for a plain run, its measurements.
    """
    keras.utils.set_random_seed(0)
    model, fit = program.build()
    before, trace = _norms(model), Trace(program.watch)
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
    the steps, `size` is the first loss itself. `growth` is that of the kernel that grows most, `shrinking` that of the one that does
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
        "size": first,
        "growth": max(ratios),
        "shrinking": min(ratios),
    }


# Data and parts


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def whole(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Return integers from 0 on."""
    return np.random.default_rng(seed).integers(0, high, shape)


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
    """Adds a loss that is computed from its inputs; has a number that a callback may change, and a
    source of noise.
    """

    def __init__(self, objective: Callable[..., Any], number: float = 1.0):
        super().__init__()
        self.objective = objective
        self.number = self.add_weight(shape=(), initializer=keras.initializers.Constant(number), trainable=False, name="number")
        self.noise = keras.random.SeedGenerator(5)

    def call(self, *inputs):
        self.add_loss(self.objective(self, *inputs))
        return inputs[0]


class Phases(keras.Model):
    """Networks that are trained in turn within one step, each with its own optimizer and loss."""

    def __init__(self, networks: dict[str, Any], losses: dict[str, Callable[..., Any]], optimizers: dict[str, Any]):
        super().__init__()
        self.names, self.losses_of = list(losses), losses
        self.noise = keras.random.SeedGenerator(5)
        for name, part in networks.items():
            setattr(self, name, part)
        for name, optimizer in optimizers.items():
            optimizer.build(getattr(self, name).trainable_variables)
            setattr(self, f"{name}_optimizer", optimizer)
            setattr(self, f"{name}_mean", keras.metrics.Mean(name=f"{name}_loss"))
        first, *others = optimizers.values()
        if zoo.BACKEND == "jax":  # Keras hands a step the slots of one optimizer; those of the others come with the model
            self.slots = [v for optimizer in others for v in optimizer.variables]
        self.built = True
        self.compile(first)

    @property
    def metrics(self):
        return [getattr(self, f"{name}_mean") for name in self.names]

    def call(self, x):
        return getattr(self, self.names[0])(x)

    def _turns(self) -> Iterator[tuple[str, list[Any], Any, Any]]:
        for name in self.names:
            yield name, getattr(self, name).trainable_variables, getattr(self, f"{name}_optimizer"), getattr(self, f"{name}_mean")

    def _step(self, data):
        for name, weights, optimizer, mean in self._turns():
            loss, gradients = differentiated(lambda name=name: self.losses_of[name](self, data), lambda weights=weights: weights)
            optimizer.apply(gradients, weights)
            mean.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def _pure_step(self, state, data):
        import jax

        groups = (self.trainable_variables, self.non_trainable_variables, self.optimizer.variables, self.metrics_variables)
        held = {id(v): value for group, values in zip(groups, state) for v, value in zip(group, values)}
        known = [v for group in (groups[0], groups[1], groups[3]) for v in group]

        def within(act, own=(), values=()):
            now = {**held, **{id(v): value for v, value in zip(own, values)}}
            with keras.StatelessScope(state_mapping=[(v, now[id(v)]) for v in known]) as scope:
                result = act()
            kept = {id(v) for v in own}
            return result, {id(v): scope.get_current_value(v) for v in known if id(v) not in kept}

        logs = {}
        for name, weights, optimizer, mean in self._turns():
            turn = jax.value_and_grad(
                lambda values, name=name, weights=weights: within(lambda: self.losses_of[name](self, data), weights, values), has_aux=True
            )
            (loss, moved), gradients = turn([held[id(v)] for v in weights])
            held.update(moved)
            before = [held[id(v)] for v in optimizer.variables], gradients, [held[id(v)] for v in weights]
            values, slots = optimizer.stateless_apply(*before)
            held.update({id(v): value for v, value in zip([*weights, *optimizer.variables], [*values, *slots])})
            _, moved = within(lambda mean=mean, loss=loss: mean.update_state(loss))
            held.update(moved)
            logs[mean.name], _ = within(mean.result)
        return logs, tuple([held[id(v)] for v in group] for group in groups)

    if zoo.BACKEND == "jax":

        def train_step(self, state, data):
            return self._pure_step(state, data)

    else:

        def train_step(self, data):
            return self._step(data)


# Losses that rise, or have both signs, because two networks play against one another or an agent acts


def _fooled(critic: Any, fake: Any) -> Any:
    return ops.mean(ops.softplus(-critic(fake)))


def _told_apart(critic: Any, real: Any, fake: Any) -> Any:
    return ops.mean(ops.softplus(-critic(real))) + ops.mean(ops.softplus(critic(fake)))


def _made(model: Any, real: Any) -> Any:
    return model.generator(keras.random.normal((ops.shape(real)[0], 3), seed=model.noise), training=True)


def _gan(rates: tuple[float, float], losses: tuple[Any, Any], constraint: Any = None, kind: Any = Opt.Adam) -> Any:
    generator = network(3, 8, 6)
    critic = network(6, 16, 1, activation="leaky_relu", kernel_constraint=constraint)
    model = Phases(
        {"critic": critic, "generator": generator},
        {
            "critic": lambda model, data: losses[0](model.critic, data[0], _made(model, data[0])),
            "generator": lambda model, data: losses[1](model.critic, _made(model, data[0])),
        },
        {"critic": kind(rates[0]), "generator": kind(rates[1])},
    )
    real = draw(320, 6) * 0.5 + 2
    return model, arrays(real, real, epochs=6)


@wild("gan-generator-behind", watch="generator_loss", settled=at_least(3.0))
def gan_behind():
    """The critic learns ten times faster, so the loss of the generator rises."""
    return _gan((1e-2, 1e-3), (_told_apart, _fooled))


class Clipped(keras.constraints.Constraint):
    """Weights between two bounds, as in the first Wasserstein GAN."""

    def __call__(self, w):
        return ops.clip(w, -0.1, 0.1)


@wild("wgan", watch="critic_loss", negative=at_least(0.3))
def wgan():
    """The loss of the critic is a difference, negative as soon as it learns."""
    scores = lambda critic, real, fake: ops.mean(critic(fake)) - ops.mean(critic(real))  # noqa: E731
    return _gan((5e-3, 5e-3), (scores, lambda critic, fake: -ops.mean(critic(fake))), Clipped(), Opt.RMSprop)


@wild("wgan-critic-at-its-bounds", negative=at_least(0.8), settled=at_most(-3.0))
def critic_at_bounds():
    """The best critic within its bounds has every weight at a bound, so kernels do not change while
    the loss falls.
    """
    y = np.sign(draw(320, 1, seed=1))
    model = network(6, 16, 1, kernel_constraint=Clipped())
    model.compile(Opt.RMSprop(5e-3), loss=lambda y, scores: ops.mean(y * scores, -1))
    return model, arrays(draw(320, 6) + 0.5 * y, y, epochs=8)


class Rewarded(keras.utils.PyDataset):
    """States, the actions of the policy at the beginning of the epoch, and their advantages as
    sample weights.
    """

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


@wild("actor-critic", negative=at_least(0.02))
def actor_critic():
    """One loss of an actor of either sign, a critic and an entropy."""
    x = keras.Input((4,))
    hidden = layers.Dense(16, "tanh")(x)

    def loss(layer, logits, value, x):
        action = keras.random.categorical(ops.stop_gradient(logits), 1, seed=layer.noise)[:, 0]
        best = ops.cast(ops.equal(action, ops.cast(ops.argmax(x[:, :3], -1), action.dtype)), "float32")
        reward = 3.0 * best - 1.0 + keras.random.normal(ops.shape(best), seed=layer.noise)
        chosen = ops.sum(ops.log_softmax(logits) * ops.one_hot(action, 3), -1)
        advantage = reward - value[:, 0]
        entropy = -ops.sum(ops.softmax(logits) * ops.log_softmax(logits), -1)
        return ops.mean(0.1 * ops.square(advantage) - ops.stop_gradient(advantage) * chosen - 0.5 * entropy)

    model = keras.Model(x, Added(loss)(layers.Dense(3)(hidden), layers.Dense(1)(hidden), x))
    model.compile(Opt.Adam(1e-2, clipnorm=0.5))
    return model, arrays(draw(320, 4))


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


@wild("gradient-reversal", spike=at_least(1.3))
def reversal():
    """The features unlearn what the last layer learns, so its loss returns to that of guessing and
    stays there.
    """
    x = keras.Input((6,))
    features = layers.Dense(8, "tanh")(x)
    backwards = layers.Lambda(lambda f: ops.stop_gradient(4.0 * f) - 3.0 * f)(features)
    model = keras.Model(x, layers.Dense(2)(backwards))
    model.compile(Opt.Adam(1e-2), crossentropy())
    data = draw(320, 6)
    return model, arrays(data, (data[:, 0] > 0).astype("int64"))


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
    """The weight of the KL term is raised each epoch, from zero, until the code contains no
    information.
    """
    model, beta = _vae(0.0)
    model.compile(Opt.Adam(2e-2), "mse")
    return model, arrays(_correlated(), _correlated(), epochs=7, callbacks=[AtEpoch(lambda epoch: beta.assign(1e-3 * 5.0**epoch))])


@wild("weight-untracked-variable", settled=at_least(50.0), not_on={"jax": "a compiled step takes no variable that the model does not hold"})
def untracked():
    """The loss function reads a variable that is tracked nowhere, and that a callback raises a
    hundredfold.
    """
    weight = keras.Variable(1.0, trainable=False, name="weight")
    model = network(6, 8, 1)
    model.compile(Opt.Adam(1e-3), lambda y, p: weight * ops.mean(ops.square(y - p), -1))
    x, y = linear_data()
    return model, arrays(x, y + 3 * draw(320, 1, seed=3), callbacks=[AtEpoch(lambda epoch: weight.assign(4.0**epoch))])


@wild("penalty-raised", settled=at_least(20.0))
def penalty():
    """A constraint as a penalty whose weight grows fivefold at a time; it contradicts the data."""
    x = keras.Input((6,))
    penalised = Added(lambda layer, p: layer.number * ops.mean(ops.square(p - 1.0)))
    model = keras.Model(x, penalised(network(6, 8, 1, last={"bias_constraint": "max_norm", "use_bias": False})(x)))
    model.compile(Opt.Adam(1e-3), "mse")
    return model, arrays(*linear_data(), callbacks=[AtEpoch(lambda epoch: penalised.number.assign(5.0**epoch))])


@wild("margin-raised-bounded-in-the-loss", back=at_least(2.0), found={"tensorflow": FUSED})
def margin_bounded():
    """An additive margin on the bounded logit of the true class is raised from 0 to 12 while the
    network learns.
    """

    def loss(y, outputs):
        hot = ops.one_hot(ops.cast(y[:, 0], "int32"), 3)
        return ops.categorical_crossentropy(hot, 4.0 * ops.tanh(outputs) - y[:, 1:] * hot, from_logits=True)

    model = network(6, 16, 3)
    model.compile(Opt.Adam(1e-2), loss)
    x = draw(1920, 6)
    y = np.stack([x[:, :3].argmax(1), np.repeat(np.linspace(0, 12, 120), 16)], 1).astype("float32")
    return model, arrays(x, y, epochs=1)


# Rates that go up and down


@wild("rate-raised-by-callback", back=at_least(1.3))
def raised():
    """A scheduler raises the rate tenfold in the last epoch; the loss rises to a higher level of
    noise.
    """
    model = network(6, 1, last={"kernel_initializer": "zeros"})
    model.compile(Opt.SGD(0.02), "mse")
    x, y = linear_data(160)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 if epoch < 2 else 0.2)
    return model, arrays(x, y + 0.5 * draw(160, 1, seed=2), batch=2, epochs=3, callbacks=[scheduler])


# Data that changes


class Harder(keras.utils.PyDataset):
    """Small targets at first, and from the middle on ten times larger ones that the inputs do not
    determine.
    """

    def __len__(self):
        return 120

    def __getitem__(self, i):
        x = draw(16, 6, seed=i)
        return x, (0.3 * x[:, :1] if i < 60 else 3.0 * draw(16, 1, seed=1000 + i)).astype("float32")


@wild("curriculum", settled=at_least(3.0), spike=at_least(2.0))
def curriculum():
    """The loss jumps in the middle of an epoch and stays there, because the new data is harder."""
    model = network(6, 8, 1)
    model.compile(Opt.Adam(1e-2), "mse")
    return model, {"x": Harder(), "epochs": 1}


@wild("curriculum-large", settled=at_least(100.0))
def curriculum_large():
    """The same with a generator, from a loss of 1 to one of thousands."""

    def batches():
        for step in range(120):
            x = draw(16, 6, seed=step)
            yield x, ((1.0 if step < 60 else 60.0) * (x[:, :1] + draw(16, 1, seed=1000 + step))).astype("float32")

    model = network(6, 8, 1)
    model.compile(Opt.Adam(1e-2), "mse")
    return model, {"x": batches(), "steps_per_epoch": 30, "epochs": 4}


@wild("online-drift", late=at_least(5.0))
def drift():
    """The target changes all the time, and faster and faster."""
    steps = 120
    x, scale = draw(16 * steps, 6), np.repeat(np.linspace(0, 3, steps), 16)[:, None]
    model = network(6, 1)
    model.compile(Opt.SGD(0.05), "mse")
    return model, arrays(x, (x[:, :1] * np.exp(scale) + 0.1 * draw(16 * steps, 1, seed=1)).astype("float32"), epochs=1)


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


@wild("negative-cosine", negative=at_least(0.9))
def cosine():
    """A similarity as a loss: negative, down to -1, at which two views collapse onto each other."""
    model = network(6, 16, 4)
    model.compile(Opt.Adam(1e-2), keras.losses.CosineSimilarity())
    x = draw(320, 6)
    return model, arrays(x, np.tanh(x @ draw(6, 4, seed=1)) + 1)


@wild("random-labels-fast", settled=(0.5, 1.2))
def random_labels_fast():
    """Nothing to learn: at a high rate the loss stays at the entropy of the labels."""
    model = network(6, 16, 4)
    model.compile(Opt.Adam(1e-2), crossentropy())
    return model, arrays(draw(2400, 6), whole(4, 2400, seed=1), epochs=2)


@wild("parity", settled=(0.8, 1.1))
def parity():
    """A recurrent network on a parity that it does not find."""
    x = whole(2, 320, 8).astype("float32")
    model = keras.Sequential([keras.Input((8, 1)), layers.SimpleRNN(8), layers.Dense(1)])
    model.compile(Opt.Adam(1e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    return model, arrays(2 * x[..., None] - 1, x.sum(1, keepdims=True) % 2, batch=32, epochs=7)


@wild("dead-from-the-start", settled=(0.5, 1.6), growth=(1.0, 1.0))
def dead_features():
    """All inputs are zero: only the last bias can be learned."""
    model = network(6, 8, 8, 1)
    model.compile(Opt.Adam(1e-3), "mse")
    return model, arrays(np.zeros((320, 6), "float32"), 1 + draw(320, 1))


@wild("fine-tuning", settled=at_most(0.5))
def fine_tuning():
    """Frozen layers and a frozen normalisation with the statistics of other data, below a new head.
    """
    x, y = linear_data()
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dense(1)])
    model.layers[1].set_weights([np.ones(16), np.zeros(16), np.full(16, 0.3), np.full(16, 25.0)])
    model.layers[0].trainable = model.layers[1].trainable = False
    model.compile(Opt.Adam(3e-2), "mse")
    return model, arrays(x, y)


# Sizes


def _sized(x: np.ndarray, y: np.ndarray, optimizer: Any, **more: Any) -> Any:
    model = network(x.shape[1], 8, 1)
    model.compile(optimizer, "mse")
    return model, arrays(x, y.astype("float32"), **more)


@wild("tiny-losses", size=at_most(1e-8))
def tiny():
    """Targets of 0.00001, and so losses of 1e-10 at the end."""
    x, y = linear_data()
    model = network(6, 8, 1, last={"kernel_initializer": keras.initializers.RandomNormal(stddev=1e-5)})
    model.compile(Opt.Adam(1e-6), "mse")
    return model, arrays(x, 1e-5 * y)


@wild("enormous-losses", size=at_least(1e12))
def enormous():
    """Targets of millions: the loss is in trillions and hardly changes."""
    x, y = linear_data()
    return _sized(x, 3e6 * y, Opt.Adam(1e-2))


@wild("batch-of-one", spike=at_least(100.0))
def batch_of_one():
    """Targets with a heavy tail, one at a time."""
    y = np.random.default_rng(3).standard_t(1.5, (200, 1))
    return _sized(draw(200, 6), y, Opt.Adam(1e-3), batch=1, epochs=1)


@wild("batch-of-one-memorised", spike=at_least(1e5), settled=at_most(1e-2))
def memorised():
    """The network has become certain, so one of a few wrong labels costs a million times as much as
    a right one; one sample at a time.
    """
    x = 3 * draw(300, 6)
    y = (x[:, :1] > 0).astype("float32")
    x[:, 0] += 15 * np.sign(x[:, 0])
    y[230::33] = 1 - y[230::33]
    model = network(6, 1, last={"kernel_initializer": "zeros"})
    model.compile(Opt.Adam(0.2), keras.losses.BinaryCrossentropy(from_logits=True))
    return model, arrays(x, y, batch=1, epochs=1)


# Weights that grow or shrink


class Factors(layers.Layer):
    """Hand-written embeddings."""

    def build(self, shape):
        start = keras.initializers.RandomNormal(stddev=1e-3)
        self.users = self.add_weight(shape=(20, 4), initializer=start, name="users")
        self.items = self.add_weight(shape=(20, 4), initializer=start, name="items")

    def call(self, pairs):
        return ops.sum(ops.take(self.users, pairs[:, 0], 0) * ops.take(self.items, pairs[:, 1], 0), -1, keepdims=True)


@wild("matrix-factorisation-by-hand", growth=at_least(20.0), saddle=at_least(0.5))
def factorisation_by_hand():
    """Tiny hand-written embeddings grow, after the loss has stayed at a saddle."""
    model = keras.Sequential([keras.Input((2,), dtype="int32"), Factors()])
    model.set_weights([1e-3 * draw(20, 4, seed=4), 1e-3 * draw(20, 4, seed=5)])
    model.compile(Opt.SGD(1.0, momentum=0.7), "mse")
    u, v = draw(20, 3), draw(20, 3, seed=1)
    pairs = np.stack(np.meshgrid(np.arange(20), np.arange(20)), -1).reshape(-1, 2)
    pairs = np.random.default_rng(2).permutation(pairs)
    y = (u[pairs[:, 0]] * v[pairs[:, 1]]).sum(1, keepdims=True)
    return model, arrays(pairs, y, batch=40, epochs=20)


@wild("deep-linear-saddle", growth=at_least(5.0), saddle=at_least(0.4))
def deep_linear():
    """Small weights in four linear layers: a long plateau, then everything at once."""
    small = keras.initializers.RandomNormal(stddev=0.03)
    model = network(6, 6, 6, 6, 1, activation="linear", kernel_initializer=small, use_bias=False)
    model.compile(Opt.Adam(3e-3), "mse")
    return model, arrays(*linear_data(), epochs=10)


@wild("zero-initialised-head", settled=at_most(0.5))
def zero_head():
    """The last kernel starts at 0, so the first gradient of all others is 0, too."""
    images, y = digits()
    model = network(64, 16, 10, last={"kernel_initializer": "zeros"})
    model.compile(Opt.Adam(1e-2), crossentropy())
    return model, arrays(images.reshape(-1, 64), y)


class LowRank(layers.Layer):
    """A frozen dense layer and an addition of rank 2, one half of which is 0 at the start."""

    def build(self, shape):
        self.whole = layers.Dense(16, "linear", trainable=False)
        self.whole.build(shape)
        self.a = self.add_weight(shape=(shape[-1], 2), initializer="he_normal", name="a")
        self.b = self.add_weight(shape=(2, 16), initializer="zeros", name="b")

    def call(self, x):
        return self.whole(x) + 8.0 * ops.matmul(ops.matmul(x, self.a), self.b)


@wild("low-rank-adaptation", settled=at_most(0.9))
def lora():
    """Only low-rank additions are trained."""
    images, y = digits()
    head = layers.Dense(10, trainable=False)
    model = keras.Sequential([keras.Input((64,)), LowRank(), layers.ReLU(), LowRank(), layers.ReLU(), head])
    model.compile(Opt.Adam(3e-3), crossentropy())
    return model, arrays(images.reshape(-1, 64), y)


@wild("unscaled-regression", growth=at_least(10.0), settled=at_most(0.5))
def unscaled():
    """Targets of hundreds: the weights grow accordingly, and the loss falls."""
    x, y = linear_data()
    return _sized(x, 300 * y + 200, Opt.Adam(0.3))


@wild("tiny-features", growth=at_least(300.0), settled=at_most(0.5))
def tiny_features():
    """Features of 0.001 need weights of a thousand."""
    x, y = linear_data()
    model = network(6, 1)
    model.compile(Opt.Adam(10.0), "mse")
    return model, arrays(1e-3 * x, y)


@wild("normalised-adam", growth=at_least(10.0), settled=at_most(0.7))
def normalised_adam():
    """A kernel below BatchNormalization has no fixed scale: at a high rate it grows, and the
    network learns.
    """
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


# Noise, spikes and oscillation


@wild("label-noise", settled=(0.5, 1.1))
def label_noise():
    """Four labels of ten are wrong, and the rate is high."""
    images, y = digits()
    wrong = np.random.default_rng(0).random(len(y)) < 0.4
    model = network(64, 16, 10)
    model.compile(Opt.SGD(0.2, momentum=0.9), crossentropy())
    return model, arrays(images.reshape(-1, 64), np.where(wrong, whole(10, len(y), seed=1), y), epochs=5)


@wild("clipped-lstm", spike=at_least(4.0))
def clipped_lstm():
    """Sequences with outliers a hundred times as large, whose gradients are clipped."""
    x = draw(320, 6, 2)
    y = x.sum((1, 2))[:, None]
    x[::29] *= 10.0
    y[::29] *= 10.0
    model = keras.Sequential([keras.Input((6, 2)), layers.LSTM(6), layers.Dense(1)])
    model.compile(Opt.SGD(0.05, global_clipnorm=1.0), "mse")
    return model, arrays(x, y, batch=32, epochs=7)


def _catapulted(rate: float) -> Any:
    model = network(1, 256, 1, activation="linear", use_bias=False)
    model.set_weights([0.3 * draw(1, 256, seed=1), 0.3 * draw(256, 1, seed=2)])
    model.compile(Opt.SGD(rate), "mse")
    return model, arrays(np.ones((640, 1), "float32"), np.zeros((640, 1), "float32"), batch=8, epochs=1)


@wild("catapult", peak=at_least(4.0), settled=at_most(0.1))
def catapult():
    """Two linear layers at a rate above the sharpness limit: the loss rises at first, then reaches
    a flatter region.
    """
    return _catapulted(0.026)


@wild("catapult-high", early=at_least(20.0), settled=at_most(0.1))
def catapult_high():
    """The same at a rate at which the loss is a hundred times its initial value after six steps."""
    return _catapulted(0.033)


# Losses through zero and at zero


@wild("hinge-satisfied", zero=at_least(0.3))
def hinge():
    """A support vector machine on separable data: the loss is exactly zero, and sometimes slightly
    above.
    """
    x = draw(320, 6)
    x[:, 0] += 2 * np.sign(x[:, 0])
    model = network(6, 1)
    model.compile(Opt.SGD(0.1), "hinge")
    return model, arrays(x, np.sign(x[:, :1]), batch=4, epochs=3)


# Arithmetic and ways to apply an update


def _in_precision(policy: str, optimizer: Any) -> Any:
    images, y = digits()
    keras.config.set_dtype_policy(policy)
    try:
        hidden = [layers.Dense(16), layers.BatchNormalization(), layers.ReLU()]
        model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, dtype="float32")])
        model.compile(optimizer, crossentropy())
    finally:
        keras.config.set_dtype_policy("float32")
    return model, arrays(images.reshape(-1, 64), y)


def _scaled(start: float) -> Any:
    return _in_precision("mixed_float16", Opt.LossScaleOptimizer(Opt.Adam(1e-2), initial_scale=start, dynamic_growth_steps=50))


@wild("float16-overflows-at-the-start", settled=at_most(0.5), overflows=REFUSED)
def float16():
    """The loss scale begins too high and is halved until nothing overflows."""
    return _scaled(2.0**22)


@wild("float16-scale-of-a-billion", settled=at_most(0.5), overflows=REFUSED)
def float16_billion():
    """The same from a billion, as in some recipes: eleven overflows, then none."""
    return _scaled(2.0**30)


def _single_samples(optimizer: Any, rows: int = 300) -> Any:
    model = network(6, 8, 1)
    model.compile(optimizer, "mse")
    return model, arrays(*linear_data(rows), batch=1, epochs=1)


@wild("accumulation-over-many", spike=at_least(5.0))
def accumulation_over_many():
    """Nothing changes for 31 steps, then everything at once; one sample at a time."""
    return _single_samples(Opt.Adam(3e-2, gradient_accumulation_steps=32), 120)


@wild("rate-reduced-to-nothing", spike=at_least(5.0))
def reduced():
    """A plateau reduces the rate until an update is smaller than the last bit of a weight."""
    reduce = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.01, patience=0, min_delta=10.0, min_lr=1e-11)
    model, fit = _single_samples(Opt.Adam(1e-2), 30)
    return model, {**fit, "epochs": 10, "callbacks": [reduce]}


@wild("averaged-weights", spike=at_least(1.5))
def averaged():
    """Noisy weights at a high rate, sometimes overwritten by their average."""
    images, y = digits()
    model = network(64, 16, 10)
    model.compile(Opt.SGD(0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=25), crossentropy())
    return model, arrays(images.reshape(-1, 64), y, batch=8, epochs=3)

