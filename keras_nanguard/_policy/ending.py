"""Proof that a policy terminates: under endless bad steps it reaches `stop` or `raise_error` within a known number of steps.

The argument. Take a set of rules such that every bad step, whatever its site and kind, is matched by one of them, and
that none of them has an exception (no layer, magnitude, cause or unless). Each rule ends training after a number of
matching steps that can be computed: `firings * spacing`, where `spacing` is the larger of what the condition needs and
the cool-down, and `firings` is one more than the sum of its limits. By the pigeonhole principle, among as many bad steps
as these numbers add up to (minus one for each rule, plus one) some rule has matched as often as it needs, in whatever
order the steps came. It has ended training, provided that its limits still count all of its firings. Imports no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import product

from keras_nanguard._core.incident import KINDS, SITES
from keras_nanguard._policy.fields import construct, field_path
from keras_nanguard._policy.ledger import STATE_SITES, TRAINING_SITES
from keras_nanguard._policy.rules import Limit, Rule, Rung

__all__ = ["Trouble", "limit_problems", "longest_trouble", "termination_problem", "with_reachable_limits"]

Trouble = tuple[str, str, str]
"""Site, kind, and `refused` or `committed`."""

REFUSED: frozenset[Trouble] = frozenset(product(TRAINING_SITES, KINDS, ("refused",)))
"""Everything that makes the guard refuse a step; training makes no progress while it lasts."""

COMMITTED: frozenset[Trouble] = frozenset(product(STATE_SITES, ("nonfinite",), ("committed",)))
"""Trouble in a committed state, which spoils every later step."""


def limit_problems(rules: Sequence[Rule]) -> Iterator[str]:
    """Yield a problem for each rung that changes something without a limit that can be exhausted."""
    for rule in rules:
        path, spacing = field_path("rules", rule.name), _spacing(rule, sole=True)
        for rung in rule.ladder if rule.enabled else ():
            if rung.changes and not rung.terminal:
                yield from _limit_problem(path, rule, rung, spacing or rule.cooldown + 1)
            path += ".otherwise"


def _limit_problem(path: str, rule: Rule, rung: Rung, spacing: int) -> Iterator[str]:
    changing = ", ".join(action.name for action in rung.do if action.changes)
    if rung.limit is None:
        what = f"a limit for {changing} (rule {rule.name!r}), such as {{ times = 3, per_steps = 2000 }}"
        yield f"{path}.limit: expected {what}, received none: the rule would repeat it forever"
    elif rung.limit.per_steps is not None and rung.limit.times * spacing >= rung.limit.per_steps:
        most = rung.limit.times * spacing
        what = f"more than {most} steps (rule {rule.name!r} fires at most every {spacing} steps)"
        yield f"{path}.limit.per_steps: expected {what}, received {rung.limit.per_steps}: the limit is never reached"


def with_reachable_limits(rule: Rule, first: bool, rest: bool) -> Rule:
    """Return the rule with limits that can be reached: a `per_steps` that was inherited and is too short is extended.

    Args:
        first: whether the first rung inherited its limit.
        rest: whether the other rungs did.
    """
    spacing = _spacing(rule, sole=True) or rule.cooldown + 1
    inherited = [first, *[rest] * (len(rule.ladder) - 1)]
    ladder = tuple(_reachable(rung, spacing) if adjust else rung for rung, adjust in zip(rule.ladder, inherited))
    return construct(Rule, {**{entry.name: getattr(rule, entry.name) for entry in fields(rule)}, "ladder": ladder})


def _reachable(rung: Rung, spacing: int) -> Rung:
    limit = rung.limit
    if limit is None or limit.per_steps is None or not rung.changes or rung.terminal:
        return rung
    reached = {"times": limit.times, "per_steps": max(limit.per_steps, limit.times * spacing + 1)}
    return replace(rung, limit=construct(Limit, reached))


def longest_trouble(rules: Iterable[Rule], committed: bool = True) -> int | None:
    """Return the maximum number of bad steps in a row before training ends, None where nothing is certain.

    Args:
        committed: consider steps that spoil a committed state as well as refused ones.
    """
    needed = REFUSED | COMMITTED if committed else REFUSED
    enabled = [rule for rule in rules if rule.enabled]
    alone = [steps for rule in enabled if _covers(rule) >= needed and (steps := _steps(rule, sole=True))]
    bounds = [*alone, *_joint_bound(enabled, needed)]
    return min(bounds, default=None)


def termination_problem(rules: Sequence[Rule]) -> str:
    """Return a problem where endless bad steps may never end training, `""` where they certainly do."""
    if longest_trouble(rules) is not None:
        return ""
    ends = [rule for rule in rules if rule.enabled and _steps(rule, sole=False)]
    covered = frozenset().union(*(_covers(rule) for rule in ends))
    missing = (REFUSED | COMMITTED) - covered
    if missing:
        received = " and ".join(
            f"none that certainly does so for {', '.join(sites)} ({moment})"
            for moment in ("refused", "committed")
            if (sites := [site for site in SITES if any((site, kind, moment) in missing for kind in KINDS)])
        )
    else:
        received = "limits whose per_steps is so short that a mixture of incidents never exhausts them"
    what = "a rule that ends training with stop or raise_error when bad steps never end"
    remedy = 'add, for example, { name = "endless", when = "refused", after = { consecutive = 12 }, do = "stop" }'
    return f"rules: expected {what}, received {received}; {remedy}, or start from a preset"


def _covers(rule: Rule) -> frozenset[Trouble]:
    """Return everything that the rule matches unconditionally."""
    if rule.layer or rule.cause or rule.unless.on or rule.unless.cause or rule.when == "before_training":
        return frozenset()
    if rule.magnitude.min_abs is not None or rule.magnitude.min_share is not None:
        return frozenset()
    return frozenset(
        (site, kind, moment)
        for site, kind, moment in REFUSED | COMMITTED
        if (not rule.on or site in rule.on) and (not rule.kind or kind in rule.kind) and rule.when in ("any", moment)
    )


def _spacing(rule: Rule, sole: bool) -> int | None:
    """Return the number of matching steps after which the rule certainly fires again, None where that is not certain."""
    needed = rule.after.needs(sole)
    return None if needed is None else max(needed, rule.cooldown + 1)


def _steps(rule: Rule, sole: bool) -> int | None:
    """Return the number of matching steps after which the rule has certainly ended training, None where it may never."""
    spacing, rungs = _spacing(rule, sole), _until_terminal(rule)
    if spacing is None or rungs is None:
        return None
    steps = spacing * (1 + sum(rung.limit.times for rung in rungs if rung.limit))
    return steps if steps <= _memory(rungs) else None


def _until_terminal(rule: Rule) -> list[Rung] | None:
    """Return the rungs above the first terminal one, None where no terminal rung can be reached."""
    above: list[Rung] = []
    for rung in rule.ladder:
        if rung.terminal:
            return above
        if rung.limit is None:
            return None
        above.append(rung)
    return None


def _memory(rungs: Iterable[Rung]) -> float:
    """Return for how many steps the limits of all these rungs count a firing."""
    windows = [rung.limit.per_steps for rung in rungs if rung.limit and rung.limit.per_steps is not None]
    return min(windows, default=float("inf"))


def _joint_bound(rules: list[Rule], needed: frozenset[Trouble]) -> list[int]:
    """Return the bound that several rules give together, as a list of at most one number."""
    cost = {rule.name: steps for rule in rules if (steps := _steps(rule, sole=False))}
    chosen = sorted((rule for rule in rules if rule.name in cost), key=lambda rule: cost[rule.name])
    for rule in reversed(list(chosen)):
        rest = [other for other in chosen if other is not rule]
        if frozenset().union(*(_covers(other) for other in rest)) >= needed:
            chosen = rest
    if not frozenset().union(*(_covers(rule) for rule in chosen)) >= needed:
        return []
    bound = 1 + sum(cost[rule.name] - 1 for rule in chosen)
    remembered = all(bound <= _memory(_until_terminal(rule) or []) for rule in chosen)
    return [bound] if remembered else []
