"""Lint rules: a hazard that is visible before training, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from keras_nanguard._lint.subject import Subject

Site = tuple[str, str]
"""Path of the layer, variable, loss or metric (`""` for the model as a whole), and the
observation."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """One hazard in one model.

    Attributes:
        code: code of the rule.
        severity: `"error"` (it causes a failure or wrong results), `"warning"` (it may) or `"note"`
            (for information).
        path: path of the layer or variable, name of the loss or metric, or `""`.
        detail: the observation, one sentence.
        fix: the remedy, one sentence.
    """

    code: str
    severity: str
    path: str
    detail: str
    fix: str


RULES: dict[str, Callable[[Subject], Iterator[Hazard]]] = {}
"""What yields the hazards of each rule, by its code. `docs/lint.md` has the consequences of each, a
program with the hazard and the corrected program; the tests run both."""


def rule(
    severity: Literal["error", "warning", "note"],
    *,
    fix: str,
    each: Literal["", "layers", "operations", "outputs"] = "",
    of: Collection[str] = (),
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add a rule: the function below, whose name is its code, and whose docstring says the hazard.

    Args:
        severity, fix: see `Hazard`.
        each: `"layers"`, `"operations"` or `"outputs"` of the subject, for each of which the
            function returns the observation, or `""`. Without it the function takes the subject
            and yields the sites of the hazard.
        of: their classes; all by default.
    """

    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def find(subject: Subject) -> Iterator[Hazard]:
            sites: Iterable[Site]
            if each:
                chosen = (one for one in getattr(subject, each) if not of or one.kind in of)
                sites = ((one.path, function(one)) for one in chosen)
            else:
                sites = function(subject)
            for path, detail in sites:
                if detail:
                    yield Hazard(function.__name__, severity, path, detail, fix)

        RULES[function.__name__] = find
        return function

    return add
