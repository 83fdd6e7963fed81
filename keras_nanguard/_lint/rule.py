"""What a lint rule is: a hazard that can be seen before training, why it is one, what to do, and two samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from keras_nanguard._lint.subject import Subject

__all__ = ["Hazard", "Rule", "Site"]

Site = tuple[str, str]
"""Path of the layer, variable, loss or metric (`""` for the model as a whole), and what was seen there."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """One hazard in one model.

    Attributes:
        code: code of the rule.
        severity: `"error"` (it will go wrong), `"warning"` (it may) or `"note"` (worth knowing).
        path: path of the layer or variable, name of the loss or metric, or `""`.
        detail: what was seen, one sentence.
        fix: what to do, one sentence.
    """

    code: str
    severity: str
    path: str
    detail: str
    fix: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One hazard that lint looks for.

    Attributes:
        code: short name in snake case, by which the rule is ignored or looked up.
        severity: severity of its hazards.
        title: the hazard in a few words.
        why: what goes wrong, and how.
        fix: what to do.
        invalid: a program in which the rule, and no other of its severity or worse, finds something.
        valid: the same program put right; no rule finds anything.
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
