"""The options of `repair`. Imports neither NumPy nor a backend: the command line takes its choices
from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keras_nanguard._core.errors import GuardError, expected, require_one_of
from keras_nanguard._core.variable_names import selected
from keras_nanguard._files.problems import Limits
from keras_nanguard._files.reports import ScanReport

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

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            require_one_of(name, getattr(self, name), allowed)

    def method(self, role: str) -> str:
        """Return the method for a role; a variable that is neither weight, statistic nor slot is
        kept."""
        return str(getattr(self, _FIELDS[role])) if role in _FIELDS else "keep"

    def remedy(self, role: str) -> str:
        """Return which methods replace the bad values of a role, `""` if none do."""
        if role not in _FIELDS:
            return ""
        field = _FIELDS[role]
        methods = " or ".join(one for one in CHOICES[field] if one not in ("keep", "source"))
        return f"choose {methods} for the {field}, or name a source"

    def refuse_no_match(self, found: ScanReport) -> None:
        """Raise a `GuardError` if `only` selects no variable at all."""
        names = ((one.path, one.location, one.layer) for one in found.variables)
        if self.only and not any(selected(self.only, *each) for each in names):
            what, received = "a variable that matches only", f"only={list(self.only)!r}"
            remedy = f"The names are those in the scan of {found.source}."
            raise GuardError(expected(what, received, remedy))
