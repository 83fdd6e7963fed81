"""One card for each kind of incident of a run: finding, cause, actions, outcomes, advice, and bad
rows of its bundle, as small images or as columns next to the usual range of each.

Of a bundle only fixed names within the run's own directory are read, without pickle, and only
arrays of moderate size.
"""

from __future__ import annotations

import base64
import shlex
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.data import argument_path
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.incident import Diagnosis, Incident
from keras_nanguard._core.literals import CAUSE_WORDS
from keras_nanguard._core.plain_values import times
from keras_nanguard._files import bundles
from keras_nanguard._files.formats.limits import PARSE_ERRORS
from keras_nanguard._report import console
from keras_nanguard._report.console import IncidentKind
from keras_nanguard._report.reported_run import ReportedRun

MAX_BYTES = 64 << 20
MAX_TABLE_BYTES = 256 << 10
MAX_ROWS, MAX_COLUMNS, MAX_SIDE = 4, 24, 96

MIN_SIDE, MIN_GREY = 4, 16
"""Smallest sides of an image, and of one without an axis of channels: smaller arrays are series."""

Array = np.ndarray[Any, Any]


def layer_table(folder: Path) -> str:
    """Return the table of layers of a bundle as text, or `""`."""
    try:
        file = bundles.regular(folder / "layers.txt", MAX_TABLE_BYTES)
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


class Column(NamedTuple):
    """One value of a row, and the smallest and largest finite one of its column in other rows."""

    number: int
    value: float
    low: float
    high: float
    unusual: bool


@dataclass(frozen=True)
class BatchRow:
    """A row of the batch of a bundle, as a card shows it.

    Attributes:
        row: its index within the batch.
        of: the user's name of the displayed array (`x/age`).
        picture: a data URI of a PNG, or `""`.
        columns: its columns, unusual ones first; empty if there is a picture.
    """

    row: int
    of: str
    picture: str
    columns: Sequence[Column]


def batch_rows(folder: Path | None, rows: Sequence[int], culprit: str = "") -> list[BatchRow]:
    """Return some rows of the batch of a bundle, as a card shows them.

    The displayed array is the one that is not finite in that row, else the culprit, else the first
    input.

    Args:
        rows: indices within the batch.
        culprit: the array to blame, as a diagnosis names it, or `""`.
    """
    parts = _parts(folder) if folder is not None and rows else []
    found: list[BatchRow] = []
    for row in rows:
        chosen = _chosen(parts, row, culprit)
        if chosen is None or len(found) == MAX_ROWS:
            continue
        path, array = chosen
        array = array.astype(np.float64)
        others = np.delete(array, [r for r in rows if 0 <= r < len(array)], axis=0)
        picture = _picture(array[row], others)
        flat = others.reshape(len(others), array[row].size)
        columns = [] if picture else _columns(array[row].reshape(-1), flat)
        found.append(BatchRow(row, argument_path(path), picture, columns))
    return found


def _chosen(parts: Sequence[tuple[str, Array]], row: int, culprit: str) -> tuple[str, Array] | None:
    known = [(path, array) for path, array in parts if 0 <= row < len(array)]
    bad = [(path, array) for path, array in known if not np.isfinite(array[row]).all()]
    blamed = [(path, array) for path, array in bad or known if culprit and path == culprit]
    no_input = ("targets", "sample_weight")
    inputs = [part for part in known if part[1].ndim > 1 and not part[0].startswith(no_input)]
    return next(iter((*blamed, *bad, *inputs)), None)


def _parts(folder: Path) -> list[tuple[str, Array]]:
    """Return the numeric arrays of a batch that have rows, with their paths in a diagnosis."""
    try:
        batch = bundles.batch_arrays(folder, MAX_BYTES)
        found = [(path, finiteness.widen(array)) for path, array in batch]
    except (FileFormatError, *PARSE_ERRORS):
        return []
    return [
        (path, array)
        for path, array in found  # compared as float64
        if array.ndim and 0 < array.size <= MAX_BYTES // 8 and array.dtype.kind in "fiu"
    ]


def _columns(row: Array, others: Array) -> list[Column]:
    """Return some columns of a row, unusual ones first."""
    finite = np.ma.masked_invalid(np.vstack([others, np.full(len(row), np.nan)]))
    low, high = finite.min(axis=0).filled(np.nan), finite.max(axis=0).filled(np.nan)
    with np.errstate(all="ignore"):
        unusual = ~np.isfinite(row) | (row < low - (high - low)) | (row > high + (high - low))
    order = np.argsort(~unusual, kind="stable")[:MAX_COLUMNS].tolist()
    return [Column(n, row[n], low[n], high[n], bool(unusual[n])) for n in order]


def _picture(row: Array, others: Array) -> str:
    """Return an image as a data URI, with NaN and Inf in magenta; `""` if it does not have the
    shape of one."""
    smallest = MIN_GREY if row.ndim == 2 else MIN_SIDE
    if row.ndim == 2:
        row = row[..., None]
    if row.ndim != 3 or row.shape[-1] not in (1, 3, 4) or min(row.shape[:2]) < smallest:
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


MAX_CARDS = 200
"""Maximum number of kinds with a card. All others share one."""


@dataclass(frozen=True)
class Card:
    """The card of one kind of incident: records and plain text, which the page escapes.

    Attributes:
        title: cause and place.
        first: the first of the incidents that still has its bundle, or the first of all.
        code: code to paste, or `""`.
        layers: the table of layers of the bundle, or `""`.
        bundle: folder of the bundle, or `""`.
        labels: names of the bad rows of the step.
    """

    title: str
    kind: IncidentKind
    first: Incident
    code: str
    layers: str
    rows: Sequence[BatchRow]
    bundle: str
    replay: str
    labels: Sequence[str]


def cards(run: ReportedRun, steps: Sequence[int]) -> list[Card]:
    """Return the cards in the order in which each kind first occurred.

    Args:
        steps: the step of each incident, counted as in the samples of the recording.
    """
    groups = console.kinds(run.incidents, steps)
    kept = sorted(groups[:MAX_CARDS], key=lambda kind: kind.steps[0])
    found = [_card(run, kind) for kind in kept]
    if rare := {console.kind_of(kind.first) for kind in groups[MAX_CARDS:]}:
        pairs = zip(run.incidents, steps)
        others = [(incident, step) for incident, step in pairs if console.kind_of(incident) in rare]
        together = IncidentKind([incident for incident, _ in others], [step for _, step in others])
        title = f"{times(len(rare), 'more kind')} of incidents; this is the first of them"
        found.append(replace(_card(run, together), title=title))
    return found


def _card(run: ReportedRun, kind: IncidentKind) -> Card:
    """Return the card of incidents."""
    folders = [bundles.bundle_folder(one.bundle, run.directory) for one in kind.incidents]
    place = next((n for n, folder in enumerate(folders) if folder is not None), 0)
    first, folder, step = kind.incidents[place], folders[place], kind.steps[place]
    diagnosis = first.diagnosis or Diagnosis()
    bundle = "" if folder is None and run.directory is not None else first.bundle or ""
    return Card(
        title=str(kind),
        kind=kind,
        first=first,
        code=snippet(diagnosis),
        layers="" if folder is None else layer_table(folder),
        rows=batch_rows(folder, diagnosis.samples, diagnosis.culprit),
        bundle=bundle,
        replay=f"keras-nanguard replay {shlex.quote(console.printable(bundle))}",
        labels=[one.label for one in run.recording.samples if step in one.steps][:20],
    )


def snippet(diagnosis: Diagnosis) -> str:
    """Return code to paste, or `""`. It has no name from the data except identifiers."""
    name = diagnosis.culprit_shown.rpartition("/")[2]
    code = str(CAUSE_WORDS[diagnosis.cause].get("code", ""))
    return code.replace("{name}", name if name.isidentifier() and not iskeyword(name) else "x")
