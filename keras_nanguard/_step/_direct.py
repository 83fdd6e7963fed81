"""One step of a Keras trainer straight off its iterator.

Around each execution Keras 3.15 does what only several steps in one need: the step is a function within a function, its
outputs leave as an optional, and two eager operations ask that optional whether there are any. And `tf.function` looks up
the trace by the types of its arguments and of everything that it captures, although they are those of the step before. Of a
step of 0.6 ms that is 0.25 (keras/src/backend/tensorflow/trainer.py, `_make_function`). Where one execution is one step,
nothing of it is needed: the trace is looked up once for each iterator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

__all__ = ["Direct"]


class Direct:
    """The train function of a model, one step in each execution.

    Args:
        step: the train step, `step(data) -> outputs`.
        otherwise: the train function as Keras makes it, for iterators that are not TensorFlow's (`train_on_batch`).
    """

    def __init__(self, step: Callable[[Any], Any], otherwise: Callable[[Any], Any]):
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def execution(iterator: Any) -> Any:
            return step(keras.tree.map_structure(_present, iterator.get_next()))

        self._function, self._otherwise = tf.function(execution, reduce_retracing=True), otherwise
        self._iterator: Callable[[], Any] = lambda: None
        self._trace: Any = None

    def __call__(self, iterator: Any) -> Any:
        """Run the step on the next batch.

        Raises:
            tf.errors.OutOfRangeError: where there is none.
        """
        if not isinstance(iterator, tf.data.Iterator):
            return self._otherwise(iterator)
        if self._iterator() is not iterator:
            self._trace = self._function.get_concrete_function(iterator)
            self._iterator = weakref.ref(iterator)
        return self._trace(iterator)


def _present(value: Any) -> Any:
    """Return a component of a batch as Keras hands it to the step: `None` for one that a generator left out."""
    return None if isinstance(value, tf.experimental.Optional) else value
