"""Policies, and the pure function `decide`. Imports no backend.

`decide(policy, ledger, incident)` has no side effects: it returns what to do, as data, and the ledger to pass in next
time. Every rule is applied to every incident; each rule that fires contributes to the decision.

Example:

    >>> from keras_nanguard._core.incident import Finding, Incident
    >>> policy, ledger = Policy.from_any("recover"), Ledger()
    >>> incident = Incident(step=7, epoch=0, batch=7, findings=(Finding("loss"),))
    >>> decision, ledger = decide(policy, ledger, incident)
    >>> [action["action"] for action in decision.actions]
    ['warn', 'skip']
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._core.incident import Decision, Incident
from keras_nanguard._policy import config, presets
from keras_nanguard._policy.actions import Action, Rollback, Skip
from keras_nanguard._policy.ending import limit_problems, longest_trouble, termination_problem, with_reachable_limits
from keras_nanguard._policy.fields import construct, contradictions, field_path, raise_problems, shown
from keras_nanguard._policy.ledger import Ledger, Tally
from keras_nanguard._policy.rule_files import rule_from_file, rule_to_file
from keras_nanguard._policy.rules import Rule
from keras_nanguard._policy.settings import Checks, LayerChecks, Snapshot, matches_path

__all__ = ["Ledger", "Policy", "Rule", "decide"]

MAX_DEPTH = 100
"""Maximum depth of a rollback that goes deeper on every repetition."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the guard checks, and what it does about what it finds.

    Create one with `Policy.from_any`; `str(policy)` is the policy file of it.

    Attributes:
        title: one line about the policy.
        refuse: whether a bad step is refused. If False, the guard reports and changes nothing.
        checks: which sites are checked, and their limits.
        snapshot: how snapshots for rollbacks are taken and stored.
        rules: which incidents lead to which actions.
        layers: limits that differ for some layers.
        half_written: names of the rules that override `do` of a preset, but not its `otherwise`. It describes the origin of
            the policy and is not part of it.
    """

    title: str = ""
    refuse: bool = True
    checks: Checks = field(default_factory=Checks)
    snapshot: Snapshot = field(default_factory=Snapshot)
    rules: tuple[Rule, ...] = ()
    layers: tuple[LayerChecks, ...] = ()
    half_written: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.refuse and not self.rules:
            source = shown(self.title or presets.DEFAULT_PRESET)
            what, remedy = "a policy with rules, its title first", f"Write Policy.from_any({source})."
            raise PolicyError(expected(what, f"Policy({shown(self.title)})", remedy))
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = [
            f"{field_path('rules', name)}: expected one rule of this name, received {names.count(name)}" for name in twice
        ]
        problems += limit_problems(self.rules)
        if self.refuse or any(rung.changes for rule in self.rules if rule.enabled for rung in rule.ladder):
            problems += filter(None, [termination_problem(self.rules)])
        if self.snapshot.every == 0:
            back = ", ".join(rule.name for rule in self.rules if rule.enabled and rule.uses(Rollback))
            problems += [f"snapshot.every: expected at least 1, as these rules roll back: {back}, received 0"] if back else []
        raise_problems(problems)

    @classmethod
    def from_any(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | Policy = "recover", **overrides: Any
    ) -> Policy:
        """Return the policy of a preset name, a file, a dict or a policy.

        Args:
            source: name of a preset; path of a `.toml`, `.yaml`, `.yml` or `.json` file; a dict of the same shape; or
                a `Policy`.
            overrides: sections of a policy file, merged over the source: `snapshot={"every": 50}`.

        Raises:
            PolicyError: with every problem found, each with its path.
        """
        return cls.assembled(source, overrides)

    @classmethod
    def assembled(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | Policy,
        overrides: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
    ) -> Policy:
        """Return the policy that `from_any` returns, with other defaults.

        Args:
            source: as in `from_any`.
            overrides: sections of a policy file, merged over the source.
            defaults: sections that apply where neither source nor overrides set a value.

        Raises:
            PolicyError: with every problem found, each with its path.
        """
        if not isinstance(source, Policy):
            return cls._from_document(config.resolved(source, overrides, defaults))
        if not (overrides or defaults):
            return source
        return cls._from_document(config.over(source.to_dict(), overrides, defaults), source.half_written)

    @classmethod
    def _from_document(cls, resolved: config.Resolved, half_written: frozenset[str] = frozenset()) -> Policy:
        """Return the policy of a complete document: validated, and with nothing left to inherit."""
        document = resolved.document
        checks, snapshot = Checks.from_file(document.get("checks", {})), construct(Snapshot, document.get("snapshot", {}))
        tables = document.get("rules", ())
        problems = [f"checks.loss_scale.{line}" for line in contradictions(checks.loss_scale)]
        problems += [f"snapshot.{line}" for line in contradictions(snapshot)]
        idle = [table["name"] for table in tables if "do" not in table]
        problems += [f"{field_path('rules', name)}.do: expected at least one action, received nothing" for name in idle]
        if not tables and document.get("refuse", True):
            problems.append(termination_problem(()))
        raise_problems(problems)
        rules = tuple(_rule(table, resolved.overridden.get(table["name"])) for table in tables)
        return cls(
            title=document.get("title", ""),
            refuse=document.get("refuse", True),
            checks=checks,
            snapshot=snapshot,
            rules=rules,
            layers=tuple(LayerChecks.from_file(glob, sites) for glob, sites in document.get("layers", {}).items()),
            half_written=_half_written(rules, resolved.overridden, half_written),
        )

    def limits_for(self, path: str) -> Checks:
        """Return the checks of the layer or variable at a Keras path; the last matching section wins."""
        checks = self.checks
        for section in self.layers:
            if matches_path(path, section.glob):
                checks = section.over(checks)
        return checks

    @property
    def longest_trouble(self) -> int | None:
        """Maximum number of bad steps in a row before training ends; None for a policy that refuses nothing."""
        return longest_trouble(self.rules, committed=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as `from_any` reads it: plain values, complete, nothing inherited."""
        document: dict[str, Any] = {"version": presets.VERSION, "preset": presets.NO_PRESET}
        document |= {"title": self.title} if self.title else {}
        document |= {"refuse": False} if not self.refuse else {}
        sections = {
            "checks": self.checks.to_file(),
            "snapshot": self.snapshot.to_file(),
            "rules": [rule_to_file(rule) for rule in self.rules],
            "layers": {section.glob: section.to_file() for section in self.layers},
        }
        return document | {name: section for name, section in sections.items() if section}

    def to_toml(self) -> str:
        """Return this policy as a TOML file."""
        return config.toml(self.to_dict())

    def __repr__(self) -> str:
        return f"Policy({self.title!r}, {len(self.rules)} rules)"

    def __str__(self) -> str:
        return self.to_toml()


def _rule(table: Mapping[str, Any], overridden: frozenset[str] | None) -> Rule:
    """Return a rule; `overridden` are the fields given over those of an inherited rule of the same name, if there is one."""
    rule = rule_from_file(table)
    return rule if overridden is None else with_reachable_limits(rule, "limit" not in overridden, "otherwise" not in overridden)


def _half_written(rules: Iterable[Rule], own: Mapping[str, frozenset[str]], before: frozenset[str]) -> frozenset[str]:
    ladders = {rule.name for rule in rules if len(rule.ladder) > 1}
    half = {name for name, given in own.items() if "do" in given and "otherwise" not in given and name in ladders}
    return (before - {name for name, given in own.items() if "otherwise" in given}) | half


def decide(policy: Policy, ledger: Ledger, incident: Incident) -> tuple[Decision, Ledger]:
    """Return what to do about an incident, and the ledger to pass in with the next one.

    Pure and total: it has no side effects, never raises for a valid policy, and its run time grows only with the number
    of rules and their windows. A refused step stays refused whatever the decision.
    """
    step = ledger.step_of(incident)
    entered = ledger.entered(incident, step)
    run = entered.run if entered.last == step else None
    tallies = dict(ledger.rules)
    fired: list[_Firing] = []
    for rule in policy.rules:
        tally = rule.tally(ledger)
        if rule.reset_after is not None and ledger.good_steps(tally, step) >= rule.reset_after:
            tally = Tally()
        if rule.matches(incident):
            tally = tally.counted(step, run, rule.after.horizon)
            if rule.ready(tally, step) and rule.after.met(tally, step, entered.jumps):
                firing = _firing(rule, tally, step)
                fired.append(firing)
                tally = firing.tally
        if tally != Tally():
            tallies[rule.name] = tally
    return _decision(incident, fired), replace(entered, rules=tallies)


@dataclass(frozen=True, slots=True)
class _Firing:
    """One rule that fired, the actions it asks for, and its tally afterwards."""

    rule: Rule
    actions: tuple[Action, ...]
    tally: Tally
    reason: str

    @property
    def terminal(self) -> bool:
        return any(action.terminal for action in self.actions)

    @property
    def changes(self) -> bool:
        return any(action.changes for action in self.actions)


def _firing(rule: Rule, tally: Tally, step: int) -> _Firing:
    """Fire a rule: the first rung of its ladder whose limit is not exhausted acts, if any."""
    number = rule.rung(tally, step)
    above = rule.ladder[:number]
    exhausted = "".join(f"; the limit of {rung.limit.sentence()} is reached" for rung in above if rung.limit is not None)
    reason = f"{rule.name}: {tally.consecutive} in a row, {tally.total} in total{exhausted}"
    if number is None:
        return _Firing(rule, (), replace(tally, since=0, fired=step), reason)
    rung = rule.ladder[number]
    earlier = rule.counted(tally, step)
    chosen = tuple(_deepened(action, earlier) for action in rung.do)
    after = tally.acted(step, number, len(rule.ladder), rung.limit.times if rung.limit else 0)
    return _Firing(rule, chosen, after, reason)


def _deepened(action: Action, earlier: int) -> Action:
    """Return the action; a rollback with `deeper` gets its actual depth."""
    if isinstance(action, Rollback) and action.deeper and earlier:
        return construct(Rollback, {**asdict(action), "depth": min(action.depth + earlier, MAX_DEPTH)})
    return action


def _decision(incident: Incident, fired: list[_Firing]) -> Decision:
    """Merge the actions of the rules: each action once, with the parameters of the first rule, ordered by phase.

    A terminal action drops the changes of other rules, and there is only one terminal action. `skip` remains only for
    a refused step where nothing is changed and training does not end.
    """
    terminal = [firing for firing in fired if firing.terminal]
    decisive = terminal or [firing for firing in fired if firing.changes] or fired
    chosen: dict[str, Action] = {}
    for firing in fired:
        for action in firing.actions:
            if not (terminal and action.changes and not firing.terminal):
                chosen.setdefault(action.name, action)
    endings = [action for action in chosen.values() if action.terminal]
    for action in endings[1:]:
        del chosen[action.name]
    more = any(action.changes or action.terminal for action in chosen.values())
    if more:
        chosen.pop(Skip.name, None)
    elif incident.refused:
        chosen.setdefault(Skip.name, Skip())
    reasons = "; ".join(firing.reason for firing in decisive)
    return Decision(
        rule=" + ".join(firing.rule.name for firing in decisive if firing.actions),
        actions=tuple(action.to_dict() for action in sorted(chosen.values(), key=lambda action: action.phase)),
        reason=(reasons or "no rule fired") + ("." if more or not incident.refused else "; the step was skipped."),
        terminal=bool(terminal),
    )
