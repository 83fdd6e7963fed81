"""`decide`: the pure function from an incident and the counts so far to the decision about it.

The first of these that applies decides:

1. a bound: training ends after `max_consecutive_refused` or `max_refused_share` bad steps;
2. a rule that is due and does more than report;
3. the policy: `loss_scale`, `divergence`, or for a bad step its `escalation`.

Rules that only report add their actions. A change whose budget is used up ends training instead.

The counts are frozen and saved as JSON. Healthy steps are not recorded; they follow from the step
numbers of the bad ones.

Example:

    >>> from keras_nanguard._core.incident import Finding, Incident
    >>> policy, state = Policy(), PolicyState()
    >>> incident = Incident(step=7, epoch=0, batch=7, findings=(Finding("loss"),))
    >>> decision, state = decide(policy, state, incident)
    >>> [action["action"] for action in decision.actions]
    ['skip']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from keras_nanguard._core.incident import Decision, Incident, Outcome
from keras_nanguard._core.literals import RESULT_SITES, causes_with
from keras_nanguard._policy.actions import ACTIONS, REPORT, Action, LowerLr, Rollback, Skip
from keras_nanguard._policy.policy import Policy
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

BAD_DATA = causes_with("batch")
"""Causes in the batch itself, which neither another state nor another rate can cure."""

RATE_CURES = causes_with("rate")
"""Causes that a lower learning rate can cure. For other causes the rate does not change."""


def is_bad_step(incident: Incident) -> bool:
    """Return whether the step was refused, or left NaN or Inf in the training state."""
    if incident.refused:
        return True
    return any(f.kind == "nonfinite" and f.site in TRAINING_SITES for f in incident.findings)


def is_of_data(incident: Incident) -> bool:
    """Return whether a step was refused because of its batch."""
    if not incident.refused or "state" in incident.sites:
        return False
    if incident.bad_at_start:
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
    """The counts of a policy. Start with `PolicyState()`; `decide` returns the next one. Its steps
    are counted from the first fit on.

    Attributes:
        earlier: number of steps before this fit.
        step: the step of the last incident, None before the first.
        last: the last bad step of the streak, None before the first.
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

    earlier: int = Field(default=0, ge=0)
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

        Args:
            matching: names of the rules that match it.
        """
        step = self.earlier + incident.step
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
        if incident.refused and step not in self.refused:
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

    def performed(self, outcomes: Sequence[Outcome]) -> PolicyState:
        """Return the state after actions with these outcomes. One without effect is not repeated;
        of several calls, one that was done is enough.
        """
        done = {outcome.action for outcome in outcomes if outcome.status == "done"}
        all_names = {*self.without_effect, *(outcome.action for outcome in outcomes)}
        return self.replaced(without_effect=tuple(sorted(all_names - done)))

    def with_streaks_of(self, other: PolicyState) -> PolicyState:
        """Return this state with all streaks of another one. Replayed steps and those of the next
        fit begin new streaks, as in `PolicyState()`.
        """
        return self.replaced(
            last=other.last,
            consecutive=other.consecutive,
            climb=other.climb,
            without_effect=other.without_effect,
            rules=other.rules,
        )

    def without_refused(self, steps: Iterable[int]) -> PolicyState:
        """Return this state without these refused steps of the fit, which run again."""
        gone = {self.earlier + step for step in steps}
        return self.replaced(refused=tuple(step for step in self.refused if step not in gone))

    def after_fit(self, steps: int) -> PolicyState:
        """Return this state for the next fit, after one of this many complete steps: budgets stay,
        streaks end.
        """
        earlier = self.earlier + steps + 1  # the last incident may be about the step after these
        return self.with_streaks_of(PolicyState()).replaced(earlier=earlier)


@dataclass(frozen=True)
class _Choice:
    """The choice for one incident.

    Attributes:
        name: the rule, or the part of the policy, that decides.
        reason: the reason, as a clause.
    """

    name: str
    actions: tuple[Action, ...]
    reason: str

    @property
    def terminal(self) -> bool:
        return any(action.terminal for action in self.actions)


def decide(policy: Policy, state: PolicyState, incident: Incident) -> tuple[Decision, PolicyState]:
    """Return what to do about an incident, and the state to pass in with the next one.

    Pure and total: it has no side effects and never raises for a valid policy. A refused step stays
    refused, regardless of the decision.
    """
    matching = [rule for rule in policy.rules if rule.matches(incident)]
    state = state.counted(incident, [rule.name for rule in matching])
    due = [rule for rule in matching if state.in_a_row(rule.name, incident) % rule.after == 0]
    reports = [action for rule in due if rule.only_reports for action in rule.do]
    deciding = next((rule for rule in due if not rule.only_reports), None)
    choice = _bound(policy, state, incident)
    if choice is None and deciding is not None:
        reason = _in_a_row(state.in_a_row(deciding.name, incident), "matching incident")
        choice = _Choice(deciding.name, deciding.do, reason)
    if choice is None:
        choice = _of_policy(policy, state, incident)
    choice = _within_budget(policy, state, choice)
    actions = _ordered(incident, [*reports, *choice.actions], policy.refuse)
    complete = (_planned(policy, state, incident, action) for action in actions)
    planned = tuple({"action": action.name, **action.model_dump()} for action in complete)
    state = state.acted(action.name for action in actions if action.changes)
    names = {rule.name: None for rule in due if rule.only_reports} | {choice.name: None}
    return Decision(
        rule=" + ".join(names) if planned else "",
        actions=planned,
        reason=f"{choice.reason[:1].upper()}{choice.reason[1:]}.",
        terminal=policy.refuse and choice.terminal,
    ), state


def _in_a_row(count: int, what: str) -> str:
    return f"the first {what}" if count == 1 else f"{count} {what}s in a row"


def _bound(policy: Policy, state: PolicyState, incident: Incident) -> _Choice | None:
    """Return the choice to end a run with too many bad steps."""
    if not policy.refuse or state.last != state.step:
        return None
    if state.consecutive >= policy.max_consecutive_refused:
        reason = f"{state.consecutive} bad steps in a row"
        return _Choice("max_consecutive_refused", (policy.ending,), reason)
    if incident.refused and len(state.refused) >= policy.max_refused_share * SHARE_WINDOW:
        reason = f"{len(state.refused)} of the last {SHARE_WINDOW} steps were refused"
        return _Choice("max_refused_share", (policy.ending,), reason)
    return None


def _of_policy(policy: Policy, state: PolicyState, incident: Incident) -> _Choice:
    """Return the choice of the policy for an incident that no rule decides."""
    if not incident.refused and incident.step <= 0 and "state" in incident.sites:
        reason = "the model is bad before the first step"
        return _Choice("before_training", (policy.ending,), reason)
    if "loss_scale" in incident.sites and policy.loss_scale.action:
        reason = "the loss scale is outside of its range"
        return _Choice("loss_scale", policy.loss_scale.action, reason)
    if _is_bad_state(incident):
        return _bad_state(policy, state, incident)
    if any(finding.kind == "divergence" for finding in incident.findings):
        return _Choice("divergence", policy.divergence.action, "training has diverged")
    if not incident.refused:
        return _Choice("report", (), "nothing is changed")
    heals = any(action.changes for stage in policy.escalation for action in stage)
    if is_of_data(incident) and heals:  # and no change of the model would help; `stop` ends on it
        return _Choice("bad_data", (Skip(),), _in_a_row(state.consecutive, "bad step"))
    return _escalation(policy, state, incident)


def _is_bad_state(incident: Incident) -> bool:
    """Whether the state itself is bad: written by other code, or by a step that committed."""
    if incident.refused and incident.causes == {"divergence"}:
        return False  # finite, and so large because of the learning rate
    sites = ("state",) if incident.refused else STATE_SITES
    kinds = ("nonfinite", "out_of_range")
    return any(f.site in sites and f.kind in kinds for f in incident.findings)


def _escalation(policy: Policy, state: PolicyState, incident: Incident) -> _Choice:
    """Return the current stage of the escalation."""
    steps = state.consecutive if is_of_data(incident) else state.climb
    steps = max(steps, 1)  # 0: the same step had bad data, too
    place = min(steps, len(policy.escalation)) - 1
    rate = not incident.causes or not incident.causes.isdisjoint(RATE_CURES)
    nothing_committed = incident.committed == 0
    actions = tuple(
        action
        for action in policy.escalation[place]
        if not (action.name == "lower_lr" and not rate)
        and not (action.name == "rollback" and nothing_committed)
        and action.name not in state.without_effect
    )
    return _Choice("escalation", actions, _in_a_row(steps, "bad step"))


def _bad_state(policy: Policy, state: PolicyState, incident: Incident) -> _Choice:
    """Return the choice for a bad state: the first stage that does more than skip.

    Each earlier rollback within `BUDGET_WINDOW` steps selects the next such stage. The rate is
    lowered only from the second time on, because one fault is not evidence against the rate.
    """
    stages = [
        stage
        for stage in policy.escalation
        if any(action.changes or action.terminal for action in stage)
    ]
    if not stages:
        return _Choice("bad_state", (), "the escalation restores nothing")
    again = state.times("rollback")
    cured = not incident.causes or not incident.causes.isdisjoint({*RATE_CURES, "state_nonfinite"})
    actions = tuple(
        action
        for action in stages[min(again, len(stages) - 1)]
        if action.name != "lower_lr" or (again and cured)
    )
    return _Choice("bad_state", actions, "the state is bad" + (" again" if again else ""))


def _within_budget(policy: Policy, state: PolicyState, choice: _Choice) -> _Choice:
    """Return the choice, or the choice to end the run if one of its actions was done too often."""
    for action in choice.actions:
        times = state.times(action.name)
        if action.changes and times >= policy.action_budget and not choice.terminal:
            reason = f"{action.name} was done {times} times within {BUDGET_WINDOW} steps"
            return _Choice("action_budget", (policy.ending,), reason)
    return choice


def _ordered(incident: Incident, actions: Iterable[Action], refuse: bool) -> list[Action]:
    """Return each action once, by phase: of each change the first, and of reports each function and
    message; `skip` only if nothing is changed and training continues.
    """
    chosen: dict[str | Action, Action] = {}
    for action in actions:
        if refuse or not (action.changes or action.terminal):
            chosen.setdefault(action if action.phase == REPORT else action.name, action)
    more = any(action.changes or action.terminal for action in chosen.values())
    chosen.pop("skip", None)
    if incident.refused and not more:
        chosen["skip"] = Skip()
    return sorted(chosen.values(), key=lambda action: action.phase)


def _planned(policy: Policy, state: PolicyState, incident: Incident, action: Action) -> Action:
    """Return an action with the parameters from the tables of the policy and from earlier
    incidents. Only a repeated rollback goes further back, or one after a divergence.
    """
    given, table = action.model_dump(exclude_unset=True), getattr(policy, action.name, None)
    default, times = (table if isinstance(table, Action) else action), state.times(action.name)
    found = default.replaced(**given)
    if isinstance(found, Rollback):
        replay = found.replay_steps or incident.diverged or _is_bad_state(incident)
        further = incident.diverged or (found.further_back and times > 0)
        return found.replaced(**{"replay_steps": replay, **given, "further_back": further})
    if isinstance(found, LowerLr) and (incident.diverged or times):
        return found.replaced(**{"recover_after": 0, **given})
    return found


def actions_of(decision: Decision) -> tuple[Action, ...]:
    """Return the actions of a decision, which has them as plain data."""
    plain = [dict(action) for action in decision.actions]
    return tuple(ACTIONS[parameters.pop("action")](**parameters) for parameters in plain)
