"""Faults on order, on JAX: what `keras_nanguard.testing.inject` does around and inside of the compiled step.

A step on JAX is a pure function, so state and batch are spoiled on the host, before it runs. Loss and gradients are
spoiled inside, by a factor that the step asks the host for; the host waits for each step, so that it knows which one
asks. The hook stands around the transaction where there is one: no refusal gives back what it writes.

Names private to Keras that are used here: ``Model._make_function``, through which every train, test and predict function
is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard import _probes, _state
from keras_nanguard._errors import GuardError, expected
from keras_nanguard._step._jax_trainer import variables

__all__ = ["Hook"]


class Hook:
    """One fault, put around every train step of one model.

    Args:
        model: a compiled model.
        fault: a `keras_nanguard.testing.Fault`.

    Attributes:
        reached: whether a step that was traced (or run) has a place for the fault.
        seen: steps so far.
    """

    def __init__(self, model: Any, fault: Any):
        self.model, self.fault = model, fault
        self.reached = False
        self.seen = self._inside = 0
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        """Put it in place, on the instance only."""
        self._override("_make_function", self._making(self.model._make_function))
        for name in ("make_test_function", "make_predict_function"):
            self._override(name, self._without(getattr(self.model, name)))
        if self.fault.site in ("loss", "gradients"):
            self._override("compute_loss", self._computing(self.model.compute_loss))
        self._making_train = True
        self.model.train_function = None

    def remove(self) -> None:
        """Leave the model as it was; the next fit compiles it without the fault."""
        for name, before in self._before.items():
            _state.unset_instance(self.model, name)
            if before is not None:
                _state.set_instance(self.model, name, before)
        self.model.train_function = None

    def _override(self, name: str, value: Any) -> None:
        self._before[name] = vars(self.model).get(name)
        _state.set_instance(self.model, name, value)

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
        parts = data if isinstance(data, tuple) else (data,)
        inputs = self.fault.site == "inputs"
        chosen, found = (parts[:1] if inputs else parts[1:]), []

        def spoil(path: str, value: Any) -> Any:
            if isinstance(value, dict):
                return type(value)((k, spoil(f"{path}/{k}", v)) for k, v in value.items())
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                return type(value)(spoil(f"{path}/{k}", v) for k, v in enumerate(value))
            if not hasattr(value, "dtype") or not _is_float(value) or not self.fault.matches(path):
                return value
            found.append(path)
            return self._bad(value, _some(value, self.fault.rows, self.fault.entries)) if now else value

        spoiled = tuple(spoil(str(i), part) for i, part in enumerate(chosen))
        if not found:
            what = f"float {self.fault.site} that match path={self.fault.path!r}"
            types = [getattr(t, "dtype", type(t)) for t in jax.tree_util.tree_leaves(chosen)]
            raise GuardError(expected(what, types, "Cast the data to float32, or choose another path."))
        self.reached = True
        if not isinstance(data, tuple):
            return spoiled[0]
        return (*spoiled, *parts[1:]) if inputs else (*parts[:1], *spoiled)

    def _bad(self, value: Any, mask: np.ndarray[Any, Any]) -> Any:
        """Return the array with some of its entries made bad, on the device it came from."""
        array = np.array(value)
        wanted = self.fault.value(array.dtype)
        wide = _probes.widen(array)
        spike = np.where(wide == 0, self.fault.magnitude, wide * self.fault.magnitude)
        bad = spike if wanted is None else np.full(array.shape, wanted)
        with np.errstate(over="ignore"):
            array[mask] = bad.astype(array.dtype)[mask]
        return jax.device_put(array, value.sharding) if isinstance(value, jax.Array) else array

    # The state

    def _written(self, state: Any, now: bool) -> Any:
        """Return the state as if something else had written to it."""
        wanted = {id(v) for v in self._variables() if self.fault.matches(v.path)}
        if not wanted:
            what = f"{self.fault.site} that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in self._variables()) or "none"
            raise GuardError(expected(what, paths, "Choose another path, or a model that has such variables."))
        self.reached = True
        if not now:
            return state
        leaves, tree = jax.tree_util.tree_flatten(state)
        held = variables(self.model)
        for i, variable in enumerate(held):
            if id(variable) in wanted:
                leaves[i] = self._bad(leaves[i], _first(leaves[i], self.fault.entries))
        return jax.tree_util.tree_unflatten(tree, leaves)

    def _variables(self) -> list[Any]:
        anatomy = _state.Anatomy.of(self.model)
        groups: dict[str, tuple[Any, ...]] = {
            "weights": anatomy.trainable,
            "statistics": anatomy.statistics,
            "slots": anatomy.slots,
            "loss_scale": tuple(scale for scale, _ in anatomy.scales),
        }
        return [v for v in groups[self.fault.site] if _probes.is_float(v.dtype)]

    # Loss and gradients

    def _computing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            if not self._inside or loss is None:
                return loss
            self.reached = True
            loss = jnp.asarray(loss)
            factor = self._factor(loss.dtype)
            if self.fault.site == "loss":
                return loss * factor
            return _with_gradient(loss, factor) if self.fault.path == "*" else self._with_some(loss, factor)

        return compute_loss

    def _factor(self, dtype: Any) -> Any:
        """Ask the host for the factor of the step that runs."""
        bad = np.asarray(self.fault.factor(np.dtype(dtype)), dtype)

        def now() -> Any:
            return bad if self.seen - 1 in self.fault.steps else np.ones((), dtype)

        return jax.pure_callback(now, jax.ShapeDtypeStruct((), dtype))

    def _with_some(self, loss: Any, factor: Any) -> Any:
        """Add zeros to the loss whose gradients, by the chosen variables alone, are what the fault wants."""
        chosen = [v for v in self.model.trainable_variables if self.fault.matches(v.path)]
        if not chosen:
            what = f"trainable variables that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in self.model.trainable_variables)
            raise GuardError(expected(what, paths, "Choose another path."))
        for variable in chosen:
            value = keras.ops.convert_to_tensor(variable)
            loss = loss + _zero(value, factor, _first(value, self.fault.entries)).astype(loss.dtype)
        return loss


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


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
    """Return 0, whose gradient by the masked entries of `value` is `factor` where that is not 1, else 0."""
    return jnp.zeros((), value.dtype)


def _zero_forward(value: Any, factor: Any, mask: Any) -> Any:
    return jnp.zeros((), value.dtype), (value, factor, mask)


def _zero_backward(kept: Any, upstream: Any) -> Any:
    value, factor, mask = kept
    bad = (upstream * factor).astype(value.dtype)
    by_value = jnp.where(jnp.asarray(mask) & (factor != 1), bad, jnp.zeros_like(value))
    return by_value, jnp.zeros_like(factor), None


_zero.defvjp(_zero_forward, _zero_backward)
