"""Repairs one variable, and a file in the process that reads it: finds the bad values, and replaces
them or gives the reason why not.

A file is rewritten into a folder for unfinished files. Everything in it that is not replaced is
copied unchanged, with its permissions.
"""

from __future__ import annotations

import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core import atomic_files
from keras_nanguard._core.atomic_files import save_arrays
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.finiteness import widen
from keras_nanguard._files.initial_values import initial_value
from keras_nanguard._files.names import Identity, identities, optimizer_settings
from keras_nanguard._files.opening import WEIGHTS, opened, refuse_bomb
from keras_nanguard._files.problems import Limits, RepairOptions
from keras_nanguard._files.reading import Progress
from keras_nanguard._files.reports import Change
from keras_nanguard._files.scanner import scan_contents, scan_file
from keras_nanguard._files.stored import (
    BOMB_FLOOR,
    MAX_EXPANSION,
    MAX_UNBACKED,
    READ_BYTES,
    Contents,
    StoredArray,
    named_dtype,
)

Values = NDArray[Any] | str
"""The values of a variable, or the reason why there are none."""

_CONSTANTS = {"zeros": 0.0, "ones": 1.0}

_WORDS = {
    "initial": "set to initial values",
    "zeros": "set to 0",
    "ones": "set to 1",
    "source": "were bad: the variable was taken from the source",
}
"""What each method does."""


def repaired(
    identity: Identity,
    location: str,
    values: NDArray[Any],
    options: RepairOptions,
    initial: Callable[[], Values],
    source: Callable[[], Values],
) -> tuple[Change, NDArray[Any] | None]:
    """Return the repair of a variable and its new values in the dtype of the old ones, `None` if it
    is not repaired.

    Args:
        identity, location: names, role and place of the variable, as in a `Change`.
        values: the old values, of any float or complex dtype.
        options: how each role is repaired.
        initial, source: return initial values, and the good values of the source.
    """
    method = options.method(identity.role)
    bad = bad_values(values, identity, options)
    count = int(bad.sum())
    if not count:
        new: Values = "no single value is bad"
    elif method == "keep":
        new = f"unchanged: {options.remedy(identity.role)}".removesuffix(": ")
    elif method == "source":  # the whole variable, whose values belong together
        new = source()
        if not isinstance(new, str) and new.shape != values.shape:
            new = f"the source has the shape {new.shape} there"
        new = new if isinstance(new, str) else new.astype(values.dtype)
    else:
        new = np.full((), _CONSTANTS[method]) if method in _CONSTANTS else initial()
        if not isinstance(new, str):
            filling = np.broadcast_to(new, values.shape)[bad]
            new = values.copy(order="K")
            new[bad] = filling.astype(values.dtype)
    if not isinstance(new, str) and bad_values(new, identity, options).any():
        new = "the new values are bad too"
    if isinstance(new, str):
        return Change(identity.path, location, method, "skipped", new, count), None
    detail = f"{count} of {bad.size} values {_WORDS[method]}"
    return Change(identity.path, location, method, "done", detail, count), new


def bad_values(
    values: NDArray[Any], identity: Identity, options: RepairOptions
) -> NDArray[np.bool_]:
    """Return which values of a variable are bad.

    Args:
        values: the variable, of any float or complex dtype.
        identity: its names and role.
        options: the limits.

    Returns:
        Mask of the shape of `values`: non-finite, beyond a limit, or a negative variance.
    """
    wide = values if values.dtype.kind in "fc" else values.astype(np.float32)
    bound = options.limits.of(identity)
    with np.errstate(all="ignore"):
        bad = np.asarray(~np.isfinite(wide))
        if math.isfinite(bound):
            bad |= np.abs(wide) > np.float64(bound)
        if "variance" in identity.name or "stddev" in identity.name:
            bad |= wide.real < 0
    return bad


Replacements = dict[str, Callable[[], NDArray[Any]]]
"""New values of an array, by its key in the file."""


class Unwritable(Exception):
    """A file cannot be written: error number, reason, path."""


def rewrite(path: str, scratch: str, output: str, kind: str, new: Replacements) -> None:
    """Write the new file into a folder, and sync it to the disk.

    Args:
        path: the old file.
        scratch: the folder, which is made.
        output: final path of the new file, whose name it gets in the folder.
        kind, new: kind of the file, as in `Contents`, and the new arrays.

    Raises:
        FileFormatError: if the kind cannot be rewritten, or the old file is damaged.
        Unwritable: if the new file cannot be written.
    """
    writers = {"keras": _archive, "npz": _archive, "weights.h5": _hdf5, "h5": _hdf5}
    if kind not in writers:
        instead = {
            "folder": f"repair its {WEIGHTS}",
            "sharded": "repair each shard, in place",
        }.get(kind, "load it and repair the model")
        raise FileFormatError(f"A file of the kind {kind!r} cannot be rewritten: {instead}.")
    target = os.path.join(scratch, os.path.basename(output))
    try:
        os.mkdir(scratch)
        writers[kind](path, target, new)
        shutil.copymode(path, target)
        atomic_files.flush_to_disk(Path(target))
    except OSError as error:
        if error.errno is None:  # of HDF5, about the old file
            raise
        raise Unwritable(error.errno, error.strerror or str(error), output) from error


def _hdf5(path: str, target: str, new: Replacements) -> None:
    """Write a copy of an HDF5 file with its arrays replaced."""
    shutil.copyfile(path, target)
    _replace(target, new)


def _replace(path: str, new: Replacements) -> None:
    """Replace the arrays of an HDF5 file; bfloat16 is written as unnamed bytes, as Keras does."""
    with h5py.File(path, "r+", locking=False) as file:
        for key, values in new.items():
            dataset = file[key.encode("utf-8", "surrogateescape")]
            plain = np.require(values(), requirements="C")
            if dataset.dtype.kind != "V":
                dataset[...] = plain
                continue
            bits, kind = plain.view(dataset.dtype), dataset.id.get_type()
            dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, kind)


def _archive(path: str, target: str, new: Replacements) -> None:
    """Write a copy of a zip archive with its weights or arrays replaced, each compressed as
    before."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        declared = sum(info.file_size for info in source.infolist())
        if declared > max(BOMB_FLOOR, MAX_EXPANSION * os.path.getsize(path)):
            raise FileFormatError(f"{path} declares {declared} bytes in all: a zip bomb.")
        for info in source.infolist():
            refuse_bomb(info)
            member = zipfile.ZipInfo(info.filename, info.date_time)
            member.compress_type, member.external_attr = info.compress_type, info.external_attr
            with copy.open(member, "w", force_zip64=True) as written, source.open(info) as old:
                _member(old, written, info.filename, new, os.path.dirname(target))


def _member(old: IO[bytes], written: IO[bytes], name: str, new: Replacements, folder: str) -> None:
    if name == WEIGHTS:
        unpacked = os.path.join(folder, f".{name}")
        with open(unpacked, "wb") as file:
            shutil.copyfileobj(old, file, READ_BYTES)
        _replace(unpacked, new)
        with open(unpacked, "rb") as file:
            shutil.copyfileobj(file, written, READ_BYTES)
        os.unlink(unpacked)
    elif name in new:
        npy.write_array(written, new[name](), allow_pickle=False)
    else:
        shutil.copyfileobj(old, written, READ_BYTES)


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
        names = ((entry.location, entry.path, entry.layer) for entry in bad)
        changes = plan.changes(own[0] for own in names if chosen.selects(*own))
        written = bool(plan.replacements) and not chosen.dry_run
        if written:
            rewrite(path, scratch, output, contents.kind, plan.replacements)
    new = os.path.join(scratch, os.path.basename(output))
    after = scan_file(new, progress, options["limits"]) if written else None
    return {"before": before, "changes": [asdict(change) for change in changes], "after": after}


def copy_values(path: str, progress: Progress, names: list[str], output: str) -> dict[str, Any]:
    """Write the arrays of a file that have one of these paths or locations to an `.npz` file,
    bfloat16 and float16 as float32."""
    with opened(path) as contents:
        found = _by_name(contents)
        known = {name: widen(found[name].read()) for name in names if name in found}
        save_arrays(Path(output), known)
    return {}


def _by_name(contents: Contents) -> dict[str, StoredArray]:
    """Return the arrays that can be read by path and by location; the first of each name."""
    found: dict[str, StoredArray] = {}
    for array, identity in zip(contents.arrays, identities(contents), strict=True):
        if not array.unread:
            found.setdefault(identity.path, array)
            found.setdefault(array.location, array)
    return found


class FileRepair:
    """The repair plan of one open file, with the arrays of a good one by path or location.

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
        good = self._good.get(identity.path)
        change, new = repaired(
            identity,
            array.location,
            array.read(),
            self._options,
            lambda: initial_value(identity.name, array.shape, identity.settings, self._draw),
            lambda: good.read() if good is not None else "the source has no such variable",
        )
        if new is not None:
            self.replacements[array.key] = lambda: new
        return change

    def _too_large(self, array: StoredArray) -> str:
        """Return why an array cannot be loaded and rewritten, if the file declares far more than it
        stores."""
        if self._unbacked + array.unbacked > MAX_UNBACKED:
            declared = f"it declares {array.nbytes} bytes and the file stores {array.stored}"
            return f"{declared}: load the model and repair that"
        self._unbacked += array.unbacked
        return ""

    def _reset_slots(self) -> list[Change]:
        """Return the changes that set each slot of the optimizer to its initial value."""
        changes, refusal = [], self._reset_refusal()
        given = self._optimizer.get("initial_scale")
        scale = float(given) if isinstance(given, (int, float)) else 0.0
        scale = scale if 0.0 < scale < math.inf else _INITIAL_SCALE
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
