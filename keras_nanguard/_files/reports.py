"""What `scan` and `repair` return: frozen records that convert to text, HTML and JSON.

Imports neither NumPy nor a backend, so that a program that only shows a report starts fast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from keras_nanguard._core.notebook import block
from keras_nanguard._files.judge import SEVERITIES, Problem, Statistics

__all__ = [
    "FORMAT",
    "SEVERITIES",
    "Change",
    "Problem",
    "RepairReport",
    "ScanReport",
    "ScannedLayer",
    "ScannedVariable",
    "Statistics",
    "Verdict",
    "row_of",
    "variable_of",
]

FORMAT = 1
"""Version of the JSON format of each report; incremented if a reader of the old one would misread
the new one."""

_RANK = {severity: place for place, severity in enumerate((*SEVERITIES, ""))}

_SHOWN_LAYERS = 20


class Verdict:
    """A report with one verdict, `ok`."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; notes are not."""
        raise NotImplementedError

    @property
    def clean(self) -> bool:
        """The same as `ok`."""
        return self.ok


@dataclass(frozen=True, slots=True)
class ScannedVariable:
    """One variable and its problems.

    Attributes:
        path: names of its layers and its own, such as `"backbone/post_bn/moving_variance"`; the
            same for a live model and for its file.
        layer: the path of its layer.
        name: name of the variable within its layer.
        role: one of `"weight"`, `"statistics"`, `"slot"`, `"other"`.
        location: Keras path of the variable, or its location in the file.
        dtype: name of its dtype.
        shape: its shape.
        statistics: its statistics, or `None` if its dtype is not a float dtype or it could not be
            read.
        problems: its problems, worst first.
    """

    path: str
    layer: str
    name: str
    role: str
    location: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Statistics | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def severity(self) -> str:
        """Severity of the worst problem, or `""`."""
        return self.problems[0].severity if self.problems else ""

    @property
    def bad(self) -> bool:
        """Whether there is an error or a warning."""
        return self.severity in ("error", "warning")


def row_of(entry: ScannedVariable) -> list[Any]:
    """Return plain JSON values in the order of the fields (three times as fast as `asdict`)."""
    found = entry.statistics
    counts = None if found is None else [getattr(found, name) for name in Statistics.__slots__]
    problems = [[one.code, one.severity, one.detail, one.count] for one in entry.problems]
    own = [entry.path, entry.layer, entry.name, entry.role, entry.location, entry.dtype]
    return [*own, entry.shape, counts, problems]


def variable_of(row: list[Any]) -> ScannedVariable:
    """Return the variable of a row."""
    path, layer, name, role, location, dtype, shape, counts, listed = row
    found = None if counts is None else Statistics(*counts)
    problems = tuple(Problem(*one) for one in listed)
    return ScannedVariable(
        path, layer, name, role, location, dtype, tuple(shape), found, problems
    )


@dataclass(frozen=True, slots=True)
class ScannedLayer:
    """The variables of one layer, worst first."""

    path: str
    variables: tuple[ScannedVariable, ...]

    @property
    def severity(self) -> str:
        """Severity of the worst problem in the layer, or `""`."""
        return self.variables[0].severity


@dataclass(frozen=True, slots=True)
class ScanReport(Verdict):
    """The result of `scan`.

    Attributes:
        source: path of the file, or name of the model.
        kind: `"model"`, or the kind of the file.
        variables: every variable, in the order of the source.
        notes: sentences about what was not read, and why.
    """

    source: str
    kind: str
    variables: tuple[ScannedVariable, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not self.bad

    @property
    def bad(self) -> tuple[ScannedVariable, ...]:
        """The variables with an error or a warning, worst first."""
        return tuple(sorted((entry for entry in self.variables if entry.bad), key=_badness))

    @property
    def finite(self) -> bool:
        """Whether every value is finite and everything was read."""
        codes = {found.code for entry in self.bad for found in entry.problems}
        return codes.isdisjoint(("nan", "inf", "unread"))

    @property
    def layers(self) -> tuple[ScannedLayer, ...]:
        """The variables grouped by layer, the worst layer first."""
        grouped: dict[str, list[ScannedVariable]] = {}
        for entry in self.variables:
            grouped.setdefault(entry.layer, []).append(entry)
        found = [
            ScannedLayer(path, tuple(sorted(entries, key=_badness)))
            for path, entries in grouped.items()
        ]
        return tuple(sorted(found, key=lambda layer: _badness(layer.variables[0])))

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of variables, values and problems."""
        read = [entry.statistics for entry in self.variables if entry.statistics is not None]
        severities = [entry.severity for entry in self.variables]
        return {
            "variables": len(self.variables),
            "values": sum(found.size for found in read),
            "nan": sum(found.nan for found in read),
            "inf": sum(found.inf for found in read),
            **{f"{severity}s": severities.count(severity) for severity in SEVERITIES},
        }

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        counts = self.counts
        scanned = f"{counts['values']:,} values in {counts['variables']:,} variables"
        if self.ok:
            return f"{self.source}: clean, {scanned}."
        layers = sum(layer.severity in ("error", "warning") for layer in self.layers)
        bad = f"{_counted(len(self.bad), 'bad variable')} in {_counted(layers, 'layer')}"
        return f"{self.source}: {bad}, of {scanned}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version; all numbers are finite."""
        return {
            "format": FORMAT,
            "source": self.source,
            "kind": self.kind,
            "clean": self.ok,
            "finite": self.finite,
            "counts": self.counts,
            "notes": list(self.notes),
            "layers": [
                {
                    "path": layer.path,
                    "severity": layer.severity,
                    "variables": [_plain(v) for v in layer.variables],
                }
                for layer in self.layers
            ],
        }

    def __repr__(self) -> str:
        counted = f"{len(self.variables)} variables, {len(self.bad)} of them bad"
        return f"ScanReport({self.source!r}, {counted})"

    def __str__(self) -> str:
        lines = [self.headline]
        shown = [layer for layer in self.layers if layer.severity in ("error", "warning")]
        for layer in shown[:_SHOWN_LAYERS]:
            lines.append(f"{layer.path}")
            for entry in layer.variables:
                lines += [
                    f"  {entry.name}: {found.detail} ({found.severity})" for found in entry.problems
                ]
        if len(shown) > _SHOWN_LAYERS:
            lines.append(f"and {len(shown) - _SHOWN_LAYERS} more layers")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        rows = [
            (e.layer, e.name, found.severity, found.detail)
            for e in self.bad
            for found in e.problems
        ]
        return block(
            self.headline, self.notes, ("layer", "variable", "severity", "problem"), rows, self.ok
        )


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _badness(entry: ScannedVariable) -> tuple[int, float]:
    """Return a key that sorts variables worst first: by severity, then by the share of bad
    values."""
    found = entry.statistics
    affected = sum(one.count for one in entry.problems if one.severity == entry.severity)
    return _RANK[entry.severity], -affected / max(1, found.size if found else 1)


def _plain(entry: ScannedVariable) -> dict[str, Any]:
    return {
        **asdict(entry),
        "shape": list(entry.shape),
        "problems": [asdict(found) for found in entry.problems],
    }


@dataclass(frozen=True, slots=True)
class Change:
    """The repair of one variable, done or planned.

    Attributes:
        path: path of the variable.
        location: Keras path of the variable, or its place in the file.
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
class RepairReport(Verdict):
    """The result of `repair`.

    Attributes:
        source: path of the file, or name of the model.
        output: path of the new file, or `None` for a model and if nothing was written.
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
        """Whether no error or warning is left; for a dry run, whether there was none."""
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
        return {
            "format": FORMAT,
            "source": self.source,
            "output": self.output,
            "backup": self.backup,
            "dry_run": self.dry_run,
            "clean": self.ok,
            "changes": [asdict(change) for change in self.changes],
            "before": self.before.counts,
            "after": self.after.counts if self.after else None,
        }

    def __repr__(self) -> str:
        return f"RepairReport({self.source!r}, {len(self.done)} done, {len(self.skipped)} skipped)"

    def __str__(self) -> str:
        listed = [f"{change.status} {change.path}: {change.detail}" for change in self.changes]
        return "\n".join([*listed, *self.closing])

    def _repr_html_(self) -> str:
        title = f"{self.source}: {len(self.done)} repaired, {len(self.skipped)} left alone"
        rows = [(change.path, change.status, change.detail) for change in self.changes]
        return block(title, self.closing, ("variable", "", "what was done"), rows, self.ok)
