"""The kind of the standard output."""

from __future__ import annotations

import sys

__all__ = ["is_terminal"]


def is_terminal() -> bool:
    """Whether the standard output is a terminal; false if unknown (`None`, closed)."""
    try:
        return bool(sys.stdout.isatty())
    except Exception:  # noqa: BLE001  any object may be in its place
        return False
