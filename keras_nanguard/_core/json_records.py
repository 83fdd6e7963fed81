"""Records from JSON, with the type of each field checked."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

T = TypeVar("T")

_adapter = functools.cache(TypeAdapter)

STORED = ConfigDict(extra="forbid")
"""The `__pydantic_config__` of a dataclass that is stored: unknown fields are errors."""

Whole = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
"""An integer that can be computed with and shown."""


def stored(kind: Callable[..., T], given: Mapping[str, Any]) -> T:
    """Return the record with these fields, given as JSON has them: tuples as lists, non-finite
    numbers as the strings `"nan"`, `"inf"` and `"-inf"`.

    Raises:
        ValueError: if a field is missing, unknown or of another type.
    """
    try:
        found: T = _adapter(kind).validate_python(given)
        return found
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where, received = ".".join(map(str, problem["loc"])), reprlib.repr(problem["input"])
        raise ValueError(f"{where}: {problem['msg']}, received {received}") from error
