"""The options and the result of `repair`. Imports neither NumPy nor a backend: the command line
takes its choices from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from keras_nanguard._core.display import TableReport
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.plain_values import plain
from keras_nanguard._core.variable_names import selected
from keras_nanguard._files.problems import Limits
from keras_nanguard._files.scan_report import ScanReport

FORMAT = 1
"""Version of the JSON format; incremented if a reader of the old one would misread the new one."""

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
            value = getattr(self, name)
            if value not in allowed:
                received = f"{name}={value!r}"
                raise GuardError(expected(f"one of {', '.join(allowed)}", received, "Choose one."))

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

    def selects(self, *names: str) -> bool:
        """Return whether a variable with these names (path, location, layer) is to be repaired."""
        return selected(self.only, *names)

    def refuse_no_match(self, found: ScanReport) -> None:
        """Raise a `GuardError` if `only` selects no variable at all."""
        names = ((one.path, one.location, one.layer) for one in found.variables)
        if self.only and not any(self.selects(*each) for each in names):
            what, received = "a variable that matches only", f"only={list(self.only)!r}"
            remedy = f"The names are those in the scan of {found.source}."
            raise GuardError(expected(what, received, remedy))


@dataclass(frozen=True, slots=True)
class Change:
    """The repair of one variable, done or planned.

    Attributes:
        path: path of the variable.
        location: Keras path of the variable, or its location in the file.
        method: `"initial"`, `"zeros"`, `"ones"`, `"source"`, `"reset"` or `"keep"`.
        status: `"done"` or `"skipped"`, as in an `Outcome`.
        detail: what was changed, or why nothing was.
        count: number of values that were bad.
    """

    path: str
    location: str
    method: str
    status: str
    detail: str
    count: int = 0


@dataclass(frozen=True, slots=True)
class RepairReport(TableReport):
    """The result of `repair`.

    Attributes:
        source: path of the file, or name of the model.
        output: path of the new file, or `None` if no file was written.
        backup: path of the backup of the old file, if it was replaced.
        dry_run: whether nothing was changed.
        changes: one entry for each bad variable.
        before: the scan before.
        after: the scan after, or `None` if nothing was changed.
    """

    source: str
    output: str | None
    backup: str | None
    dry_run: bool
    changes: tuple[Change, ...]
    before: ScanReport
    after: ScanReport | None

    @property
    def ok(self) -> bool:
        """Whether no error or warning is left. In a dry run: whether there was none."""
        return (self.after or self.before).ok

    @property
    def done(self) -> tuple[Change, ...]:
        """The changes that were made (in a dry run: that would be made)."""
        return tuple(change for change in self.changes if change.status == "done")

    @property
    def skipped(self) -> tuple[Change, ...]:
        """The variables that were not changed, each with the reason."""
        return tuple(change for change in self.changes if change.status == "skipped")

    @property
    def closing(self) -> list[str]:
        """The last lines of the report: which file was written, and what is still bad."""
        lines = [] if self.changes else [f"{self.source}: nothing to repair."]
        if self.dry_run:
            lines.append("Dry run: nothing was written.")
        if self.output:
            lines.append(f"Written to {self.output}.")
        if self.backup:
            lines.append(f"The old file is {self.backup}.")
        left = self.after.bad if self.after else () if self.dry_run else self.before.bad
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            lines.append(f"Still bad: {', '.join(entry.path for entry in left[:5])}{more}.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version."""
        counts = {"before": self.before.counts, "after": self.after.counts if self.after else None}
        return dict(plain({"format": FORMAT, **asdict(self), "clean": self.ok, **counts}))

    def __repr__(self) -> str:
        return f"RepairReport({self.source!r}, {len(self.done)} done, {len(self.skipped)} skipped)"

    def __str__(self) -> str:
        listed = [f"{change.status} {change.path}: {change.detail}" for change in self.changes]
        return "\n".join([*listed, *self.closing])

    def _table(self) -> Any:
        headline = f"{self.source}: {len(self.done)} repaired, {len(self.skipped)} not changed"
        rows = [(change.path, change.status, change.detail) for change in self.changes]
        return headline, self.closing, ("variable", "", "what was done"), rows
