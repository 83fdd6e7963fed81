"""Shows bad rows of a bundle: as small images, or as columns next to the usual range of each.

It reads only fixed names within the run's own directory, without pickle, and only arrays of
moderate size.
"""

from __future__ import annotations

import base64
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core import plain_json
from keras_nanguard._core.data_names import GENERATED_PREFIXES, argument_path, arguments, named

__all__ = ["bundle_folder", "layer_table", "shown"]

MAX_BYTES = 64 << 20
MAX_TABLE_BYTES = 256 << 10
MAX_JSON_BYTES = 4 << 20
MAX_ROWS, MAX_COLUMNS, MAX_SIDE = 4, 24, 96

Array = np.ndarray[Any, Any]


def bundle_folder(bundle: str | None, directory: Path | None) -> Path | None:
    """Return the folder of a bundle within the directory of its run, or `None`."""
    if bundle is None or directory is None:
        return None
    folder = directory / "incidents" / Path(bundle.replace("\\", "/")).name
    return folder if folder.is_dir() and not folder.is_symlink() else None


def layer_table(folder: Path | None) -> str:
    """Return the table of layers of a bundle as text, or `""`."""
    try:
        if folder is None:
            return ""
        file = _regular(folder / "layers.txt", MAX_TABLE_BYTES)
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _regular(path: Path, max_bytes: int) -> Path:
    """Return the path of a file of moderate size in the folder itself; not a link or a pipe.

    Raises:
        OSError, ValueError: if it is not one.
    """
    if path.is_symlink() or not path.is_file() or path.stat().st_size > max_bytes:
        raise ValueError(f"{path.name} is not a file, or too large")
    return path


def shown(folder: Path | None, rows: Sequence[int], culprit: str = "") -> list[dict[str, Any]]:
    """Return the display of some rows of the batch of a bundle.

    Args:
        folder: the bundle.
        rows: indices within the batch.
        culprit: the array to blame, as a diagnosis names it, or `""`.

    Returns:
        For each row `{"row", "of", "picture", "columns"}`: the user's name of the displayed array
        (`x/age`, or `""`), a data URI of a PNG or `""`, and `(column, value, low, high, unusual)`
        with the range of this column in the other rows. The displayed array is the one that is not
        finite in that row, else the culprit, else the first input.
    """
    parts = _parts(folder) if folder is not None and rows else []
    found: list[dict[str, Any]] = []
    for row in rows:
        chosen = _chosen(parts, row, culprit)
        if chosen is None or len(found) == MAX_ROWS:
            continue
        path, array = chosen
        array = array.astype(np.float64)
        others = np.delete(array, [r for r in rows if 0 <= r < len(array)], axis=0)
        one = {"row": row, "of": argument_path(path), "picture": _picture(array[row], others)}
        flat = others.reshape(len(others), array[row].size)
        columns = [] if one["picture"] else _columns(array[row].reshape(-1), flat)
        found.append({**one, "columns": columns})
    return found


def _chosen(parts: Sequence[tuple[str, Array]], row: int, culprit: str) -> tuple[str, Array] | None:
    known = [(path, array) for path, array in parts if 0 <= row < len(array)]
    bad = [(path, array) for path, array in known if not np.isfinite(array[row]).all()]
    blamed = [(path, array) for path, array in bad or known if culprit and path == culprit]
    no_input = ("targets", "sample_weight")
    inputs = [part for part in known if part[1].ndim > 1 and not part[0].startswith(no_input)]
    return next(iter((*blamed, *bad, *inputs)), None)


_UNREADABLE = (
    *(OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError),
    *(RuntimeError, MemoryError, SyntaxError),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


def _parts(folder: Path) -> list[tuple[str, Array]]:
    """Return the numeric arrays of a batch that have rows, with their paths in a diagnosis (`""` if
    unknown).
    """
    try:
        file = _regular(folder / "batch.npz", MAX_BYTES)
        with zipfile.ZipFile(file) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                return []
        with np.load(file, allow_pickle=False) as stored:
            names = sorted(stored.files, key=lambda name: (len(name), name))
            found = {name: stored[name] for name in names}
    except _UNREADABLE:
        return []
    paths, dtypes = _reported(folder)
    parts = []
    for name, array in found.items():
        if isinstance(array, np.ndarray):  # of another member it is the bytes
            array = _widened(array, dtypes.get(name, ""))
            fits = 0 < array.size <= MAX_BYTES // 8  # they are compared as float64
            if array.ndim and fits and array.dtype.kind in "fiu":
                parts.append((paths.get(name, ""), array))
    return parts


def _reported(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return paths and dtypes of the arrays of a bundle, by their names in the file."""
    try:
        about = _document(folder / "bundle.json")
        found = list(arguments(_packed(about["batch"])))
        dtypes = {str(number): str(name) for number, name in enumerate(about["dtypes"])}
    except _UNREADABLE:
        return {}, {}
    names = _input_names(folder)
    return {number: named(path, names) for _, path, number in found}, dtypes


def _packed(structure: Any) -> Any:
    """Return the arguments of the step, with names in place of the arrays."""
    if isinstance(structure, int):
        return str(structure)
    (kind, content), *_ = (structure or {"left_out": ""}).items()
    if kind == "dict":
        return {str(key): _packed(child) for key, child in content.items()}
    return tuple(_packed(child) for child in content) if kind in ("tuple", "list") else None


def _input_names(folder: Path) -> tuple[str, ...]:
    """Return the name of each `keras.Input` of the model of a bundle if they are in a list, like
    their arrays.
    """
    try:
        layers = _document(folder / "model.json")["config"]["input_layers"]
        entries = [layers] if isinstance(layers[0], str) else layers
        names = [str(entry[0]) for entry in entries if isinstance(entry, list)]
        return tuple("" if name.startswith(GENERATED_PREFIXES) else name for name in names)
    except _UNREADABLE:
        return ()


def _document(path: Path) -> Any:
    return plain_json.loads(_regular(path, MAX_JSON_BYTES).read_text(encoding="utf-8"))


def _widened(array: Array, dtype: str) -> Array:
    """Return bfloat16, which a bundle stores as bits, as float32."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array if dtype in ("", array.dtype.name) else array[:0]


def _columns(row: Array, others: Array) -> list[tuple[int, str, str, str, bool]]:
    """Return index, value, smallest and largest finite value of the other rows, and whether it is
    unusual, for some columns, the unusual ones first."""
    finite = np.ma.masked_invalid(np.vstack([others, np.full(len(row), np.nan)]))
    low, high = finite.min(axis=0).filled(np.nan), finite.max(axis=0).filled(np.nan)
    with np.errstate(all="ignore"):
        unusual = ~np.isfinite(row) | (row < low - (high - low)) | (row > high + (high - low))
    order = np.argsort(~unusual, kind="stable")[:MAX_COLUMNS]
    found = []
    for n in order.tolist():
        texts = f"{row[n]:.4g}", f"{low[n]:.4g}", f"{high[n]:.4g}"
        found.append((n, *texts, bool(unusual[n])))
    return found


def _picture(row: Array, others: Array) -> str:
    """Return an image as a data URI, with NaN and Inf in magenta; `""` if it does not have the
    shape of one.
    """
    if row.ndim == 2:
        row = row[..., None]
    if row.ndim != 3 or row.shape[-1] not in (1, 3, 4) or min(row.shape[:2]) < 4:
        return ""
    step = -(-max(row.shape[:2]) // MAX_SIDE)
    values = row[::step, ::step, :3]
    usual = others[np.isfinite(others)]
    low, high = (float(usual.min()), float(usual.max())) if usual.size else (0.0, 1.0)
    bad = ~np.isfinite(values).all(axis=-1)
    values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    grey = np.clip((values - low) / ((high - low) or 1.0), 0.0, 1.0) * 255.0
    pixels = np.repeat(grey, 3, axis=-1) if grey.shape[-1] == 1 else grey
    pixels = pixels.astype(np.uint8)
    pixels[bad] = (255, 0, 200)
    return f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"


def _png(pixels: Array) -> bytes:
    """Return pixels, uint8 `(height, width, 3)`, as a PNG."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        size, check = len(content), zlib.crc32(kind + content)
        return struct.pack(">I", size) + kind + content + struct.pack(">I", check)

    height, width = pixels.shape[:2]
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
