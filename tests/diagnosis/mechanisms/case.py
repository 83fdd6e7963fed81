"""The definition of a program, and small models and data that several programs share."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import Incident, NanGuard

try:
    import tensorflow as tf
except ImportError:  # the programs that need it are left out on other backends
    tf = None


@dataclass
class Case:
    """One program.

    Attributes:
        model: a compiled model.
        x: inputs.
        y: targets.
        causes: the right causes.
        culprit: part of the name of the culprit, `""` if there is none.
        rows: rows of the batch to blame, `None` if not checked.
        step: step of the incident, `None` if not checked.
        fit: arguments of `fit`.
    """

    model: Any
    x: Any
    y: Any
    causes: tuple[str, ...]
    culprit: str = ""
    rows: tuple[int, ...] | None = None
    step: int | None = None
    fit: dict[str, Any] = field(default_factory=dict)

    def train(self, guard: NanGuard) -> list[Incident]:
        """Train for an epoch of batches of 8, and return the incidents."""
        how = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0, **self.fit}
        self.model.fit(self.x, self.y, **how, callbacks=[guard])
        return guard.incidents


PROGRAMS: dict[str, Callable[[bool], Case]] = {}


def program(build: Callable[[bool], Case]) -> Callable[[bool], Case]:
    """Register a program, which starts from a fixed seed, under the name of its function."""

    @functools.wraps(build)
    def seeded(bad: bool) -> Case:
        keras.utils.set_random_seed(0)
        return build(bad)

    PROGRAMS[build.__name__] = seeded
    return seeded


MARKS: dict[str, pytest.MarkDecorator] = {}
"""The marks of programs that some backends cannot run."""


def not_on(backends: str, reason: str) -> Callable[[Callable[[bool], Case]], Callable[[bool], Case]]:
    """Register a program that is excluded on these backends for this reason."""
    able = [name for name in ("tensorflow", "jax", "torch") if name not in backends.split()]

    def register(build: Callable[[bool], Case]) -> Callable[[bool], Case]:
        MARKS[build.__name__] = pytest.mark.requires_backend(*able, reason=reason)
        return program(build)

    return register


def tensorflow_alone(reason: str) -> Callable[[Callable[[bool], Case]], Callable[[bool], Case]]:
    """Register a TensorFlow program, which is excluded on other backends for this reason."""
    return not_on("jax torch", reason)


def data(rows: int = 64, features: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a linear regression."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, features)).astype("float32")
    return x, (x[:, :1] * 0.5 + 0.1 * x[:, 1:2]).astype("float32")


def classes(rows: int = 64, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels of a classification."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, count, rows)
    x = rng.standard_normal((rows, 4)).astype("float32")
    x[:, 0] += labels
    return x, labels.astype("int32")


def compiled(model: Any, optimizer: Any = "sgd", loss: Any = "mse", **compile_: Any) -> Any:
    """Compile a model, and return it."""
    model.compile(optimizer, loss, **compile_)
    return model


def stack(*parts: Any, shape: tuple[int, ...] = (4,), **compile_: Any) -> Any:
    """Return a compiled stack of these layers."""
    return compiled(keras.Sequential([keras.Input(shape), *parts]), **compile_)


def mlp(*extra: Any, out: int = 1, activation: Any = None, **compile_: Any) -> Any:
    """Return a small network, compiled."""
    keras.utils.set_random_seed(0)
    first = layers.Dense(8, activation="tanh", name="first")
    return stack(first, *extra, layers.Dense(out, activation=activation, name="head"), **compile_)


def linear(optimizer: Any = "sgd", loss: Any = "mse", **compile_: Any) -> Any:
    """Return two linear layers without any bound."""
    keras.utils.set_random_seed(0)
    parts = layers.Dense(8, name="first"), layers.Dense(1, name="head")
    return stack(*parts, optimizer=optimizer, loss=loss, **compile_)


def unary(function: Any, name: str, **compile_: Any) -> Any:
    """Return a small network with a custom function in the middle."""
    return mlp(layers.Lambda(function, name=name), **compile_)
