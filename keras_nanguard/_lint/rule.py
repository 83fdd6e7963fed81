"""Lint rules: a hazard that is visible before training, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from keras_nanguard._lint.subject import Output, Placed, Subject

Site = tuple[str, str]
"""Path of the layer, variable, loss or metric (`""` for the model as a whole), and the
observation."""

Check = Callable[[Subject], Iterable[Site]]
"""Yields the sites of a hazard."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """One hazard in one model.

    Attributes:
        code: code of the rule.
        severity: `"error"` (it causes a failure), `"warning"` (it may cause one) or `"note"` (for
            information).
        path: path of the layer or variable, name of the loss or metric, or `""`.
        detail: the observation, one sentence.
        fix: the remedy, one sentence.
    """

    code: str
    severity: str
    path: str
    detail: str
    fix: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of hazard. `docs/lint.md` has its consequences, a program with the hazard and the
    corrected program; the tests run both.

    Attributes:
        code: short name in snake case, by which the rule is ignored: that of its function.
        severity: severity of its hazards.
        title: the hazard in a few words: the docstring of its function.
        fix: the remedy.
        check: yields the sites of the hazard.
    """

    code: str
    severity: str
    title: str
    fix: str
    check: Check

    def find(self, subject: Subject) -> list[Hazard]:
        """Return the hazards of this kind in a model."""
        sites = self.check(subject)
        return [Hazard(self.code, self.severity, path, detail, self.fix) for path, detail in sites]


def rule(
    severity: str, *, fix: str, each: Callable[[Subject], Iterable[Any]] | None = None
) -> Callable[[Callable[[Any], Any]], Rule]:
    """Make a rule of the function below.

    Args:
        severity, fix: see `Rule`.
        each: returns layers, operations or outputs, for each of which the function returns the
            observation, or `""`. Without it the function takes the subject and yields the sites of
            the hazard.
    """

    def register(function: Callable[[Any], Any]) -> Rule:
        def check(subject: Subject) -> Iterable[Site]:
            if each is not None:
                return [(one.path, found) for one in each(subject) if (found := function(one))]
            sites: Iterable[Site] = function(subject)
            return sites

        title = (function.__doc__ or "").removesuffix(".")
        return Rule(function.__name__, severity, title, fix, check)

    return register


def rules_of(module: ModuleType) -> list[Rule]:
    """Return the rules of a module, in the order of its lines."""
    return [one for one in vars(module).values() if isinstance(one, Rule)]


def layers(*kinds: str) -> Callable[[Subject], list[Placed]]:
    """Return the argument `each` of a rule about the layers of some classes, or about all."""
    return lambda subject: [one for one in subject.layers if not kinds or one.kind in kinds]


def operations(*kinds: str) -> Callable[[Subject], list[Placed]]:
    """Return the argument `each` of a rule about the operations of some classes."""
    return lambda subject: [one for one in subject.operations if one.kind in kinds]


def outputs(subject: Subject) -> tuple[Output, ...]:
    """Return the outputs: the argument `each` of a rule about them."""
    return subject.outputs
