"""What can happen at all: which kind of trouble is seen at which site and when, and why a rule meets none of it.

`SEEN` is the table of everything that a guarded run can show to its policy; a test holds it together with the code that
makes findings. Level 0: imports no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from keras_nanguard._core.incident import SITES
from keras_nanguard._policy.rules import Rule
from keras_nanguard._policy.settings import Checks, on_path

__all__ = ["SEEN", "Seen", "seen_by", "why_never"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One kind of trouble at one site, at one moment.

    Attributes:
        site, kind: as in a `Finding`.
        moment: `refused`, `committed`, or `before_training`.
        path: whether its finding names a place (a layer's variable, an input, an output, a metric).
        counts: whether its finding counts NaN and Inf entries.
        value: whether its finding has a value other than 0.
        needs: the check that looks for it, `""` where it is always looked for.
    """

    site: str
    kind: str
    moment: str
    path: bool = False
    counts: bool = False
    value: bool = False
    needs: str = ""


def _seen(site: str, kind: str, moments: str, tells: str = "", needs: str = "") -> Iterable[Seen]:
    flags = {name: name in tells.split() for name in ("path", "counts", "value")}
    return (Seen(site, kind, moment, **flags, needs=needs) for moment in moments.split())


SEEN: tuple[Seen, ...] = (
    *_seen("inputs", "nonfinite", "refused", "path counts"),
    *_seen("targets", "nonfinite", "refused", "path counts"),
    *_seen("state", "nonfinite", "refused before_training", "path counts"),
    *_seen("state", "out_of_range", "refused before_training", "path value"),
    *_seen("outputs", "nonfinite", "refused", "path counts"),
    *_seen("loss", "nonfinite", "refused", "counts value"),
    *_seen("loss", "explosion", "committed", "value", needs="trend"),
    *_seen("loss", "spike", "committed", "value", needs="trend"),
    *_seen("gradients", "nonfinite", "refused", "path counts"),
    *_seen("gradients", "explosion", "refused", "value"),
    *_seen("gradients", "explosion", "committed", "value", needs="trend"),
    *_seen("gradients", "spike", "committed", "value", needs="trend"),
    *_seen("gradients", "stuck", "committed", "path", needs="gradients"),
    *_seen("weights", "nonfinite", "refused committed", "path counts"),
    *_seen("weights", "explosion", "refused", "value"),
    *_seen("statistics", "nonfinite", "refused committed", "path counts"),
    *_seen("statistics", "explosion", "refused", "value"),
    *_seen("statistics", "spike", "committed", "path value", needs="statistics"),
    *_seen("statistics", "stuck", "committed", "path", needs="statistics stuck_after"),
    *_seen("slots", "nonfinite", "refused committed", "path counts"),
    *_seen("slots", "explosion", "refused", "value"),
    *_seen("loss_scale", "collapse", "refused", "value"),
    *_seen("loss_scale", "collapse", "committed", "path value", needs="loss_scale"),
    *_seen("loss_scale", "out_of_range", "refused", "value"),
    *_seen("loss_scale", "out_of_range", "committed", "path value", needs="loss_scale"),
    *_seen("validation", "nonfinite", "committed", "path value"),
    *_seen("validation", "out_of_range", "committed", "path value", needs="statistics"),
    *_seen("predictions", "nonfinite", "committed", "path counts"),
)
"""Everything that is seen under a policy that refuses bad steps. One that does not commits them all."""

ONLY_COMMITTED = frozenset({"spike", "training_flag"})
"""Causes that the diagnosis of a refused step never names."""

Narrowing = tuple[Callable[[Rule, Checks, Seen], bool], Callable[[Rule, Sequence[Seen]], str]]
"""What of a rule a trouble has to meet, and the reason to give where none does: of the rule, and what was left."""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(dict.fromkeys(words), key=lambda word: SITES.index(word) if word in SITES else 0))


def _kinds_there(rule: Rule, left: Sequence[Seen]) -> str:
    return f"{_listed(rule.on)} never shows {_listed(rule.kind)}, only {_listed(one.kind for one in left)}"


def _moments(rule: Rule, left: Sequence[Seen]) -> str:
    what = _listed(one.site for one in left) if rule.on else _listed(one.kind for one in left)
    return f"{what} is never seen when = {rule.when!r}, only when {' or '.join(dict.fromkeys(one.moment for one in left))}"


def _at(rule: Rule, moment: str) -> bool:
    meets = {
        "any": ("refused", "committed", "before_training"),
        "committed": ("committed", "before_training"),
        "from_start": ("refused",),
    }
    return moment in meets.get(rule.when, (rule.when,))


def _looked_for(rule: Rule, checks: Checks, one: Seen) -> bool:
    return all(checks.statistics.stuck_after if word == "stuck_after" else getattr(checks, word).enabled for word in one.needs.split())


def _magnitude(rule: Rule, checks: Checks, one: Seen) -> bool:
    return (not rule.magnitude.min_abs or one.value) and (not rule.magnitude.min_share or one.counts)


NARROWINGS: tuple[Narrowing, ...] = (
    (lambda r, c, one: not r.on or one.site in r.on, lambda r, left: f"nothing is ever reported at {_listed(r.on)}"),
    (lambda r, c, one: not r.kind or one.kind in r.kind, _kinds_there),
    (lambda r, c, one: _at(r, one.moment), _moments),
    (_looked_for, lambda r, left: f"checks.{_listed(one.needs.split()[0] for one in left)} is switched off"),
    (
        lambda r, c, one: not r.layer or one.path or any(on_path("", glob) for glob in r.layer),
        lambda r, left: f"what is found at {_listed(one.site for one in left)} names no layer, and layer is given",
    ),
    (_magnitude, lambda r, left: f"what is found at {_listed(one.site for one in left)} has no such magnitude"),
    (lambda r, c, one: one.site not in r.unless.on, lambda r, left: "unless.on takes out all of its sites"),
    (lambda r, c, one: not r.cause or bool(set(r.cause) - set(r.unless.cause)), lambda r, left: "unless.cause takes out all of its causes"),
    (
        lambda r, c, one: not r.cause or one.moment != "refused" or not set(r.cause) <= ONLY_COMMITTED,
        lambda r, left: f"no refused step has the cause {_listed(r.cause)}",
    ),
)
"""How the fields of a rule narrow down what it looks at, one after the other."""


def seen_by(rule: Rule, checks: Checks, refuse: bool = True) -> tuple[Seen, ...]:
    """Return everything that can happen and that the rule matches."""
    return _narrowed(rule, checks, refuse)[0]


def why_never(rule: Rule, checks: Checks, refuse: bool = True) -> str:
    """Return why nothing that the rule looks at can happen, `""` where something can.

    Args:
        rule: the rule.
        checks: the checks of its policy.
        refuse: whether its policy refuses bad steps.
    """
    return _narrowed(rule, checks, refuse)[1]


def _narrowed(rule: Rule, checks: Checks, refuse: bool) -> tuple[tuple[Seen, ...], str]:
    left: tuple[Seen, ...] = SEEN
    if not refuse:
        left = tuple(replace(one, moment="committed") if one.moment == "refused" else one for one in SEEN)
    for meets, reason in NARROWINGS:
        rest = tuple(one for one in left if meets(rule, checks, one))
        if not rest:
            return (), reason(rule, left)
        left = rest
    return left, ""
