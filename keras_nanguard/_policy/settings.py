"""The settings of a policy besides its rules: which sites are checked, their limits, and how snapshots are taken.

Imports no backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from keras_nanguard._policy.checking import check
from keras_nanguard._policy.fields import construct, non_defaults, problem, reconciled, spec

__all__ = [
    "LAYER_SITES",
    "LIMITED",
    "SWITCHED",
    "Checks",
    "DivergenceCheck",
    "LayerChecks",
    "LossScaleCheck",
    "SiteCheck",
    "Snapshot",
    "StatisticsCheck",
    "matches_path",
]


HIGH_SCALE = 2.0**16
"""Loss scale above which a gradient of 1 overflows in float16."""


@dataclass(frozen=True, slots=True)
class SiteCheck:
    """How one site is checked.

    Attributes:
        enabled: check the site between two steps (only for sites in `SWITCHED`).
        max_abs: a finite value larger than this is a finding of kind `out_of_range` (only for sites in `LIMITED`); None: no limit.
    """

    enabled: bool = field(default=True, metadata=spec("whether the site is checked"))
    max_abs: float | None = field(default=None, metadata=spec("largest magnitude allowed", gt=0))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class StatisticsCheck(SiteCheck):
    """How the moving statistics of BatchNorm and Normalization are checked.

    Attributes:
        stuck_after: trainable BatchNorm statistics that have not changed for so many steps are `stuck`; 0: never.
    """

    max_abs: float = field(default=1e30, metadata=spec("largest magnitude allowed", gt=0))
    stuck_after: int = field(default=500, metadata=spec("steps without any change, 0 is never", unit="steps", ge=0))


@dataclass(frozen=True, slots=True)
class LossScaleCheck:
    """How the loss scale of mixed_float16 is checked.

    Attributes:
        enabled: whether the loss scale is checked.
        min_value: a scale below this has collapsed.
        max_value: a scale above this has diverged.
        patience: overflows in a row that are left to dynamic scaling before they are reported. At a scale above `HIGH_SCALE` they
            are not counted: there every ordinary gradient overflows, and it takes a halving for each power of 2 to come down.
    """

    enabled: bool = field(default=True, metadata=spec("whether the loss scale is checked"))
    min_value: float = field(default=1.0, metadata=spec("a scale below this has collapsed", gt=0))
    max_value: float = field(default=2.0**32, metadata=spec("a scale above this has diverged", gt=0))
    patience: int = field(default=8, metadata=spec("overflows in a row left to dynamic scaling", unit="steps", ge=0, le=1000))

    ordered: ClassVar = (("min_value", "max_value"),)

    def __post_init__(self) -> None:
        check(self)

    def leaves(self, streak: int, scale: float) -> bool:
        """Whether overflow number `streak` in a row, at this scale, is left to dynamic scaling, which halves the scale."""
        return (streak <= self.patience or scale > HIGH_SCALE) and self.min_value <= scale * 0.5 <= self.max_value


@dataclass(frozen=True, slots=True)
class DivergenceCheck:
    """Whether a lost run is looked for while every number of it is finite (see `Divergence`).

    Attributes:
        enabled: whether it is looked for.
    """

    enabled: bool = field(default=True, metadata=spec("whether divergence is looked for"))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Checks:
    """Which sites are checked, and their limits. Policy files may write `true` or `false` for a site."""

    inputs: SiteCheck = SiteCheck()
    targets: SiteCheck = SiteCheck()
    outputs: SiteCheck = SiteCheck()
    loss: SiteCheck = SiteCheck()
    gradients: SiteCheck = SiteCheck()
    weights: SiteCheck = SiteCheck()
    statistics: StatisticsCheck = StatisticsCheck()
    slots: SiteCheck = SiteCheck()
    loss_scale: LossScaleCheck = LossScaleCheck()
    metrics: SiteCheck = SiteCheck()
    validation: SiteCheck = SiteCheck()
    predictions: SiteCheck = SiteCheck()
    divergence: DivergenceCheck = DivergenceCheck()

    @classmethod
    def from_file(cls, table: Mapping[str, Any]) -> Checks:
        """Return the checks of a validated `[checks]` table of a policy file."""
        return Checks(**_merged(cls(), table))

    def to_file(self) -> dict[str, Any]:
        """Return what differs from the defaults, as `from_file` reads it."""
        tables = {entry.name: _short(getattr(self, entry.name)) for entry in fields(self)}
        return {name: table for name, table in tables.items() if table != {}}


SWITCHED = ("gradients", "statistics", "loss_scale", "divergence")
"""Checks that can be disabled: those between two steps. Whether a step is refused depends on none of them."""

LIMITED = ("weights", "statistics", "slots")
"""Sites whose finite values are compared with `max_abs`, in the state before a refused step."""

LAYER_SITES = ("outputs", "gradients", "weights", "statistics", "slots")
"""The sites that have a value per layer or variable, and so may have limits per layer."""


@dataclass(frozen=True, slots=True)
class LayerChecks:
    """The checks of the layers whose Keras path matches a glob, where they differ from `[checks]`.

    Attributes:
        glob: pattern of a path or of a part of it between slashes (see `matches_path`).
        sites: the fields that differ, by site.
    """

    glob: str
    sites: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_file(cls, glob: str, table: Mapping[str, Any]) -> LayerChecks:
        """Return the checks of a validated `[layers."glob"]` table of a policy file."""
        return cls(glob, {site: _lengthened(given) for site, given in table.items()})

    def over(self, checks: Checks) -> Checks:
        """Return `checks` with the fields that differ replaced."""
        return replace(checks, **_merged(checks, self.sites))

    def to_file(self) -> dict[str, Any]:
        """Return the differences as a policy file writes them."""
        return {site: _shortened(table) for site, table in self.sites.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How snapshots of the train state are taken and stored.

    Attributes:
        every: steps between two snapshots; 0: none is taken, and no rollback is possible.
        keep: number of snapshots to keep.
        storage: in host memory, or on disk under the guard's `directory`.
        good_after: good steps that have to follow before a snapshot counts as verified.
    """

    every: int = field(default=100, metadata=spec("steps between two snapshots, 0 is none", unit="steps", ge=0))
    keep: int = field(default=2, metadata=spec("number of snapshots to keep", unit="snapshots", ge=1, le=1000))
    storage: str = field(default="memory", metadata=spec("where snapshots are stored", choices=("memory", "disk")))
    good_after: int = field(
        default=10, metadata=spec("good steps before a snapshot counts as verified", unit="steps", ge=0)
    )

    ordered: ClassVar = (("good_after", "every"),)

    def __post_init__(self) -> None:
        check(self)

    def conflicts(self) -> Iterator[str]:
        """Yield the conflicts between the fields."""
        if self.keep == 1 and self.good_after:
            yield problem("keep", "at least 2 (one verified, one not yet), or good_after = 0", self.keep)

    @classmethod
    def over(cls, below: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings `given` merged over those of `below`, which are adjusted to them (see `reconciled`).

        With `keep=1` a snapshot counts as verified at once: there is no room for a second one that is not yet verified.
        """
        table = reconciled(cls, given, below)
        if table.get("keep") == 1 and "good_after" not in given:
            table["good_after"] = 0
        elif table.get("keep") == 1 and "keep" not in given and given["good_after"]:
            table["keep"] = cls().keep
        return table

    def to_file(self) -> dict[str, Any]:
        """Return what differs from the defaults, as a policy file writes it."""
        return non_defaults(self)


def matches_path(path: str, glob: str) -> bool:
    """Return whether a glob matches a Keras path, or a run of the parts of it between slashes.

    `post_bn*` matches `post_bn_1`, `model/post_bn_1` and `model/post_bn_1/moving_mean`.
    """
    if fnmatchcase(path, glob):
        return True
    parts = path.split("/")
    runs = ((first, last) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))
    return any(fnmatchcase("/".join(parts[first:last]), glob) for first, last in runs)


def _merged(checks: Checks, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sites of `table`, each as its check in `checks` with the given fields replaced."""
    return {site: _over(getattr(checks, site), _lengthened(given)) for site, given in table.items()}


def _over(present: Any, given: Mapping[str, Any]) -> Any:
    return construct(type(present), {entry.name: given.get(entry.name, getattr(present, entry.name)) for entry in fields(present)})


def _lengthened(given: Any) -> Mapping[str, Any]:
    return {"enabled": given} if isinstance(given, bool) else given


def _shortened(table: Mapping[str, Any]) -> Any:
    return table["enabled"] if set(table) == {"enabled"} else dict(table)


def _short(check_of_site: Any) -> Any:
    return _shortened(non_defaults(check_of_site))
