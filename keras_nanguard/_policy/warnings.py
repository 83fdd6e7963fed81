"""What in a valid policy has no effect: rules that never act, and actions that cannot be done.

Imports no backend.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from keras_nanguard._policy.actions import Call
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.problems import nearest, safe_repr
from keras_nanguard._policy.settings import matches_path


def warnings_about(
    policy: Policy, model: str = "", paths: Collection[str] | None = None, guard: Any = None
) -> tuple[str, ...]:
    """Return a sentence for each rule that never acts, and for each action that cannot be done.

    Args:
        policy: the policy.
        model: name of the model or of its file.
        paths: Keras paths of its variables; `None` if there is no model to compare with.
        guard: the guard, whose directory, functions and diagnoses an action or a rule may need;
            `None` if there is none.
    """
    found = [*_never_reached(policy)]
    found += _match_nothing(policy, model, paths) if paths is not None else ()
    found += _lack_something(policy, guard) if guard is not None else ()
    return tuple(found)


def _never_reached(policy: Policy) -> Iterator[str]:
    bound = policy.max_consecutive_refused
    for rule in policy.rules:
        if rule.after >= bound and not {"spike", "stuck", "out_of_range"} & {*rule.kind}:
            yield (
                f"Rule {rule.name!r} never acts: after = {rule.after}, but training ends at "
                f"max_consecutive_refused = {bound}."
            )


def _match_nothing(policy: Policy, model: str, paths: Collection[str]) -> Iterator[str]:
    globs = [(f"Rule {rule.name!r}", glob) for rule in policy.rules for glob in rule.layer]
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


def _lack_something(policy: Policy, guard: Any) -> Iterator[str]:
    stages = [("escalation", stage) for stage in policy.escalation]
    stages += [(f"rule {rule.name!r}", rule.do) for rule in policy.rules]
    stages.append(("divergence.action", policy.divergence.action))
    stages.append(("loss_scale.action", policy.loss_scale.action))
    for place, actions in stages:
        for action in actions:
            if action.name == "quarantine" and guard.directory is None:
                yield f"quarantine in {place} saves nothing: NanGuard has no directory."
            if isinstance(action, Call) and action.function not in guard.functions:
                known = ", ".join(sorted(guard.functions)) or "none"
                yield (
                    f"call in {place} does nothing: no function is registered as "
                    f"{action.function!r} (registered: {known})."
                )
    for rule in policy.rules:
        if rule.cause and not guard.diagnose:
            yield f"Rule {rule.name!r} never acts: it needs a cause, and diagnose=False finds none."
