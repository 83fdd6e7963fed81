"""`lint`: numeric hazards that are visible in a model before training.

`docs/lint.md` explains every rule, with a program that has the hazard and the corrected one; the
tests run both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keras_nanguard._core.display import TableReport
from keras_nanguard._core.errors import GuardError, as_words, expected, no_model, require_keras_3
from keras_nanguard._core.plain_values import times
from keras_nanguard._files.live import is_model
from keras_nanguard._files.problems import SEVERITIES
from keras_nanguard._lint import rules_compiled, rules_layers  # noqa: F401  they add their rules
from keras_nanguard._lint.rule import RULES, Hazard
from keras_nanguard._lint.subject import Subject

FORMAT = 1
"""Version of the JSON format of a `LintReport`."""


@dataclass(frozen=True, slots=True)
class LintReport(TableReport):
    """The hazards of one model, worst first.

    Attributes:
        model: name of the model.
        hazards: the hazards that were found.
    """

    model: str
    hazards: tuple[Hazard, ...]

    @property
    def ok(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(hazard.severity == "note" for hazard in self.hazards)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version."""
        return {
            "format": FORMAT,
            "model": self.model,
            "clean": self.ok,
            "hazards": [asdict(hazard) for hazard in self.hazards],
        }

    def __repr__(self) -> str:
        return f"LintReport({self.model!r}, {times(len(self.hazards), 'hazard')})"

    def __str__(self) -> str:
        if not self.hazards:
            return f"{self.model}: no hazard found by {len(RULES)} rules."
        lines = []
        for one in self.hazards:
            at = f" at {one.path}" if one.path else ""
            lines.append(f"{one.severity} {one.code}{at}: {one.detail}. {one.fix}")
        return "\n".join(lines)

    def _table(self) -> Any:
        rows = [(one.severity, one.code, one.path, one.detail, one.fix) for one in self.hazards]
        head = ("", "hazard", "where", "observation", "remedy")
        return f"{self.model}: {times(len(rows), 'hazard')}.", (), head, rows


def lint(model: Any, x: Any = None, y: Any = None, *, ignore: Sequence[str] = ()) -> LintReport:
    """Check a model for numeric hazards before it is trained.

    The model is neither called nor changed. Code that is not visible (the graph of a subclassed
    model, a custom loss function) is not checked.

    Args:
        model: a built Keras model; rules about loss and optimizer apply if it is compiled.
        x: inputs as for `fit`, or `None`.
        y: targets as for `fit`, or `None`.
        ignore: codes of rules to disable, or a single one.

    Returns:
        The report.

    Raises:
        GuardError: if `model` is not a model, or `ignore` is no code or list of codes.

    Example:

        print(lint(model, x_train[:1000], y_train[:1000]))
    """
    require_keras_3(model)
    if not is_model(model):
        raise no_model(model, "lint {path}")
    ignored = as_words(ignore, "ignore")
    if unknown := set(ignored) - set(RULES):
        what, received = f"codes among {', '.join(sorted(RULES))}", f"ignore={sorted(unknown)}"
        raise GuardError(expected(what, received, "Correct it."))
    subject = Subject(model, x, y)
    chosen = (find for code, find in RULES.items() if code not in ignored)
    found = [hazard for find in chosen for hazard in find(subject)]
    found.sort(key=lambda hazard: SEVERITIES.index(hazard.severity))
    return LintReport(str(model.name), tuple(found))
