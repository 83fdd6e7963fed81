"""The repair of the arrays of a model, live or in a file: each bad value is replaced, or there is a
reason why not. Imports no backend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.finiteness import named_dtype
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._core.variable_names import selected
from keras_nanguard._files.formats.contents import Contents, Identity, ModelArray
from keras_nanguard._files.formats.limits import MAX_UNBACKED
from keras_nanguard._files.problems import is_loss_scale, not_negative
from keras_nanguard._files.repair_options import RepairOptions
from keras_nanguard._files.reports import Change, ScanReport


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


def by_name(contents: Contents) -> dict[str, ModelArray]:
    """Return the arrays that can be read by path and by location, without the names that several
    arrays have: layers of one name in a custom layer have one path."""
    named = [(name, a) for a in contents.arrays for name in {a.who.path, a.location}]
    counts = Counter(name for name, _ in named)
    return {name: array for name, array in named if counts[name] == 1 and not array.unread}


@dataclass(slots=True)
class Repair:
    """How the arrays of a model are repaired.

    Attributes:
        options: the method for each role.
        contents: the arrays of the model.
        good: the arrays of a good model by path and by location, from `by_name`.
        initial: returns the initial values of an array, which are broadcast to its shape, or raises
            `NotRepaired`.
        replace: replaces the values of an array, in its dtype.
        unbacked: bytes that the arrays repaired so far declare and the file does not store.
        paths: how many arrays of the model have each path.
        locations: how many of them have each location, the same as the path in a live model.
    """

    options: RepairOptions
    contents: Contents
    good: Mapping[str, ModelArray]
    initial: Callable[[ModelArray], NDArray[Any] | float]
    replace: Callable[[ModelArray, NDArray[Any]], None]
    unbacked: int = 0
    paths: Counter[str] = field(init=False)
    locations: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = Counter(array.who.path for array in self.contents.arrays)
        self.locations = Counter(array.location for array in self.contents.arrays)

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
                    changes.append(self._reset(array))
            elif bad:
                changes.append(self._change(array))
        return changes

    def _may_reset(self, array: ModelArray) -> bool:
        return array.who.role == "slot" and array.is_float and self.options.slots == "reset"

    def _change(self, array: ModelArray) -> Change:
        """Repair one array; `source` replaces it as a whole, as its values belong together."""
        who, method, count = array.who, self.options.method(array.who.role), 0
        about = (plain_text(who.path), plain_text(array.location), method)
        try:
            self._check_size(array)
            values = _read(array)
            bad = bad_values(values, who, self.options)
            count = int(bad.sum())
            new = self._new(array, values, bad, method)
            if bad_values(new, who, self.options).any():
                raise NotRepaired("the new values are bad too")
            self._put(array, new)
        except NotRepaired as reason:
            return Change(*about, "skipped", str(reason), count)
        return Change(*about, "done", f"{count} of {bad.size} values {_WORDS[method]}", count)

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
        """Return the array of the source that has path and location of an array; else the one that
        has its path, if no other array has it."""
        path = array.who.path
        good = self.good.get(array.location)
        is_one = self.locations[array.location] == 1
        if is_one and good is not None and good.who.path == path:
            return good
        if self.paths[path] > 1:
            raise NotRepaired("several variables have this path: which one to take is not known")
        if path not in self.good:
            raise NotRepaired("the source has no such variable, or several variables of this path")
        return self.good[path]

    def _reset(self, array: ModelArray) -> Change:
        """Set a slot of an optimizer to its initial value."""
        about = (plain_text(array.who.path), plain_text(array.location), "reset")
        try:
            initial = np.asarray(self.initial(array)).astype(named_dtype(array.dtype))
            self._check_size(array)
        except NotRepaired as reason:
            return Change(*about, "skipped", str(reason))
        self._put(array, np.broadcast_to(initial, array.shape))
        return Change(*about, "done", "set to its initial value")

    def _put(self, array: ModelArray, values: NDArray[Any]) -> None:
        if not self.options.dry_run:
            self.replace(array, values)

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
