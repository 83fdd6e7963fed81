"""Fault injection: make a training run fail at one site, in one way, at an exact step.

Inject the same fault into a stock Keras model to show its effect, and into a guarded one to show
that it has none. It works in graph mode, eagerly, under XLA, inside `steps_per_execution` and with
mixed precision, because it wraps the whole train step, counts the steps itself, and requires
nothing of the model. The backend-specific part is in `_backends/BACKEND/faults.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Integral, Real
from types import TracebackType
from typing import Any, get_args

import ml_dtypes
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import (
    GuardError,
    expected,
    require_count,
    require_keras_3,
    require_one_of,
)
from keras_nanguard._core.literals import FaultKind, FaultSite
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._policy.settings import matches_path

__all__ = ["KINDS", "SITES", "Fault", "Injection", "corrupt", "inject"]

SITES: tuple[str, ...] = get_args(FaultSite)
"""Sites at which a fault can be injected."""

KINDS: tuple[str, ...] = get_args(FaultKind)
"""Kinds of faults: three non-finite values; `overflow`, the largest finite number of the dtype,
with which the next operation overflows; `spike`, the value times `magnitude`; `zero`.
"""

FACTORS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "zero": 0.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: its kind, its place and its steps.

    Attributes:
        site, kind, path, rows, entries, magnitude: as for `inject`.
        steps: the train steps at which it is injected, in order, from 0.
    """

    site: FaultSite
    kind: FaultKind
    steps: tuple[int, ...]
    path: str = "*"
    rows: tuple[int, ...] | None = (0,)
    entries: int | None = 1
    magnitude: float = 1e6

    def matches(self, path: str) -> bool:
        """Whether the fault applies to a path."""
        in_batch = self.site in ("inputs", "targets")
        return fnmatchcase(path, self.path) if in_batch else matches_path(path, self.path)

    def factor(self, dtype: Any) -> float:
        """Return the factor for a value of this dtype."""
        if self.kind == "spike":
            return self.magnitude
        if self.kind in FACTORS:
            return FACTORS[self.kind]
        return float(ml_dtypes.finfo(finiteness.dtype_name(dtype)).max)

    def value(self, dtype: Any) -> float | None:
        """Return the replacement of an entry of this dtype; `None` for a spike, which multiplies
        it.
        """
        return None if self.kind == "spike" else self.factor(dtype)


def inject(
    model: Any,
    *,
    site: FaultSite,
    kind: FaultKind = "nan",
    step: int | Iterable[int] = 0,
    count: int = 1,
    path: str = "*",
    rows: int | Iterable[int] | None = 0,
    entries: int | None = 1,
    magnitude: float = 1e6,
    require_fired: bool = True,
) -> Injection:
    """Return a context that injects a fault into the training of a model.

    Contexts can be nested. The site determines when the fault is injected:

    - batch: before the step reads the batch;
    - state: between the previous step and this one, as if other code had written it;
    - loss: into the result of `compute_loss`, so it reaches all gradients;
    - gradients: in the backward pass, so the loss does not change.

    Args:
        model: a compiled `keras.Model`, guarded or not.
        site: `"inputs"`, `"targets"` (also the sample weights), `"loss"`, `"gradients"`,
            `"weights"`, `"statistics"`, `"slots"` or `"loss_scale"`.
        kind: `"nan"`, `"inf"`, `"-inf"`, `"overflow"` (the largest finite number), `"spike"` (times
            `magnitude`) or `"zero"`.
        step: one or several train steps, counted from 0 at the start of the context. The count
            continues over all fits in it.
        count: number of steps in a row, starting at each `step`.
        path: glob that matches the Keras path of the variables or consecutive parts of it, as in a
            policy (`"dense"`, `"dense/kernel"`), or the path in the batch: inputs are `0` or
            `0/name`, targets `0`, sample weights `1`.
        rows: row or rows of the batch; `None` for all.
        entries: number of entries of each tensor, or of each row of a batch, from the first one on;
            `None` for all.
        magnitude: factor of a spike.
        require_fired: whether to raise at the end of the context if the fault was never injected.
            Use `False` if training may stop before the step of the fault.

    Returns:
        An `Injection`, a context manager.

    Raises:
        GuardError: for an invalid argument, and at the end of the context if the fault was never
            injected.

    Example:

    ```python
    with inject(model, site="inputs", kind="nan", step=(3, 7), rows=2) as fault:
        model.fit(x, y, callbacks=[guard])
    assert [i.step for i in guard.incidents] == [3, 7] == list(fault.fired)
    ```
    """
    require_one_of("site", site, SITES)
    require_one_of("kind", kind, KINDS)
    require_keras_3(model)
    if not hasattr(model, "train_step") or not getattr(model, "compiled", False):
        remedy = "Call model.compile(optimizer, loss) first."
        raise GuardError(expected("a compiled keras.Model", f"model={model!r}", remedy))
    starts = _whole("step", step)
    require_count("count", count)
    _require("path", path, str, "a glob", 'Write path="dense/kernel".')
    _require("magnitude", magnitude, Real, "a number", "Write magnitude=1e6.")
    if entries is not None:
        require_count("entries", entries)
    steps = tuple(sorted({first + i for first in starts for i in range(count)}))
    chosen = None if rows is None else _whole("rows", rows)
    size = None if entries is None else int(entries)
    fault = Fault(site, kind, steps, path, chosen, size, magnitude)
    return Injection(model, fault, require_fired)


class Injection:
    """The context that `inject` returns.

    Attributes:
        fault: the fault.
    """

    def __init__(self, model: Any, fault: Fault, require_fired: bool = True):
        self.model, self.fault, self.require_fired = model, fault, require_fired
        self._hook: Any = None

    @property
    def steps_run(self) -> int:
        """Number of train steps that have run in the context."""
        return 0 if self._hook is None else int(self._hook.seen)

    @property
    def fired(self) -> tuple[int, ...]:
        """The steps at which the fault was injected: not those whose batch has none of its rows."""
        if self._hook is None or not self._hook.reached:
            return ()
        ran = (step for step in self.fault.steps if step < self.steps_run)
        return tuple(step for step in ran if step not in self._hook.missed)

    def __enter__(self) -> Injection:
        if self._hook is not None:
            remedy = "Call inject(...) for each context."
            raise GuardError(
                expected("an injection that was not used before", "one that was", remedy)
            )
        self._hook = current.fault_hook(self.model, self.fault)
        self._hook.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if kind is None and self.require_fired and not self.fired:
            why = f"{self.steps_run} train steps ran"
            if self.steps_run and not self._hook.reached:
                why += ", and none of them called model.compute_loss"
            elif self._hook.missed:
                rows = ", ".join(map(str, self.fault.rows or ()))
                why += f", and no batch of them has row {rows}"
            fault = f"a fault of {self.fault.site} at step {self.fault.steps[0]} to be injected"
            remedy = "Train the model inside the context, for more steps."
            raise GuardError(expected(fault, why, remedy))


def corrupt(
    variable: Any, kind: FaultKind = "nan", *, entries: int | None = 1, magnitude: float = 1e6
) -> None:
    """Overwrite the first entries of a variable between two steps, as a faulty callback would.

    Args:
        variable: a `keras.Variable` of any float dtype.
        kind, entries, magnitude: as for `inject`.

    Raises:
        GuardError: for an invalid argument, or a variable that cannot represent the fault.
    """
    require_one_of("kind", kind, KINDS)
    _require("magnitude", magnitude, Real, "a number", "Write magnitude=1e6.")
    if entries is not None:
        require_count("entries", entries)
    dtype = getattr(variable, "dtype", None)
    if not isinstance(variable, keras_variables.VARIABLE) or not finiteness.is_float(dtype):
        received = f"variable={getattr(variable, 'path', variable)!r} of dtype {dtype}"
        remedy = "Choose a weight, statistic or slot."
        raise GuardError(expected("a keras.Variable of a float dtype", received, remedy))
    array = np.array(keras_variables.view(variable), order="C")  # PyTorch may store it by columns
    flat = array.reshape(-1)
    fault = Fault("weights", kind, (), entries=entries, magnitude=magnitude)
    value = fault.value(array.dtype)
    wide = finiteness.widen(flat[:entries])
    flat[:entries] = np.where(wide == 0, magnitude, wide * magnitude) if value is None else value
    keras_variables.write(variable, array)


def _require(name: str, value: Any, kind: type[Any], what: str, remedy: str) -> None:
    if not isinstance(value, kind):
        raise GuardError(expected(f"{name} to be {what}", f"{name}={value!r}", remedy))


def _whole(name: str, value: Any) -> tuple[int, ...]:
    several = isinstance(value, Iterable) and getattr(value, "shape", None) != ()
    values = tuple(value) if several else (value,)
    valid = [isinstance(v, Integral) and not isinstance(v, bool) and int(v) >= 0 for v in values]
    if not valid or not all(valid):
        what, remedy = f"{name} to be whole numbers from 0 on", f"Write {name}=3 or {name}=(3, 7)."
        raise GuardError(expected(what, f"{name}={value!r}", remedy))
    return tuple(map(int, values))
