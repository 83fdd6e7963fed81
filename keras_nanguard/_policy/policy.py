"""Policies, and the pure function that decides by them. Level 0: imports no backend.

Deciding has no effects: `decide(policy, ledger, incident)` returns what shall be done, as data, and the ledger to hand
in next time. Every rule looks at every incident; each rule that fires takes part in the decision.

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
from keras_nanguard._policy.ending import longest_trouble, unending, unlimited, widened
from keras_nanguard._policy.fields import at, contradictions, made, refuse, shown
from keras_nanguard._policy.ledger import Ledger, Tally
from keras_nanguard._policy.rule_files import rule_from_file, rule_to_file
from keras_nanguard._policy.rules import Rule
from keras_nanguard._policy.settings import Checks, LayerChecks, Snapshot, on_path

__all__ = ["Ledger", "Policy", "Rule", "decide"]

DEEPEST = 100
"""A rollback that goes deeper on every repetition goes no deeper than this."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the guard looks at, and what it does about what it sees.

    Make one with `Policy.from_any`; `str(policy)` is the file that makes it.

    Attributes:
        title: one line about the policy.
        refuse: whether a bad step is refused. Without it the guard sees and tells and changes nothing.
        checks: which sites are looked at, and within which limits.
        snapshot: how states are kept to go back to.
        rules: which incidents do what.
        layers: where limits differ for some layers.
        half_written: names of the rules whose `do` was written over that of a preset, and `otherwise` was not. It says how
            the policy came to be and is no part of it.
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
            what, remedy = "a policy with rules, and first its title", f"Write Policy.from_any({source})."
            raise PolicyError(expected(what, f"Policy({shown(self.title)})", remedy))
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems = [
            f"{at('rules', name)}: expected one rule of this name, received {names.count(name)}" for name in twice
        ]
        problems += unlimited(self.rules)
        if self.refuse or any(rung.changes for rule in self.rules if rule.enabled for rung in rule.ladder):
            problems += filter(None, [unending(self.rules)])
        if self.snapshot.every == 0:
            back = ", ".join(rule.name for rule in self.rules if rule.enabled and rule.uses(Rollback))
            problems += [f"snapshot.every: expected at least 1, as these rules go back: {back}, received 0"] if back else []
        refuse(problems)

    @classmethod
    def from_any(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | Policy = "recover", **overrides: Any
    ) -> Policy:
        """Return the policy that a preset name, a file, a dict or a policy stands for.

        Args:
            source: name of a preset; path of a `.toml`, `.yaml`, `.yml` or `.json` file; a dict of the same shape; or
                a `Policy`.
            overrides: sections of a policy file, laid over the source: `snapshot={"every": 50}`.

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
            overrides: sections of a policy file, laid over the source.
            defaults: sections that count where neither source nor overrides set something else.

        Raises:
            PolicyError: with every problem found, each with its path.
        """
        if not isinstance(source, Policy):
            return cls._built(config.resolved(source, overrides, defaults))
        if not (overrides or defaults):
            return source
        return cls._built(config.over(source.to_dict(), overrides, defaults), source.half_written)

    @classmethod
    def _built(cls, resolved: config.Resolved, half_written: frozenset[str] = frozenset()) -> Policy:
        """Return the policy of a whole document: validated, and with nothing left to inherit."""
        document = resolved.document
        checks, snapshot = Checks.from_file(document.get("checks", {})), made(Snapshot, document.get("snapshot", {}))
        tables = document.get("rules", ())
        problems = [f"checks.loss_scale.{line}" for line in contradictions(checks.loss_scale)]
        problems += [f"snapshot.{line}" for line in contradictions(snapshot)]
        idle = [table["name"] for table in tables if "do" not in table]
        problems += [f"{at('rules', name)}.do: expected at least one action, received nothing" for name in idle]
        if not tables and document.get("refuse", True):
            problems.append(unending(()))
        refuse(problems)
        rules = tuple(_rule(table, resolved.own.get(table["name"])) for table in tables)
        return cls(
            title=document.get("title", ""),
            refuse=document.get("refuse", True),
            checks=checks,
            snapshot=snapshot,
            rules=rules,
            layers=tuple(LayerChecks.from_file(glob, sites) for glob, sites in document.get("layers", {}).items()),
            half_written=_half_written(rules, resolved.own, half_written),
        )

    def limits_for(self, path: str) -> Checks:
        """Return the checks of the layer or variable at a Keras path; of several sections the last wins."""
        checks = self.checks
        for section in self.layers:
            if on_path(path, section.glob):
                checks = section.over(checks)
        return checks

    @property
    def longest_trouble(self) -> int | None:
        """The most bad steps in a row before training ends; None for a policy that refuses nothing."""
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
        """Return the TOML file that makes this policy."""
        return config.toml(self.to_dict())

    def __repr__(self) -> str:
        return f"Policy({self.title!r}, {len(self.rules)} rules)"

    def __str__(self) -> str:
        return self.to_toml()


def _rule(table: Mapping[str, Any], own: frozenset[str] | None) -> Rule:
    """Return a rule; `own` are the fields that were laid over a rule of the same name, if there was one."""
    rule = rule_from_file(table)
    return rule if own is None else widened(rule, "limit" not in own, "otherwise" not in own)


def _half_written(rules: Iterable[Rule], own: Mapping[str, frozenset[str]], before: frozenset[str]) -> frozenset[str]:
    ladders = {rule.name for rule in rules if len(rule.ladder) > 1}
    half = {name for name, given in own.items() if "do" in given and "otherwise" not in given and name in ladders}
    return (before - {name for name, given in own.items() if "otherwise" in given}) | half


def decide(policy: Policy, ledger: Ledger, incident: Incident) -> tuple[Decision, Ledger]:
    """Return what shall be done about an incident, and the ledger to hand in with the next one.

    Pure and total: it has no effects, never raises on a valid policy, and takes time that grows with the number of
    rules and their windows only. A refused step stays refused whatever is decided.
    """
    step = ledger.at(incident)
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
    """One rule that fired, what it asks for, and what it remembers of it."""

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
    """Let a rule fire: the first rung of its ladder that has budget left acts, if any."""
    number = rule.rung(tally, step)
    above = rule.ladder[:number]
    used = "".join(f"; {rung.limit.sentence()} is used up" for rung in above if rung.limit is not None)
    reason = f"{rule.name}: {tally.consecutive} in a row, {tally.total} in all{used}"
    if number is None:
        return _Firing(rule, (), replace(tally, since=0, fired=step), reason)
    rung = rule.ladder[number]
    earlier = rule.counted(tally, step)
    chosen = tuple(_deepened(action, earlier) for action in rung.do)
    kept = tally.acted(step, number, len(rule.ladder), rung.limit.times if rung.limit else 0)
    return _Firing(rule, chosen, kept, reason)


def _deepened(action: Action, earlier: int) -> Action:
    """Return a rollback that goes deeper on repetition with its depth worked out."""
    if isinstance(action, Rollback) and action.deeper and earlier:
        return made(Rollback, {**asdict(action), "depth": min(action.depth + earlier, DEEPEST)})
    return action


def _decision(incident: Incident, fired: list[_Firing]) -> Decision:
    """Merge what the rules ask for: each action once, as the first rule wants it, in the order of the phases.

    An ending puts aside what other rules would have changed, and there is only one ending. To skip is to do nothing
    else: it stands for a refused step where nothing is changed or ended.
    """
    ends = [firing for firing in fired if firing.terminal]
    decisive = ends or [firing for firing in fired if firing.changes] or fired
    chosen: dict[str, Action] = {}
    for firing in fired:
        for action in firing.actions:
            if not (ends and action.changes and not firing.terminal):
                chosen.setdefault(action.name, action)
    endings = [action for action in chosen.values() if action.terminal]
    for action in endings[1:]:
        del chosen[action.name]
    more = any(action.changes or action.terminal for action in chosen.values())
    if more:
        chosen.pop(Skip.name, None)
    elif incident.refused:
        chosen.setdefault(Skip.name, Skip())
    told = "; ".join(firing.reason for firing in decisive)
    return Decision(
        rule=" + ".join(firing.rule.name for firing in decisive if firing.actions),
        actions=tuple(action.to_dict() for action in sorted(chosen.values(), key=lambda action: action.phase)),
        reason=(told or "no rule fired") + ("." if more or not incident.refused else "; the step was left out."),
        terminal=bool(ends),
    )
