"""Fault injection: the place and the value of a fault, the same on every backend.

A hook wraps the train step of a model outside of the transaction, so a refusal restores neither its
count of steps nor the fault that it writes to the state. A backend's `Hook` implements how a step
is wrapped, and whether a fault is due in it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from keras_nanguard._backends.shared import step_cache
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

__all__ = ["FaultHook", "first_entries", "repeated", "without_faults"]


class FaultHook:
    """One fault, injected into every train step of one model.

    Args:
        model: a compiled model.
        fault: a `keras_nanguard.testing.Fault`.

    Attributes:
        reached: whether a step that was traced (or run) has a place for the fault.
        installed: the faults that are installed in any model.
        run_again: the models of which a step is being replayed.
    """

    installed: ClassVar[list[FaultHook]] = []
    run_again: ClassVar[dict[object, Any]] = {}

    seen = 0
    """Train steps that ran since it was installed."""

    counts_replays = True
    """Whether a step that is run again for a trial is counted, too."""

    def __init__(self, model: Any, fault: Any):
        self.model, self.fault = model, fault
        self.reached = False
        self._running = 0
        self._overrides = Overrides()
        step_cache.forget(model)

    def install(self) -> None:
        """Install the fault, on the instance only."""
        self._wrap()
        if self.fault.site in ("loss", "gradients"):
            self._override("compute_loss", self._computing(self.model.compute_loss))
        self.model.train_function = None
        self.installed.append(self)

    def remove(self) -> None:
        """Remove the fault; the next fit creates its train function without it."""
        if self in self.installed:
            self.installed.remove(self)
        self._overrides.give_back()
        self.model.train_function = None
        step_cache.forget(self.model)

    def _wrap(self) -> None:
        """Wrap every train step of the model that is made from now on."""
        raise NotImplementedError

    def _override(self, name: str, value: Any) -> None:
        self._overrides.set(self.model, name, value)

    @property
    def _now(self) -> Any:
        """Whether the fault is due in the running step: a bool of Python, or a tensor."""
        return self.seen - 1 in self.fault.steps

    @property
    def _now_inside(self) -> Any:
        """The same, when the loss is computed."""
        return self._now

    @property
    def paused(self) -> bool:
        """Whether a step of the model is being replayed, without the fault."""
        return any(model is self.model for model in list(self.run_again.values()))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark a step of training, into which the fault belongs."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _bad(self, value: Any, chosen: Any, now: Any) -> Any:
        """Return a tensor whose chosen entries are bad if the fault is due.

        Args:
            value: a float tensor or array.
            chosen: bool mask of its shape.
            now: whether the fault is due.
        """
        value = ops.convert_to_tensor(value)
        dtype = keras.backend.standardize_dtype(value.dtype)
        wanted = self.fault.value(dtype)
        if wanted is None:
            magnitude = ops.cast(self.fault.magnitude, dtype)
            bad = ops.where(ops.equal(value, 0), magnitude, value * magnitude)
        else:
            bad = ops.convert_to_tensor(wanted, dtype=dtype)
        return ops.where(ops.logical_and(chosen, now), bad, value)

    # The batch

    def _spoiled(self, data: Any, now: Any) -> Any:
        """Return the batch of a step, with the fault in each chosen float tensor if it is due."""
        if self.fault.site not in ("inputs", "targets"):
            return data
        parts = data if isinstance(data, tuple) else (data,)
        inputs = self.fault.site == "inputs"
        chosen, found = (parts[:1] if inputs else parts[1:]), []

        def spoil(path: str, value: Any) -> Any:
            if isinstance(value, dict):
                return type(value)((k, spoil(f"{path}/{k}", v)) for k, v in value.items())
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                return type(value)(spoil(f"{path}/{k}", v) for k, v in enumerate(value))
            if not _is_float(value) or not self.fault.matches(path):
                return value
            found.append(path)
            if now is False:
                return value
            return self._bad(value, _of_rows(value, self.fault.rows, self.fault.entries), now)

        spoiled = tuple(spoil(str(i), part) for i, part in enumerate(chosen))
        if not found:
            what = f"float {self.fault.site} that match path={self.fault.path!r}"
            types = [getattr(t, "dtype", type(t)) for t in keras.tree.flatten(chosen)]
            raise GuardError(
                expected(what, types, "Cast the data to float32, or choose another path.")
            )
        self.reached = True
        if not isinstance(data, tuple):
            return spoiled[0]
        return (*spoiled, *parts[1:]) if inputs else (*parts[:1], *spoiled)

    # The state

    def _write(self, now: Any) -> None:
        """Write the fault into the state before a step, as other code could."""
        for variable in self._in_state():
            if now is not False:
                mask = first_entries(variable, self.fault.entries)
                variable.assign(self._bad(variable.value, mask, now))

    def _in_state(self) -> list[Any]:
        """Return the chosen variables at the site of the fault; none if it is elsewhere."""
        if self.fault.site in ("inputs", "targets", "loss", "gradients"):
            return []
        train_state = TrainState.of(self.model)
        groups: dict[str, tuple[Any, ...]] = {
            "weights": train_state.trainable,
            "statistics": train_state.statistics,
            "slots": train_state.slots,
            "loss_scale": tuple(scale for scale, _ in train_state.scales),
        }
        variables = [v for v in groups[self.fault.site] if finiteness.is_float(v.dtype)]
        chosen = [v for v in variables if self.fault.matches(v.path)]
        if not chosen:
            what = f"{self.fault.site} that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in variables) or "none"
            raise GuardError(
                expected(what, paths, "Choose another path, or a model that has such variables.")
            )
        self.reached = True
        return chosen

    # Loss and gradients

    def _computing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Model.compute_loss` with the fault in the loss, or in its gradients."""

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            if loss is None or not self._running:
                return loss
            self.reached = True
            now = self._now_inside
            if now is False:
                return loss
            loss = ops.convert_to_tensor(loss)
            factor = self._factor(loss, now)
            if self.fault.site == "loss":
                return loss * factor
            if self.fault.path == "*":
                return _with_gradient(loss, factor)
            for variable in self._trained():
                mask = first_entries(variable, self.fault.entries)
                zero = _zero(ops.convert_to_tensor(variable), factor, mask)
                loss = loss + ops.cast(zero, loss.dtype)
            return loss

        return compute_loss

    def _factor(self, loss: Any, now: Any) -> Any:
        """Return the factor for a loss or its gradients, 1 if the fault is not due."""
        dtype = keras.backend.standardize_dtype(loss.dtype)
        bad = ops.convert_to_tensor(self.fault.factor(dtype), dtype=dtype)
        return ops.where(now, bad, ops.ones_like(bad))

    def _trained(self) -> list[Any]:
        """Return the chosen trainable variables, for faults in gradients."""
        chosen = [v for v in self.model.trainable_variables if self.fault.matches(v.path)]
        if not chosen:
            what = f"trainable variables that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in self.model.trainable_variables)
            raise GuardError(expected(what, paths, "Choose another path."))
        return chosen


def _is_float(value: Any) -> bool:
    if not isinstance(value, np.ndarray) and not (ops.is_tensor(value) and hasattr(value, "shape")):
        return False
    return finiteness.is_real(value.dtype)


def _of_rows(value: Any, rows: tuple[int, ...] | None, entries: int | None) -> Any:
    """Return a mask of the first entries of the chosen rows of a batch."""
    shape = ops.shape(value)
    if not shape:
        return rows is None or 0 in rows
    row, place = ops.arange(shape[0]), ops.arange(math.prod(shape[1:]))
    in_rows = ops.ones_like(row, dtype="bool")
    if rows is not None:
        in_rows = ops.any(ops.equal(ops.expand_dims(row, -1), ops.convert_to_tensor(rows)), -1)
    in_entries = ops.ones_like(place, dtype="bool") if entries is None else place < entries
    return ops.logical_and(
        ops.reshape(in_rows, (-1, *(1 for _ in shape[1:]))),
        ops.reshape(in_entries, (1, *shape[1:])),
    )


def first_entries(variable: Any, entries: int | None) -> np.ndarray[Any, Any]:
    """Return a mask of the first entries of a variable."""
    shape = tuple(variable.shape)
    return np.arange(math.prod(shape)).reshape(shape) < (np.inf if entries is None else entries)


def _with_gradient(loss: Any, factor: Any) -> Any:
    """Return the loss, with its gradient multiplied."""

    @ops.custom_gradient  # type: ignore[untyped-decorator]
    def same(loss: Any, factor: Any) -> Any:
        def gradient(*args: Any, upstream: Any = None) -> Any:
            upstream = args[0] if upstream is None else upstream
            return upstream * factor, ops.zeros_like(factor)

        return loss * 1, gradient

    return same(loss, factor)


def _zero(value: Any, factor: Any, mask: Any) -> Any:
    """Return 0 with a gradient by the masked entries of `value`: `factor` if that is not 1,
    else 0.
    """

    @ops.custom_gradient  # type: ignore[untyped-decorator]
    def zero(value: Any, factor: Any) -> Any:
        def gradient(*args: Any, upstream: Any = None) -> Any:
            upstream = args[0] if upstream is None else upstream
            bad = upstream * ops.cast(factor, upstream.dtype)
            chosen = ops.logical_and(mask, ops.not_equal(factor, 1))
            return ops.where(chosen, bad, ops.zeros_like(value)), ops.zeros_like(factor)

        return ops.zeros((), value.dtype), gradient

    return zero(value, factor)


def repeated(model: Any) -> Callable[[], None]:
    """Return a function to call before each replay of a step, so that faults of later steps are not

    injected early.
    """
    hooks = [hook for hook in FaultHook.installed if hook.model is model and hook.counts_replays]
    counted = [(hook, hook.seen) for hook in hooks]

    def again() -> None:
        for hook, seen in counted:
            hook.seen = seen - 1

    return again


@contextlib.contextmanager
def without_faults(model: Any) -> Iterator[None]:
    """Replay steps of a model without their injected faults."""
    entered = object()
    FaultHook.run_again[entered] = model
    try:
        yield
    finally:
        del FaultHook.run_again[entered]
