"""Checks every value of an open file or of a live model: the statistics of each variable, and their
problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray

from keras_nanguard._files.arrays import Tally, float_name, named_dtype
from keras_nanguard._files.live import live_variables
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.problems import Limits, find_problems, problem
from keras_nanguard._files.reading import Progress
from keras_nanguard._files.reports import ScannedVariable, ScanReport
from keras_nanguard._files.stored import PARSE_ERRORS, Contents, StoredArray, plain_text

__all__ = ["scan_contents", "scan_file", "scan_model"]


def scan_model(model: Any, limits: Limits) -> ScanReport:
    """Scan a live model.

    Raises:
        GuardError: if it is not a built model.
    """
    variables = []
    for live in live_variables(model):
        kind = named_dtype(live.dtype)
        pieces = [live.read()] if kind is not None and float_name(kind) else None
        float16 = getattr(live.layer, "compute_dtype", "") == "float16"
        about = (live.keras_path, live.dtype, live.shape)
        variables.append(_scanned(live.identity, about, pieces, limits, float16))
    return ScanReport(str(model.name), "model", tuple(variables))


def scan_file(path: str, progress: Progress, limits: dict[str, Any]) -> dict[str, Any]:
    """Return kind, notes and variables of a file, plain JSON values.

    Args:
        path: any model file.
        progress: called with the number of bytes read so far and of all bytes.
        limits: a `Limits` as a dict.
    """
    with opened(path) as contents:
        return scan_contents(contents, progress, Limits(**limits))[0]


def scan_contents(
    contents: Contents, progress: Progress, limits: Limits
) -> tuple[dict[str, Any], tuple[ScannedVariable, ...]]:
    """Scan an open file; return plain JSON values as `scan_file`, and the bad variables."""
    done, total, variables = 0, sum(array.nbytes for array in contents.arrays), []
    for array, who in zip(contents.arrays, identities(contents), strict=True):
        variables.append(_stored(array, who, limits))
        done += array.nbytes
        progress(done, total)
    plain = [asdict(variable) for variable in variables]
    found = {"kind": contents.kind, "notes": contents.notes, "variables": plain}
    return found, ScanReport("", contents.kind, tuple(variables)).bad


def _stored(array: StoredArray, who: Identity, limits: Limits) -> ScannedVariable:
    about, reason = (array.location, array.dtype, array.shape), array.unread
    if not reason:
        try:
            pieces = array.pieces() if array.is_float else None
            return _scanned(who, about, pieces, limits, _in_float16(who))
        except PARSE_ERRORS as error:
            reason = plain_text(str(error).strip() or type(error).__name__, 200)
    unread = (problem("unread", reason=reason),)
    return ScannedVariable(who.path, who.layer, who.name, who.role, *about, problems=unread)


def _scanned(
    who: Identity,
    about: tuple[str, str, tuple[int, ...]],
    pieces: Iterable[NDArray[Any]] | None,
    limits: Limits,
    float16: bool,
) -> ScannedVariable:
    """Scan one variable.

    Args:
        who, about: its names and role; its location, dtype and shape.
        pieces: its values, or `None` if they are no floats.
        limits, float16: see `find_problems`.
    """
    own = (who.path, who.layer, who.name, who.role, *about)
    if pieces is None:
        return ScannedVariable(*own)
    tally = Tally(limits.of(who))
    for piece in pieces:
        tally.add(piece)
    found = tally.result()
    problems = find_problems(who, found, limits, rank=len(about[2]), float16=float16)
    return ScannedVariable(*own, found, problems)


def _in_float16(who: Identity) -> bool:
    policy = who.settings.get("dtype")
    named = policy.get("config") if isinstance(policy, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else policy
    return name in ("float16", "mixed_float16")
