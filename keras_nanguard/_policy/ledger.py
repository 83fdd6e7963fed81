"""The state of a policy between incidents: frozen counts, by step number, that can be saved as JSON.

Healthy steps are not recorded one by one; they follow from the step numbers of the bad ones. There are two counters:
`consecutive` (bad steps in a row, up to now) and `total`. Imports no backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.incident import Incident

__all__ = ["FORMAT", "STATE_SITES", "TRAINING_SITES", "Ledger", "Tally", "is_bad_step"]

FORMAT = 1
"""Version of the JSON format of a `Ledger`."""

MAX_JUMPS = 1000
"""Maximum number of finite jumps that are stored."""

STATE_SITES = ("state", "weights", "statistics", "slots", "loss_scale")
"""The sites that persist after a step: trouble in one of them spoils every later step."""

TRAINING_SITES = ("inputs", "targets", "outputs", "loss", "gradients", *STATE_SITES)
"""The sites of a train step; `metrics`, `validation` and `predictions` only report on it."""


def is_bad_step(incident: Incident) -> bool:
    """Return whether the step of an incident failed: it was refused, or it left NaN or Inf in the training state."""
    return incident.refused or any(f.kind == "nonfinite" and f.site in TRAINING_SITES for f in incident.findings)


@dataclass(frozen=True, slots=True)
class Tally:
    """The counts of one rule.

    Attributes:
        consecutive: matching bad steps with no good step in between, up to `last`.
        total: matching steps in total.
        since: matching steps since the rule last fired.
        last: the last matching step, None before the first.
        fired: the step at which the rule last fired, None before the first.
        recent: the matching steps that lie within the longest window of the rule.
        spent: for each rung of the rule's ladder, the steps at which it acted, as far as its limit counts them.
    """

    consecutive: int = 0
    total: int = 0
    since: int = 0
    last: int | None = None
    fired: int | None = None
    recent: tuple[int, ...] = ()
    spent: tuple[tuple[int, ...], ...] = ()

    def counted(self, step: int, run: int | None, horizon: int) -> Tally:
        """Return the tally after one more matching step; `run` is the first step of the unbroken run of bad steps."""
        if step == self.last:
            return self
        joined = self.last is not None and (step - self.last == 1 or (run is not None and run <= self.last))
        return replace(
            self,
            consecutive=self.consecutive + 1 if joined else 1,
            total=self.total + 1,
            since=self.since + 1,
            last=step,
            recent=(*(s for s in self.recent if s > step - horizon), step) if horizon else (),
        )

    def acted(self, step: int, rung: int, rungs: int, keep: int) -> Tally:
        """Return the tally after the rule fired and its rung number `rung` acted; `keep` is that rung's limit."""
        spent = [*self.spent, *((),) * rungs][:rungs]
        spent[rung] = (*spent[rung], step)[-keep:] if keep else ()
        return replace(self, since=0, fired=step, spent=tuple(spent))

    def shifted(self, by: int) -> Tally:
        """Return the tally with `by` added to every step number."""
        return replace(
            self,
            last=None if self.last is None else self.last + by,
            fired=None if self.fired is None else self.fired + by,
            recent=tuple(step + by for step in self.recent),
            spent=tuple(tuple(step + by for step in steps) for steps in self.spent),
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The counts of a policy. Start with `Ledger()`; `decide` returns the next one.

    Attributes:
        step: the latest step of any incident, None before the first.
        last: the latest bad step, None before the first.
        run: the first step of the unbroken run of bad steps that ends at `last`, None before the first.
        consecutive: number of bad steps in that run.
        total: bad steps in total.
        jumps: the latest steps at which a finite jump was seen (kinds `spike` and `explosion`).
        rules: the counts of each rule, by its name.
    """

    step: int | None = None
    last: int | None = None
    run: int | None = None
    consecutive: int = 0
    total: int = 0
    jumps: tuple[int, ...] = ()
    rules: Mapping[str, Tally] = field(default_factory=dict)

    def step_of(self, incident: Incident) -> int:
        """Return the step under which an incident is recorded.

        That is its own step number, unless an incident of a later step was recorded before: then it counts as one more
        step after that one, so that no order of reporting can keep a streak from growing.
        """
        if self.step is None or incident.step >= self.step:
            return incident.step
        return self.step + 1

    def entered(self, incident: Incident, step: int) -> Ledger:
        """Return the ledger after one more incident, with the tallies of the rules unchanged."""
        jumped = any(finding.kind in ("spike", "explosion") for finding in incident.findings)
        jumps = (*self.jumps, step)[-MAX_JUMPS:] if jumped and step not in self.jumps[-1:] else self.jumps
        seen = replace(self, step=step, jumps=jumps)
        if not is_bad_step(incident) or step == self.last:
            return seen
        joined = self.last is not None and step - self.last == 1
        return replace(
            seen,
            last=step,
            run=self.run if joined else step,
            consecutive=self.consecutive + 1 if joined else 1,
            total=self.total + 1,
        )

    def good_steps(self, tally: Tally, step: int) -> int:
        """Return how many good steps precede `step`, as seen by a rule with this tally."""
        known = [earlier for earlier in (self.last, tally.last) if earlier is not None]
        return max(0, step - max(known) - 1) if known else 0

    def rewound(self) -> Ledger:
        """Return this ledger for steps that are run again: an incident in one of them counts as one of a later step."""
        return self if self.step is None else replace(self, step=self.step + 1)

    def resumed(self) -> Ledger:
        """Return this ledger for a fit that counts its steps from 0 again: counts and limits are kept, streaks end."""
        if self.step is None:
            return self
        by = -(self.step + 2)
        return replace(
            self,
            step=-2,
            last=None if self.last is None else self.last + by,
            run=None if self.run is None else self.run + by,
            jumps=tuple(step + by for step in self.jumps),
            rules={name: tally.shifted(by) for name, tally in self.rules.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with a format version."""
        return {"format": FORMAT, **_listed(asdict(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """Rebuild a ledger from `to_dict()`.

        Raises:
            FileFormatError: if it has another format, or a field is missing, unknown or not an integer.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            received = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            remedy = "Read it with the version that wrote it, or start with Ledger()."
            raise FileFormatError(expected(f"a ledger of format {FORMAT}", f"format={received!r}", remedy))
        try:
            tables = data["rules"].items()
            rules = {str(name): Tally(**_checked(table, Tally)) for name, table in tables}
            plain = {key: value for key, value in data.items() if key not in ("format", "rules")}
            return cls(**_checked({**plain, "rules": {}}, cls) | {"rules": rules})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            remedy = "Do not edit it by hand; start with Ledger() if it is damaged."
            raise FileFormatError(expected("a ledger as Ledger.to_dict() writes it", error, remedy)) from error


def _checked(table: Mapping[str, Any], kind: type[Tally | Ledger]) -> dict[str, Any]:
    """Return the fields of a record from JSON, lists as tuples; raise for anything that is not an integer."""
    names = {entry.name for entry in fields(kind)}
    if set(table) != names:
        raise ValueError(f"the fields {sorted(table)} are not {sorted(names)}")
    return {name: _integers(name, value) for name, value in table.items()}


def _integers(name: str, value: Any) -> Any:
    """Return one field as the record stores it. `_LISTS` names the elements of each list."""
    if name == "rules" or (value is None and name in ("step", "last", "run", "fired")):
        return value
    if name in _LISTS:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name}={value!r} is not a list")
        return tuple(_integers(_LISTS[name], item) for item in value)
    least = 0 if name in ("consecutive", "total", "since") else -math.inf
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} is not a step number or count")
    return value


_LISTS = {"recent": "a step", "jumps": "a step", "spent": "spent by a rung", "spent by a rung": "a step"}


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
