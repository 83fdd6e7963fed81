"""Fault injection on JAX: `keras_nanguard.testing.inject` around and inside of the compiled step.

A step on JAX is a pure function, so faults in state and batch are written on the host before it
runs. Loss and gradients are multiplied inside by a factor that the step requests from the host. The
host waits for each step, so the request can be assigned to it. The hook wraps the transaction, so a
refusal does not restore its writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard._backends.shared.faults import FaultHook
from keras_nanguard._core import finiteness
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._keras.jax_trainer import over_lists, variables

__all__ = ["Hook", "repeated"]


def repeated(model: Any) -> Callable[[], None]:
    """Return a function that does nothing: a replay does not run the counting hook."""
    return lambda: None


class Hook(FaultHook):
    """One fault, injected into every train step of one model."""

    seen = 0
    """Steps so far."""

    def install(self) -> None:
        """Install the fault, on the instance only."""
        keras_fitting.on_making(
            self.model, self._making, self._overrides, default=over_lists
        )  # on Keras 3.6 in guarded steps only
        for name in ("make_test_function", "make_predict_function"):
            self._override(name, self._without(getattr(self.model, name)))
        if self.fault.site in ("loss", "gradients"):
            self._override("compute_loss", self._computing(self.model.compute_loss))
        self._making_train = True
        self.model.train_function = None

    def _without(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            self._making_train = False
            try:
                return real(*args, **kwargs)
            finally:
                self._making_train = True

        return make

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(step_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            step = self._around(step_function) if self._making_train else step_function
            return real(step, *args, **kwargs)

        return make

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(state: Any, data: Any) -> Any:
            self.seen += 1
            now = self.seen - 1 in self.fault.steps
            if self.fault.site in ("inputs", "targets"):
                data = self._spoiled(data, now)
            elif self.fault.site not in ("loss", "gradients"):
                state = self._written(state, now)
            self._inside += 1
            try:
                return jax.block_until_ready(step(state, data))
            finally:
                self._inside -= 1

        return train_step

    # The batch

    def _spoiled(self, data: Any, now: bool) -> Any:
        def bad(value: Any) -> Any:
            return (
                self._bad(value, _some(value, self.fault.rows, self.fault.entries))
                if now
                else value
            )

        return self._in_batch(data, _is_float, bad)

    def _bad(self, value: Any, mask: np.ndarray[Any, Any]) -> Any:
        """Return the array with some of its entries made bad, on the device it came from."""
        array = np.array(value)
        wanted = self.fault.value(array.dtype)
        wide = finiteness.widen(array)
        spike = np.where(wide == 0, self.fault.magnitude, wide * self.fault.magnitude)
        bad = spike if wanted is None else np.full(array.shape, wanted)
        with np.errstate(over="ignore"):
            array[mask] = bad.astype(array.dtype)[mask]
        return jax.device_put(array, value.sharding) if isinstance(value, jax.Array) else array

    # The state

    def _written(self, state: Any, now: bool) -> Any:
        """Return the state with the fault, as if other code had written it."""
        wanted = {id(v) for v in self._in_state()}
        if not now:
            return state
        leaves, tree = jax.tree_util.tree_flatten(state)
        held = variables(self.model)
        for i, variable in enumerate(held):
            if id(variable) in wanted:
                leaves[i] = self._bad(leaves[i], _first(leaves[i], self.fault.entries))
        return jax.tree_util.tree_unflatten(tree, leaves)

    # Loss and gradients

    @property
    def _applies(self) -> bool:
        return self._inside > 0 and not self.paused

    def _factor(self, loss: Any) -> Any:
        """Request the factor of the running step from the host; in a replay it is 1."""
        dtype = loss.dtype
        bad = np.asarray(self.fault.factor(np.dtype(dtype)), dtype)

        def now() -> Any:
            return (
                bad if self._applies and self.seen - 1 in self.fault.steps else np.ones((), dtype)
            )

        return jax.pure_callback(now, jax.ShapeDtypeStruct((), dtype))

    def _with_gradient(self, loss: Any, factor: Any) -> Any:
        return _with_gradient(loss, factor)

    def _with_some(self, loss: Any, factor: Any) -> Any:
        for variable in self._trained():
            value = keras.ops.convert_to_tensor(variable)
            loss = loss + _zero(value, factor, _first(value, self.fault.entries)).astype(loss.dtype)
        return loss


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and bool(jnp.issubdtype(value.dtype, jnp.floating))


def _some(value: Any, rows: Sequence[int] | None, entries: int | None) -> np.ndarray[Any, Any]:
    """Return a mask of the first entries of the chosen rows of a batch."""
    mask = np.zeros(value.shape, bool)
    if not mask.ndim:
        return np.ones((), bool)
    chosen = range(len(mask)) if rows is None else [row for row in rows if row < len(mask)]
    for row in chosen:
        mask[row].reshape(-1)[:entries] = True
        if mask.ndim == 1:
            mask[row] = True
    return mask


def _first(value: Any, entries: int | None) -> np.ndarray[Any, Any]:
    """Return a mask of the first entries of an array."""
    flat = np.arange(int(np.prod(value.shape))) < (np.inf if entries is None else entries)
    return flat.reshape(value.shape)


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _with_gradient(loss: Any, factor: Any) -> Any:
    return loss


def _forward(loss: Any, factor: Any) -> Any:
    return loss, factor


def _backward(factor: Any, upstream: Any) -> Any:
    return upstream * factor, jnp.zeros_like(factor)


_with_gradient.defvjp(_forward, _backward)


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _zero(value: Any, factor: Any, mask: Any) -> Any:
    """Return 0 with a gradient by the masked entries of `value`: `factor` if that is not 1,
    else 0.
    """
    return jnp.zeros((), value.dtype)


def _zero_forward(value: Any, factor: Any, mask: Any) -> Any:
    return jnp.zeros((), value.dtype), (value, factor, mask)


def _zero_backward(kept: Any, upstream: Any) -> Any:
    value, factor, mask = kept
    bad = (upstream * factor).astype(value.dtype)
    by_value = jnp.where(jnp.asarray(mask) & (factor != 1), bad, jnp.zeros_like(value))
    return by_value, jnp.zeros_like(factor), None


_zero.defvjp(_zero_forward, _zero_backward)
