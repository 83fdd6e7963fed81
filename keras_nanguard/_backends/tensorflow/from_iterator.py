"""Runs one step of a Keras trainer per batch, which the host takes from the data.

In each execution Keras 3.15 does work that only several steps per execution need. The step is a
function within a function, its outputs are wrapped in an optional, and two eager operations check
it. `tf.function` also looks up the trace by the types of all arguments and captured values,
although they are the same as in the step before. This takes 0.25 ms of a step of 0.6 ms
(keras/src/backend/tensorflow/trainer.py, `_make_function`). With one step per execution this is not
needed: the host takes the batch, which a diagnosis can then use, and looks up the trace once per
iterator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

__all__ = ["Direct", "next_batch"]


class Direct:
    """The train function of a model, one step in each execution.

    Args:
        step: the train step, `step(data) -> outputs`.
    """

    def __init__(self, step: Callable[[Any], Any]):
        self._function = tf.function(
            tf.autograph.experimental.do_not_convert(step), reduce_retracing=True
        )
        self._iterator: Callable[[], Any] = lambda: None
        self._trace: Any = None

    def __call__(self, data: Any, iterator: Any) -> Any:
        """Run the step on the next batch of this iterator."""
        if not isinstance(iterator, tf.data.Iterator):
            return self._function(data)
        if self._iterator() is not iterator:
            spec = keras.tree.map_structure(_present, iterator.element_spec)
            self._trace = self._function.get_concrete_function(spec)
            self._iterator = weakref.ref(iterator)
        return self._trace(data)

    def again(self, data: Any) -> Any:
        """Run the step on an earlier batch."""
        return (self._trace or self._function)(data)


def next_batch(iterator: Any) -> Any:
    """Return the next batch of the data, as Keras passes it to a step.

    Raises:
        StopIteration: if there is none.
    """
    return keras.tree.map_structure(_present, next(iterator))


def _present(value: Any) -> Any:
    """Return a component of a batch, or its spec; `None` for one that a generator omitted."""
    return None if isinstance(value, (tf.experimental.Optional, tf.OptionalSpec)) else value
