"""pydantic models generated from records: each table of a policy file has the fields of the dataclass of its values.

Needs pydantic. Imports no backend.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field as Described, create_model, model_validator
from pydantic_core import PydanticCustomError

from keras_nanguard._policy.fields import MAX_INTEGER, construct, contradictions, expected_value, plain_type, printable

__all__ = ["EXPECTED_VALUES", "MODELS", "OneKey", "Table", "checked_printable", "described", "model", "model_of", "table_of"]

EXPECTED_VALUES: dict[tuple[str, str], str] = {}
"""The valid values of each field in words, by the names of model and field."""


MODELS: dict[type[Any], Any] = {}
"""The model of each record."""


class Table(BaseModel):
    """A table of a policy file: no unknown keys, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OneKey(Table):
    """A table with exactly one key, which names its kind."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @model_validator(mode="before")
    @classmethod
    def _single(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and len(given) != 1:
            raise PydanticCustomError("single", "{what}", {"what": cls.__doc__})
        return given


def model(
    name: str, doc: str, entries: Mapping[str, Any], base: type[Table] = Table, checks: Mapping[str, Any] | None = None
) -> Any:
    """Return a model created at run time; a type checker knows nothing of it."""
    make: Any = create_model
    return make(name, __base__=base, __doc__=doc, __validators__=dict(checks or {}), **entries)


def described(entry: Field[Any], model: str) -> tuple[Any, Any]:
    """Return annotation and description of one field of a record for pydantic."""
    meta, kind = entry.metadata, plain_type(entry)
    EXPECTED_VALUES[model, entry.name] = expected_value(entry)
    annotation: Any = {"int": int, "float": float, "str": str, "bool": bool}[kind]
    bounds = dict(meta["bounds"])
    if meta["choices"]:
        annotation = Literal[meta["choices"]]
    elif kind == "str":
        bounds = {"pattern": meta["pattern"]} if meta["pattern"] else {"max_length": meta["max_length"]}
        annotation = Annotated[str, AfterValidator(checked_printable)]
    elif kind == "int":
        bounds = {"ge": 0, "le": MAX_INTEGER, **bounds}
    unit = f" ({meta['unit']})" if meta["unit"] else ""
    default = ... if entry.default is MISSING else entry.default
    return annotation, Described(default=default, description=f"{meta['meaning']}{unit}", **bounds)


def checked_printable(text: str) -> str:
    """Raise for a string that is not fit for a report."""
    if not printable(text):
        raise PydanticCustomError("printable", "printable")
    return text


def table_of(record: type[Any], name: str, alone: bool = True, **more: Any) -> Any:
    """Return the model of a record; `alone`: it is never merged over another document, so fields are also checked together."""
    known = _described_fields(record, name)

    def together(table: Table) -> Table:
        given = {word: getattr(table, word) for word in known if word in table.model_fields_set}
        found = contradictions(construct(record, given))
        if found:
            raise PydanticCustomError("together", "{problems}", {"problems": "\n".join(found)})
        return table

    checks = {"together": model_validator(mode="after")(together)} if alone else {}
    MODELS[record] = model(name, (record.__doc__ or "").split("\n")[0], known | more, checks=checks)
    return MODELS[record]


@functools.cache
def model_of(record: type[Any]) -> Any:
    """Return the model of a record written in code, which checks each field by itself."""
    return model(record.__name__, (record.__doc__ or "").split("\n")[0], _described_fields(record, record.__name__))


def _described_fields(record: type[Any], name: str) -> dict[str, Any]:
    return {entry.name: described(entry, name) for entry in fields(record) if "meaning" in entry.metadata}
