"""The properties of each cause, from `causes.toml`, for decisions, reports and diagnoses.

Imports no backend.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "causes.toml").read_text("utf-8"))

CAUSE_WORDS: dict[str, dict[str, Any]] = _FILE["causes"]
"""The table of each cause."""

HINTS: dict[str, str] = _FILE["hints"]
"""Advice by the operation or layer that produced a bad value."""

DERIVATIVE_HINTS: dict[str, str] = _FILE["derivatives"]
"""Advice by the operation of the forward pass whose derivative is infinite."""


def causes_with(name: str) -> frozenset[str]:
    """Return the causes whose table has a property, such as `rate`."""
    return frozenset(cause for cause, table in CAUSE_WORDS.items() if table.get(name))
