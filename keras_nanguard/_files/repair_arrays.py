"""The repair of the arrays of a model, live or in a file: what is to be repaired and how; each bad
value is replaced, or there is a reason why not. Imports no backend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError, GuardError, expected, require_one_of
from keras_nanguard._core.finiteness import named_dtype
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._core.variable_names import selected
from keras_nanguard._files.formats.contents import Contents, Identity, ModelArray
from keras_nanguard._files.formats.limits import MAX_UNBACKED
from keras_nanguard._files.problems import Limits, is_loss_scale, not_negative
from keras_nanguard._files.reports import Change, ScanReport

CHOICES: Mapping[str, tuple[str, ...]] = {
    "statistics": ("initial", "source", "keep"),
    "weights": ("initial", "zeros", "ones", "source", "keep"),
    "slots": ("reset", "source", "keep"),
}
"""The methods of repair, by role."""

_FIELDS = {"statistics": "statistics", "weight": "weights", "slot": "slots"}


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """The arguments of `repair`: the method for each role, and the variables to repair."""

    statistics: str = "initial"
    weights: str = "keep"
    slots: str = "reset"
    limits: Limits = field(default_factory=Limits)
    only: tuple[str, ...] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            require_one_of(name, getattr(self, name), allowed)

    def method(self, role: str) -> str:
        """Return the method for a role; a variable that is neither weight, statistic nor slot is
        kept."""
        return str(getattr(self, _FIELDS[role])) if role in _FIELDS else "keep"

    def remedy(self, role: str) -> str:
        """Return which methods replace the bad values of a role, `""` if none do."""
        if role not in _FIELDS:
            return ""
        field = _FIELDS[role]
        methods = " or ".join(one for one in CHOICES[field] if one not in ("keep", "source"))
        return f"choose {methods} for the {field}, or name a source"

    def refuse_no_match(self, found: ScanReport) -> None:
        """Raise a `GuardError` if `only` selects no variable at all."""
        names = ((one.path, one.location, one.layer) for one in found.variables)
        if self.only and not any(selected(self.only, *each) for each in names):
            what, received = "a variable that matches a pattern", f"only={list(self.only)!r}"
            remedy = f"The names are those in the scan of {found.source}."
            raise GuardError(expected(what, received, remedy))


class NotRepaired(Exception):
    """An array is not changed; the message is the reason."""


_CONSTANTS = {"zeros": 0.0, "ones": 1.0}

_WORDS = {
    "initial": "set to initial values",
    "zeros": "set to 0",
    "ones": "set to 1",
    "source": "were bad: the variable was taken from the source",
}
"""What each method does."""

Name = str | tuple[str, str]
"""The path of an array, or its path and its location."""


def _names(array: ModelArray) -> tuple[Name, Name]:
    """Return what finds an array in a source, the more exact name first: layers of one name in a
    custom layer have one path, and what is in one location may be another layer."""
    return (array.who.path, array.location), array.who.path


def by_name(contents: Contents) -> dict[Name, ModelArray]:
    """Return the arrays that can be read by their names, without those that several arrays have."""
    counts = Counter(name for array in contents.arrays for name in _names(array))
    readable = (array for array in contents.arrays if not array.unread)
    return {name: array for array in readable for name in _names(array) if counts[name] == 1}


@dataclass(slots=True)
class Repair:
    """How the arrays of a model are repaired.

    Attributes:
        options: the method for each role.
        contents: the arrays of the model.
        good: the arrays of a good model, from `by_name`.
        initial: returns the initial values of an array, which are broadcast to its shape, or raises
            `NotRepaired`.
        replace: replaces the values of an array, in its dtype.
        unbacked: bytes that the arrays repaired so far declare and the file does not store.
        names: how many arrays of the model have each name.
    """

    options: RepairOptions
    contents: Contents
    good: Mapping[Name, ModelArray]
    initial: Callable[[ModelArray], NDArray[Any] | float]
    replace: Callable[[ModelArray, NDArray[Any]], None]
    unbacked: int = 0
    names: Counter[Name] = field(init=False)

    def __post_init__(self) -> None:
        self.names = Counter(name for array in self.contents.arrays for name in _names(array))

    def changes(self, report: ScanReport) -> list[Change]:
        """Repair the arrays that are bad in a report of the contents, and return the change of
        each. If a slot is reset, so are all of its optimizer but step count and learning rate."""
        pairs = zip(report.variables, self.contents.arrays, strict=True)
        chosen = [
            (entry.bad, array)
            for entry, array in pairs
            if selected(self.options.only, entry.path, entry.location, entry.layer)
        ]
        reset = {_optimizer(array) for bad, array in chosen if bad and self._may_reset(array)}
        changes = []
        for bad, array in chosen:
            if self._may_reset(array) and _optimizer(array) in reset:
                if bad or array.who.name.rpartition("/")[2] not in ("iteration", "learning_rate"):
                    changes.append(self._change(array, "reset"))
            elif bad:
                changes.append(self._change(array, self.options.method(array.who.role)))
        return changes

    def _may_reset(self, array: ModelArray) -> bool:
        return array.who.role == "slot" and array.is_float and self.options.slots == "reset"

    def _change(self, array: ModelArray, method: str) -> Change:
        """Repair one array; `source` and `reset` replace it as a whole, as its values belong
        together."""
        about, count = (plain_text(array.who.path), plain_text(array.location), method), 0
        try:
            self._check_size(array)
            if method == "reset" and not array.unread:
                initial = np.asarray(self.initial(array)).astype(named_dtype(array.dtype))
                new, done = np.broadcast_to(initial, array.shape), "set to its initial value"
            else:
                values = _read(array)
                bad = bad_values(values, array.who, self.options)
                count = int(bad.sum())
                new = self._new(array, values, bad, method)
                if bad_values(new, array.who, self.options).any():
                    raise NotRepaired("the new values are bad too")
                done = f"{count} of {bad.size} values {_WORDS[method]}"
        except NotRepaired as reason:
            return Change(*about, "skipped", str(reason), count)
        if not self.options.dry_run:
            self.replace(array, new)
        return Change(*about, "done", done, count)

    def _new(
        self, array: ModelArray, values: NDArray[Any], bad: NDArray[np.bool_], method: str
    ) -> NDArray[Any]:
        """Return the values of an array with the bad ones replaced."""
        if not bad.any():
            raise NotRepaired("no single value is bad")
        if method == "keep":
            remedy = self.options.remedy(array.who.role)
            raise NotRepaired(f"unchanged: {remedy}".removesuffix(": "))
        if method == "source":
            found = _read(self._good(array))
            if found.shape != values.shape:
                raise NotRepaired(f"the source has the shape {found.shape} there")
            return found.astype(values.dtype)
        initial = _CONSTANTS[method] if method in _CONSTANTS else self.initial(array)
        new = values.copy(order="K")
        new[bad] = np.broadcast_to(initial, values.shape)[bad].astype(values.dtype)
        return new

    def _good(self, array: ModelArray) -> ModelArray:
        """Return the array of the source with a name of an array that no other array has."""
        for name in _names(array):
            if self.names[name] == 1 and name in self.good:
                return self.good[name]
        if self.names[array.who.path] > 1:
            raise NotRepaired("several variables have this path: which one to take is not known")
        raise NotRepaired("the source has no such variable, or several variables of this path")

    def _check_size(self, array: ModelArray) -> None:
        """Refuse to load and rewrite an array if the file declares far more than it stores."""
        if self.unbacked + array.unbacked > MAX_UNBACKED:
            declared = f"it declares {array.nbytes} bytes and the file stores {array.stored}"
            raise NotRepaired(f"{declared}: load the model and repair that")
        self.unbacked += array.unbacked


def _read(array: ModelArray) -> NDArray[Any]:
    try:
        return array.read()
    except FileFormatError as error:
        raise NotRepaired(f"not read: {array.unread or error}") from error


def _optimizer(slot: ModelArray) -> str:
    """Return the path of the optimizer of a slot, also of an inner one."""
    return slot.who.layer.removesuffix("/inner_optimizer")


def bad_values(values: NDArray[Any], who: Identity, options: RepairOptions) -> NDArray[np.bool_]:
    """Return which values of a variable are bad.

    Args:
        values: the variable, of any float or complex dtype.

    Returns:
        Mask of the shape of `values`: non-finite, beyond a limit, a negative variance or
        second moment, or a loss scale of 0 or below.
    """
    wide = values if values.dtype.kind in "fc" else values.astype(np.float32)
    bound = options.limits.of(who)
    with np.errstate(all="ignore"):
        bad = np.asarray(~np.isfinite(wide))
        if math.isfinite(bound):
            bad |= np.abs(wide) > np.float64(bound)
        if not_negative(who):
            bad |= wide.real < 0
        if is_loss_scale(who):
            bad |= wide.real <= 0
    return bad
