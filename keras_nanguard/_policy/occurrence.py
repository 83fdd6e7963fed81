"""What can occur: which kind of trouble is found at which site and when, and why a rule matches none of it.

`OCCURRENCES` is the table of everything that a guarded run can report to its policy; a test compares it with the code
that makes findings. Imports no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from keras_nanguard._core.incident import SITES
from keras_nanguard._policy.rules import Rule
from keras_nanguard._policy.settings import Checks, matches_path

__all__ = ["OCCURRENCES", "Occurrence", "matched_by", "why_it_never_fires"]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One kind of trouble at one site, at one moment.

    Attributes:
        site, kind: as in a `Finding`.
        moment: `refused`, `committed`, or `before_training`.
        path: whether its finding has a path (a variable of a layer, an input, an output, a metric).
        counts: whether its finding counts NaN and Inf entries.
        value: whether its finding has a value other than 0.
        needs: the check that finds it, `""` where it is always checked.
    """

    site: str
    kind: str
    moment: str
    path: bool = False
    counts: bool = False
    value: bool = False
    needs: str = ""


def _occurrences(site: str, kind: str, moments: str, reports: str = "", needs: str = "") -> Iterable[Occurrence]:
    flags = {name: name in reports.split() for name in ("path", "counts", "value")}
    return (Occurrence(site, kind, moment, **flags, needs=needs) for moment in moments.split())


OCCURRENCES: tuple[Occurrence, ...] = (
    *_occurrences("inputs", "nonfinite", "refused", "path counts"),
    *_occurrences("targets", "nonfinite", "refused", "path counts"),
    *_occurrences("state", "nonfinite", "refused before_training", "path counts"),
    *_occurrences("state", "out_of_range", "refused before_training", "path value"),
    *_occurrences("outputs", "nonfinite", "refused", "path counts"),
    *_occurrences("loss", "nonfinite", "refused", "counts value"),
    *_occurrences("loss", "divergence", "committed", "value", needs="divergence"),
    *_occurrences("gradients", "nonfinite", "refused", "path counts"),
    *_occurrences("gradients", "explosion", "refused", "value"),
    *_occurrences("gradients", "stuck", "committed", "path", needs="gradients"),
    *_occurrences("weights", "nonfinite", "refused committed", "path counts"),
    *_occurrences("weights", "explosion", "refused", "value"),
    *_occurrences("weights", "out_of_range", "committed", "path value"),
    *_occurrences("weights", "divergence", "committed", "path value", needs="divergence"),
    *_occurrences("statistics", "nonfinite", "refused committed", "path counts"),
    *_occurrences("statistics", "explosion", "refused", "value"),
    *_occurrences("statistics", "out_of_range", "committed", "path value", needs="statistics"),
    *_occurrences("statistics", "spike", "committed", "path value", needs="statistics"),
    *_occurrences("statistics", "stuck", "committed", "path", needs="statistics stuck_after"),
    *_occurrences("slots", "nonfinite", "refused committed", "path counts"),
    *_occurrences("slots", "explosion", "refused", "value"),
    *_occurrences("slots", "out_of_range", "committed", "path value"),
    *_occurrences("loss_scale", "collapse", "refused", "value"),
    *_occurrences("loss_scale", "collapse", "committed", "path value", needs="loss_scale"),
    *_occurrences("loss_scale", "out_of_range", "refused", "value"),
    *_occurrences("loss_scale", "out_of_range", "committed", "path value", needs="loss_scale"),
    *_occurrences("validation", "nonfinite", "committed", "path value"),
    *_occurrences("validation", "out_of_range", "committed", "path value", needs="statistics"),
    *_occurrences("predictions", "nonfinite", "committed", "path counts"),
)
"""Everything that occurs under a policy that refuses bad steps. A policy that does not refuse commits them all."""

ONLY_COMMITTED = frozenset({"spike", "training_flag"})
"""Causes that the diagnosis of a refused step never names."""

Filter = tuple[Callable[[Rule, Checks, Occurrence], bool], Callable[[Rule, Sequence[Occurrence]], str]]
"""Whether a rule matches an occurrence, and the reason to give where it matches none of those that were left."""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(dict.fromkeys(words), key=lambda word: SITES.index(word) if word in SITES else 0))


def _kinds_there(rule: Rule, left: Sequence[Occurrence]) -> str:
    return f"{_listed(rule.on)} never reports {_listed(rule.kind)}, only {_listed(one.kind for one in left)}"


def _moments(rule: Rule, left: Sequence[Occurrence]) -> str:
    what = _listed(one.site for one in left) if rule.on else _listed(one.kind for one in left)
    return f"{what} never occurs when = {rule.when!r}, only when {' or '.join(dict.fromkeys(one.moment for one in left))}"


def _at(rule: Rule, moment: str) -> bool:
    meets = {
        "any": ("refused", "committed", "before_training"),
        "committed": ("committed", "before_training"),
        "from_start": ("refused",),
    }
    return moment in meets.get(rule.when, (rule.when,))


def _checked(rule: Rule, checks: Checks, one: Occurrence) -> bool:
    return all(checks.statistics.stuck_after if word == "stuck_after" else getattr(checks, word).enabled for word in one.needs.split())


def _magnitude(rule: Rule, checks: Checks, one: Occurrence) -> bool:
    return (not rule.magnitude.min_abs or one.value) and (not rule.magnitude.min_share or one.counts)


FILTERS: tuple[Filter, ...] = (
    (lambda r, c, one: not r.on or one.site in r.on, lambda r, left: f"nothing is ever reported at {_listed(r.on)}"),
    (lambda r, c, one: not r.kind or one.kind in r.kind, _kinds_there),
    (lambda r, c, one: _at(r, one.moment), _moments),
    (_checked, lambda r, left: f"checks.{_listed(one.needs.split()[0] for one in left)} is disabled"),
    (
        lambda r, c, one: not r.layer or one.path or any(matches_path("", glob) for glob in r.layer),
        lambda r, left: f"what is found at {_listed(one.site for one in left)} names no layer, and the rule has layer",
    ),
    (_magnitude, lambda r, left: f"what is found at {_listed(one.site for one in left)} has no such magnitude"),
    (lambda r, c, one: one.site not in r.unless.on, lambda r, left: "unless.on excludes all of its sites"),
    (lambda r, c, one: not r.cause or bool(set(r.cause) - set(r.unless.cause)), lambda r, left: "unless.cause excludes all of its causes"),
    (
        lambda r, c, one: not r.cause or one.moment != "refused" or not set(r.cause) <= ONLY_COMMITTED,
        lambda r, left: f"no refused step has the cause {_listed(r.cause)}",
    ),
)
"""How the fields of a rule restrict what it matches, one after the other."""


def matched_by(rule: Rule, checks: Checks, refuse: bool = True) -> tuple[Occurrence, ...]:
    """Return everything that can occur and that the rule matches."""
    return _filtered(rule, checks, refuse)[0]


def why_it_never_fires(rule: Rule, checks: Checks, refuse: bool = True) -> str:
    """Return why nothing that the rule matches can occur, `""` where something can.

    Args:
        rule: the rule.
        checks: the checks of its policy.
        refuse: whether its policy refuses bad steps.
    """
    return _filtered(rule, checks, refuse)[1]


def _filtered(rule: Rule, checks: Checks, refuse: bool) -> tuple[tuple[Occurrence, ...], str]:
    left: tuple[Occurrence, ...] = OCCURRENCES
    if not refuse:
        left = tuple(replace(one, moment="committed") if one.moment == "refused" else one for one in OCCURRENCES)
    for meets, reason in FILTERS:
        rest = tuple(one for one in left if meets(rule, checks, one))
        if not rest:
            return (), reason(rule, left)
        left = rest
    return left, ""
