"""`lint`: numeric hazards that can be seen in a model before it is trained.

Every rule carries a program in which it finds something and the same program put right; both are run by the tests, and
`docs/lint.md` is written from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keras_nanguard._core.errors import GuardError, expected, no_model
from keras_nanguard._files.live import is_model
from keras_nanguard._lint import rules_data, rules_layers, rules_optimizer, rules_outputs
from keras_nanguard._lint.rule import Hazard, Rule
from keras_nanguard._lint.subject import Subject

__all__ = ["RULES", "Hazard", "LintReport", "Rule", "lint"]

FORMAT = 1
"""Number of the JSON form of a `LintReport`."""

RULES: tuple[Rule, ...] = (*rules_outputs.RULES, *rules_optimizer.RULES, *rules_layers.RULES, *rules_data.RULES)
"""Every rule there is."""

_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class LintReport:
    """The hazards of one model, worst first.

    Attributes:
        model: name of the model.
        hazards: what was found.
    """

    model: str
    hazards: tuple[Hazard, ...]

    @property
    def clean(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(hazard.severity == "note" for hazard in self.hazards)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format number."""
        return {
            "format": FORMAT,
            "model": self.model,
            "clean": self.clean,
            "hazards": [asdict(hazard) for hazard in self.hazards],
        }

    def __repr__(self) -> str:
        return f"LintReport({self.model!r}, {len(self.hazards)} hazards)"

    def __str__(self) -> str:
        if not self.hazards:
            return f"{self.model}: no hazard found by {len(RULES)} rules."
        return "\n".join(
            f"{one.severity} {one.code}{f' at {one.path}' if one.path else ''}: {one.detail}. {one.fix}"
            for one in self.hazards
        )


def lint(model: Any, x: Any = None, y: Any = None, *, ignore: Sequence[str] = ()) -> LintReport:
    """Look for numeric hazards in a model before it is trained.

    The model is neither called nor changed. What cannot be seen (the graph of a subclassed model, a loss that is a
    function of the user's own) is passed over in silence.

    Args:
        model: a built Keras model; rules about loss and optimizer apply where it is compiled.
        x: inputs as `fit` takes them, or `None`.
        y: targets as `fit` takes them, or `None`.
        ignore: codes of rules to leave out.

    Returns:
        The report.

    Raises:
        GuardError: if it is no model, or a code to ignore does not exist.

    Example:

        print(lint(model, x_train[:1000], y_train[:1000]))
    """
    if not is_model(model):
        raise no_model(model, "lint {path}")
    codes = {rule.code for rule in RULES}
    if unknown := set(ignore) - codes:
        raise GuardError(
            expected(f"codes among {', '.join(sorted(codes))}", f"ignore={sorted(unknown)}", "Correct it.")
        )
    subject = Subject(model, x, y)
    found = [hazard for rule in RULES if rule.code not in ignore for hazard in rule.find(subject)]
    return LintReport(str(model.name), tuple(sorted(found, key=lambda hazard: _SEVERITIES.index(hazard.severity))))
