"""Checks every value of an open file or of a live model: the statistics of each variable, and their
problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from keras_nanguard._files.arrays import Tally, float_name, named_dtype
from keras_nanguard._files.live import LiveVariable
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.problems import (
    Problem,
    Statistics,
    find_problems,
    magnitude_limit,
    problem,
)
from keras_nanguard._files.reading import Progress
from keras_nanguard._files.reports import ScannedVariable, ScanReport
from keras_nanguard._files.stored import PARSE_ERRORS, Contents, StoredArray, plain_text

__all__ = ["Scanner", "scan_contents", "scan_stored"]


def scan_stored(
    path: str, progress: Progress, limit: float | None, statistics_limit: float
) -> dict[str, Any]:
    """Return kind, notes and variables of a file, plain JSON values.

    Args:
        path: any model file.
        progress: called with the number of bytes read so far and of all bytes.
        limit: magnitude that no value may exceed, or `None`.
        statistics_limit: magnitude that no moving statistic may exceed.
    """
    with opened(path) as contents:
        return scan_contents(contents, progress, limit, statistics_limit)[0]


def scan_contents(
    contents: Contents, progress: Progress, limit: float | None, statistics_limit: float
) -> tuple[dict[str, Any], tuple[ScannedVariable, ...]]:
    """Scan an open file; return plain JSON values as `scan_stored`, and the bad variables."""
    variables = tuple(Scanner(limit, statistics_limit).contents(contents, progress))
    plain = [asdict(variable) for variable in variables]
    found = {"kind": contents.kind, "notes": contents.notes, "variables": plain}
    return found, ScanReport("", contents.kind, variables).bad


class Scanner:
    """Computes the statistics of variables, one after the other, and finds their problems.

    Args:
        limit: magnitude that no value may exceed, or `None`.
        statistics_limit: magnitude that no moving statistic may exceed.
    """

    def __init__(self, limit: float | None, statistics_limit: float):
        self._limit, self._statistics_limit = limit, statistics_limit

    def contents(self, contents: Contents, progress: Progress) -> list[ScannedVariable]:
        """Scan every array of an open file."""
        done, total, found = 0, sum(array.nbytes for array in contents.arrays), []
        for array, identity in zip(contents.arrays, identities(contents), strict=True):
            found.append(self._stored(array, identity))
            done += array.nbytes
            progress(done, total)
        return found

    def _stored(self, array: StoredArray, who: Identity) -> ScannedVariable:
        found, reason = None, array.unread
        if array.is_float and not reason:
            try:
                tally = self._tally(who)
                for piece in array.pieces():
                    tally.add(piece)
                found = tally.result()
            except PARSE_ERRORS as error:
                reason = plain_text(str(error).strip() or type(error).__name__, 200)
        about = (array.location, array.dtype, array.shape)
        if reason:
            unread = (problem("unread", reason=reason),)
            own = (who.path, who.layer, who.name, who.role)
            return ScannedVariable(*own, *about, problems=unread)
        return self._scanned(who, *about, found, _in_float16(who))

    def live(self, live: LiveVariable) -> ScannedVariable:
        """Scan one variable of a live model."""
        found, kind = None, named_dtype(live.dtype)
        if kind is not None and float_name(kind):
            tally = self._tally(live.identity)
            tally.add(live.read())
            found = tally.result()
        float16 = getattr(live.layer, "compute_dtype", "") == "float16"
        about = (live.keras_path, live.dtype, live.shape)
        return self._scanned(live.identity, *about, found, float16)

    def _tally(self, who: Identity) -> Tally:
        return Tally(magnitude_limit(who, self._limit, self._statistics_limit))

    def _scanned(
        self,
        who: Identity,
        location: str,
        dtype: str,
        shape: tuple[int, ...],
        found: Statistics | None,
        float16: bool,
    ) -> ScannedVariable:
        problems: tuple[Problem, ...] = ()
        if found is not None:
            problems = find_problems(
                who,
                found,
                rank=len(shape),
                float16=float16,
                limit=self._limit,
                statistics_limit=self._statistics_limit,
            )
        own = (who.path, who.layer, who.name, who.role)
        return ScannedVariable(*own, location, dtype, shape, found, problems)


def _in_float16(who: Identity) -> bool:
    policy = who.settings.get("dtype")
    named = policy.get("config") if isinstance(policy, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else policy
    return name in ("float16", "mixed_float16")
