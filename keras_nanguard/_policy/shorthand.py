"""The words of `keras.callbacks.ReduceLROnPlateau` as arguments of `NanGuard`, laid over a policy. Imports no backend.

`patience`, `factor` and `min_lr` set what they set there: how often in a row before the learning rate is reduced, by which factor, and
down to what. There an epoch without progress is counted, here a bad step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._policy.actions import LowerLr
from keras_nanguard._policy.conditions import MAX_WINDOW, Condition, Consecutive, Fraction
from keras_nanguard._policy.ending import with_reachable_limits
from keras_nanguard._policy.fields import problem, raise_problems
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.rules import Rule

__all__ = ["SHORTHAND", "with_shorthand"]

PERIODS = 4
"""After how many times `patience` bad steps in a row a rule that ends training waits for, at least."""


def _is_number(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


SHORTHAND: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "patience": ("a whole number >= 0 and <= 1000", lambda value: _is_number(value, int) and 0 <= value <= 1000),
    "factor": ("a finite number > 0 and < 1", lambda value: _is_number(value, (int, float)) and 0 < value < 1),
    "min_lr": ("a finite number >= 0", lambda value: _is_number(value, (int, float)) and value >= 0),
}
"""Each word with what it may be, in words and as a function."""


def with_shorthand(policy: Policy, words: Mapping[str, Any]) -> Policy:
    """Return a policy with these words of `ReduceLROnPlateau` laid over its rules.

    Args:
        policy: the policy.
        words: values of `SHORTHAND`. `patience` is the number of bad steps in a row after which a rule lowers the learning rate; rules
            that end training after some in a row wait for at least four times as many. `factor` and `min_lr` are those of each
            `lower_lr`; `factor` is the least share of a rate at which training diverged that counts as safe, too.

    Raises:
        PolicyError: if a value is not valid, or the policy has no rule to which a word applies.
    """
    allowed = {word: SHORTHAND[word] for word in words}
    raise_problems(
        (problem(word, what, words[word]) for word, (what, valid) in allowed.items() if not valid(words[word])), "the arguments of NanGuard"
    )
    if not words:
        return policy
    _require_rules(policy, words)
    rate = {word: float(value) for word, value in words.items() if word != "patience"}
    rules = [_with_rate(rule, rate) for rule in policy.rules]
    if "patience" in words:
        steps = max(words["patience"], 1)  # ReduceLROnPlateau acts at the first epoch for 0 as for 1
        rules = [_with_patience(rule, steps) for rule in rules]
    return replace(policy, rules=tuple(rules))


def _require_rules(policy: Policy, words: Mapping[str, Any]) -> None:
    lowering = [rule for rule in policy.rules if rule.enabled and rule.uses(LowerLr)]
    remedy = "Write NanGuard(patience=5, factor=0.5) for the policy 'recover', or set it in the rules of your policy."
    given = f"{', '.join(words)} with the policy {policy.title.partition(':')[0] or 'of your own'!r}"
    if not lowering:
        raise PolicyError(expected("a policy that lowers the learning rate", given, remedy))
    if "patience" in words and not any(isinstance(rule.after, Consecutive) for rule in lowering):
        what = "a policy that lowers the learning rate after some bad steps in a row"
        raise PolicyError(expected(what, given, remedy))


def _with_rate(rule: Rule, values: Mapping[str, Any]) -> Rule:
    if not values or not rule.uses(LowerLr):
        return rule
    rungs = (
        replace(rung, do=tuple(_lowering(action, values) if isinstance(action, LowerLr) else action for action in rung.do))
        for rung in rule.ladder
    )
    return replace(rule, ladder=tuple(rungs))


def _lowering(action: LowerLr, values: Mapping[str, Any]) -> LowerLr:
    """Return the action with these values; the share of a rate that is safe is not below the factor that was asked for."""
    return replace(action, **values, safe=max(action.safe, values.get("factor", 0.0)))


def _with_patience(rule: Rule, steps: int) -> Rule:
    if isinstance(rule.after, Consecutive) and rule.uses(LowerLr):
        return with_reachable_limits(replace(rule, after=Consecutive(steps)), True, True)
    return replace(rule, after=_at_least(rule.after, PERIODS * steps)) if rule.when == "refused" and any(_endings(rule)) else rule


def _at_least(after: Condition, steps: int) -> Condition:
    """Return the condition of an ending that so many bad steps in a row do not meet earlier."""
    if isinstance(after, Consecutive):
        return Consecutive(max(after.steps, steps))
    if isinstance(after, Fraction):
        return replace(after, steps=min(max(after.steps, math.ceil(steps / after.share)), MAX_WINDOW))
    return after


def _endings(rule: Rule) -> Iterator[bool]:
    return (action.terminal for rung in rule.ladder for action in rung.do)
