"""The result of `scan`: frozen records, shown as text, HTML or JSON. Imports neither NumPy nor a
backend, so that a program that only shows a report starts fast."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from keras_nanguard._core.display import TableReport
from keras_nanguard._core.plain_values import plain
from keras_nanguard._files.problems import SEVERITIES, ArrayStats, Problem

FORMAT = 1
"""Version of the JSON format; incremented if a reader of the old one would misread the new one."""

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
    statistics: ArrayStats | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def severity(self) -> str:
        """Severity of the worst problem, or `""`."""
        return self.problems[0].severity if self.problems else ""

    @property
    def bad(self) -> bool:
        """Whether there is an error or a warning."""
        return self.severity in ("error", "warning")


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
            **{f"{severity}s": severities.count(severity) for severity in SEVERITIES},
        }

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        counts, bad = self.counts, self.bad
        scanned = f"{counts['values']:,} values in {counts['variables']:,} variables"
        if self.ok:
            return f"{self.source}: clean, {scanned}."
        layers = len({entry.layer for entry in bad})
        found = f"{_counted(len(bad), 'bad variable')} in {_counted(layers, 'layer')}"
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
        counted = f"{len(self.variables)} variables, {len(self.bad)} of them bad"
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
            lines.append(f"and {len(bad) - _SHOWN_LAYERS} more layers")
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


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
