"""Replays a step for a diagnosis on TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import instrument
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._backends.tensorflow.intercept import Intercept, Seen
from keras_nanguard._backends.tensorflow.origins import Origins
from keras_nanguard._keras import (
    arrays as keras_arrays,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import ThreadOverrides


class Instrument(instrument.Instrument):
    """Records layers and losses in eager execution, or in the graph that is being built."""

    def _begin(self) -> None:
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        _GRADIENTS.enter(self)

    def _end(self) -> None:
        _GRADIENTS.leave(self)

    def _here(self) -> bool:
        if self.graph is None:
            return bool(tf.executing_eagerly())
        return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is self.graph

    def _is_float(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor) and bool(value.dtype.is_floating)

    def tensor_of(self, variable: Any) -> Any:
        return tf.convert_to_tensor(variable.value)

    def returned(self, tensors: Iterable[Any]) -> list[Any]:
        found = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
        return [t for t in found if getattr(t, "graph", None) is self.graph]

    def _identity(self, value: Any, passed: Callable[[Any], Any]) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def identity(x: Any) -> Any:
            return tf.identity(x), passed

        return identity(value)


def _gradient(
    real: Callable[..., Any], running: Sequence[Instrument], *args: Any, **kwargs: Any
) -> Any:
    return running[-1].differentiate(real, *args, **kwargs)


_GRADIENTS = ThreadOverrides(tf.GradientTape, {"gradient": _gradient})


class Replay(interface.Replay):
    """Replays a step and records its operations."""

    Origins = Origins
    Instrument = Instrument

    @contextlib.contextmanager
    def intercepted(self, model: Any, optimizers: Iterable[Any], immediate: bool) -> Iterator[Seen]:
        """Record losses and updates on one replica; `immediate`: updates run at once."""
        alone = keras_optimizers.without_strategy(optimizers, tf.distribute.get_strategy())
        seen = Seen()
        notes = Intercept(model, optimizers, immediate, lambda variable: None, lambda: seen)
        with alone, notes, notes.creating():
            yield seen

    @contextlib.contextmanager
    def preserved(self, variables: Sequence[Any]) -> Iterator[None]:
        """Restore these variables, and the generator of eager operations without a seed, at the
        end.

        Inside the context a variable with a copy per replica is that of the first replica, so no
        other replica is needed or changed.
        """
        natives = [part for v in map(keras_variables.native, variables) for part in _copies(v)]
        natives = [v for v in natives if hasattr(v, "assign")]
        old = [v.read_value() for v in natives]
        drawn = getattr(context.context(), "_rng", None)
        stream = drawn.getstate() if drawn is not None else None
        try:
            with keras_variables.on_first_replica(variables):
                yield
        finally:
            for variable, value in zip(natives, old):
                variable.assign(value)
            if drawn is not None and stream is not None:
                drawn.setstate(stream)

    def without_rows(self, value: Any, kept: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensor(*keras_arrays.gathered(value, np.asarray(kept)))
        return tf.gather(value, kept)

    def twin(self, variable: Any) -> Any:
        native = getattr(variable, "value", None)
        if not isinstance(native, tf.Variable):
            return None
        return tf.Variable(tf.cast(native, tf.float32), trainable=native.trainable)

    def compiled(
        self, function: Callable[..., Any], step: ReplayableStep, args: Sequence[Any], jit: bool
    ) -> Any:
        return tf.function(function, jit_compile=jit, autograph=False)(list(args))


def _copies(variable: Any) -> Sequence[Any]:
    return getattr(variable, "values", (variable,))  # type: ignore[no-any-return]
