"""The updates of large weights one after another, so that what they compute on the way is in memory one at a time.

In a plain step an update runs as soon as its gradient is there. Those of a guarded step wait for the verdict, and then TensorFlow would
begin all of them at once: Adam's holds several arrays of the size of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.tensorflow import graph
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides

__all__ = ["one_by_one"]

LARGE = 1 << 20
"""Entries from which one update keeps all cores busy, so that nothing is lost where the next one waits for it."""


@contextmanager
def one_by_one(optimizers: Iterable[Any]) -> Iterator[None]:
    """While updates of these optimizers are traced, let that of each large weight wait for the one before."""
    last: list[Any] = []
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, optimizers):
            overrides.set(optimizer, "update_step", _waiting(optimizer.update_step, last))
        yield


def _waiting(real: Callable[..., Any], last: list[Any]) -> Callable[..., Any]:
    """Return what stands in for `update_step`; `last` holds what the update before has written."""

    def update_step(gradient: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        size = variable.shape.num_elements()
        if tf.executing_eagerly() or size is None or size < LARGE:
            return real(gradient, variable, *args, **kwargs)
        traced = tf.compat.v1.get_default_graph()
        start = graph.mark(traced)
        with tf.control_dependencies([op for op in last if op.graph is traced]):
            result = real(gradient, variable, *args, **kwargs)
        last[:] = [op for op in traced.get_operations()[start:] if op.type.startswith(("Assign", "ResourceApply"))]
        return result

    return update_step
