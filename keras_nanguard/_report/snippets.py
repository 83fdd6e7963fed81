"""What reports say by cause: words of the printed line, code to paste."""

from __future__ import annotations

from keras_nanguard._core.cause_words import CAUSE_WORDS
from keras_nanguard._core.incident import Diagnosis

REASONS, ADVICE, _SNIPPETS = (
    {cause: str(about[part]) for cause, about in CAUSE_WORDS.items() if part in about}
    for part in ("reason", "brief", "code")
)


def snippet(diagnosis: Diagnosis) -> str:
    """Return code to paste, or `""`. It has no name from the data except identifiers."""
    name = diagnosis.culprit_shown
    code = _SNIPPETS.get(diagnosis.cause, "")
    return code.replace("{name}", name if name.isidentifier() else "x")
