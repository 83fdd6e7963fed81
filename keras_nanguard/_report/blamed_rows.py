"""The rows of a bundle that are to blame: small pictures, or their columns beside the usual range of each.

Reads only fixed names within the run's own directory, without pickle, and only arrays of moderate size.
"""

from __future__ import annotations

import base64
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["bundle_folder", "layer_table", "shown"]

MAX_BYTES = 64 << 20
MAX_TABLE_BYTES = 256 << 10
MAX_ROWS, MAX_COLUMNS, MAX_SIDE = 4, 24, 96

Array = np.ndarray[Any, Any]


def bundle_folder(bundle: str | None, directory: Path | None) -> Path | None:
    """Return the folder of a bundle within the directory of its run, `None` where it is not there."""
    if bundle is None or directory is None:
        return None
    folder = directory / "incidents" / Path(bundle.replace("\\", "/")).name
    return folder if folder.is_dir() and not folder.is_symlink() else None


def layer_table(folder: Path | None) -> str:
    """Return the table of layers of a bundle as text, `""` where there is none."""
    try:
        if folder is None or (folder / "layers.txt").stat().st_size > MAX_TABLE_BYTES:
            return ""
        return (folder / "layers.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def shown(folder: Path | None, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return what is shown of some rows of the batch of a bundle.

    Returns:
        For each row `{"row", "picture", "columns"}`: a data URI of a PNG or `""`, and `(column, value, low, high, unusual)` with the
        range that this column has in the other rows.
    """
    inputs = _inputs(folder) if rows else None
    if inputs is None:
        return []
    others = np.delete(inputs, [r for r in rows if r < len(inputs)], axis=0).astype(np.float64)
    found = []
    for row in [r for r in rows if r < len(inputs)][:MAX_ROWS]:
        picture = _picture(inputs[row], others)
        columns = [] if picture else _columns(inputs[row].reshape(-1).astype(np.float64), others.reshape(len(others), -1))
        found.append({"row": row, "picture": picture, "columns": columns})
    return found


def _inputs(folder: Path | None) -> Array | None:
    """Return the first array of numbers of a batch with at least two dimensions."""
    if folder is None:
        return None
    try:
        with zipfile.ZipFile(folder / "batch.npz") as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                return None
        with np.load(folder / "batch.npz", allow_pickle=False) as arrays:
            for name in sorted(arrays.files):
                array: Array = arrays[name]
                if array.ndim >= 2 and array.size and array.dtype.kind in "fiu":
                    return array
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return None


def _columns(row: Array, others: Array) -> list[tuple[int, str, str, str, bool]]:
    with np.errstate(all="ignore"):
        finite = np.where(np.isfinite(others), others, np.nan)
        empty = np.isnan(finite).all(axis=0) if len(finite) else np.ones(len(row), bool)
        low = np.where(empty, np.nan, np.nanmin(np.where(empty, 0.0, finite), axis=0, initial=np.inf))
        high = np.where(empty, np.nan, np.nanmax(np.where(empty, 0.0, finite), axis=0, initial=-np.inf))
        unusual = ~np.isfinite(row) | (row < low - (high - low)) | (row > high + (high - low))
    order = np.argsort(~unusual, kind="stable")[:MAX_COLUMNS]
    return [(int(n), f"{row[n]:.4g}", f"{low[n]:.4g}", f"{high[n]:.4g}", bool(unusual[n])) for n in order]


def _picture(row: Array, others: Array) -> str:
    """Return an image as a data URI: grey or colour, what is not finite in magenta; `""` if it has not the shape of one."""
    if row.ndim == 2:
        row = row[..., None]
    if row.ndim != 3 or row.shape[-1] not in (1, 3, 4) or min(row.shape[:2]) < 4:
        return ""
    step = -(-max(row.shape[:2]) // MAX_SIDE)
    values = row[::step, ::step, :3].astype(np.float64)
    usual = others[np.isfinite(others)]
    low, high = (float(usual.min()), float(usual.max())) if usual.size else (0.0, 1.0)
    bad = ~np.isfinite(values).all(axis=-1)
    grey = np.clip((np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0), 0.0, 1.0) * 255.0
    pixels = np.repeat(grey, 3, axis=-1) if grey.shape[-1] == 1 else grey
    pixels = pixels.astype(np.uint8)
    pixels[bad] = (255, 0, 200)
    return f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"


def _png(pixels: Array) -> bytes:
    """Return pixels, uint8 `(height, width, 3)`, as a PNG."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = pixels.shape[:2]
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
