"""Functions for a diagnosis on JAX: recording of a run, and tensor helpers.

A step on JAX is a function from state to state. Here it runs eagerly as one that reads and writes
the variables (`Transaction.replayed`), so that the variables have its results.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard._backends.jax import intercept
from keras_nanguard._backends.jax.intercept import primal
from keras_nanguard._backends.jax.origins import Origins
from keras_nanguard._backends.jax.outputs import LogOutputs
from keras_nanguard._backends.shared import instrument
from keras_nanguard._keras import optimizers as keras_optimizers, sparse_arrays
from keras_nanguard._keras.jax_trainer import by_part, ready

__all__ = [
    "Instrument",
    "Origins",
    *(
        "body_of",
        "intercepted",
        "is_tensor",
        "key",
        "like",
        "losses_of",
        "preserved",
        "slope",
        "tensor",
        "twin",
        "without_rows",
    ),
]


class Instrument(instrument.Instrument):
    """Records layers and losses in an eager run.

    Below `jax.grad` every value is a pair of itself and its derivative; the value is recorded. The
    backward pass begins when a probe first receives a gradient, and ends when a layer or a loss is
    called again.
    """

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        pass

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


class _ReplayedUpdate(intercept.Update):
    """One update, whose results are written into the variables."""

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Each gradient with its variable."""
        return list(zip(self.grads, keras_optimizers.trained_by(self.optimizer)))

    def run(self) -> None:
        """Run the deferred update."""
        weights, slots = self.real(self.slots, self.grads, self.weights)
        for variable, value in zip(keras_optimizers.trained_by(self.optimizer), weights):
            variable.assign(value)
        for variable, value in zip(self.optimizer.variables, slots):
            variable.assign(value)


class _Intercept(intercept.Intercept):
    """Records losses and updates of an eager run; returns the old state unless updates run."""

    def __init__(self, model: Any, optimizers: Iterable[Any], immediate: bool):
        super().__init__(model, optimizers, None, None)
        self.immediate = immediate

    def _applier(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            self.records.append(
                _ReplayedUpdate(optimizer, real, optimizer_variables, grads, trainable_variables)
            )
            if self.immediate:
                return real(optimizer_variables, grads, trainable_variables)
            return list(trainable_variables), list(optimizer_variables)

        return stateless_apply


def body_of(model: Any) -> Any:
    """Return the train step of a model as a function of its batch, which reads and writes the
    variables.
    """

    def body(data: Any) -> Any:
        ready(model, data)
        lists = by_part(model)
        logs, new = model.train_step(
            tuple([v.value for v in variables] for variables in lists), data
        )
        for variables, values in zip(lists, new):
            for variable, value in zip(variables, values):
                variable.assign(value)
        return logs

    return body


def losses_of(model: Any) -> Any:
    """Return a function that finds the losses in the logs of a step that never calls
    `compute_loss`.
    """
    return LogOutputs(model).losses


def intercepted(model: Any, optimizers: Iterable[Any], immediate: bool) -> Any:
    """Return a context that records losses and updates; `immediate`: updates run at once."""
    return _Intercept(model, optimizers, immediate)


@contextlib.contextmanager
def preserved(variables: Sequence[Any]) -> Iterator[None]:
    """Restore these variables at the end."""
    old = [(v, v.value) for v in variables if isinstance(v, keras.Variable)]
    try:
        yield
    finally:
        for variable, value in old:
            variable.assign(value)


def key(variable: Any) -> int | None:
    """Return the number of a variable in `Origins`: that of its array at the beginning."""
    return id(variable.value)


def is_tensor(value: Any) -> bool:
    """Whether an object is a dense array."""
    return isinstance(value, (np.ndarray, jax.Array))


def slope(origin: Any) -> Any:
    """Return the origin of a gradient as one of the backward pass if the loss is finite.

    JAX computes the slope of an operation (1 / x of a logarithm) in its forward pass, for a
    multiplication in the backward pass. A bad value that begins there and does not reach the loss
    is such a slope, or a value that is masked away.
    """
    if origin is None or origin.source != "operation":
        return origin
    return origin if origin.phase == "backward" else dataclasses.replace(origin, phase="slope")


def tensor(value: Any) -> Any:
    """Return a NumPy array as a JAX array."""
    return jnp.asarray(value)


def like(array: Any, value: Any) -> Any:
    """Return an array in the dtype of another array."""
    return jnp.asarray(np.asarray(array).astype(value.dtype))


def without_rows(value: Any, kept: Any) -> Any:
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


def twin(variable: Any) -> Any:
    """Return the variable's array in float32, or `None`."""
    value = getattr(variable, "value", None)
    return value.astype(jnp.float32) if isinstance(value, jax.Array) else None
