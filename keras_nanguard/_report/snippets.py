"""Code to paste, for causes that code can fix."""

from __future__ import annotations

import sys
from pathlib import Path

from keras_nanguard._core.incident import Diagnosis

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["snippet"]

_SNIPPETS = tomllib.loads((Path(__file__).parent / "page" / "snippets.toml").read_text("utf-8"))


def snippet(diagnosis: Diagnosis) -> str:
    """Return code to paste, or `""`. It has no name from the data except identifiers."""
    name = diagnosis.culprit_shown
    code: str = _SNIPPETS.get(diagnosis.cause, "")
    return code.replace("{name}", name if name.isidentifier() else "x")
