"""Rules: which incidents lead to which actions, under which condition, how often, and what follows. Imports no backend."""

from __future__ import annotations

from dataclasses import dataclass, field

from keras_nanguard._core.errors import PolicyError
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._policy.actions import Action
from keras_nanguard._policy.checking import check
from keras_nanguard._policy.conditions import Condition, Immediately
from keras_nanguard._policy.fields import MOMENTS, NAME, spec
from keras_nanguard._policy.ledger import Ledger, Tally
from keras_nanguard._policy.settings import matches_path

__all__ = ["Limit", "Magnitude", "Rule", "Rung", "Unless"]

@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on repetitions, within a number of steps or in the whole run."""

    times: int = field(metadata=spec("maximum number of times", ge=1, le=10_000))
    per_steps: int | None = field(default=None, metadata=spec("within this many, in the whole run if omitted", unit="steps", ge=1))

    def __post_init__(self) -> None:
        check(self)

    def sentence(self) -> str:
        """Return the limit in words."""
        times = "once" if self.times == 1 else f"{self.times} times"
        return f"{times} in {self.per_steps} steps" if self.per_steps else f"{times} in total"


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Minimum severity of a finding. A non-finite value exceeds any bound."""

    min_abs: float | None = field(default=None, metadata=spec("minimum magnitude of the value", ge=0))
    min_share: float | None = field(default=None, metadata=spec("minimum share of NaN and Inf entries", ge=0, le=1))

    def __post_init__(self) -> None:
        check(self)

    def met(self, finding: Finding) -> bool:
        """Return whether a finding is that severe."""
        if self.min_abs is not None and (finding.value is None or abs(finding.value) < self.min_abs):
            return False
        if self.min_share is None:
            return True
        bad, size = (finding.nan or 0) + (finding.inf or 0), finding.size or 0
        return size > 0 and bad >= self.min_share * size


@dataclass(frozen=True, slots=True)
class Unless:
    """Exceptions of a rule: any finding at one of these sites, or one of these causes."""

    on: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()

    def met(self, incident: Incident) -> bool:
        """Return whether the rule has to ignore the incident."""
        if any(finding.site in self.on for finding in incident.findings):
            return True
        return not incident.causes.isdisjoint(self.cause)


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of a rule's ladder: its actions, and how often they are done before the next rung follows."""

    do: tuple[Action, ...]
    limit: Limit | None = None

    @property
    def terminal(self) -> bool:
        """Whether training ends here."""
        return any(action.terminal for action in self.do)

    @property
    def changes(self) -> bool:
        """Whether something is changed here."""
        return any(action.changes for action in self.do)

    def sentence(self) -> str:
        """Return what is done, and how often, as the predicate of a sentence that starts with "the guard"."""
        budget = f" ({self.limit.sentence()})" if self.limit else ""
        return " and ".join(action.sentence() for action in self.do) + budget

    def open(self, spent: tuple[int, ...], step: int) -> bool:
        """Return whether the limit allows one more time at `step`. A terminal rung is always open."""
        return self.limit is None or self.terminal or self.counted(spent, step) < self.limit.times

    def counted(self, spent: tuple[int, ...], step: int) -> int:
        """Return how many of the earlier times the limit still counts at `step`."""
        window = None if self.limit is None else self.limit.per_steps
        return len(spent) if window is None else sum(1 for earlier in spent if earlier > step - window)


@dataclass(frozen=True, slots=True)
class Rule:
    """Which incidents lead to which actions, under which condition.

    Attributes:
        name: name of the rule; rules of the same name override one another.
        ladder: the rungs; the first one whose limit is not exhausted acts. Files write the first rung as `do` and
            `limit`, and the next ones as `otherwise`.
        on: sites that it matches; empty: all.
        kind: kinds of trouble; empty: all.
        layer: globs of Keras paths; empty: all.
        cause: causes of the diagnosis; empty: any, also no diagnosis at all.
        magnitude: minimum severity of a finding.
        when: one of `MOMENTS`.
        unless: exceptions, for which the rule ignores an incident.
        after: the condition under which it fires.
        cooldown: steps after firing in which it does not fire again.
        reset_after: good steps in a row after which its counts and limits are reset; None: never.
        enabled: whether the rule is applied.
    """

    name: str = field(metadata=spec("name of the rule", pattern=NAME))
    ladder: tuple[Rung, ...]
    on: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    layer: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()
    magnitude: Magnitude = field(default_factory=Magnitude)
    when: str = field(default="any", metadata=spec("moments that the rule is restricted to", choices=MOMENTS))
    unless: Unless = field(default_factory=Unless)
    after: Condition = field(default_factory=Immediately)
    cooldown: int = field(default=0, metadata=spec("steps after firing in which it does not fire again", unit="steps", ge=0))
    reset_after: int | None = field(default=None, metadata=spec("good steps in a row that reset its counts", unit="steps", ge=1))
    enabled: bool = field(default=True, metadata=spec("whether the rule is applied"))

    def __post_init__(self) -> None:
        check(self)
        if not self.ladder:
            raise PolicyError("no action", ("do: expected at least one action, received nothing",))

    def matches(self, incident: Incident) -> bool:
        """Return whether the rule matches this incident: one of its findings meets every condition on findings."""
        if not self.enabled or not self._moment(incident) or self.unless.met(incident):
            return False
        if self.cause and incident.causes.isdisjoint(self.cause):
            return False
        return any(self._finding(finding) for finding in incident.findings)

    def tally(self, ledger: Ledger) -> Tally:
        """Return the counts of this rule in the ledger."""
        return ledger.rules.get(self.name) or Tally()

    def ready(self, tally: Tally, step: int) -> bool:
        """Return whether the cool-down is over."""
        return tally.fired is None or step - tally.fired > self.cooldown

    def rung(self, tally: Tally, step: int) -> int | None:
        """Return the number of the first rung whose limit is not exhausted, None where all of them are."""
        spent = (*tally.spent, *((),) * len(self.ladder))
        open_rungs = (number for number, rung in enumerate(self.ladder) if rung.open(spent[number], step))
        return next(open_rungs, None)

    def uses(self, kind: type[Action]) -> bool:
        """Return whether an action of this kind is anywhere on the ladder."""
        return any(isinstance(action, kind) for rung in self.ladder for action in rung.do)

    def counted(self, tally: Tally, step: int) -> int:
        """Return how many earlier actions of this rule its limits still count at `step`."""
        return sum(rung.counted(spent, step) for rung, spent in zip(self.ladder, tally.spent, strict=False))

    def _moment(self, incident: Incident) -> bool:
        if self.when == "refused":
            return incident.refused
        if self.when == "before_training":
            return not incident.refused and incident.step <= 0 and "state" in incident.sites
        if self.when == "from_start":
            return incident.refused and incident.committed == 0
        return self.when == "any" or not incident.refused

    def _finding(self, finding: Finding) -> bool:
        return (
            (not self.on or finding.site in self.on)
            and (not self.kind or finding.kind in self.kind)
            and (not self.layer or any(matches_path(finding.path, glob) for glob in self.layer))
            and self.magnitude.met(finding)
        )
