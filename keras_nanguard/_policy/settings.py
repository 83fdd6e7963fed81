"""The settings of a policy besides its rules: what is checked, within which limits, and how states are kept.

Level 0: imports no backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from keras_nanguard._policy.checking import check
from keras_nanguard._policy.fields import changed, follow, made, problem, spec

__all__ = [
    "LAYER_SITES",
    "LIMITED",
    "SWITCHED",
    "Checks",
    "LayerChecks",
    "LossScaleCheck",
    "SiteCheck",
    "Snapshot",
    "StatisticsCheck",
    "TrendCheck",
    "on_path",
]


@dataclass(frozen=True, slots=True)
class SiteCheck:
    """How one site is checked.

    Attributes:
        enabled: look there between two steps (sites in `SWITCHED`; no other is looked at in this way).
        max_abs: a finite value larger than this is trouble of kind `out_of_range` (sites in `LIMITED`); None: no limit.
    """

    enabled: bool = field(default=True, metadata=spec("look there at all"))
    max_abs: float | None = field(default=None, metadata=spec("largest magnitude that is in order", gt=0))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class StatisticsCheck(SiteCheck):
    """How the moving statistics of BatchNorm and Normalization are checked.

    Attributes:
        stuck_after: trainable BatchNorm statistics that have not moved for so many steps are `stuck`; 0: never.
    """

    max_abs: float = field(default=1e30, metadata=spec("largest magnitude that is in order", gt=0))
    stuck_after: int = field(default=500, metadata=spec("steps without any movement, 0 is never", unit="steps", ge=0))


@dataclass(frozen=True, slots=True)
class LossScaleCheck:
    """How the loss scale of mixed_float16 is checked.

    Attributes:
        enabled: look at it at all.
        min_value: a scale below this has collapsed.
        max_value: a scale above this has run away.
        patience: overflows in a row that dynamic scaling may settle by itself before they are trouble.
    """

    enabled: bool = field(default=True, metadata=spec("look there at all"))
    min_value: float = field(default=1.0, metadata=spec("a scale below this has collapsed", gt=0))
    max_value: float = field(default=2.0**32, metadata=spec("a scale above this has run away", gt=0))
    patience: int = field(default=8, metadata=spec("overflows in a row that are in order", unit="steps", ge=0, le=1000))

    ordered: ClassVar = (("min_value", "max_value"),)

    def __post_init__(self) -> None:
        check(self)

    def leaves(self, streak: int, scale: float) -> bool:
        """Whether the last of so many overflows in a row, at this scale, is left to dynamic scaling, which halves the scale."""
        return streak <= self.patience and self.min_value <= scale * 0.5 <= self.max_value


@dataclass(frozen=True, slots=True)
class TrendCheck:
    """How loss and gradient norm of healthy steps are watched for finite trouble (see `Trend`).

    Attributes:
        enabled: watch at all.
        spike_factor: a jump to so many times the robust level is a spike.
        explosion_factor: growth to so many times the level at the start is an explosion.
        patience: steps in a row that the growth has to last.
        warmup: values to see before anything but a jump by a factor of a million is called a spike.
    """

    enabled: bool = field(default=True, metadata=spec("watch at all"))
    spike_factor: float = field(default=1e4, metadata=spec("a jump to so many times the robust level", ge=2))
    explosion_factor: float = field(default=1e6, metadata=spec("growth to so many times the first level", ge=10))
    patience: int = field(default=3, metadata=spec("steps in a row that growth lasts", unit="steps", ge=1, le=1000))
    warmup: int = field(default=20, metadata=spec("values seen before the first spike below 1e6", unit="steps", ge=5, le=1000))

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Checks:
    """Which sites are looked at, and within which limits. Policy files write `true` or `false` for a site in short."""

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
    trend: TrendCheck = TrendCheck()

    @classmethod
    def from_file(cls, table: Mapping[str, Any]) -> Checks:
        """Return the checks that a policy file writes under `[checks]`, as it has been validated."""
        return Checks(**_merged(cls(), table))

    def to_file(self) -> dict[str, Any]:
        """Return what differs from the defaults, as `from_file` reads it."""
        tables = {entry.name: _short(getattr(self, entry.name)) for entry in fields(self)}
        return {name: table for name, table in tables.items() if table != {}}


SWITCHED = ("gradients", "statistics", "loss_scale", "trend")
"""Checks that can be switched off: what is looked at between two steps. Whether a step is refused depends on none of them."""

LIMITED = ("weights", "statistics", "slots")
"""Sites whose finite values are held against `max_abs`, in the state before a step that was refused."""

LAYER_SITES = ("outputs", "gradients", "weights", "statistics", "slots")
"""The sites that have a value per layer or variable, and so may have limits per layer."""


@dataclass(frozen=True, slots=True)
class LayerChecks:
    """The checks of the layers whose Keras path meets a glob, where they differ from `[checks]`.

    Attributes:
        glob: pattern of a path or of a part of it between slashes (see `on_path`).
        sites: what differs, by site: a plain table of the fields of the site's check.
    """

    glob: str
    sites: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_file(cls, glob: str, table: Mapping[str, Any]) -> LayerChecks:
        """Return the checks that a policy file writes under `[layers."glob"]`, as it has been validated."""
        return cls(glob, {site: _lengthened(given) for site, given in table.items()})

    def over(self, checks: Checks) -> Checks:
        """Return `checks` with these differences."""
        return replace(checks, **_merged(checks, self.sites))

    def to_file(self) -> dict[str, Any]:
        """Return the differences as a policy file writes them."""
        return {site: _shortened(table) for site, table in self.sites.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How states are kept to go back to.

    Attributes:
        every: steps between two snapshots; 0: none is taken, and nothing can be gone back to.
        keep: how many are kept.
        storage: in host memory, or on disk under the guard's `directory`.
        good_after: good steps that have to follow before a snapshot counts as good.
    """

    every: int = field(default=100, metadata=spec("steps between two snapshots, 0 is none", unit="steps", ge=0))
    keep: int = field(default=2, metadata=spec("how many are kept", unit="snapshots", ge=1, le=1000))
    storage: str = field(default="memory", metadata=spec("where they are kept", choices=("memory", "disk")))
    good_after: int = field(
        default=10, metadata=spec("good steps before a snapshot counts as good", unit="steps", ge=0)
    )

    ordered: ClassVar = (("good_after", "every"),)

    def __post_init__(self) -> None:
        check(self)

    def conflicts(self) -> Iterator[str]:
        """Yield what is wrong between the fields."""
        if self.keep == 1 and self.good_after:
            yield problem("keep", "at least 2 (one good, one to become good), or good_after = 0", self.keep)

    @classmethod
    def over(cls, below: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings `given` over those of `below`, which give way where the two contradict (see `follow`).

        Where there is room for one snapshot only, it counts as good at once: none could become good beside it.
        """
        table = follow(cls, given, below)
        if table.get("keep") == 1 and "good_after" not in given:
            table["good_after"] = 0
        elif table.get("keep") == 1 and "keep" not in given and given["good_after"]:
            table["keep"] = cls().keep
        return table

    def to_file(self) -> dict[str, Any]:
        """Return what differs from the defaults, as a policy file writes it."""
        return changed(self)


def on_path(path: str, glob: str) -> bool:
    """Return whether a glob meets a Keras path, or a run of the parts of it between slashes.

    `post_bn*` meets `post_bn_1`, `model/post_bn_1` and `model/post_bn_1/moving_mean`; so does `model/post_bn_1`.
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
    return made(type(present), {entry.name: given.get(entry.name, getattr(present, entry.name)) for entry in fields(present)})


def _lengthened(given: Any) -> Mapping[str, Any]:
    return {"enabled": given} if isinstance(given, bool) else given


def _shortened(table: Mapping[str, Any]) -> Any:
    return table["enabled"] if set(table) == {"enabled"} else dict(table)


def _short(check_of_site: Any) -> Any:
    return _shortened(changed(check_of_site))
