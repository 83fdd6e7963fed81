"""The results of `scan`, `repair` and `recalibrate`: frozen records, shown as text, table or JSON.
Imports no backend, so that a program that only shows a report starts fast."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from keras_nanguard._core.display import TableReport
from keras_nanguard._core.plain_values import plain, times
from keras_nanguard._files.problems import SEVERITIES, ArrayStats, Problem

FORMAT = 1
"""Version of the JSON format of each report; incremented if a reader of the old one would misread
the new one."""

_SHOWN_LAYERS = 20


@dataclass(frozen=True, slots=True)
class ScannedVariable:
    """One variable and its problems.

    Attributes:
        path: the names of its layers and of the variable, such as
            `"backbone/post_bn/moving_variance"`; the same for a live model and for its file.
        layer: the path of its layer.
        name: name of the variable within its layer.
        role: one of `"weight"`, `"statistics"`, `"slot"`, `"other"`.
        location: Keras path of the variable, or its location in the file.
        dtype: name of its dtype.
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
    statistics: ArrayStats | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def severity(self) -> str:
        """Severity of the worst problem, or `""`."""
        return self.problems[0].severity if self.problems else ""

    @property
    def bad(self) -> bool:
        """Whether there is an error or a warning."""
        return bool(self.problems)


def _badness(entry: ScannedVariable) -> tuple[int, float]:
    """Return a key that sorts variables worst first: by severity, then by the share of bad
    values."""
    found = entry.statistics
    affected = sum(one.count for one in entry.problems if one.severity == entry.severity)
    rank = (*SEVERITIES, "").index(entry.severity)
    return rank, -affected / max(1, found.size if found else 1)


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
class ScanReport(TableReport):
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
        for entry in sorted(self.variables, key=_badness):
            grouped.setdefault(entry.layer, []).append(entry)
        return tuple(ScannedLayer(path, tuple(entries)) for path, entries in grouped.items())

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
            "errors": severities.count("error"),
            "warnings": severities.count("warning"),
        }

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        counts, bad = self.counts, self.bad
        scanned = f"{counts['values']:,} values in {counts['variables']:,} variables"
        if self.ok:
            return f"{self.source}: clean, {scanned}."
        layers = len({entry.layer for entry in bad})
        found = f"{times(len(bad), 'bad variable')} in {times(layers, 'layer')}"
        return f"{self.source}: {found}. Scanned {scanned}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version; all numbers are finite."""
        found = {
            "format": FORMAT,
            "source": self.source,
            "kind": self.kind,
            "clean": self.ok,
            "finite": self.finite,
            "counts": self.counts,
            "notes": self.notes,
            "layers": [{"severity": layer.severity, **asdict(layer)} for layer in self.layers],
        }
        return dict(plain(found))

    def __repr__(self) -> str:
        counted = f"{times(len(self.variables), 'variable')}, {len(self.bad)} of them bad"
        return f"ScanReport({self.source!r}, {counted})"

    def __str__(self) -> str:
        lines = [self.headline]
        bad = [layer for layer in self.layers if layer.variables[0].bad]
        for layer in bad[:_SHOWN_LAYERS]:
            found = [(entry.name, one) for entry in layer.variables for one in entry.problems]
            lines += [
                layer.path,
                *(f"  {name}: {one.detail} ({one.severity})" for name, one in found),
            ]
        if len(bad) > _SHOWN_LAYERS:
            lines.append(f"and {times(len(bad) - _SHOWN_LAYERS, 'more layer')}")
        return "\n".join([*lines, *self.notes])

    def _table(self) -> Any:
        head = ("layer", "variable", "severity", "problem", "dtype", "range")
        rows = []
        for entry in self.bad:
            found, between = entry.statistics, ""
            if found is not None and found.min is not None:
                between = f"{found.min:.4g} to {found.max:.4g}"
            about = (f"{entry.dtype}{list(entry.shape)}", between)
            for one in entry.problems:
                rows.append((entry.layer, entry.name, one.severity, one.detail, *about))
        return self.headline, self.notes, head, rows


def report_of(plain: dict[str, Any]) -> ScanReport:
    """Return the report that was converted to plain JSON values with `asdict`."""
    variables = []
    for one in plain["variables"]:
        found = one["statistics"]
        typed = {
            "shape": tuple(one["shape"]),
            "statistics": None if found is None else ArrayStats(**found),
            "problems": tuple(Problem(**problem) for problem in one["problems"]),
        }
        variables.append(ScannedVariable(**{**one, **typed}))
    return ScanReport(plain["source"], plain["kind"], tuple(variables), tuple(plain["notes"]))


@dataclass(frozen=True, slots=True)
class Change:
    """The repair of one variable, done or planned.

    Attributes:
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


@dataclass(frozen=True, slots=True)
class Recalibrated:
    """One layer whose statistics were re-estimated.

    Attributes:
        path: names of its outer layers and its own, joined by `/`.
        mean_moved: largest change of a moving mean, or `None` if the old one was not finite.
        variance_ratio: largest factor by which a moving variance grew or shrank, or `None` if an
            old one was not finite.
        samples: number of values per channel.
    """

    path: str
    mean_moved: float | None
    variance_ratio: float | None
    samples: int

    def __str__(self) -> str:
        change = "old statistics not finite"
        if self.mean_moved is not None and self.variance_ratio is not None:
            change = f"mean changed by up to {self.mean_moved:.4g}"
            change += f", variance by up to x{self.variance_ratio:.4g}"
        return f"{self.path}: {change}; {self.samples} values per channel used"


@dataclass(frozen=True, slots=True)
class RecalibrateReport:
    """The result of `recalibrate`.

    Attributes:
        layers: the layers, in the order of the model.
    """

    model: str
    batches: int
    layers: tuple[Recalibrated, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version."""
        return dict(plain({"format": FORMAT, **asdict(self)}))

    def __repr__(self) -> str:
        counted = f"{times(len(self.layers), 'layer')}, batches={self.batches}"
        return f"RecalibrateReport({self.model!r}, {counted})"

    def __str__(self) -> str:
        layers = times(len(self.layers), "BatchNormalization layer")
        batches = f"{self.batches} batch{'' if self.batches == 1 else 'es'}"
        head = f"{self.model}: statistics of {layers} estimated from {batches}."
        return "\n".join([head, *(f"  {layer}" for layer in self.layers)])
