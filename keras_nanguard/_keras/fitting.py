"""What surrounds the steps of a fit: `compile`, the train function, the data that `fit` iterates over, where it prints.

Each function says which name private to Keras it uses, and why there is no public way; `tests/keras_internals/test_internals.py`
fails when a release of Keras takes one of them away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import keras
from keras.src.utils import io_utils

from keras_nanguard._keras import native_variables
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

__all__ = [
    *("as_built", "begin_at", "built_in", "compiled_as", "on_making", "print_message", "running_data", "running_spec", "savers"),
]


def print_message(text: str) -> None:
    """Print a line the way Keras prints: on the screen, or into the log."""
    io_utils.print_msg(text)


def built_in(model: Any, train_state: TrainState) -> tuple[Any, ...]:
    """Return what a trace of a train step has built in: the call of `compile`, the optimizers, their rates, all variables.

    Which of them are trainable is no part of it: Keras goes on with the train function it has until `compile` is called.
    """
    rates = [getattr(keras_optimizers.inner(optimizer), "_learning_rate", None) for optimizer in train_state.optimizers]
    return (compiled_as(model) or object(), *train_state.optimizers, *rates, *sorted(train_state.everything, key=id))


def compiled_as(model: Any) -> Any:
    """Return what the last call of `compile` has left, `None` where it was never called.

    `Model._compile_config` is private; `compile` makes a new one each time, and nothing public tells that it was called.
    """
    return getattr(model, "_compile_config", None)


def savers(callbacks: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return `(callback, method)` of callbacks that save a model past `Model.save` and `Model.save_weights`.

    `OrbaxCheckpoint._save_checkpoint` is private; all of its saves go through it, and it reads the state by itself.
    """
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    return [(c, "_save_checkpoint") for c in callbacks if orbax is not None and isinstance(c, orbax)]


@contextmanager
def as_built(model: Any, optimizers: Iterable[Any]) -> Iterator[None]:
    """Let those variables be trainable that the optimizers were built to update, and no others.

    Stock Keras goes on with the train function that it has where `trainable` is changed and `compile` is not called.
    """
    trained = {id(native_variables.unwrapped(v)) for o in optimizers if o.built for v in keras_optimizers.trained_by(o)}
    changed = [v for v in model.variables if trained and v.trainable != (id(v) in trained)]
    for variable in changed:
        variable.trainable = not variable.trainable
    try:
        yield
    finally:
        for variable in changed:
            variable.trainable = not variable.trainable


def on_making(model: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]], overrides: Overrides) -> bool:
    """Let `change(make)` stand in for what makes each train, test and predict function of a model; returns whether there is that.

    ``Model._make_function`` is private; Keras before 3.8 or so makes each function in a method of its own.
    """
    real = getattr(model, "_make_function", None)
    if real is not None:
        overrides.set(model, "_make_function", change(real))
    return real is not None


def begin_at(model: Any, epoch: int | None) -> None:
    """Let `fit` begin with this epoch, as Keras' own `BackupAndRestore` does; `None` takes that back.

    It comes before an `initial_epoch` that `fit` is given. `Model._initial_epoch` is private, and the only way.
    """
    if epoch is not None:
        model._initial_epoch = _Epoch(epoch)
    elif isinstance(getattr(model, "_initial_epoch", None), _Epoch):
        model._initial_epoch = None


class _Epoch(int):
    """An epoch that counts as given also where it is 0: `fit` begins with `model._initial_epoch or initial_epoch`."""

    def __bool__(self) -> bool:
        return True


def running_data() -> Any:
    """Return the data adapter of the innermost `evaluate` or `predict` that runs, `None` where it can be read only once."""
    adapter = _adapter("evaluate", "predict")
    return None if "Generator" in type(adapter).__name__ else adapter


def running_spec() -> Any:
    """Return the `element_spec` of the data that the innermost `fit` trains on, `None` where it has none.

    `TFEpochIterator._distributed_dataset` is the `tf.data.Dataset` that it was given or has made.
    """
    iterator = _epoch_iterator("fit")
    return getattr(getattr(iterator, "_distributed_dataset", None), "element_spec", None)


def _adapter(*calls: str) -> Any:
    """Return the data adapter of the innermost of these calls that runs."""
    return getattr(_epoch_iterator(*calls), "data_adapter", None)


def _epoch_iterator(*calls: str) -> Any:
    """Return the `EpochIterator` of the innermost of these calls that runs, `None` where there is none.

    Trainers keep it in a local variable, `epoch_iterator`, and tell callbacks nothing of it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in calls and "epoch_iterator" in frame.f_locals:
            return frame.f_locals["epoch_iterator"]
        frame = frame.f_back
    return None
