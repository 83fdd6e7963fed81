"""The repair of a file in the process that reads it.

The file is rewritten into a folder for unfinished files. Everything in it that is not replaced is
copied unchanged, with its permissions.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.finiteness import widen
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._core.variable_names import STARTS, initializer_names, with_unit_forget_bias
from keras_nanguard._files.formats.contents import ModelArray
from keras_nanguard._files.formats.limits import BOMB_FLOOR, MAX_EXPANSION, READ_BYTES, refuse_bomb
from keras_nanguard._files.formats.names import optimizer_settings
from keras_nanguard._files.formats.opening import WEIGHTS, opened
from keras_nanguard._files.isolated import Progress
from keras_nanguard._files.problems import Limits
from keras_nanguard._files.repair_arrays import NotRepaired, Repair, RepairOptions, by_name
from keras_nanguard._files.scan import scan_contents

Arrays = Mapping[str, NDArray[Any]]
"""New values of arrays, by their location in the file."""


def repair_file(
    path: str,
    progress: Progress,
    options: dict[str, Any],
    source: str | None,
    scratch: str,
    output: str,
) -> dict[str, Any]:
    """Scan a file, repair its arrays, and write and scan the new one if any is to be replaced.

    Args:
        path, source: the file, and a good file or `None`.
        progress: called with the number of bytes read so far and of all bytes.
        options: a `RepairOptions` as a dict.
        scratch: a folder that is made for the new file.
        output: final path of the new file, whose name it gets in the folder.

    Returns:
        The scan before, the changes, and the scan of the new file, `None` if there is none.

    Raises:
        FileFormatError: if the file cannot be rewritten, or is damaged.
        Unwritable: if the new file cannot be written.
    """
    limits = Limits(**options["limits"])
    chosen = RepairOptions(**{**options, "limits": limits, "only": tuple(options["only"])})
    with ExitStack() as stack:
        contents = stack.enter_context(opened(path))
        before = scan_contents(contents, limits, progress)
        good = {} if source is None else by_name(stack.enter_context(opened(source)))
        initial = partial(_initial, optimizer_settings(contents.config))
        new: dict[str, NDArray[Any]] = {}

        def replace(array: ModelArray, values: NDArray[Any]) -> None:
            new[array.location] = values

        changes = Repair(chosen, contents, good, initial, replace).changes(before)
        if any(change.status == "done" for change in changes):  # also in a dry run
            _refuse_other_kinds(contents.kind)
        if new:
            rewrite(path, scratch, output, contents.kind, new)
    found: dict[str, Any] = {"before": asdict(before), "after": None}
    found["changes"] = [asdict(change) for change in changes]
    if new:
        with opened(os.path.join(scratch, os.path.basename(output))) as contents:
            after = asdict(scan_contents(contents, limits, progress))
        found["after"] = {**after, "source": plain_text(output)}
    return found


def _initial(optimizer: Mapping[str, Any], array: ModelArray) -> NDArray[Any] | float:
    if array.who.role == "slot":
        return initial_slot(array.who.name, optimizer)
    return initial_value(array.who.name, array.shape, array.who.settings)


def _refuse_other_kinds(kind: str) -> None:
    """Raise a `FileFormatError` for a kind of file that cannot be rewritten."""
    if kind not in ("keras", "npz", "weights.h5", "h5"):
        instead = {
            "folder": f"repair its {WEIGHTS}",
            "sharded": "repair each shard, in place",
        }.get(kind, "load it and repair the model")
        raise FileFormatError(f"A file of the kind {kind!r} cannot be rewritten: {instead}.")


def copy_values(path: str, progress: Progress, names: list[str], output: str) -> dict[str, Any]:
    """Write the arrays of a file that have one of these paths to an `.npz` file, bfloat16 and
    float16 as float32, and return the reason for each that cannot be read.

    Raises:
        Unwritable: if the `.npz` file cannot be written.
    """
    known, unread = {}, {}
    with opened(path) as contents:
        found = by_name(contents)
        for name in names:
            if name in found:
                try:
                    known[name] = widen(found[name].read())
                except FileFormatError as error:
                    unread[name] = str(error)
        with _writing(output):
            atomic_files.save_arrays(Path(output), known)
    return unread


class Unwritable(Exception):
    """A file cannot be written: error number, reason, path."""


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Convert an error of the system to an `Unwritable` that names this file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of HDF5, about the old file
            raise
        raise Unwritable(error.errno, error.strerror or str(error), path) from error


def rewrite(path: str, scratch: str, output: str, kind: str, new: Arrays) -> None:
    """Write the new file into a folder, and sync it to the disk.

    Args:
        path: the old file.
        scratch: the folder, which is made.
        output: final path of the new file, whose name it gets in the folder.
        kind, new: kind of the file, as in `Contents`, and the new arrays.

    Raises:
        FileFormatError: if the old file is damaged.
        Unwritable: if the new file cannot be written.
    """
    target = os.path.join(scratch, os.path.basename(output))
    with _writing(output):
        os.mkdir(scratch)
        if kind in ("keras", "npz"):
            _archive(path, target, new)
        else:
            shutil.copyfile(path, target)
            _replace(target, new)
        atomic_files.flush_to_disk(Path(target))
        shutil.copymode(path, target)  # last: it may be read-only


def _replace(path: str, new: Arrays) -> None:
    """Replace the arrays of an HDF5 file; bfloat16 is written as unnamed bytes, as Keras does."""
    with h5py.File(path, "r+", locking=False) as file:
        for key, values in new.items():
            dataset = file[key.encode("utf-8", "surrogateescape")]
            plain = np.require(values, requirements="C")
            if dataset.dtype.kind != "V":
                dataset[...] = plain
                continue
            bits, kind = plain.view(dataset.dtype), dataset.id.get_type()
            dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, kind)


def _archive(path: str, target: str, new: Arrays) -> None:
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


def _member(old: IO[bytes], written: IO[bytes], name: str, new: Arrays, folder: str) -> None:
    if name == WEIGHTS:
        unpacked = os.path.join(folder, f".{name}")
        with open(unpacked, "wb") as file:
            shutil.copyfileobj(old, file, READ_BYTES)
        _replace(unpacked, new)
        with open(unpacked, "rb") as file:
            shutil.copyfileobj(file, written, READ_BYTES)
        os.unlink(unpacked)
    elif (location := name.removesuffix(".npy")) in new:
        npy.write_array(written, new[location], allow_pickle=False)
    else:
        shutil.copyfileobj(old, written, READ_BYTES)


# Initial values from the configuration in a file: constants only, as this process has no backend


_ZERO_SLOTS = frozenset(("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "Lion", "Lamb", "Adadelta"))
"""Optimizers of Keras whose slots are all initialized with 0 (`keras.src.optimizers`; Adagrad, Ftrl
and Nadam differ)."""

_INITIAL_SCALE = 2.0**15
"""Default initial scale of a `LossScaleOptimizer`."""

_START_SETTINGS = {"dynamic_scale": "initial_scale", "learning_rate": "learning_rate"}
"""Settings of an optimizer with the initial values of its variables that do not start at 0."""


def initial_slot(name: str, settings: Mapping[str, Any]) -> float:
    """Return the initial value of a variable of an optimizer.

    Args:
        name: name of the variable, or its number.
        settings: the optimizer's configuration, from `names.optimizer_settings`.

    Raises:
        NotRepaired: if it does not follow from the file.
    """
    optimizer = settings.get("class_name")
    if optimizer not in (*_ZERO_SLOTS, "LossScaleOptimizer"):
        named = optimizer or "(which the file does not name)"
        unknown = f"the initial slots of the optimizer {named} are not known"
        raise NotRepaired(f"{unknown}: reset those of the loaded model")
    if settings.get("use_ema"):
        averages = "the optimizer has moving averages of the weights, which must not become 0"
        raise NotRepaired(f"{averages}: reset the loaded model")
    last = name.rpartition("/")[2]
    if last not in _START_SETTINGS:
        return 0.0
    given = _number(settings.get(_START_SETTINGS[last]))
    if given is not None and given > 0.0:
        return given
    if last == "dynamic_scale":
        return _INITIAL_SCALE
    raise NotRepaired("its initial value is not in the file")


def initial_value(
    name: str, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> NDArray[Any] | float:
    """Return initial values of a variable of a layer, of its shape or one for all.

    Args:
        name: name of the variable within its layer.
        settings: the layer's configuration, empty if there is none.

    Raises:
        NotRepaired: if they do not follow from the file.
    """
    nodes = map(settings.get, initializer_names(name))
    node = next((node for node in nodes if isinstance(node, dict)), None)
    if name == "moving_stddev" or node is None:
        if name in STARTS:
            return STARTS[name]
        raise NotRepaired(f"its initial value is not in the file ({name})")
    kind, given = node.get("class_name"), node.get("config")
    options = given if isinstance(given, dict) else {}
    constants = {"Zeros": 0.0, "Ones": 1.0, "Constant": _number(options.get("value", 0.0))}
    value = constants.get(str(kind))
    if value is None:
        named = f"its initializer {plain_text(kind, 60)!r} is not evaluated for a file"
        if str(kind) in constants:
            named = f"its initializer {kind!r} has no single finite value"
        raise NotRepaired(f"{named}: load the model and repair that")
    if name == "bias" and settings.get("unit_forget_bias") and shape:
        return with_unit_forget_bias(np.broadcast_to(value, shape))
    return value


def _number(value: Any) -> float | None:
    """Return a value of a configuration as a finite number, or `None` if it is not one."""
    is_finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return float(value) if is_finite else None
