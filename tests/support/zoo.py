"""Small models, data with and without bad values, and results of runs to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_nanguard import NanGuard

BATCH, BATCHES = 8, 12
MODES: dict[str, dict[str, Any]] = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "steps4": {"steps_per_execution": 4},
}
BACKEND = keras.backend.backend()
OLD = tuple(int(n) for n in keras.__version__.split(".")[:2]) < (3, 8)
"""Whether this is one of the lowest versions of Keras, which behave differently in some cases."""


class Tally:
    """A number that trials and replays do not restore: it is in no `__dict__`."""

    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


# Data


@dataclass
class Data:
    """Batches of `x`, `y` and more, each an array or a nested structure of arrays whose first axis is the sample."""

    x: Any
    y: Any
    more: tuple[Any, ...] = ()

    def without(self, batches: Iterable[int]) -> Data:
        """Return the data with some batches left out."""
        dropped = set(batches)
        rows = np.concatenate(
            [np.arange(b * BATCH, b * BATCH + BATCH) for b in range(self.batches) if b not in dropped]
        )
        return Data(*(keras.tree.map_structure(lambda a: a[rows], part) for part in (self.x, self.y, self.more)))

    def with_poison(self, batches: Iterable[int], value: float = np.nan, where: str = "x") -> Data:
        """Return the data with bad batches inserted at these numbers."""
        kept, rows, bad = iter(range(self.batches)), [], set(batches)
        for batch in range(self.batches + len(bad)):
            source = batch % self.batches if batch in bad else next(kept)
            rows.append(np.arange(source * BATCH, source * BATCH + BATCH))
        chosen = np.concatenate(rows)
        more = Data(*(keras.tree.map_structure(lambda a: a[chosen], part) for part in (self.x, self.y, self.more)))
        for batch in bad:
            poison(more, batch, value, where)
        return more

    @property
    def batches(self) -> int:
        return len(keras.tree.flatten(self.x)[0]) // BATCH

    @property
    def all(self) -> tuple[Any, ...]:
        return (self.x, self.y, *self.more)


def draw(seed: int = 0, features: int = 6, batches: int = BATCHES, sequence: int = 0) -> np.ndarray:
    """Return normally distributed inputs."""
    shape = (batches * BATCH, sequence, features) if sequence else (batches * BATCH, features)
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def regression(batches: int = BATCHES, seed: int = 0) -> Data:
    """Return 6 features and a target that they determine."""
    x = draw(seed, batches=batches)
    return Data(x, (x[:, :1] - 0.5 * x[:, 1:2] ** 2).astype("float32"))


def poison(data: Data, batch: int, value: float = np.nan, where: str = "x", row: int = 2) -> Data:
    """Write a bad number into a row of a batch, in place; in the first float array."""
    arrays = keras.tree.flatten(getattr(data, where))
    array = next(a for a in arrays if a.dtype.kind == "f")
    place = batch * BATCH + row
    array[place : place + 1].reshape(-1)[:1] = value
    return data


def overflowing(*batches: int, count: int = BATCHES) -> Data:
    """Return data whose loss overflows in some batches although inputs and targets are finite."""
    data = regression(batches=count)
    for batch in batches:
        data.y[batch * BATCH + 2] = 1e38
    return data


# Models


FILLS = BACKEND != "tensorflow" or hasattr(keras.Model, "_make_function")
"""Whether data may end within an execution of several steps: Keras 3.6 loses some then."""


def supported(mode: dict[str, Any], even: bool = True) -> None:
    """Skip a test of a mode that the backend or the version of Keras does not support."""
    if mode.get("steps_per_execution", 1) > 1 and not even and not FILLS:
        pytest.skip("this version of Keras loses the steps of an execution that the data does not fill, and numbers them otherwise")
    if BACKEND == "torch" and mode.get("steps_per_execution", 1) > 1:
        pytest.skip("Keras has no steps_per_execution on torch")
    if BACKEND == "torch" and mode.get("jit_compile"):
        pytest.skip("compiling a step on torch takes ten seconds: tests/backends/torch/test_compiled_step.py tests it")


def plain(
    optimizer: Any = "adam", *, dropout: bool = True, loss: Any = "mse", metrics: Any = ("mae",), rounded: bool = False, **mode: Any
) -> Any:
    """Dense, BatchNormalization, Dropout and GaussianNoise: every kind of state that a step writes.

    `rounded`: the compared runs are compiled separately.
    """
    supported(mode)
    bias = not (rounded or mode.get("jit_compile"))  # ahead of BatchNormalization its gradient is rounding, which XLA rounds differently
    noise = [layers.Dropout(0.3), layers.GaussianNoise(0.1)] if dropout else []
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, use_bias=bias),
            layers.BatchNormalization(),
            layers.ReLU(),
            *noise,
            layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(optimizer, loss, metrics=list(metrics), **mode)
    return model


@keras.saving.register_keras_serializable("zoo")
def trapped(y_true: Any, y_pred: Any) -> Any:
    """Return a loss whose value is finite, and whose gradient is NaN if the second target is 0."""
    target, switch = y_true[:, :1], y_true[:, 1:]
    return ops.mean(ops.square(target - y_pred), -1) + 0.01 * ops.mean(ops.sqrt(ops.square(y_pred * switch)), -1)


def trap(data: Data) -> Data:
    """Return the data with a second target, 1, for `trapped`."""
    return Data(data.x, np.concatenate([data.y, np.ones_like(data.y)], 1), data.more)


# Callbacks


class _Acts(keras.callbacks.Callback):
    """Calls a function with the model at one batch, or at all of them, and stores its results."""

    def __init__(self, act: Callable[[Any], Any], batch: int | None = None, epoch: int | None = None):
        super().__init__()
        self.act, self.batch, self.epoch = act, batch, epoch
        self.now, self.seen = 0, []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def _at(self, batch: int) -> None:
        if self.batch in (None, batch) and self.epoch in (None, self.now):
            self.seen.append(self.act(self.model))


class Before(_Acts):
    """Acts before the batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._at(batch)


class After(_Acts):
    """Acts after the batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at(batch)


def raising(error: BaseException | type[BaseException]) -> Callable[[Any], None]:
    """Return a function that raises."""

    def act(model: Any) -> None:
        raise error

    return act


# Runs


@dataclass
class Run:
    """The results of a run."""

    model: Any
    history: dict[str, list[float]]
    guard: NanGuard | None = None
    state: list[tuple[str, np.ndarray]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The steps of the incidents."""
        return [incident.step for incident in self.guard.incidents] if self.guard else []


def state_of(model: Any, *optimizers: Any) -> list[tuple[str, np.ndarray]]:
    """Return every variable of the train state with its path: model, recurrent states, metrics, optimizers."""
    held = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    optimizers = optimizers or (model.optimizer, *held)
    states = [s for layer in model._flatten_layers() for s in keras.tree.flatten(getattr(layer, "states", None) or [])]
    found = [*model.variables, *states, *model.metrics_variables]
    found += [v for o in dict.fromkeys(o for o in optimizers if o is not None) for v in o.variables]
    return [(v.path, np.array(ops.convert_to_numpy(v.value))) for v in {id(v): v for v in found}.values()]


def _generators() -> list[tuple[str, np.ndarray]]:
    """Return the generators of no model: on torch, unseeded dropout draws from one."""
    if BACKEND != "torch":
        return []
    import torch

    return [("torch's generator", torch.get_rng_state().numpy().copy())]


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Run graphs without arithmetic rewriting.

    TensorFlow's arithmetic optimizer rewrites `rate * (scale * gradient)` as `(rate * scale) *
    gradient` if nothing else reads the inner product and both are in one graph. This changes the
    rounding, and any reader of the gradient prevents it, not only the guard. Without the optimizer
    runs can be compared bit by bit.
    """
    if BACKEND != "tensorflow":
        yield
        return
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options().get("arithmetic_optimization", True)
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": before})


def run(
    build: Callable[..., Any],
    data: Any,
    *,
    guard: Any = None,
    epochs: int = 2,
    rewritten: bool = False,
    **more: Any,
) -> Run:
    """Build a model from a fixed seed, and train it as `trained`."""
    keras.utils.set_random_seed(0)
    return trained(build(), data, guard=guard, epochs=epochs, rewritten=rewritten, **more)


def trained(
    model: Any,
    data: Any,
    *,
    guard: Any = None,
    epochs: int = 2,
    rewritten: bool = False,
    **more: Any,
) -> Run:
    """Train a model from a fixed seed, guarded if a `NanGuard` is given (`True`: a default one).

    With `guard="undiagnosed"` there is no diagnosis, which does not change a run
    (tests/diagnosis/test_untouched.py), but may take half of its time if batches are bad. Graphs
    run `as_written`, or rewritten by TensorFlow if `rewritten`.
    """
    keras.utils.set_random_seed(1)
    guard = NanGuard(verbose=0, diagnose=guard is True) if guard in (True, "undiagnosed") else guard
    callbacks = [*([guard] if guard is not None else []), *more.pop("callbacks", [])]
    more = {"epochs": epochs, **more}
    with contextlib.nullcontext() if rewritten else as_written():
        if isinstance(data, Data):
            history = fit(model, data, *callbacks, **more)
        else:
            history = model.fit(data(), verbose=0, callbacks=callbacks, **more).history
    return Run(model, numbers(history), guard, [*state_of(model), *_generators()])


def fit(model: Any, data: Data, *callbacks: Any, **more: Any) -> dict[str, list[float]]:
    """Train for an epoch on batches in order, and return the History; `None` is no callback."""
    names = ("x", "y", "sample_weight")
    given = {**dict(zip(names, data.all)), "batch_size": BATCH, "shuffle": False, "verbose": 0}
    given["callbacks"] = [callback for callback in callbacks if callback is not None]
    return model.fit(**{**given, **more}).history


def refuses_one_batch(fit: Callable[..., Any], epochs: int = 2) -> NanGuard:
    """Check that a guarded run equals the plain one, and that its bad batch is refused.

    Args:
        fit: `fit(guard, bad)` trains with a guard, or with `None`, and returns History and the
            state. If `bad`, row 2 of batch 5 is bad.
        epochs: of the fit.

    Returns:
        the guard of the bad run.
    """
    with as_written():
        plain, state = fit(None, False)
        guard = NanGuard(verbose=0, diagnose=False)
        history, guarded = fit(guard, False)
    assert guard.incidents == [] and plain_logs(history) == plain
    pairs = zip(state, guarded, strict=True)
    assert [p for (p, one), (_, other) in pairs if not np.array_equal(one, other)] == []
    guard = NanGuard(verbose=0)
    history, state = fit(guard, True)
    assert history["refused_steps"] == [1] * epochs
    assert [incident.batch for incident in guard.incidents] == [5] * epochs
    assert all(finite(value) for _, value in state)
    return guard


def numbers(history: dict[str, list[Any]]) -> dict[str, list[float]]:
    """Return a History with tensors, which an old Keras leaves in it, as numbers."""
    return {key: [float(value) for value in values] for key, values in history.items()} if OLD else history


def plain_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs, or a History, without the guard's own keys."""
    return {key: value for key, value in logs.items() if key != "refused_steps" and not key.startswith("nanguard/")}


def assert_same(ones: Iterable[Any], others: Iterable[Any], tolerance: float = 0.0) -> None:
    """Check that two lists of arrays are equal, or close."""
    for one, other in zip(ones, others, strict=True):
        one, other = ops.convert_to_numpy(one), ops.convert_to_numpy(other)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def differences(one: Run, other: Run, tolerance: float = 0.0) -> list[str]:
    """Return the paths of all variables, and the names of all History entries, in which two runs differ."""
    reported = []
    assert [a.shape for _, a in one.state] == [a.shape for _, a in other.state], "the runs have other variables"
    for (path, a), (_, b) in zip(one.state, other.state):
        if not _same(a, b, tolerance):
            reported.append(f"{path}: {np.ravel(a)[:3]} and {np.ravel(b)[:3]}")
    for key in set(plain_logs(one.history)) | set(plain_logs(other.history)):
        if not _same(np.array(one.history.get(key)), np.array(other.history.get(key)), tolerance):
            reported.append(f"history[{key!r}]: {one.history.get(key)} and {other.history.get(key)}")
    return reported


def _same(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    if a.dtype.kind in "iub" or not tolerance:
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(np.allclose(a.astype("float64"), b.astype("float64"), rtol=tolerance, atol=tolerance))


def bad_entries(model: Any) -> list[str]:
    """Return the paths of all variables of a model that are not finite."""
    return [path for path, array in state_of(model) if array.dtype.kind not in "iubO" and not finite(array)]


def finite(array: Any) -> bool:
    """Whether every entry is finite."""
    return bool(np.isfinite(np.asarray(array).astype("float64")).all())
