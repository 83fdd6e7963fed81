"""What reports say by cause, from `page/causes.toml`: words of the printed line, code to paste."""

from __future__ import annotations

import sys
from pathlib import Path

from keras_nanguard._core.incident import Diagnosis

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ADVICE", "REASONS", "snippet"]

_CAUSES = tomllib.loads((Path(__file__).parent / "page" / "causes.toml").read_text("utf-8"))

REASONS, ADVICE, _SNIPPETS = (
    {cause: str(about[part]) for cause, about in _CAUSES.items() if part in about}
    for part in ("reason", "advice", "code")
)


def snippet(diagnosis: Diagnosis) -> str:
    """Return code to paste, or `""`. It has no name from the data except identifiers."""
    name = diagnosis.culprit_shown
    code = _SNIPPETS.get(diagnosis.cause, "")
    return code.replace("{name}", name if name.isidentifier() else "x")
