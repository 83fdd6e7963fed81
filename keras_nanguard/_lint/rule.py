"""Lint rules: a hazard that is visible before training, its consequences, the remedy, and two sample programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from keras_nanguard._lint.subject import Subject

__all__ = ["Hazard", "Rule", "Site"]

Site = tuple[str, str]
"""Path of the layer, variable, loss or metric (`""` for the model as a whole), and the observation."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """One hazard in one model.

    Attributes:
        code: code of the rule.
        severity: `"error"` (it causes a failure), `"warning"` (it may cause one) or `"note"` (for information).
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
    """One kind of hazard.

    Attributes:
        code: short name in snake case, by which the rule is ignored.
        severity: severity of its hazards.
        title: the hazard in a few words.
        why: the consequences, and how they arise.
        fix: the remedy.
        invalid: a program for which the rule, and no other rule of its severity or worse, reports a hazard.
        valid: the corrected program, for which no rule reports a hazard.
        check: yields the sites of the hazard.
    """

    code: str
    severity: str
    title: str
    why: str
    fix: str
    invalid: str
    valid: str
    check: Callable[[Subject], Iterable[Site]]

    def find(self, subject: Subject) -> list[Hazard]:
        """Return the hazards of this kind in a model."""
        return [Hazard(self.code, self.severity, path, detail, self.fix) for path, detail in self.check(subject)]
