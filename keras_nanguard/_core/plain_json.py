"""JSON of files that are not trusted: of limited depth, so that nothing that goes through it
recursively runs out of stack.

Imports no backend.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_DEPTH", "check_depth", "loads"]

MAX_DEPTH = 64
"""Maximum depth of lists and objects. What this library writes has about ten levels; a batch of a
bundle may have 64.
"""


def loads(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: if it is not JSON, or too deep.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(found)
    return found


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def check_depth(value: Any) -> None:
    """Check a value as JSON makes them.

    Raises:
        ValueError: if it is too deep.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = (
            inner
            for outer in level
            if isinstance(outer, (dict, list, tuple))
            for inner in _members(outer)
        )
        level = [inner for inner in inside if isinstance(inner, (dict, list, tuple))]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _members(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container
