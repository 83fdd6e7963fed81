"""One step of a Keras trainer for each batch, taken off the data by the host.

Around each execution Keras 3.15 does what only several steps in one need: the step is a function within a function, its
outputs leave as an optional, and two eager operations ask that optional whether there are any. And `tf.function` looks up
the trace by the types of its arguments and of everything that it captures, although they are those of the step before. Of a
step of 0.6 ms that is 0.25 (keras/src/backend/tensorflow/trainer.py, `_make_function`). Where one execution is one step,
nothing of it is needed: the host takes the batch, which it then has at hand for a diagnosis, and the trace is looked up once for
each iterator.
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
        self._function = tf.function(tf.autograph.experimental.do_not_convert(step), reduce_retracing=True)
        self._iterator: Callable[[], Any] = lambda: None
        self._trace: Any = None

    def __call__(self, data: Any, iterator: Any) -> Any:
        """Run the step on a batch that was taken off this iterator."""
        if not isinstance(iterator, tf.data.Iterator):
            return self._function(data)
        if self._iterator() is not iterator:
            spec = keras.tree.map_structure(_present, iterator.element_spec)
            self._trace = self._function.get_concrete_function(spec)
            self._iterator = weakref.ref(iterator)
        return self._trace(data)

    def again(self, data: Any) -> Any:
        """Run the step on a batch that was taken off the data earlier."""
        return (self._trace or self._function)(data)


def next_batch(iterator: Any) -> Any:
    """Take a batch off the data, as Keras hands it to a step.

    Raises:
        StopIteration: where there is none.
    """
    return keras.tree.map_structure(_present, next(iterator))


def _present(value: Any) -> Any:
    """Return a component of a batch, or its spec; `None` for one that a generator left out."""
    return None if isinstance(value, (tf.experimental.Optional, tf.OptionalSpec)) else value
