"""The state of a policy between incidents: frozen counts by step number, saved as JSON.

Healthy steps are not recorded; they follow from the step numbers of the bad ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from keras_nanguard._core.incident import Incident, Outcome
from keras_nanguard._core.literals import causes_with
from keras_nanguard._policy.records import Record

SHARE_WINDOW = 200
"""Steps of which at most `max_refused_share` may be refused."""

BUDGET_WINDOW = 5000
"""Steps within which each action may be done `action_budget` times. Old actions do not count, so a
run of weeks can recover from occasional faults."""

STATE_SITES = ("state", "weights", "statistics", "slots", "loss_scale")
"""The sites that persist after a step. A fault in one of them affects every later step."""

TRAINING_SITES = ("inputs", "targets", "outputs", "loss", "gradients", *STATE_SITES)
"""The sites of a train step; `metrics`, `validation` and `predictions` only report on it."""

RESULT_SITES = ("validation", "predictions")
"""The sites of results: those of `evaluate` and `predict` during training. They have no steps."""

BAD_DATA = causes_with("batch")
"""Causes in the batch itself, which neither another state nor another rate can cure."""


def is_bad_step(incident: Incident) -> bool:
    """Return whether the step was refused, or left NaN or Inf in the training state."""
    if incident.refused:
        return True
    return any(f.kind == "nonfinite" and f.site in TRAINING_SITES for f in incident.findings)


def is_of_data(incident: Incident) -> bool:
    """Return whether a step was refused because of its batch."""
    if not incident.refused or "state" in incident.sites:
        return False
    if "bad_at_start" in incident.values:
        return True
    return not incident.causes.isdisjoint(BAD_DATA) or bool(
        {"inputs", "targets"} & {*incident.sites}
    )


def _streak(name: str, incident: Incident) -> str:
    """Return the key of the streak of a rule that an incident belongs to: in steps or results."""
    site = next((site for site in RESULT_SITES if site in incident.sites), "")
    return f"{site}:{name}" if site else name  # no name of a rule contains a colon


class RuleState(Record):
    """The counts of one rule: its incidents in a row, and the step of the last one."""

    consecutive: int = 0
    last: int | None = None


class PolicyState(Record):
    """The counts of a policy. Start with `PolicyState()`; `decide` returns the next one.

    Attributes:
        step: the latest step of any incident, None before the first.
        last: the latest bad step, None before the first.
        consecutive: bad steps in a row, up to `last`.
        climb: number of `consecutive` steps not explained by bad data; it selects the stage of the
            escalation.
        refused: the refused steps among the last `SHARE_WINDOW` steps.
        action_steps: for each action that changes something the steps, among the last
            `BUDGET_WINDOW`, at which it was decided.
        without_effect: the actions that have changed nothing since the last good step.
        rules: the counts of each rule, by its name: in bad steps, and under `SITE:NAME` in bad
            results.
    """

    step: int | None = None
    last: int | None = None
    consecutive: int = Field(default=0, ge=0)
    climb: int = Field(default=0, ge=0)
    refused: tuple[int, ...] = ()
    action_steps: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    rules: dict[str, RuleState] = Field(default_factory=dict)

    def counted(self, incident: Incident, matching: Iterable[str]) -> PolicyState:
        """Return the state after one more incident.

        An incident that is reported after that of a later step counts as the step after the later
        one. So a streak does not depend on the order of the reports.

        Args:
            incident: the incident.
            matching: names of the rules that match it.
        """
        step = incident.step
        if self.step is not None and step < self.step:
            step = self.step + 1
        changes: dict[str, Any] = {"step": step}
        if is_bad_step(incident) and step != self.last:
            joined = self.last is not None and step - self.last == 1
            before = self if joined else PolicyState()
            changes |= {
                "last": step,
                "consecutive": before.consecutive + 1,
                "climb": before.climb + (not is_of_data(incident)),
                "without_effect": before.without_effect,
            }
        if incident.refused and step not in self.refused[-1:]:
            recent = (*self.refused, step)
            changes["refused"] = tuple(s for s in recent if s > step - SHARE_WINDOW)
        state = self.replaced(**changes)
        keys = [_streak(name, incident) for name in matching]
        rules = {key: state._rule(key, step) for key in keys}
        for site in {*RESULT_SITES} & {*incident.sites}:
            state = state.with_good_result(site)  # it ends the streaks of all other rules
        return state.replaced(rules={**state.rules, **rules})

    def with_good_result(self, site: str) -> PolicyState:
        """Return the state after a result of this site that is finite."""
        kept = {k: rule for k, rule in self.rules.items() if not k.startswith(f"{site}:")}
        return self.replaced(rules=kept)

    def in_a_row(self, name: str, incident: Incident) -> int:
        """Return how many incidents in a row, up to this one, a rule has matched."""
        return self.rules[_streak(name, incident)].consecutive

    def _rule(self, key: str, step: int) -> RuleState:
        """Return the counts of a rule after one more incident that matches it."""
        rule = self.rules.get(key, RuleState())
        if ":" in key:  # a good result would have removed it
            return RuleState(consecutive=rule.consecutive + 1, last=step)
        if rule.last is None or rule.last == step:
            return RuleState(consecutive=max(rule.consecutive, 1), last=step)
        unbroken = self.last == step and step - self.consecutive < rule.last
        joined = unbroken or step - rule.last == 1
        return RuleState(consecutive=rule.consecutive + 1 if joined else 1, last=step)

    def times(self, action: str) -> int:
        """Return how often an action was decided within the last `BUDGET_WINDOW` steps."""
        if self.step is None:
            return 0
        return sum(step > self.step - BUDGET_WINDOW for step in self.action_steps.get(action, ()))

    def acted(self, actions: Iterable[str]) -> PolicyState:
        """Return the state after these actions were decided at the latest step."""
        step = self.step or 0
        found = dict(self.action_steps)
        for name in actions:
            recent = (*found.get(name, ()), step)
            found[name] = tuple(earlier for earlier in recent if earlier > step - BUDGET_WINDOW)
        return self.replaced(action_steps=found)

    def performed(self, outcomes: Iterable[Outcome]) -> PolicyState:
        """Return the state after the actions were done. An action without effect is not
        repeated."""
        status = {outcome.action: outcome.status for outcome in outcomes}
        skipped = {name for name, what in status.items() if what == "skipped"}
        kept = {name for name in self.without_effect if status.get(name) != "done"}
        return self.replaced(without_effect=tuple(sorted(kept | skipped)))

    def rewound(self) -> PolicyState:
        """Return this state for steps that are replayed: each counts as a later step."""
        return self if self.step is None else self.replaced(step=self.step + 1)

    def resumed(self) -> PolicyState:
        """Return this state for a fit that counts its steps from 0: budgets stay, streaks end."""
        if self.step is None:
            return self
        by = -(self.step + 2)
        return self.replaced(
            step=-2,
            last=None if self.last is None else self.last + by,
            refused=tuple(step + by for step in self.refused),
            action_steps={
                name: tuple(step + by for step in steps)
                for name, steps in self.action_steps.items()
            },
            rules={},
        )
