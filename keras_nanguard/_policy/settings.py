"""The tables of a policy: snapshots, the checks between steps, limits, and rules."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._policy.actions import (
    REPORT,
    Action,
    FixLossScale,
    Item,
    Items,
    LowerLr,
    Rollback,
    as_file,
)
from keras_nanguard._policy.records import Causes, Globs, Kinds, Name, Record, Sites, Steps, several

HIGH_SCALE = 2.0**16
"""Loss scale above which a gradient of 1 overflows in float16, whose largest number is 65504."""


class Snapshot(Record):
    """How snapshots of the train state are taken and stored."""

    every: Steps = Field(
        default=100, description="steps between two snapshots, 0 takes only the first"
    )
    keep: int = Field(default=2, ge=1, le=1000, description="number of snapshots to keep")
    storage: Literal["memory", "disk"] = Field(
        default="memory", description="in host memory, or on disk under the guard's `directory`"
    )
    verify_after: Steps = Field(
        default=10,
        description="good steps after which a snapshot counts as verified, at most `every`; "
        "immediately with `keep = 1`",
    )

    @property
    def good_steps(self) -> int:
        """Number of good steps that verify a snapshot, as far as `every` and `keep` allow.

        With one snapshot there is no room for a second that is not yet verified.
        """
        return 0 if self.keep == 1 else min(self.verify_after, self.every or self.verify_after)


def _off(value: Any) -> Any:
    return () if value is False or value == "off" else value


def _or_off(actions: tuple[Action, ...]) -> Any:
    return as_file(actions) if actions else "off"


if TYPE_CHECKING:
    ItemsOrOff = tuple[Action, ...]
else:
    ItemsOrOff = Annotated[
        several(Item, _or_off),
        BeforeValidator(_off, json_schema_input_type=Literal["off"] | Item | list[Item]),
    ]
"""One action, a list of them, or `off`."""


class Divergence(Record):
    """What happens to a run with finite numbers that is proven to have diverged."""

    action: ItemsOrOff = Field(
        default=(Rollback(), LowerLr()), description="what to do, or `off` to disable the check"
    )


class LossScale(Record):
    """How the loss scale of mixed_float16 is checked, and what happens outside of its range."""

    floor: float = Field(
        default=1.0,
        gt=0,
        description="a lower scale is a `collapse`, unless gradients need it",
    )
    ceiling: float = Field(
        default=2.0**32,
        gt=0,
        description="a higher scale is `out_of_range`, unless dynamic scaling has raised it",
    )
    streak: int = Field(
        default=8, ge=0, le=1000, description="overflows in a row that are left to dynamic scaling"
    )
    action: ItemsOrOff = Field(
        default=(FixLossScale(reset_to=1024.0),),
        description="what to do, or `off` to disable the check",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.floor > self.ceiling:
            raise ValueError(f"floor <= ceiling = {self.ceiling:g}")
        return self

    def is_expected_overflow(self, streak: int, scale: float, last: float) -> bool:
        """Return whether dynamic scaling handles the last of `streak` overflows in a row.

        Args:
            last: that of the last good step, 0 if there is none.

        Overflows at a scale above `HIGH_SCALE` are not counted. Ordinary gradients overflow there,
        and dynamic scaling halves the scale once per step.
        """
        few = streak <= self.streak or scale > HIGH_SCALE
        return few and self.floor <= scale * 0.5 and not self.is_too_high(scale * 0.5, last)

    def is_too_high(self, scale: float, last: float) -> bool:
        """Return whether a scale is above the ceiling, and dynamic scaling has not raised it."""
        return scale > max(self.ceiling, 2.0 * last)


class Statistics(Record):
    """How the moving statistics of BatchNormalization are checked."""

    stuck_after: Steps = Field(
        default=50,
        description="steps without change after which statistics are `stuck`; 0 is never",
    )


class Limit(Record):
    """A limit on the magnitude of a finite number in the state. There is none by default."""

    site: Literal["weights", "statistics", "slots"] = Field(description="what it applies to")
    max_abs: float = Field(gt=0, description="a larger magnitude is `out_of_range`")
    layer: Globs = Field(default=("*",), min_length=1, description="globs of Keras paths")


class Rule(Record):
    """Actions for incidents with a given cause, site, kind or layer.

    A rule that only reports (`warn`, `call`) adds its actions to the decision. Any
    other rule replaces the decision.
    """

    name: Name = Field(description="a rule replaces the rule of the preset that has the same name")
    cause: Causes = Field(default=(), description="causes that it applies to, all if omitted")
    site: Sites = Field(default=(), description="sites that it applies to, all if omitted")
    kind: Kinds = Field(default=(), description="kinds that it applies to, all if omitted")
    layer: Globs = Field(default=(), description="globs of Keras paths, all if omitted")
    after: int = Field(
        default=1, ge=1, le=10**6, description="number of such incidents in a row at which it acts"
    )
    do: Items = Field(description="one action or several")

    @property
    def only_reports(self) -> bool:
        """Whether no action changes the run, ends it or is `skip`."""
        return all(action.phase == REPORT for action in self.do)

    def matches(self, incident: Incident) -> bool:
        """Return whether the rule applies to an incident: whether one finding meets every field."""
        if self.cause and incident.causes.isdisjoint(self.cause):
            return False
        return any(self._finding(finding) for finding in incident.findings)

    def _finding(self, finding: Finding) -> bool:
        return (
            (not self.site or finding.site in self.site)
            and (not self.kind or finding.kind in self.kind)
            and (not self.layer or any(matches_path(finding.path, glob) for glob in self.layer))
        )


def matches_path(path: str, glob: str) -> bool:
    """Return whether a glob matches a Keras path or consecutive parts of it.

    `post_bn*` matches `post_bn_1`, `model/post_bn_1` and `model/post_bn_1/moving_mean`.
    """
    parts = path.split("/")
    starts = range(len(parts))
    runs = ("/".join(parts[n:end]) for n in starts for end in range(len(parts), n, -1))
    return any(fnmatchcase(run, glob) for run in runs)
