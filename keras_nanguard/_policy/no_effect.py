"""Warnings about parts of a policy that have no effect: rules that can never fire, settings and globs that match nothing.

None of these is an error: the policy is valid, but perhaps not what was intended. Imports no backend.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache

from keras_nanguard._policy import conditions
from keras_nanguard._policy.actions import Call, FixLossScale, LowerLr, Quarantine, Rollback
from keras_nanguard._policy.conditions import Condition
from keras_nanguard._policy.ending import REFUSED
from keras_nanguard._policy.fields import field_path
from keras_nanguard._policy.occurrence import Occurrence, matched_by, why_it_never_fires
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.presets import PRESETS
from keras_nanguard._policy.rules import Rule
from keras_nanguard._policy.settings import LIMITED, SWITCHED, Checks, LayerChecks, matches_path
from keras_nanguard._policy.spelling import nearest

__all__ = ["GuardOptions", "ModelNames", "own_rules", "warnings_about"]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names in a model that a policy can refer to.

    Attributes:
        name: name of the model.
        paths: by site, the Keras paths that findings there can have: `()` where the model has nothing of the kind, and no
            entry where that is not known.
    """

    name: str
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """The arguments of a guard that decide whether an action or a rule can have an effect.

    Attributes:
        directory: whether it has a directory.
        functions: names of the functions that it may call.
        diagnose: whether it diagnoses.
    """

    directory: bool
    functions: Collection[str]
    diagnose: bool


def warnings_about(policy: Policy, model: ModelNames | None = None, guard: GuardOptions | None = None) -> tuple[str, ...]:
    """Return the parts of a policy that have no effect, one sentence each.

    Rules that equal those of a preset are not considered: they are written for any model.

    Args:
        policy: the policy.
        model: names in the model that the policy is used with; `None` if unknown.
        guard: arguments of the guard that the policy is used with; `None` if unknown.
    """
    found = [*_half_written(policy), *_refusing(policy), *_settings(policy)]
    for rule in own_rules(policy):
        if rule.when == "refused" and not policy.refuse:
            continue  # `_refusing` names all of them at once
        never = _never(policy, rule) or _never_here(policy, rule, model, guard)
        if never:
            found.append(f"Rule {rule.name!r} can never fire: {never}.")
        else:
            parts = [*_partly(policy, rule), *_set_aside(policy, rule), *_unreachable(rule), *_actions(policy, rule, guard)]
            parts += _idle_globs(policy, rule, model) if model is not None else ()
            found += [f"Rule {rule.name!r}: {line}." for line in parts]
    if model is not None:
        found += [line for section in policy.layers for line in _section(model, section)]
    return tuple(dict.fromkeys(found))


def own_rules(policy: Policy) -> tuple[Rule, ...]:
    """Return the enabled rules that differ from those of every preset."""
    return tuple(rule for rule in policy.rules if rule.enabled and not any(rule in _of_preset(name) for name in PRESETS))


@cache
def _of_preset(name: str) -> frozenset[Rule]:
    return frozenset(Policy.from_any(name).rules)


def _half_written(policy: Policy) -> Iterator[str]:
    for rule in policy.rules:
        if rule.name in policy.half_written and rule.enabled:
            rest = ", then ".join(rung.sentence() for rung in rule.ladder[1:])
            yield f"Rule {rule.name!r}: `do` was changed, `otherwise` was inherited: the guard {rest}. Write `otherwise`, too."


def _refusing(policy: Policy) -> Iterator[str]:
    blind = [rule.name for rule in policy.rules if rule.enabled and rule.when == "refused"]
    if blind and not policy.refuse:
        remedy = "Use the preset 'observe' to report everything and change nothing"
        yield f"With refuse = false no step is refused, and these rules never fire: {', '.join(blind)}. {remedy}."


# Rules that never fire


def _never(policy: Policy, rule: Rule) -> str:
    """Return why a rule can never fire, `""` where it can."""
    return why_it_never_fires(rule, policy.checks, policy.refuse) or _too_late(policy, rule, matched_by(rule, policy.checks, policy.refuse))


def _never_here(policy: Policy, rule: Rule, model: ModelNames | None, guard: GuardOptions | None) -> str:
    """Return why a rule can never fire with this model and this guard, `""` where it can."""
    if guard is not None and rule.cause and not guard.diagnose:
        return "it asks for a cause, and with diagnose=False there is none"
    return _not_in(model, matched_by(rule, policy.checks, policy.refuse), rule.layer) if model is not None else ""


def _partly(policy: Policy, rule: Rule) -> Iterator[str]:
    """Yield why a rule that matches refused and other steps never fires for a refused one."""
    refused = [one for one in matched_by(rule, policy.checks, policy.refuse) if one.moment == "refused"]
    reason = _too_late(policy, rule, refused) if refused else ""
    if reason:
        yield f"it never fires for a refused step: {reason}"


def _too_late(policy: Policy, rule: Rule, seen: Sequence[Occurrence]) -> str:
    """Return which rule ends training before this one can fire for any of `seen`, `""` where none certainly does."""
    ends = [other for other in _endings(policy, rule, seen) if _before(other.after, rule.after, strictly=True)]
    if ends:
        return f"it fires only {rule.after.sentence()}, and rule {ends[0].name!r} ends training {ends[0].after.sentence()}"
    longest = policy.longest_trouble
    refused = {(one.site, one.kind, one.moment) for one in seen} <= REFUSED
    if refused and longest is not None and _streak(rule.after) > longest:
        return f"it fires only {rule.after.sentence()}, and training ends after at most {longest} bad steps in a row"
    return ""


def _set_aside(policy: Policy, rule: Rule) -> Iterator[str]:
    """Yield that another rule ends training whenever this one fires, so that its changes are never made."""
    if rule.ladder[0].terminal or not rule.ladder[0].changes:
        return
    seen = matched_by(rule, policy.checks, policy.refuse)
    ends = [other for other in _endings(policy, rule, seen) if _before(other.after, rule.after, strictly=False)]
    if ends:
        changes = " and ".join(action.name for action in rule.ladder[0].do if action.changes)
        yield f"{changes} is never done, as rule {ends[0].name!r} ends training whenever this one fires"


def _endings(policy: Policy, rule: Rule, seen: Sequence[Occurrence]) -> list[Rule]:
    """Return the other rules that match everything that this one does, and end training as soon as they fire."""
    return [
        other
        for other in policy.rules
        if other is not rule and other.enabled and other.ladder[0].terminal and _is_unconditional(other)
        and set(seen) <= set(matched_by(other, policy.checks, policy.refuse))
    ]


def _is_unconditional(rule: Rule) -> bool:
    """Whether site, kind and moment alone decide that the rule matches."""
    narrows = rule.layer or rule.cause or rule.unless.on or rule.unless.cause
    return not narrows and rule.magnitude.min_abs is None and rule.magnitude.min_share is None


def _before(ending: Condition, other: Condition, strictly: bool) -> bool:
    """Whether `ending` has been met whenever `other` is, for two rules of which the first matches whatever the second does.

    Args:
        strictly: at an earlier step, not at the same one.
    """
    if isinstance(other, conditions.AnyOf):
        return all(_before(ending, part, strictly) for part in other.parts)
    if isinstance(other, conditions.AllOf):
        return any(_before(ending, part, strictly) for part in other.parts)
    if isinstance(ending, conditions.AnyOf):
        return any(_before(part, other, strictly) for part in ending.parts)
    most = _times(other) - strictly
    if isinstance(ending, conditions.Immediately):
        return most >= 1
    if isinstance(ending, conditions.Total):
        return most >= ending.steps
    if isinstance(ending, conditions.Consecutive) and isinstance(other, conditions.Consecutive):
        return most >= ending.steps
    enough = isinstance(ending, conditions.Window) and most >= ending.bounds[0]
    return enough and isinstance(other, conditions.Window) and other.horizon <= ending.horizon


def _times(condition: Condition) -> int:
    """Return the minimum number of matching steps before a simple condition is met."""
    if isinstance(condition, conditions.Count):
        return condition.steps
    return condition.bounds[0] if isinstance(condition, conditions.Window) else 1


def _streak(condition: Condition) -> int:
    """Return the minimum number of matching steps of one bad run before a condition is met."""
    if isinstance(condition, conditions.AnyOf):
        return min(_streak(part) for part in condition.parts)
    if isinstance(condition, conditions.AllOf):
        return max(_streak(part) for part in condition.parts)
    return condition.steps if isinstance(condition, conditions.Consecutive) else 1


# Rungs that are never reached, and actions that can never be done


def _unreachable(rule: Rule) -> Iterator[str]:
    path = ""
    for number, rung in enumerate(rule.ladder):
        more = number + 1 < len(rule.ladder)
        if rung.terminal and rung.limit is not None:
            yield f"{path}limit has no effect on an action that ends training"
        if more and rung.terminal:
            yield f"{path}otherwise is never reached, as training has ended before"
            return
        if more and rung.limit is None:
            yield f"{path}otherwise is never reached without a limit"
            return
        spacing = max(rule.after.needs(True) or 1, rule.cooldown + 1)
        limit = rung.limit
        if more and limit is not None and limit.per_steps is not None and limit.times * spacing >= limit.per_steps:
            yield f"{path}otherwise is never reached, as it fires at most every {spacing} steps, and limit.per_steps is {limit.per_steps}"
            return
        path += "otherwise."


def _actions(policy: Policy, rule: Rule, guard: GuardOptions | None) -> Iterator[str]:
    done = [action for rung in rule.ladder for action in rung.do]
    for action in done:
        if isinstance(action, LowerLr) and action.recover_after is None and action.ramp != LowerLr().ramp:
            yield "ramp has no effect without recover_after"
        elif isinstance(action, Rollback) and action.depth > policy.snapshot.keep:
            yield f"rollback.depth = {action.depth} exceeds the number of snapshots that are kept, snapshot.keep = {policy.snapshot.keep}"
        elif isinstance(action, FixLossScale) and action.floor < policy.checks.loss_scale.min_value and policy.checks.loss_scale.enabled:
            least = policy.checks.loss_scale.min_value
            yield f"fix_loss_scale.floor = {action.floor:g} allows what checks.loss_scale.min_value = {least:g} treats as a collapse"
        elif guard is not None and isinstance(action, Quarantine) and not guard.directory:
            yield "quarantine saves nothing, as NanGuard has no directory"
        elif guard is not None and isinstance(action, Call) and action.function not in guard.functions:
            meant = nearest(action.function, guard.functions)
            tail = f" (did you mean {meant!r}?)" if meant else f": write NanGuard(functions={{{action.function!r}: ...}})"
            yield f"call names {action.function!r}, which is not among the functions of NanGuard{tail}"


def _settings(policy: Policy) -> Iterator[str]:
    for entry in fields(Checks):
        check = getattr(policy.checks, entry.name)
        given = {"enabled": check.enabled, "max_abs": getattr(check, "max_abs", None)}
        usual = {"enabled": True, "max_abs": getattr(entry.default, "max_abs", None)}
        yield from _idle(field_path("checks", entry.name), entry.name, {word: given[word] for word in given if given[word] != usual[word]})
    for section in policy.layers:
        for site, table in section.sites.items():
            yield from _idle(field_path("layers", section.glob, site), site, table, of_layer=True)


def _idle(path: str, site: str, given: Mapping[str, object], of_layer: bool = False) -> Iterator[str]:
    """Yield a sentence for each setting of a site that is never read."""
    if "enabled" in given and (of_layer or site not in SWITCHED):
        yield f"{path}.enabled has no effect: {site} is always checked."
    if "max_abs" in given and site not in LIMITED:
        yield f"{path}.max_abs has no effect: only {', '.join(LIMITED)} are compared with a limit."


# Names that the model does not have

ABSENT = {
    "statistics": "no moving statistics (no BatchNormalization or Normalization)",
    "slots": "no optimizer slots",
    "loss_scale": "no loss scale (its optimizer is no LossScaleOptimizer)",
    "weights": "no weights",
    "gradients": "no trainable weights",
}
"""What is missing in a model that has nothing at a site."""


def _not_in(model: ModelNames, seen: Sequence[Occurrence], globs: Sequence[str]) -> str:
    """Return why a rule matches nothing of the model, `""` where it may match something."""
    there = [one for one in seen if model.paths.get(one.site) != ()]
    if not there:
        return f"the model {model.name!r} has " + " and ".join(dict.fromkeys(ABSENT.get(one.site, f"no {one.site}") for one in seen))
    if not globs or any(_may_match(model, one.site, globs) for one in there):
        return ""
    return _no_layer(model, [one.site for one in there], globs)


def _idle_globs(policy: Policy, rule: Rule, model: ModelNames) -> Iterator[str]:
    """Yield a sentence for each glob of a rule that matches nothing, where another one of its globs does."""
    seen = matched_by(rule, policy.checks, policy.refuse)
    yield from (reason for glob in rule.layer if (reason := _not_in(model, seen, [glob])))


def _may_match(model: ModelNames, site: str, globs: Sequence[str]) -> bool:
    paths = model.paths.get(site)
    return paths is None or any(matches_path(path, glob) for path in paths for glob in globs)


def _no_layer(model: ModelNames, sites: Sequence[str], globs: Sequence[str]) -> str:
    """Return a sentence: no path matches the globs, and which name is the nearest in spelling."""
    paths = [path for site in sites for path in model.paths.get(site, ())]
    known = dict.fromkeys(part for path in paths for part in path.split("/"))
    meant = next((near for glob in globs if (near := nearest(glob.strip("*"), known))), "")
    tail = f" (did you mean {meant!r}?)" if meant else f" (there is {paths[0]!r})" if paths else ""
    return f"nothing in the model {model.name!r} matches the glob {' or '.join(map(repr, globs))}{tail}"


def _section(model: ModelNames, section: LayerChecks) -> Iterator[str]:
    known = [site for site in section.sites if site in model.paths]
    if len(known) == len(section.sites) and not any(_may_match(model, site, [section.glob]) for site in known):
        sites = [site for site in known if model.paths[site]] or ["weights"]
        yield f"{field_path('layers', section.glob)}: {_no_layer(model, sites, [section.glob])}."
