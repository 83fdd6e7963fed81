"""Checks every value of an open file or of a live model: the statistics of each variable, and their
problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from keras_nanguard._files.arrays import Scratch, Tally, float_name, named_dtype
from keras_nanguard._files.judge import Problem, Statistics, find_problems, problem
from keras_nanguard._files.live import LiveVariable
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.reports import ScannedVariable, row_of
from keras_nanguard._files.stored import PARSE_ERRORS, Contents, StoredArray, plain_text

__all__ = ["Scanner", "scan_stored"]


def scan_stored(
    path: str, report: Callable[..., None], limit: float | None, statistics_limit: float
) -> dict[str, Any]:
    """Return kind, notes and rows of the variables of a file, plain JSON values.

    Args:
        path: any model file.
        report: called with the number of bytes read so far and of all bytes, or without arguments.
        limit: magnitude that no value may exceed, or `None`.
        statistics_limit: magnitude that no moving statistic may exceed.
    """
    with opened(path, report) as contents:
        variables = Scanner(limit, statistics_limit).file(contents, report)
        return {
            "kind": contents.kind,
            "notes": contents.notes,
            "variables": [row_of(v) for v in variables],
        }


class Scanner:
    """Computes the statistics of variables, one after the other, and finds their problems.

    Args:
        limit: magnitude that no value may exceed, or `None`.
        statistics_limit: magnitude that no moving statistic may exceed.
    """

    def __init__(self, limit: float | None, statistics_limit: float):
        self._limit, self._statistics_limit = limit, statistics_limit
        self._scratch = Scratch()

    def file(self, contents: Contents, report: Callable[..., None]) -> list[ScannedVariable]:
        """Scan every array of an open file."""
        done, total, found = 0, sum(array.nbytes for array in contents.arrays), []
        for array, identity in zip(contents.arrays, identities(contents), strict=True):
            found.append(self._stored(array, identity, partial(_report_from, done, total, report)))
            done += array.nbytes
        return found

    def _stored(
        self, array: StoredArray, identity: Identity, report: Callable[[int], None]
    ) -> ScannedVariable:
        found, reason = None, array.unread
        if array.is_float and not reason:
            tally, size = Tally(self._bound(identity), self._scratch), 0
            try:
                for piece in array.pieces():
                    tally.add(piece)
                    size += piece.nbytes
                    report(size)
                found = tally.result()
            except PARSE_ERRORS as error:
                reason = plain_text(str(error).strip() or type(error).__name__, 200)
        float16 = _float16(identity)
        return self._scanned(
            identity, array.location, array.dtype, array.shape, found, reason, float16
        )

    def live(self, live: LiveVariable) -> ScannedVariable:
        """Scan one variable of a live model."""
        found, kind = None, named_dtype(live.dtype)
        if kind is not None and float_name(kind):
            tally = Tally(self._bound(live.identity), self._scratch)
            tally.add(live.read())
            found = tally.result()
        float16 = getattr(live.layer, "compute_dtype", "") == "float16"
        return self._scanned(
            live.identity, live.keras_path, live.dtype, live.shape, found, "", float16
        )

    def _bound(self, identity: Identity) -> float | None:
        if identity.role == "statistics" and identity.layer_class != "Normalization":
            return min(self._statistics_limit, math.inf if self._limit is None else self._limit)
        return self._limit

    def _scanned(
        self,
        identity: Identity,
        location: str,
        dtype: str,
        shape: tuple[int, ...],
        found: Statistics | None,
        unread: str,
        float16: bool,
    ) -> ScannedVariable:
        problems: tuple[Problem, ...] = (problem("unread", reason=unread),) if unread else ()
        if found is not None:
            problems = find_problems(
                identity,
                found,
                rank=len(shape),
                float16=float16,
                limit=self._limit,
                statistics_limit=self._statistics_limit,
            )
        own = (identity.path, identity.layer, identity.name, identity.role)
        return ScannedVariable(*own, location, dtype, shape, found, problems)


def _report_from(done: int, total: int, report: Callable[..., None], read: int) -> None:
    report(done + read, total)


def _float16(identity: Identity) -> bool:
    policy = identity.settings.get("dtype")
    named = policy.get("config") if isinstance(policy, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else policy
    return name in ("float16", "mixed_float16")
