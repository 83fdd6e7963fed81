"""The result of a scan, as frozen records that convert to text and to JSON with a format version. Imports no backend."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from keras_nanguard._core.notebook import block
from keras_nanguard._files.arrays import Statistics
from keras_nanguard._files.judge import SEVERITIES, Problem

__all__ = ["FORMAT", "ScanReport", "ScannedLayer", "ScannedVariable"]

FORMAT = 1
"""Version of the JSON format of a `ScanReport`; incremented whenever a reader of the old format would misread the new one."""

_RANK = {severity: place for place, severity in enumerate((*SEVERITIES, ""))}

_SHOWN_LAYERS = 20


@dataclass(frozen=True, slots=True)
class ScannedVariable:
    """One variable and its problems.

    Attributes:
        path: names of its layers and its own, such as `"backbone/post_bn/moving_variance"`; the same for
            a live model and for its file.
        layer: the path of its layer.
        name: name of the variable within its layer.
        role: one of `"weight"`, `"statistics"`, `"slot"`, `"other"`.
        location: Keras path of the variable, or its location in the file.
        dtype: name of its dtype.
        shape: its shape.
        statistics: its statistics, or `None` if its dtype is not a float dtype or it could not be read.
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
class ScanReport:
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
    notes: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not self.bad

    @property
    def bad(self) -> tuple[ScannedVariable, ...]:
        """The variables with an error or a warning, worst first."""
        return tuple(sorted((entry for entry in self.variables if entry.bad), key=_badness))

    @property
    def finite(self) -> bool:
        """Whether every value is finite and everything was read."""
        return not any(found.code in ("nan", "inf", "unread") for entry in self.bad for found in entry.problems)

    @property
    def layers(self) -> tuple[ScannedLayer, ...]:
        """The variables grouped by layer, the worst layer first."""
        grouped: dict[str, list[ScannedVariable]] = {}
        for entry in self.variables:
            grouped.setdefault(entry.layer, []).append(entry)
        found = [ScannedLayer(path, tuple(sorted(entries, key=_badness))) for path, entries in grouped.items()]
        return tuple(sorted(found, key=lambda layer: _badness(layer.variables[0])))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version; all numbers are finite."""
        return {
            "format": FORMAT,
            "source": self.source,
            "kind": self.kind,
            "clean": self.clean,
            "finite": self.finite,
            "counts": self.counts(),
            "notes": list(self.notes),
            "layers": [
                {"path": layer.path, "severity": layer.severity, "variables": [_plain(v) for v in layer.variables]} for layer in self.layers
            ],
        }

    def counts(self) -> dict[str, int]:
        """Return the numbers of variables, values and problems."""
        read = [entry.statistics for entry in self.variables if entry.statistics is not None]
        severities = [entry.severity for entry in self.variables]
        return {
            "variables": len(self.variables),
            "values": sum(found.size for found in read),
            "nan": sum(found.nan for found in read),
            "inf": sum(found.inf for found in read),
            **{f"{severity}s": severities.count(severity) for severity in SEVERITIES},
        }

    def __repr__(self) -> str:
        return f"ScanReport({self.source!r}, {len(self.variables)} variables, {len(self.bad)} of them bad)"

    def __str__(self) -> str:
        lines = [self.headline()]
        shown = [layer for layer in self.layers if layer.severity in ("error", "warning")]
        for layer in shown[:_SHOWN_LAYERS]:
            lines.append(f"{layer.path}")
            for entry in layer.variables:
                lines += [f"  {entry.name}: {found.detail} ({found.severity})" for found in entry.problems]
        if len(shown) > _SHOWN_LAYERS:
            lines.append(f"and {len(shown) - _SHOWN_LAYERS} more layers")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        rows = [(e.layer, e.name, found.severity, found.detail) for e in self.bad for found in e.problems]
        return block(self.headline(), self.notes, ("layer", "variable", "severity", "problem"), rows, self.clean)

    def headline(self) -> str:
        """Return the result in one sentence."""
        counts = self.counts()
        scanned = f"{counts['values']:,} values in {counts['variables']:,} variables"
        if self.clean:
            return f"{self.source}: clean, {scanned}."
        layers = sum(layer.severity in ("error", "warning") for layer in self.layers)
        bad = f"{len(self.bad):,} bad {'variable' if len(self.bad) == 1 else 'variables'}"
        return f"{self.source}: {bad} in {layers:,} {'layer' if layers == 1 else 'layers'}, of {scanned}."


def _badness(entry: ScannedVariable) -> tuple[int, float]:
    """Return a key that sorts variables worst first: by severity, then by the share of bad values."""
    found = entry.statistics
    affected = sum(one.count for one in entry.problems if one.severity == entry.severity)
    return _RANK[entry.severity], -affected / max(1, found.size if found else 1)


def _plain(entry: ScannedVariable) -> dict[str, Any]:
    plain = asdict(entry)
    plain["shape"], plain["problems"] = list(entry.shape), [asdict(found) for found in entry.problems]
    return plain
