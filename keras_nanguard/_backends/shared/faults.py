"""Fault injection: the place and the value of a fault, the same on every backend.

A hook wraps the train step of a model outside of the transaction, so a refusal restores neither its
count of steps nor the fault that it writes to the state. A backend's `Hook` implements how a step
is wrapped, and whether a fault is due in it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from keras_nanguard._backends.shared.step_cache import forget_step
from keras_nanguard._core import finiteness
from keras_nanguard._core.data import leaves
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

_NEVER = -(1 << 40)
"""A count of steps so low that no fault ever becomes due."""


class FaultHook(Overrides):
    """One fault, injected into every train step of one model.

    Args:
        model: a compiled model.
        fault: a `keras_nanguard.testing.Fault`.

    Attributes:
        reached: whether a step that was traced (or run) has a place for the fault.
        installed: the faults that are installed in any model.
    """

    installed: ClassVar[list[FaultHook]] = []

    seen = 0
    """Train steps that ran since it was installed."""

    counts_replays = True
    """Whether a step that runs again counts itself, too."""

    def __init__(self, model: Any, fault: Any):
        super().__init__()
        self.model, self.fault = model, fault
        self.reached = False
        self._misses: Any = set()
        self._running = 0
        forget_step(model)

    @property
    def missed(self) -> set[int]:
        """The steps in which the fault was due, but whose batch has none of its rows."""
        return set(self._misses)

    def install(self) -> None:
        """Install the fault, on the instance only."""
        self._wrap()
        if self.fault.site in ("loss", "gradients"):
            self.set(self.model, "compute_loss", self._computing(self.model.compute_loss))
        self.model.train_function = None
        self.installed.append(self)

    def remove(self) -> None:
        """Remove the fault; the next fit creates its train function without it."""
        self.installed.remove(self)
        self.give_back()
        self.model.train_function = None
        forget_step(self.model)

    def _wrap(self) -> None:
        """Wrap every train step of the model that is made from now on."""
        raise NotImplementedError

    @property
    def _now(self) -> Any:
        """Whether the fault is due in the running step: a bool of Python, or a tensor."""
        return self.seen - 1 in self.fault.steps

    @property
    def _now_inside(self) -> Any:
        """The same, when the loss is computed."""
        return self._now

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark a step of training, into which the fault belongs."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _bad(self, value: Any, chosen: Any, now: Any) -> Any:
        """Return a float tensor whose entries in the mask `chosen` are bad if the fault is due."""
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
        is_whole = isinstance(data, (tuple, list))  # a DataLoader of torch yields a list
        parts = tuple(data) if is_whole else (data,)
        inputs = self.fault.site == "inputs"
        chosen = parts[:1] if inputs else parts[1:]
        named = [pair for i, part in enumerate(chosen) for pair in leaves(str(i), part)]
        found = {id(v) for path, v in named if _is_float(v) and self.fault.matches(path)}
        if not found:
            what = f"float {self.fault.site} that match path={self.fault.path!r}"
            types = [getattr(t, "dtype", type(t)) for t in keras.tree.flatten(chosen)]
            raise GuardError(
                expected(what, types, "Cast the data to float32, or choose another path.")
            )
        self.reached = True
        if now is False:
            return data

        hit: Any = False

        def spoil(value: Any) -> Any:
            nonlocal hit
            if id(value) not in found:
                return value
            places = _of_rows(value, self.fault.rows, self.fault.entries)
            hit = ops.logical_or(hit, ops.any(places))
            return self._bad(value, places, now)

        spoiled = keras.tree.map_structure(spoil, chosen)
        self._count_hit(hit)
        if not is_whole:
            return spoiled[0]
        return (*spoiled, *parts[1:]) if inputs else (*parts[:1], *spoiled)

    def _count_hit(self, hit: Any) -> None:
        """Record whether the batch of this step, in which the fault is due, has its rows."""
        if not hit:
            self._misses.add(self.seen - 1)

    # The state

    def _write(self, now: Any) -> None:
        """Write the fault into the state before a step, as other code could."""
        for variable in self._in_state():
            if now is not False:
                variable.assign(self._bad(variable.value, self._mask(variable), now))

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
        chosen = self._matching(variables, self.fault.site)
        self.reached = True
        return chosen

    def _mask(self, variable: Any) -> np.ndarray[Any, Any]:
        """Return a mask of the first entries of a variable."""
        shape, entries = tuple(variable.shape), self.fault.entries
        places = np.arange(math.prod(shape)).reshape(shape)
        return places < (np.inf if entries is None else entries)

    def _matching(self, variables: Sequence[Any], what: str) -> list[Any]:
        """Return the variables that match the path of the fault; `GuardError` if none does."""
        chosen = [v for v in variables if self.fault.matches(v.path)]
        if not chosen:
            paths = ", ".join(v.path for v in variables) or "none"
            remedy = "Choose another path, or a model that has such variables."
            wanted = f"{what} that match path={self.fault.path!r}"
            raise GuardError(expected(wanted, paths, remedy))
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
            dtype = keras.backend.standardize_dtype(loss.dtype)
            bad = ops.convert_to_tensor(self.fault.factor(dtype), dtype=dtype)
            factor = ops.where(now, bad, ops.ones_like(bad))  # 1 if the fault is not due
            if self.fault.site == "loss":
                return loss * factor
            if self.fault.path == "*":
                return _with_gradient(loss, factor, lambda v: v * 1, lambda g, f, _: g * f)
            for variable in self._matching(self.model.trainable_variables, "trainable variables"):
                change = functools.partial(_bad_entries, self._mask(variable))
                value = ops.convert_to_tensor(variable)
                zero = _with_gradient(value, factor, lambda v: ops.zeros((), v.dtype), change)
                loss = loss + ops.cast(zero, loss.dtype)
            return loss

        return compute_loss


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


def _bad_entries(mask: Any, upstream: Any, factor: Any, value: Any) -> Any:
    """Return a gradient that is bad in the masked entries if the factor is not 1, and else 0."""
    chosen = ops.logical_and(mask, ops.not_equal(factor, 1))
    return ops.where(chosen, upstream * ops.cast(factor, upstream.dtype), ops.zeros_like(value))


def _with_gradient(
    value: Any, factor: Any, result: Callable[..., Any], change: Callable[..., Any]
) -> Any:
    """Return `result(value)`, whose gradient by `value` is `change(upstream, factor, value)`."""

    @ops.custom_gradient  # type: ignore[untyped-decorator]
    def own(value: Any, factor: Any) -> Any:
        def gradient(*args: Any, upstream: Any = None) -> Any:
            upstream = args[0] if upstream is None else upstream
            return change(upstream, factor, value), ops.zeros_like(factor)

        return result(value), gradient

    return own(value, factor)


@contextlib.contextmanager
def without_faults(model: Any) -> Iterator[Callable[[], None]]:
    """Run steps of a model again without its injected faults, and without counting them.

    Returns what to call before a step that is to have the faults of the last step again.
    """
    counted = [(hook, hook.seen) for hook in FaultHook.installed if hook.model is model]

    def again() -> None:
        for hook, seen in counted:
            hook.seen = seen - hook.counts_replays

    for hook, _ in counted:
        hook.seen = _NEVER
    try:
        yield again
    finally:
        for hook, seen in counted:
            hook.seen = seen
