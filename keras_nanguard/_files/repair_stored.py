"""Repair of a file in the process that reads it: what replaces each bad array, or why nothing
does."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._files.arrays import named_dtype
from keras_nanguard._files.config_tree import optimizer_settings
from keras_nanguard._files.initial_values import initial_value
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.problems import Limits
from keras_nanguard._files.reading import Progress
from keras_nanguard._files.repair_options import RepairOptions
from keras_nanguard._files.repair_values import Values, repaired
from keras_nanguard._files.reports import Change
from keras_nanguard._files.rewrite import Replacements, rewrite
from keras_nanguard._files.scanner import scan_contents, scan_file
from keras_nanguard._files.stored import MAX_UNBACKED, Contents, StoredArray

__all__ = ["copy_values", "repair_stored", "write_values"]

_ZERO_SLOTS = frozenset(("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "Lion", "Lamb", "Adadelta"))
"""Optimizers of Keras whose slots are all initialized with 0 (`keras.src.optimizers`; Adagrad, Ftrl
and Nadam differ)."""

_INITIAL_SCALE = 2.0**15
"""Default initial scale of a `LossScaleOptimizer`."""


def repair_stored(
    path: str,
    progress: Progress,
    options: dict[str, Any],
    source: str | None,
    scratch: str,
    output: str,
) -> dict[str, Any]:
    """Scan a file, plan its repair, and write and scan the new one if anything is to be replaced.

    Args:
        path, source: the file, and a good file or `None`.
        progress: called with the number of bytes read so far and of all bytes.
        options: a `RepairOptions` as a dict.
        scratch: a folder that is made for the new file.
        output: final path of the new file, whose name it gets in the folder.

    Returns:
        The scan before, the changes, and the scan of the new file, `None` if there is none.
    """
    limits = Limits(**options["limits"])
    chosen = RepairOptions(**{**options, "limits": limits, "only": tuple(options["only"])})
    with ExitStack() as stack:
        contents = stack.enter_context(opened(path))
        before, bad = scan_contents(contents, progress, limits)
        good = {} if source is None else _by_name(stack.enter_context(opened(source)))
        plan = FileRepair(contents, chosen, good)
        changes = plan.changes(entry.location for entry in chosen.selected(bad))
        written = bool(plan.replacements) and not chosen.dry_run
        if written:
            rewrite(path, scratch, output, contents.kind, plan.replacements)
    new = os.path.join(scratch, os.path.basename(output))
    after = scan_file(new, progress, options["limits"]) if written else None
    return {"before": before, "changes": [asdict(change) for change in changes], "after": after}


def copy_values(path: str, progress: Progress, names: list[str], output: str) -> dict[str, Any]:
    """Write the arrays of a file that have one of these paths or locations to an `.npz` file."""
    with opened(path) as contents:
        found = _by_name(contents)
        write_values(output, {name: found[name].read for name in names if name in found})
    return {}


def write_values(output: str, values: Mapping[str, Callable[[], NDArray[Any]]]) -> None:
    """Write arrays by name to an `.npz` file, bfloat16 and other kinds unknown to it as float32."""
    with zipfile.ZipFile(output, "w") as archive:
        for name, read in values.items():
            array = read()
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                plain = array.astype(np.float32) if array.dtype.kind == "V" else array
                npy.write_array(member, plain, allow_pickle=False)


def _by_name(contents: Contents) -> dict[str, StoredArray]:
    """Return the arrays that can be read by path and by location; the first of each name."""
    found: dict[str, StoredArray] = {}
    for array, identity in zip(contents.arrays, identities(contents), strict=True):
        if not array.unread:
            found.setdefault(identity.path, array)
            found.setdefault(array.location, array)
    return found


class FileRepair:
    """The plan of the repair of one open file, with the arrays of a good one by path or location.

    Attributes:
        replacements: for each array to replace, a function that returns its new values.
    """

    def __init__(self, contents: Contents, options: RepairOptions, good: Mapping[str, StoredArray]):
        self._arrays = {array.location: array for array in contents.arrays}
        self._identities = dict(zip(self._arrays, identities(contents), strict=True))
        self._optimizer = optimizer_settings(contents.config)
        self._options, self._good = options, good
        self._draw = np.random.default_rng(options.seed)
        self._unbacked = 0
        self.replacements: Replacements = {}

    def changes(self, bad: Iterable[str]) -> list[Change]:
        """Return the change of each bad location, and fill `replacements`."""
        changes, reset = [], False
        for location in bad:
            identity, array = self._identities[location], self._arrays[location]
            if identity.role == "slot" and self._options.slots == "reset" and not array.unread:
                reset = True
            else:
                changes.append(self._change(array, identity))
        return changes + (self._reset_slots() if reset else [])

    def _change(self, array: StoredArray, identity: Identity) -> Change:
        if reason := f"not read: {array.unread}" if array.unread else self._too_large(array):
            method = self._options.method(identity.role)
            return Change(identity.path, array.location, method, "skipped", reason)
        change, new = repaired(
            identity,
            array.location,
            array.read(),
            self._options,
            lambda: initial_value(identity.name, array.shape, identity.settings, self._draw),
            lambda: self._from_source(identity.path),
        )
        if new is not None:
            self.replacements[array.key] = lambda: new
        return change

    def _from_source(self, path: str) -> Values:
        return self._good[path].read() if path in self._good else "the source has no such variable"

    def _too_large(self, array: StoredArray) -> str:
        """Return why an array is not loaded and rewritten, if so: the file declares far more than
        it stores."""
        if self._unbacked + array.unbacked > MAX_UNBACKED:
            declared = f"it declares {array.nbytes} bytes and the file stores {array.stored}"
            return f"{declared}: load the model and repair that"
        self._unbacked += array.unbacked
        return ""

    def _reset_slots(self) -> list[Change]:
        """Return the changes that set each slot of the optimizer to its initial value."""
        changes, refusal, scale = [], self._reset_refusal(), self._initial_scale()
        for location, identity in self._identities.items():
            array, name = self._arrays[location], identity.name.rpartition("/")[2]
            if identity.role != "slot" or not array.is_float or name == "learning_rate":
                continue
            reason = refusal or array.unread or self._too_large(array)
            value = scale if name == "dynamic_scale" else 0.0
            if not reason:
                dtype = named_dtype(array.dtype)
                self.replacements[array.key] = partial(np.full, array.shape, value, dtype)
            status = "skipped" if reason else "done"
            detail = reason or f"set to {value:g}, the initial value"
            changes.append(Change(identity.path, location, "reset", status, detail))
        return changes

    def _reset_refusal(self) -> str:
        name = self._optimizer.get("class_name")
        if name not in (*_ZERO_SLOTS, "LossScaleOptimizer"):
            named = name or "(which the file does not name)"
            unknown = f"the initial slots of the optimizer {named} are not known"
            return f"{unknown}: reset those of the loaded model"
        if self._optimizer.get("use_ema"):
            averages = "the optimizer has moving averages of the weights, which must not become 0"
            return f"{averages}: reset the loaded model"
        return ""

    def _initial_scale(self) -> float:
        given = self._optimizer.get("initial_scale")
        if isinstance(given, (int, float)) and 0.0 < given < math.inf:
            return float(given)
        return _INITIAL_SCALE
