"""Values as plain JSON, and JSON of untrusted files. Its depth is limited, so that recursive code
does not exhaust the stack.

Imports no backend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Maximum depth of lists and objects. What this library writes has about ten levels; a batch of a
bundle may have 64."""


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: mappings with text as keys, lists for tuples, and the
    strings `"nan"`, `"inf"` and `"-inf"` for non-finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

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
    for _ in range(MAX_DEPTH + 2):
        level = [outer for outer in level if isinstance(outer, (dict, list, tuple))]
        if not level:
            return
        members = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for inside in members for inner in inside]
    raise ValueError(_TOO_DEEP)
