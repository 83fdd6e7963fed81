"""How bad values are replaced, by the role of a variable. Imports neither NumPy nor a backend."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._files.problems import Limits
from keras_nanguard._files.reports import ScannedVariable

__all__ = ["CHOICES", "RepairOptions"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "statistics": ("initial", "source", "keep"),
    "weights": ("initial", "zeros", "ones", "source", "keep"),
    "slots": ("reset", "source", "keep"),
}
"""The methods of repair, by role."""

_FIELDS = {"statistics": "statistics", "weight": "weights", "slot": "slots"}


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """The arguments of `repair`: the method for each role, and the variables to repair."""

    statistics: str = "initial"
    weights: str = "keep"
    slots: str = "reset"
    limits: Limits = field(default_factory=Limits)
    only: tuple[str, ...] = ()
    dry_run: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                received = f"{name}={value!r}"
                raise GuardError(expected(f"one of {', '.join(allowed)}", received, "Choose one."))
        if self.seed is not None and self.seed < 0:
            received = f"seed={self.seed!r}"
            raise GuardError(expected("a seed of 0 or above", received, "Choose another one."))

    def method(self, role: str) -> str:
        """Return the method for a role; a variable that is neither weight, statistic nor slot is
        kept."""
        return str(getattr(self, _FIELDS[role])) if role in _FIELDS else "keep"

    def remedy(self, role: str) -> str:
        """Return which arguments replace the bad values of a role, `""` if none do."""
        if role not in _FIELDS:
            return ""
        field = _FIELDS[role]
        methods = [method for method in CHOICES[field] if method not in ("keep", "source")]
        choices = " or ".join(f"{field}={method!r}" for method in methods)
        return f"choose {choices}, or name a source"

    def selected(self, bad: Iterable[ScannedVariable]) -> list[ScannedVariable]:
        """Return the bad variables that are to be repaired."""
        return [entry for entry in bad if not self.only or self._matches(entry)]

    def _matches(self, entry: ScannedVariable) -> bool:
        names = (entry.path, entry.location, entry.layer)
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.only)
