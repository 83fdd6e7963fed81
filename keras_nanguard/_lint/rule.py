"""Lint rules: a hazard that is visible before training, its consequences, the remedy, and two
sample programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from keras_nanguard._lint.subject import Subject

__all__ = ["REGISTERED", "Check", "Hazard", "Rule", "Site", "rule"]

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
    """One kind of hazard.

    Attributes:
        code: short name in snake case, by which the rule is ignored: that of its function.
        severity: severity of its hazards.
        title: the hazard in a few words.
        why: the consequences, and how they arise.
        fix: the remedy.
        invalid: a program for which the rule, and no other rule of its severity or worse, reports a
            hazard.
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
    check: Check

    def find(self, subject: Subject) -> list[Hazard]:
        """Return the hazards of this kind in a model."""
        sites = self.check(subject)
        return [Hazard(self.code, self.severity, path, detail, self.fix) for path, detail in sites]


REGISTERED: list[Rule] = []
"""Every rule of the modules that were imported, in the order of their lines."""


def rule(
    severity: str, title: str, *, why: str, fix: str, invalid: str, valid: str, program: str = "{}"
) -> Callable[[Check], Check]:
    """Make a rule of the function below, which yields the sites of the hazard.

    Args:
        severity, title, why, fix: see `Rule`.
        invalid, valid: what distinguishes the two sample programs.
        program: both programs, with the placeholder `{}` for what distinguishes them.
    """

    def register(check: Check) -> Check:
        programs = (program.replace("{}", invalid), program.replace("{}", valid))
        code = getattr(check, "__name__", "")
        REGISTERED.append(Rule(code, severity, title, why, fix, *programs, check))
        return check

    return register
