"""Validates a record that is written in code, by the same pydantic model as a table of a policy file.

pydantic is imported only where there is something to validate. Imports no backend.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from keras_nanguard._policy.fields import contradictions, optional, refuse, with_floats

__all__ = ["check"]


def check(record: Any) -> None:
    """Validate a record that was written in code; whole numbers in float fields become floats.

    A record may name pairs of fields in `ordered`, of which the first must not exceed the second, and add problems of its
    own in a method `conflicts()`.

    Raises:
        PolicyError: with every problem of the record.
    """
    values = {entry: getattr(record, entry.name) for entry in fields(record) if "meaning" in entry.metadata}
    given = {e.name: value for e, value in values.items() if value != e.default or type(value) is not type(e.default)}
    if not given:
        return
    from keras_nanguard._policy.problems import problems_of
    from keras_nanguard._policy.tables import model_of

    nothing = {entry.name for entry in fields(record) if optional(entry)}
    told = {word: value for word, value in given.items() if value is not None or word not in nothing}
    refuse(problems_of(model_of(type(record)), told) or contradictions(record))
    with_floats(record)
