"""What in a valid policy has no effect: rules that never act, and actions that cannot be done."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from keras_nanguard._core.literals import RESULT_SITES
from keras_nanguard._policy.actions import REPORT, Call
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.records import nearest, safe_repr
from keras_nanguard._policy.settings import matches_path

BETWEEN_STEPS = frozenset({"divergence", "spike", "stuck"})
"""Kinds that checks find between two steps, at intervals."""

OF_VARIABLES = frozenset({"state", "gradients", "statistics", "weights", "slots", "loss_scale"})
"""Sites whose findings have the paths of variables. Others have those of data: `x/age`."""


def warnings_about(
    policy: Policy,
    model: str = "",
    paths: Collection[str] | None = None,
    functions: Collection[str] | None = None,
    diagnose: bool = True,
) -> tuple[str, ...]:
    """Return a sentence for each rule that never acts, and for each action that cannot be done.

    Args:
        model: name of the model or of its file.
        paths: Keras paths of its variables, and those of its data as far as they are known; `None`
            if there is no model to compare with.
        functions: names of the functions that are registered; `None` if that is not known.
        diagnose: whether causes are found.
    """
    found = [*_never_reached(policy)]
    found += _match_nothing(policy, model, paths) if paths is not None else ()
    found += _call_nothing(policy, functions) if functions is not None else ()
    found += () if diagnose else _need_a_cause(policy)
    return tuple(found)


def _never_reached(policy: Policy) -> Iterator[str]:
    bound = policy.max_consecutive_refused if policy.refuse else math.inf
    for rule in policy.rules:
        kinds, after = {*rule.kind}, f"Rule {rule.name!r} never acts{{}}: after = {rule.after}, but"
        bounded = "out_of_range" not in kinds and {*RESULT_SITES}.isdisjoint(rule.site)
        if rule.after > 1 and kinds and kinds <= BETWEEN_STEPS:
            yield f"{after.format('')} no two steps in a row have {' or '.join(sorted(kinds))}."
        elif bounded and rule.after >= bound + rule.only_reports:  # it reports at the bound, too
            where = "" if rule.site else " on bad steps"
            yield f"{after.format(where)} training ends at max_consecutive_refused = {bound}."
        elif not policy.refuse and not rule.only_reports:
            lost = " and ".join(action.name for action in rule.do if action.phase != REPORT)
            why = "a policy with refuse = false changes nothing"
            yield f"Rule {rule.name!r} does not {lost}: {why}."


def _match_nothing(policy: Policy, model: str, paths: Collection[str]) -> Iterator[str]:
    compared = (rule for rule in policy.rules if OF_VARIABLES.issuperset(rule.site))
    globs = [(f"Rule {rule.name!r}", glob) for rule in compared for glob in rule.layer]
    globs += [(f"limits[{n}]", glob) for n, one in enumerate(policy.limits) for glob in one.layer]
    parts = {part for path in paths for part in path.split("/")}
    for owner, glob in globs:
        if not any(matches_path(path, glob) for path in paths):
            meant = nearest(glob.strip("*"), parts)
            hint = f" (did you mean {safe_repr(meant)}?)" if meant else ""
            yield (
                f"{owner} never acts: nothing in the model {safe_repr(model)} matches the "
                f"glob {safe_repr(glob)}{hint}."
            )


def _call_nothing(policy: Policy, functions: Collection[str]) -> Iterator[str]:
    stages = [("escalation", stage) for stage in policy.escalation]
    stages += [(f"rule {rule.name!r}", rule.do) for rule in policy.rules]
    stages.append(("divergence.action", policy.divergence.action))
    stages.append(("loss_scale.action", policy.loss_scale.action))
    for place, actions in stages:
        for action in actions:
            if isinstance(action, Call) and action.function not in functions:
                known = ", ".join(sorted(functions)) or "none"
                yield (
                    f"call in {place} does nothing: no function is registered as "
                    f"{action.function!r} (registered: {known})."
                )


def _need_a_cause(policy: Policy) -> Iterator[str]:
    for rule in policy.rules:
        if rule.cause:
            yield f"Rule {rule.name!r} never acts: it needs a cause, and diagnose=False finds none."
