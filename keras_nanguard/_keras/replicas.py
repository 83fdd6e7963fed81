"""A model under `tf.distribute` as one of its replicas, outside of the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from keras_nanguard._keras.optimizers import inner
from keras_nanguard._keras.overrides import Overrides

__all__ = ["on_first_replica", "without_strategy"]


@contextlib.contextmanager
def on_first_replica(variables: Iterable[Any]) -> Iterator[None]:
    """Make variables of Keras refer only to the copy of the first replica. Variables with one copy,

    and native variables of the backend, do not change.
    """
    replaced = [(v, v._value) for v in variables if hasattr(getattr(v, "_value", None), "values")]
    for variable, value in replaced:
        variable._value = value.values[0]
    try:
        yield
    finally:
        for variable, value in replaced:
            variable._value = value


@contextlib.contextmanager
def without_strategy(optimizers: Iterable[Any], default: Any) -> Iterator[None]:
    """Let optimizers update outside of the strategy in which they were created."""
    with Overrides() as overrides:
        for optimizer in map(inner, optimizers):
            if getattr(optimizer, "_distribution_strategy", default) is not default:
                overrides.set(optimizer, "_distribution_strategy", default)
        yield
