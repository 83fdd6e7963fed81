"""A policy in sentences: the text of `keras-nanguard check-policy`. Imports no backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.rules import Rule
from keras_nanguard._policy.settings import LIMITED, SWITCHED, Checks

__all__ = ["explain"]

MOMENTS = {
    "any": "",
    "refused": " of a refused step",
    "committed": " in a committed state",
    "before_training": " before the first step",
    "from_start": " of a refused step while no step has committed",
}


KINDS = {
    "nonfinite": "NaN or Inf",
    "explosion": "an explosion",
    "divergence": "a divergence",
    "spike": "a spike",
    "lasting_spike": "a spike that does not come back",
    "out_of_range": "a value out of range",
    "collapse": "a collapse",
    "stuck": "a value that never changes",
}


def explain(policy: Policy) -> str:
    """Return sentences, one per line, that say what a policy will do."""
    return "\n".join(line for part in (_title, _bound, _checks, _snapshots, _rules, _layers) for line in part(policy))


def _title(policy: Policy) -> Iterator[str]:
    if policy.title:
        yield f"Policy {policy.title}."


def _bound(policy: Policy) -> Iterator[str]:
    if not policy.refuse:
        yield "Bad steps are reported and are not refused."
    steps = policy.longest_trouble
    if steps is not None:
        yield f"A bad step is refused. If every step is bad, training ends after at most {_times(steps, 'step')}."
    elif policy.refuse:
        yield "A bad step is refused."


def _checks(policy: Policy) -> Iterator[str]:
    named = [(entry.name, getattr(policy.checks, entry.name)) for entry in fields(Checks)]
    off = [name for name, site in named if name in SWITCHED and not site.enabled]
    if off:
        yield f"It does not check {', '.join(off)} between two steps."
    limits = [f"{name} {site.max_abs:g}" for name, site in named if name in LIMITED and site.max_abs]
    if limits:
        yield f"Largest magnitudes allowed: {', '.join(limits)}."
    scale = policy.checks.loss_scale
    if scale.enabled:
        yield (
            f"The loss scale is valid from {scale.min_value:g} to {scale.max_value:g}; "
            f"dynamic scaling may handle {_times(scale.patience, 'overflow')} in a row."
        )
    found = policy.checks.divergence
    if found.enabled:
        yield "A run that stays finite is lost if it is no better than untrained, makes no progress, and a lower rate does far better."


def _snapshots(policy: Policy) -> Iterator[str]:
    snapshot = policy.snapshot
    if snapshot.every == 0:
        yield "It takes no snapshots."
        return
    where = "in host memory" if snapshot.storage == "memory" else "on disk"
    verified = f"after {_times(snapshot.good_after, 'good step')}" if snapshot.good_after else "at once"
    every = _times(snapshot.every, "step")
    yield f"It takes a snapshot every {every}, keeps {snapshot.keep} {where}, and counts one as verified {verified}."


def _rules(policy: Policy) -> Iterator[str]:
    for rule in policy.rules:
        yield f"Rule {rule.name}: {_rule(rule)}"


def _rule(rule: Rule) -> str:
    if not rule.enabled:
        return "disabled."
    kinds = " or ".join(KINDS[kind] for kind in rule.kind) or "any finding"
    what = f"{kinds}{' in ' + ', '.join(rule.on) if rule.on else ''}{MOMENTS[rule.when]}"
    narrowed = "".join(_narrowed(rule))
    cooldown = f" It then does not fire for {_times(rule.cooldown, 'step')}." if rule.cooldown else ""
    reset = f" After {_times(rule.reset_after, 'good step')} in a row its counts are reset." if rule.reset_after else ""
    return f"on {what}{narrowed}, {rule.after.sentence()}, the guard {_ladder(rule)}.{cooldown}{reset}"


def _narrowed(rule: Rule) -> Iterator[str]:
    if rule.layer:
        yield f", at layers {', '.join(rule.layer)}"
    if rule.cause:
        yield f", caused by {' or '.join(rule.cause)}"
    if rule.magnitude.min_abs is not None:
        yield f", of magnitude {rule.magnitude.min_abs:g} or more"
    if rule.magnitude.min_share is not None:
        yield f", in {rule.magnitude.min_share * 100:g}% of the entries or more"
    sites, causes = " or ".join(rule.unless.on), " or ".join(rule.unless.cause)
    exceptions = [*([f"{sites} are bad too"] if sites else ()), *([f"the cause is {causes}"] if causes else ())]
    if exceptions:
        yield f", unless {' or '.join(exceptions)}"


def _ladder(rule: Rule) -> str:
    parts = [rung.sentence() for rung in rule.ladder]
    if rule.ladder[-1].limit is not None:
        parts.append("does nothing more")
    return ", then ".join(parts)


def _layers(policy: Policy) -> Iterator[str]:
    for section in policy.layers:
        parts = [f"{site} {_setting(given)}" for site, given in section.to_file().items()]
        yield f"Layers that match {section.glob!r} differ: {'; '.join(parts)}."


def _setting(given: object) -> str:
    if isinstance(given, dict):
        return ", ".join(f"{word} = {value}" for word, value in given.items())
    return "checked" if given else "not checked"


def _times(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
