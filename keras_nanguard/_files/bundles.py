"""Reading of bundles: the folder of one incident, which `_diagnose/bundle.py` describes and writes.

Nothing in it is trusted: names are fixed and links are not followed, so no path leads out of the
folder; sizes are checked before anything is unpacked; objects are never unpickled. Imports no
backend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_nanguard._core import atomic_files, plain_values
from keras_nanguard._core.data import arguments, named
from keras_nanguard._core.errors import BundleError, FileFormatError, expected
from keras_nanguard._core.finiteness import Array
from keras_nanguard._core.incident import BUNDLES, Incident
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.limits import MAX_JSON, PARSE_ERRORS
from keras_nanguard._files.formats.npz import opened_arrays

FORMAT = 1
"""Number of the form of `bundle.json`."""

MAX_BUNDLES = 12
"""Maximum number of bundles in a directory; the oldest is removed first."""

MAX_BYTES = 1 << 30
"""Maximum bytes of arrays in one bundle. Arrays that do not fit are omitted and reported: the start
first, then the state.
"""


_HEADERS = 1 << 20
"""Bytes that names and headers of the arrays may take in a file."""


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle.

    Attributes:
        batch: the arguments of the step.
        state: values of the variables before the step by path; empty if they were omitted.
        start: their values before the first step; empty if they were omitted.
        growth: the course of loss, gradient norm and weights before the step, as it was stored.
        model: the model's configuration as JSON text, `""` if it has none.
        updates_first: as in a `ReplayableStep`.
    """

    incident: Incident
    batch: Any
    state: Sequence[tuple[str, Array]]
    start: Sequence[tuple[str, Array]]
    growth: Mapping[str, Any]
    model: str
    updates_first: bool


def bundle_folder(bundle: str | None, directory: Path | None) -> Path | None:
    """Return the folder of a bundle within the directory of its run, or `None`."""
    if bundle is None or directory is None:
        return None
    folder = directory / BUNDLES / Path(bundle.replace("\\", "/")).name
    return folder if folder.is_dir() and not folder.is_symlink() else None


def folder_of(path: str | Path | None) -> Path:
    """Return the folder of a bundle.

    Raises:
        BundleError: if it is missing, or not the folder of a bundle.
    """
    folder = Path(path) if isinstance(path, (str, os.PathLike)) else None
    what = "the folder of an incident"
    if folder is None or not folder.exists():
        other = "None" if path is None else f"an object of class {type(path).__name__}"
        received = other if folder is None else f"{str(path)!r}, which does not exist"
        kept = f"a directory keeps the newest {MAX_BUNDLES}"
        raise _refused(what, received, f"Pass Incident.bundle of a diagnosed incident; {kept}.")
    if not (folder / "bundle.json").is_file():
        raise _refused(what, repr(str(path)), "It contains bundle.json; see Incident.bundle.")
    return folder


def read(path: str | Path | None) -> Bundle:
    """Read a bundle.

    Raises:
        BundleError: if it is not a bundle, missing, of a newer format, damaged or hostile.
    """
    folder = folder_of(path)
    try:
        return _read(folder)
    except BundleError:
        raise
    except (FileFormatError, *PARSE_ERRORS) as error:
        reason = f"{type(error).__name__}: {plain_text(error)}"
        raise BundleError(f"The bundle {str(path)!r} cannot be read: {reason}") from error


def _refused(what: str, received: object, remedy: str = "The file is damaged.") -> BundleError:
    return BundleError(expected(what, received, remedy))


def _read(folder: Path) -> Bundle:
    about = document(folder / "bundle.json")
    if about.get("format") != FORMAT:
        received = plain_text(f"format={about.get('format')!r}")
        raise _refused(f"a bundle of format {FORMAT}", received, "Update.")
    entries = [(str(e["path"]), str(e["dtype"])) for e in about["state"]]
    model = folder / "model.json"
    return Bundle(
        Incident.from_dict(document(folder / "incident.json")),
        _packed(about["batch"], _load(folder / "batch.npz", about["dtypes"])),
        _variables(folder / "state.npz", entries),
        _variables(folder / "start.npz", entries),
        about["growth"],
        regular(model, MAX_JSON).read_text(encoding="utf-8") if model.exists() else "",
        bool(about.get("saving")),
    )


def batch_arrays(folder: Path, max_bytes: int) -> list[tuple[str, Array]]:
    """Return the arrays of the step with their paths in a diagnosis, without omitted ones.

    Args:
        max_bytes: maximum size of all arrays together.

    Raises:
        FileFormatError: if the bundle is damaged, hostile or larger; or another of `PARSE_ERRORS`.
    """
    about = document(folder / "bundle.json")
    arrays = _load(folder / "batch.npz", about["dtypes"], max_bytes)
    batch, names = _packed(about["batch"], arrays, partly=True), about.get("inputs", ())
    return [(named(path, tuple(map(str, names))), array) for _, path, array in arguments(batch)]


def regular(path: Path, max_bytes: int) -> Path:
    """Return the path of a file of moderate size that is in the folder itself.

    Raises:
        BundleError: if it is missing, too large, a link, or no file.
    """
    if path.is_symlink():
        remedy = "Replace it by the file itself."
        raise BundleError(f"{path.name} is a link, which is not followed. {remedy}")
    if not path.is_file():
        raise BundleError(f"{path.name} is missing, or not a file.")
    if (size := path.stat().st_size) > max_bytes:
        raise BundleError(f"{path.name} has {size} bytes, more than a bundle may have.")
    return path


def document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a bundle."""
    value = plain_values.loads(regular(path, MAX_JSON).read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise _refused(f"a JSON object in {path.name}", type(value).__name__)
    return value


def _variables(path: Path, entries: Sequence[tuple[str, str]]) -> list[tuple[str, Array]]:
    if not path.exists():
        return []
    arrays = _load(path, [dtype for _, dtype in entries])
    if len(arrays) != len(entries):
        raise _refused(f"{len(entries)} arrays in {path.name}", len(arrays))
    return [(name, array) for (name, _), array in zip(entries, arrays)]


def _load(path: Path, dtypes: Sequence[Any], max_bytes: int | None = None) -> list[Array]:
    """Return the arrays of a file, none of which is unpickled or larger than a bundle may be."""
    max_bytes = 2 * MAX_BYTES if max_bytes is None else max_bytes
    regular(path, max_bytes + _HEADERS)
    if not dtypes:
        return []
    with opened_arrays(path) as found:
        if sum(array.nbytes for array in found.values()) > max_bytes:
            raise BundleError(f"{path.name} unpacks to more than a bundle may have.")
        arrays = [found[str(number)].read() for number in range(len(found))]
    return [atomic_files.typed(array, name) for array, name in zip(arrays, dtypes)]


def _packed(structure: Any, arrays: Sequence[Array], partly: bool = False) -> Any:
    """Return nested data with the arrays in place of their numbers; `None` in place of an omitted
    array, if `partly`."""
    if isinstance(structure, int):
        return arrays[structure]
    if structure is None or (partly and "left_out" in structure):
        return None
    if "left_out" in structure:
        left_out = structure["left_out"]
        raise BundleError(f"An array of the batch was omitted from the bundle: {left_out}.")
    ((kind, inner),) = structure.items()
    if kind == "dict":
        return {key: _packed(child, arrays, partly) for key, child in inner.items()}
    make = {"tuple": tuple, "list": list}[kind]
    return make(_packed(child, arrays, partly) for child in inner)
