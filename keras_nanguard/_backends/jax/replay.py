"""Replays a step for a diagnosis on JAX.

A step on JAX is a function from state to state. Here it runs eagerly as one that reads and writes
the variables (`Transaction.replayed`), so that the variables have its results.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._backends.jax.intercept import Intercept, primal
from keras_nanguard._backends.jax.origins import Origins
from keras_nanguard._backends.jax.outputs import LogOutputs
from keras_nanguard._backends.jax.step import Transaction
from keras_nanguard._backends.shared import instrument
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._keras import sparse_arrays
from keras_nanguard._keras.jax_trainer import by_part, ready, variables
from keras_nanguard._keras.train_state import TrainState


class Instrument(instrument.Instrument):
    """Records layers and losses in an eager run.

    Below `jax.grad` every value is a pair of itself and its derivative; the value is recorded. The
    backward pass begins when a probe first receives a gradient, and ends when a layer or a loss is
    called again.
    """

    def _is_float(self, value: Any) -> bool:
        known = isinstance(value, (jax.Array, jax.core.Tracer)) and hasattr(value, "dtype")
        return (
            known
            and bool(jnp.issubdtype(value.dtype, jnp.floating))
            and primal(value, None) is not None
        )

    def _push(self, call: Any) -> None:
        if self.origins is not None and self.origins.phase == "backward":
            self.origins.phase, self.origins.frames = "forward", []
        super()._push(call)

    def _pop(self, call: Any) -> None:
        if self.origins is not None and not self.origins.frames:
            self.origins.frames.append(("", ""))
        super()._pop(call)

    def _note(self, call: Any, number: int) -> None:
        for values in (call.inputs, call.outputs):
            values[:] = [primal(value, None) for value in values]
        super()._note(call, number)

    def _taken_in(self, call: Any, value: Any) -> Any:
        if self._is_float(value) and self.origins is not None:
            self.origins.entered((primal(value, None),))
        return super()._taken_in(call, value)

    def _identity(self, value: Any, passed: Callable[[Any], Any]) -> Any:
        origins = self.origins

        def seen(_: Any, upstream: Any) -> Any:
            if origins is not None:
                origins.phase = "backward"
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
            parts = by_part(model)
            logs, new = model.train_step(tuple([v.value for v in part] for part in parts), data)
            for part, values in zip(parts, new):
                for variable, value in zip(part, values):
                    variable.assign(value)
            return logs

        return body

    def intercepted(self, model: Any, optimizers: Iterable[Any], immediate: bool) -> Any:
        return Intercept(model, optimizers, updates=immediate)

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
            if not sparse_arrays.has_coordinates(value):
                return type(value).fromdense(value.todense()[rows])
            indices, values, shape = sparse_arrays.gathered(value, rows)
            return type(value)((jnp.asarray(values), jnp.asarray(indices)), shape=shape)
        return value[rows]

    def twin(self, variable: Any) -> Any:
        value = getattr(variable, "value", None)
        return value.astype(jnp.float32) if isinstance(value, jax.Array) else None

    def run_compiled(self, step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
        """Run a step once, compiled, without side effects; return its result.

        A step that has no transaction is guarded as the train step of its model.
        """
        judged = step.judged or _transaction_of(step).judged
        try:
            verdict = judged(*args)
        except Exception as error:  # noqa: BLE001  whatever the user's step raises is evidence, not a crash
            return ReplayResult(error=f"{type(error).__name__}: {error}")
        sites = {
            "loss": verdict.loss,
            "statistics": verdict.statistics,
            "gradients": verdict.gradients,
        }
        first = next((site for site, number in sites.items() if not math.isfinite(number)), "")
        return ReplayResult(first=first, loss=verdict.loss)


def _transaction_of(step: ReplayableStep) -> Transaction:
    """Return the transaction that guards the train step of a model."""
    model = step.model
    transaction = Transaction(
        model.train_step,
        lambda: TrainState.of(model, step.optimizers),
        lambda: variables(model),
        outputs=LogOutputs(model),
        model=model,
        jit=True,
    )
    transaction.tolerated = set(step.tolerated)
    transaction.adopt(tuple([v.value for v in part] for part in by_part(model)))
    return transaction
