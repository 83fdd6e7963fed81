"""When a rule fires: conditions on the counts of the ledger, which combine with `any`, `all` and `not`.

A condition counts the bad steps that its rule matches, and restarts from zero each time the rule has fired:
`consecutive = 3` fires at the third bad step in a row, at the sixth, at the ninth. Imports no backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from keras_nanguard._policy.checking import check
from keras_nanguard._policy.fields import construct, spec
from keras_nanguard._policy.ledger import Tally

__all__ = [
    "CONDITIONS",
    "MAX_WINDOW",
    "AllOf",
    "AnyOf",
    "Condition",
    "Consecutive",
    "Count",
    "Immediately",
    "Not",
    "Several",
    "Total",
    "Window",
    "from_file",
]

MAX_WINDOW = 10_000
"""Longest window, in steps: the ledger stores every matching step inside it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, as data. `name` is its name in policy files."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check(self)

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        """Return whether the condition holds at `step`, which the tally has already counted."""
        raise NotImplementedError

    def needs(self, sole: bool) -> int | None:
        """Return the number of matching steps of one bad run, since the last firing, after which it certainly holds.

        Args:
            sole: every step of the run matches; otherwise bad steps of other rules may lie in between.

        Returns:
            The number, or None where nothing is certain.
        """
        return None

    @property
    def horizon(self) -> int:
        """For how many steps back the ledger has to store every matching step."""
        return 0

    def sentence(self) -> str:
        """Return the condition in words."""
        raise NotImplementedError

    def to_file(self) -> dict[str, Any]:
        """Return the condition as `from_file` reads it."""
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {self.name: given}


@dataclass(frozen=True, slots=True)
class Immediately(Condition):
    """Always holds: the condition of a rule without `after`."""

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        return True

    def needs(self, sole: bool) -> int | None:
        return 1

    def sentence(self) -> str:
        return "each time"

    def to_file(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Count(Condition):
    """A number of bad steps. A policy file gives it alone."""

    steps: int

    def needs(self, sole: bool) -> int | None:
        return self.steps

    def to_file(self) -> dict[str, Any]:
        return {self.name: self.steps}


@dataclass(frozen=True, slots=True)
class Consecutive(Count):
    """A number of bad steps with no good step in between."""

    name: ClassVar[str] = "consecutive"
    steps: int = field(metadata=spec("bad steps in a row", unit="steps", ge=1, le=1e6))

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        return min(tally.consecutive, tally.since) >= self.steps

    def sentence(self) -> str:
        return f"at {self.steps} in a row"


@dataclass(frozen=True, slots=True)
class Total(Count):
    """A number of bad steps in total, in a row or not."""

    name: ClassVar[str] = "total"
    steps: int = field(metadata=spec("bad steps in total", unit="steps", ge=1, le=1e6))

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        return tally.since >= self.steps

    def sentence(self) -> str:
        return f"at {self.steps} in all"


class Window(Condition):
    """A number of bad steps within the last steps."""

    __slots__ = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """How many bad steps within how many."""
        raise NotImplementedError

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        times, steps = self.bounds
        start = step - steps if tally.fired is None else max(step - steps, tally.fired)
        return sum(matching > start for matching in tally.recent) >= times

    def needs(self, sole: bool) -> int | None:
        return self.bounds[0] if sole else None

    @property
    def horizon(self) -> int:
        return self.bounds[1]


@dataclass(frozen=True, slots=True)
class Within(Window):
    """A number of bad steps within a window of steps."""

    name: ClassVar[str] = "within"
    times: int = field(metadata=spec("bad steps", unit="steps", ge=1, le=MAX_WINDOW))
    steps: int = field(metadata=spec("window", unit="steps", ge=1, le=MAX_WINDOW))

    ordered: ClassVar = (("times", "steps"),)

    @property
    def bounds(self) -> tuple[int, int]:
        return self.times, self.steps

    def sentence(self) -> str:
        return f"at {self.times} within {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Fraction(Window):
    """A share of the last steps was bad. Steps before the start of training count as good."""

    name: ClassVar[str] = "fraction"
    share: float = field(metadata=spec("share of bad steps", gt=0, le=1))
    steps: int = field(metadata=spec("window", unit="steps", ge=1, le=MAX_WINDOW))

    @property
    def bounds(self) -> tuple[int, int]:
        return max(1, math.ceil(self.share * self.steps - 1e-9)), self.steps

    def sentence(self) -> str:
        return f"when {self.share * 100:g}% of the last {self.steps} steps match"


@dataclass(frozen=True, slots=True)
class Spike(Condition):
    """A number of finite jumps of the loss or the gradient norm within the last steps, the present one included."""

    name: ClassVar[str] = "spike"
    times: int = field(default=1, metadata=spec("finite jumps", ge=1, le=1000))
    steps: int = field(default=100, metadata=spec("window", unit="steps", ge=1, le=MAX_WINDOW))

    ordered: ClassVar = (("times", "steps"),)

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        return sum(jump > step - self.steps for jump in jumps) >= self.times

    def sentence(self) -> str:
        count = "a jump" if self.times == 1 else f"{self.times} jumps"
        return f"after {count} of loss or gradient norm within {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Several(Condition):
    """A combination of several conditions."""

    word: ClassVar[str] = ""
    parts: tuple[Condition, ...] = ()

    @property
    def horizon(self) -> int:
        return max(part.horizon for part in self.parts)

    def sentence(self) -> str:
        return "(" + f" {self.word} ".join(part.sentence() for part in self.parts) + ")"

    def to_file(self) -> dict[str, Any]:
        return {self.name: [part.to_file() for part in self.parts]}


@dataclass(frozen=True, slots=True)
class AnyOf(Several):
    """At least one of several conditions."""

    name: ClassVar[str] = "any"
    word: ClassVar[str] = "or"

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        return any(part.met(tally, step, jumps) for part in self.parts)

    def needs(self, sole: bool) -> int | None:
        return min((sure for part in self.parts if (sure := part.needs(sole)) is not None), default=None)


@dataclass(frozen=True, slots=True)
class AllOf(Several):
    """All of several conditions at once."""

    name: ClassVar[str] = "all"
    word: ClassVar[str] = "and"

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        return all(part.met(tally, step, jumps) for part in self.parts)

    def needs(self, sole: bool) -> int | None:
        each = [part.needs(sole) for part in self.parts]
        sure = [count for count in each if count is not None]
        return max(sure) if len(sure) == len(each) else None


@dataclass(frozen=True, slots=True)
class Not(Condition):
    """The opposite of a condition."""

    name: ClassVar[str] = "not"
    part: Condition = field(default_factory=Immediately)

    def met(self, tally: Tally, step: int, jumps: tuple[int, ...]) -> bool:
        return not self.part.met(tally, step, jumps)

    @property
    def horizon(self) -> int:
        return self.part.horizon

    def sentence(self) -> str:
        return f"unless {self.part.sentence()}"

    def to_file(self) -> dict[str, Any]:
        return {self.name: self.part.to_file()}


CONDITIONS: dict[str, type[Condition]] = {
    kind.name: kind for kind in (Consecutive, Total, Within, Fraction, Spike, AnyOf, AllOf, Not)
}
"""Every condition by its name in policy files."""


def from_file(table: Mapping[str, Any]) -> Condition:
    """Return the condition that a policy file writes as `{ consecutive = 3 }` or `{ any = [{...}, {...}] }`.

    Args:
        table: a validated table (see `_policy/schema.py`).
    """
    ((name, given),) = table.items()
    kind = CONDITIONS[name]
    if issubclass(kind, Count):
        return construct(kind, {"steps": given})
    if kind is Not:
        return Not(from_file(given))
    if issubclass(kind, Several):
        return construct(kind, {"parts": tuple(from_file(part) for part in given)})
    return construct(kind, given)
