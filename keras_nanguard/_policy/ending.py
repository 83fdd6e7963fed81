"""Proof that a policy ends: under endless bad steps it reaches `stop` or `raise_error` within a number of steps.

The argument. Take a set of rules such that every bad step, whatever its site and kind, is matched by one of them, and
nothing in them can pass a step by (no layer, magnitude, cause or unless). Each of them ends after a number of matching
steps that can be computed: `firings * spacing`, where `spacing` is the longest of what the condition needs and the
cool-down, and `firings` is one more than all its limits allow. Among as many bad steps as these numbers add up to (less
one for each rule, plus one) some rule has had its share, whatever order the trouble came in. It has ended, provided
that its limits do not forget within that time. Level 0: imports no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import product

from keras_nanguard._core.incident import KINDS, SITES
from keras_nanguard._policy.fields import at, made
from keras_nanguard._policy.ledger import STATE_SITES, TRAINING_SITES
from keras_nanguard._policy.rules import Limit, Rule, Rung

__all__ = ["Trouble", "longest_trouble", "unending", "unlimited", "widened"]

Trouble = tuple[str, str, str]
"""Site, kind, and `refused` or `committed`."""

REFUSED: frozenset[Trouble] = frozenset(product(TRAINING_SITES, KINDS, ("refused",)))
"""What can make a step be refused: left out, so that training goes nowhere while it lasts."""

COMMITTED: frozenset[Trouble] = frozenset(product(STATE_SITES, ("nonfinite",), ("committed",)))
"""What spoils every later step once it is in the state."""


def unlimited(rules: Sequence[Rule]) -> Iterator[str]:
    """Yield a problem for each rung that changes something without a limit that can run out."""
    for rule in rules:
        path, spacing = at("rules", rule.name), _spacing(rule, sole=True)
        for rung in rule.ladder if rule.enabled else ():
            if rung.changes and not rung.terminal:
                yield from _endless_rung(path, rule, rung, spacing or rule.cooldown + 1)
            path += ".otherwise"


def _endless_rung(path: str, rule: Rule, rung: Rung, spacing: int) -> Iterator[str]:
    changing = ", ".join(action.name for action in rung.do if action.changes)
    if rung.limit is None:
        what = f"a limit for {changing} (rule {rule.name!r}), such as {{ times = 3, per_steps = 2000 }}"
        yield f"{path}.limit: expected {what}, received none: it would be repeated for ever"
    elif rung.limit.per_steps is not None and rung.limit.times * spacing >= rung.limit.per_steps:
        most = rung.limit.times * spacing
        what = f"more than {most} steps (rule {rule.name!r} fires at most every {spacing} steps)"
        yield f"{path}.limit.per_steps: expected {what}, received {rung.limit.per_steps}: the limit is never reached"


def widened(rule: Rule, first: bool, rest: bool) -> Rule:
    """Return the rule with limits that can be reached, where a shorter `per_steps` was inherited.

    Args:
        first: whether the limit of the first rung was inherited.
        rest: whether those of the other rungs were.
    """
    spacing = _spacing(rule, sole=True) or rule.cooldown + 1
    inherited = [first, *[rest] * (len(rule.ladder) - 1)]
    rungs = zip(rule.ladder, inherited, strict=True)
    ladder = tuple(_reachable(rung, spacing) if yields else rung for rung, yields in rungs)
    return made(Rule, {**{entry.name: getattr(rule, entry.name) for entry in fields(rule)}, "ladder": ladder})


def _reachable(rung: Rung, spacing: int) -> Rung:
    limit = rung.limit
    if limit is None or limit.per_steps is None or not rung.changes or rung.terminal:
        return rung
    reached = {"times": limit.times, "per_steps": max(limit.per_steps, limit.times * spacing + 1)}
    return replace(rung, limit=made(Limit, reached))


def longest_trouble(rules: Iterable[Rule], committed: bool = True) -> int | None:
    """Return the most bad steps in a row before training ends, None where nothing is certain.

    Args:
        committed: count steps that spoil a committed state as well as refused ones.
    """
    needed = REFUSED | COMMITTED if committed else REFUSED
    enabled = [rule for rule in rules if rule.enabled]
    alone = [steps for rule in enabled if _covers(rule) >= needed and (steps := _steps(rule, sole=True))]
    bounds = [*alone, *_together(enabled, needed)]
    return min(bounds, default=None)


def unending(rules: Sequence[Rule]) -> str:
    """Return one problem where endless bad steps may never end, `""` where they surely end."""
    if longest_trouble(rules) is not None:
        return ""
    ends = [rule for rule in rules if rule.enabled and _steps(rule, sole=False)]
    held = frozenset().union(*(_covers(rule) for rule in ends))
    missing = (REFUSED | COMMITTED) - held
    if missing:
        received = " and ".join(
            f"none that surely does so for {', '.join(sites)} ({moment})"
            for moment in ("refused", "committed")
            if (sites := [site for site in SITES if any((site, kind, moment) in missing for kind in KINDS)])
        )
    else:
        received = "limits whose per_steps is so short that a mixture of troubles never uses them up"
    what = "a rule that ends endless trouble in stop or raise_error"
    remedy = 'add such as { name = "endless", when = "refused", after = { consecutive = 12 }, do = "stop" }'
    return f"rules: expected {what}, received {received}; {remedy}, or start from a preset"


def _covers(rule: Rule) -> frozenset[Trouble]:
    """Return every trouble that the rule matches whatever else is the matter."""
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
    """Return after how many matching steps the rule surely fires again, None where that is not certain."""
    needed = rule.after.needs(sole)
    return None if needed is None else max(needed, rule.cooldown + 1)


def _steps(rule: Rule, sole: bool) -> int | None:
    """Return after how many matching steps the rule has surely ended training, None where it may never."""
    spacing, rungs = _spacing(rule, sole), _until_terminal(rule)
    if spacing is None or rungs is None:
        return None
    steps = spacing * (1 + sum(rung.limit.times for rung in rungs if rung.limit))
    return steps if steps <= _memory(rungs) else None


def _until_terminal(rule: Rule) -> list[Rung] | None:
    """Return the rungs above the first terminal one, None where there is none that can be reached."""
    above: list[Rung] = []
    for rung in rule.ladder:
        if rung.terminal:
            return above
        if rung.limit is None:
            return None
        above.append(rung)
    return None


def _memory(rungs: Iterable[Rung]) -> float:
    """Return for how many steps the limits of all these rungs remember."""
    windows = [rung.limit.per_steps for rung in rungs if rung.limit and rung.limit.per_steps is not None]
    return min(windows, default=float("inf"))


def _together(rules: list[Rule], needed: frozenset[Trouble]) -> list[int]:
    """Return the bound that several rules give together, as a list of at most one."""
    cost = {rule.name: steps for rule in rules if (steps := _steps(rule, sole=False)) and _covers(rule) & needed}
    chosen = sorted((rule for rule in rules if rule.name in cost), key=lambda rule: cost[rule.name])
    for rule in reversed(list(chosen)):
        rest = [other for other in chosen if other is not rule]
        if frozenset().union(*(_covers(other) for other in rest)) >= needed:
            chosen = rest
    if not frozenset().union(*(_covers(rule) for rule in chosen)) >= needed:
        return []
    bound = 1 + sum(cost[rule.name] - 1 for rule in chosen)
    lasting = all(bound <= _memory(_until_terminal(rule) or []) for rule in chosen)
    return [bound] if lasting else []
