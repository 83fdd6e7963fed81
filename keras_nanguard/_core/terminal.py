"""What the standard output is."""

from __future__ import annotations

import sys

__all__ = ["is_terminal"]


def is_terminal() -> bool:
    """Whether the standard output is a terminal; what stands in its place (`None`, a logger) need not be able to say."""
    return bool(getattr(sys.stdout, "isatty", lambda: False)())
