"""Replays a step for a diagnosis on JAX.

A step on JAX is a function from state to state. Here it runs eagerly as one that reads and writes
the variables (`Transaction.replayed`), so that the variables have its results.

To find the origin of a NaN or Inf, every primitive of an eager run is recorded, and each bad value
is followed. Without compilation every primitive runs separately on arrays, including those of the
backward pass, also below `jax.grad`. Values are identified by their array object.

JAX evaluates a primitive in `jax._src.core.EvalTrace.process_primitive`. It has no public name.
Without it, only the layer table is available.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._backends.jax.intercept import Intercept, primal, running_trace
from keras_nanguard._backends.shared import instrument
from keras_nanguard._backends.shared.origins import OriginTracker, is_finite
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._core.finiteness import is_inexact
from keras_nanguard._core.observations import Origin
from keras_nanguard._keras import arrays as keras_arrays, variables as keras_variables
from keras_nanguard._keras.all_or_none import finish
from keras_nanguard._keras.jax_trainer import by_part, ready, stored

try:
    from jax._src.core import EvalTrace
except ImportError:
    EvalTrace = None

FILLING = ("broadcast_in_dim", "full", "copy")


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


class Origins(OriginTracker):
    """Context that records every eager primitive. Variables are identified by the id of their
    array.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._held: list[Any] = []
        super().__init__(*args, **kwargs)

    def __enter__(self) -> Origins:
        self._still = jax.disable_jit()
        self._still.__enter__()
        _PRIMITIVES.enter(self)
        return self

    def __exit__(self, *details: Any) -> None:
        _PRIMITIVES.leave(self)
        self._still.__exit__(*details)

    def of(self, tensor: Any) -> Origin | None:
        found = self._lineage.get(id(tensor))
        if found is None and id(tensor) in self._variables and not is_finite(tensor):
            found = self._stored(tensor)
        return self._completed(found)

    @staticmethod
    def number_of(variable: Any) -> int | None:
        """Return the number of a variable: that of its array at the beginning."""
        return id(variable.value)

    def of_gradient(self, gradient: Any) -> Origin | None:
        """Return the origin behind a gradient, as one of the backward pass if the loss is finite.

        JAX computes the slope of an operation (1 / x of a logarithm) in its forward pass, for a
        multiplication in the backward pass. A bad value that begins there and does not reach the
        loss is such a slope, or a value that is masked away.
        """
        origin = self.of(gradient)
        if origin is None or origin.source != "operation" or origin.phase == "backward":
            return origin
        return dataclasses.replace(origin, phase="slope")

    def written(self, variable: Any) -> Origin | None:
        return self.of(variable.value)

    def _keep(self, tensor: Any, origin: Origin) -> None:
        self._held.append(tensor)  # so that no other array gets its number
        super()._keep(tensor, origin)

    def see(self, primitive: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Record one primitive."""
        self.count += 1
        bad = [t for t in outputs if not is_finite(t)]
        if bad:
            filled = primitive in FILLING and not any(map(is_inexact, inputs))
            origin = self._inherited(primitive, self._inputs(inputs), bad, filled)
            for tensor in bad:
                self._keep(tensor, origin)
        elif (
            primitive in ("convert_element_type", "copy")
            and inputs
            and id(inputs[0]) in self._variables
        ):
            self._held.append(outputs[0])
            self._variables[id(outputs[0])] = self._variables[id(inputs[0])]


def _process_primitive(
    real: Callable[..., Any],
    running: Sequence[Origins],
    trace: Any,
    primitive: Any,
    args: Any,
    *rest: Any,
) -> Any:
    result = real(trace, primitive, args, *rest)
    running[-1].see(primitive.name, args, result if primitive.multiple_results else (result,))
    return result


_PRIMITIVES = ThreadOverrides(
    EvalTrace, {} if EvalTrace is None else {"process_primitive": _process_primitive}
)


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

    def intercepted(
        self, model: Any, optimizers: Iterable[Any], immediate: bool
    ) -> contextlib.AbstractContextManager[Intercept]:
        return Intercept(model, optimizers, may_commit=immediate)

    @contextlib.contextmanager
    def preserved(
        self, variables: Sequence[Any], model: Any, optimizers: Iterable[Any]
    ) -> Iterator[None]:
        old = [(v, v.value) for v in variables if keras_variables.is_variable(v)]
        try:
            yield
        finally:
            finish(partial(v.assign, value) for v, value in old)

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
        known = [v for v in step.variables() if keras_variables.is_variable(v)]

        def run(values: Any, args: Any) -> Any:
            with keras.StatelessScope(state_mapping=list(zip(known, values))):
                return function(args)

        return jax.jit(run)([v.value for v in known], list(args))
