"""Validation of records written in code, by the same pydantic models as the tables of policy files.

Imports pydantic only where there is something to validate. Imports no backend.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from keras_nanguard._policy.fields import contradictions, optional, raise_problems, with_floats

__all__ = ["check"]


def check(record: Any) -> None:
    """Validate a record that was written in code, and convert integers in float fields to floats.

    A record may list pairs of fields in `ordered`, of which the first must not exceed the second, and return further
    problems from a method `conflicts()`.

    Raises:
        PolicyError: with every problem of the record.
    """
    values = {entry: getattr(record, entry.name) for entry in fields(record) if "meaning" in entry.metadata}
    given = {e.name: value for e, value in values.items() if value != e.default or type(value) is not type(e.default)}
    if not given:
        return
    from keras_nanguard._policy.problems import problems_of
    from keras_nanguard._policy.tables import model_of

    nullable = {entry.name for entry in fields(record) if optional(entry)}
    checked = {name: value for name, value in given.items() if value is not None or name not in nullable}
    kind: Any = type(record)
    raise_problems(problems_of(model_of(kind), checked) or contradictions(record))
    with_floats(record)
