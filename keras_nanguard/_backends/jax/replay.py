"""Replays a step for a diagnosis on JAX.

A step on JAX is a function from state to state. Here it runs eagerly as one that reads and writes
the variables (`Transaction.replayed`), so that the variables have its results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._backends.jax.intercept import Intercept, primal, running_trace
from keras_nanguard._backends.jax.origins import Origins
from keras_nanguard._backends.shared import instrument
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._keras import arrays as keras_arrays
from keras_nanguard._keras.jax_trainer import by_part, ready, stored


class Instrument(instrument.Instrument):
    """Records layers and losses in an eager run, or in the trace of a compiled one.

    Below `jax.grad` every value is a pair of itself and its derivative; the value is recorded. The
    backward pass begins when a probe first receives a gradient, and ends when a layer or a loss is
    called again.
    """

    def _begin(self) -> None:
        self.trace = running_trace()

    def _is_float(self, value: Any) -> bool:
        known = isinstance(value, (jax.Array, jax.core.Tracer)) and hasattr(value, "dtype")
        return (
            known
            and bool(jnp.issubdtype(value.dtype, jnp.floating))
            and primal(value, self.trace) is not None
        )

    def returned(self, tensors: Iterable[Any]) -> list[Any]:
        return [t for t in tensors if primal(t, self.trace) is t]

    def _plain(self, value: Any) -> Any:
        return primal(value, self.trace)

    def _inside(self, call: instrument.Call) -> Any:
        if self.origins.phase == "backward":
            self.origins.phase, self.origins.frames = "forward", []
        return super()._inside(call)

    def _identity(self, value: Any, passed: Callable[[Any], Any]) -> Any:
        def seen(_: Any, upstream: Any) -> Any:
            self.origins.phase = "backward"
            return (passed(upstream),)

        @jax.custom_vjp  # type: ignore[untyped-decorator]
        def identity(x: Any) -> Any:
            return x

        identity.defvjp(lambda x: (x, None), seen)
        return identity(value)


class Replay(interface.Replay):
    """Replays a step and records its operations. JAX compiles all modes but `"eager"` with XLA."""

    Origins = Origins
    Instrument = Instrument

    def body_of(self, model: Any) -> Callable[..., Any]:
        def body(data: Any) -> Any:
            ready(model, data)
            logs, new = model.train_step(stored(model), data)
            for part, values in zip(by_part(model), new):
                for variable, value in zip(part, values):
                    variable.assign(value)
            return logs

        return body

    def intercepted(self, model: Any, optimizers: Iterable[Any], immediate: bool) -> Any:
        return Intercept(model, optimizers, may_commit=immediate)

    @contextlib.contextmanager
    def preserved(self, variables: Sequence[Any]) -> Iterator[None]:
        old = [(v, v.value) for v in variables if isinstance(v, keras.Variable)]
        try:
            yield
        finally:
            for variable, value in old:
                variable.assign(value)

    def without_rows(self, value: Any, kept: Any) -> Any:
        """Return an array of the same shape in which kept rows replace the others, because another
        shape would be compiled again.
        """
        rows = np.resize(np.asarray(kept), value.shape[0]) if len(kept) else np.zeros(0, int)
        if hasattr(value, "todense"):
            if not keras_arrays.has_coordinates(value):
                return type(value).fromdense(value.todense()[rows])
            indices, values, shape = keras_arrays.gathered(value, rows)
            return type(value)((jnp.asarray(values), jnp.asarray(indices)), shape=shape)
        return value[rows]

    def twin(self, variable: Any) -> Any:
        value = getattr(variable, "value", None)
        return value.astype(jnp.float32) if isinstance(value, jax.Array) else None

    def compiled(
        self, function: Callable[..., Any], step: ReplayableStep, args: Sequence[Any], jit: bool
    ) -> Any:
        if step.judged is None:
            ready(step.model, *args)
        known = [v for v in step.variables() if isinstance(v, keras.Variable)]

        def run(values: Any, args: Any) -> Any:
            with keras.StatelessScope(state_mapping=list(zip(known, values))):
                return function(args)

        return jax.jit(run)([v.value for v in known], list(args))
