"""Copies and pickles of `NanGuard`: tuners copy callbacks for each trial, other processes get
pickles.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from keras_nanguard._core.incident import Incident
from keras_nanguard._fit.counts import Totals
from keras_nanguard._fit.reporter import Reporter

__all__ = ["CopyMixin"]

SETTINGS = ("resume", "functions", "diagnose", "logs", "sample_ids")
"""Arguments of a guard besides policy, directory and verbosity."""


class CopyMixin:
    """The part of `NanGuard` for its copies and pickles. A copy is never attached to a fit."""

    incidents: list[Incident]
    session: Any
    _reporter: Reporter
    _unused: Callable[[], Any]
    _copied: Callable[[], dict[str, Any]]
    _counts = Totals()
    """The counts of the fits before the last one."""

    def _counted(self) -> Totals:
        """Return the counts of all fits so far."""
        return self._counts if self.session is None else self._counts.plus(self.session.counts)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle: settings, incidents and counts."""
        unused = vars(self._unused())
        own = {
            name: value
            for name, value in vars(self).items()
            if name in SETTINGS or name not in unused
        }
        own |= {
            "incidents": list(self.incidents),
            "_reporter": copy.copy(self._reporter),
            **self._copied(),
        }
        return {**unused, **own, "_counts": self._counted(), "_watching": False}

    def __copy__(self) -> Any:
        """Return a new guard with the same settings."""
        return self._fresh(lambda value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a new guard with the same settings and functions, and copies of the attributes of
        a subclass.
        """
        return self._fresh(lambda value: copy.deepcopy(value, memo), memo)

    def _fresh(self, copied: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> Any:
        """Return a new guard. It does not resume, because the snapshots in the directory belong to
        the original.
        """
        made = type(self).__new__(type(self))
        if memo is not None:
            memo[id(self)] = made
        unused = self._unused()
        more = {
            name: copied(value)
            for name, value in vars(self).items()
            if name not in vars(unused) and not hasattr(unused, name)
        }
        vars(made).update(
            {
                **vars(unused),
                **{name: getattr(self, name) for name in SETTINGS},
                **more,
                "_resumed": True,
            }
        )
        return made
