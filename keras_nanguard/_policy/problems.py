"""Translation of pydantic errors to the problems of a policy, each with its path and a suggestion.

Needs pydantic. Imports no backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from keras_nanguard._core.incident import CAUSES, KINDS, SITES
from keras_nanguard._policy.fields import MOMENTS, field_path, problem
from keras_nanguard._policy.spelling import nearest
from keras_nanguard._policy.tables import EXPECTED_VALUES

__all__ = ["problems_of"]


def problems_of(model: Any, value: object) -> list[str]:
    """Return every problem of a value for a model, each with its path; an empty list where it is valid."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        return [line for detail in error.errors(include_url=False) for line in _problems_of(detail, model)]
    return []


def _problems_of(detail: ErrorDetails, root: Any) -> list[str]:
    """Return the problems for one error of pydantic, for a value of the model `root`."""
    loc, kind, context = detail["loc"], detail["type"], detail.get("ctx", {})
    path = field_path(*(part for part in loc if part != "[key]"))
    if kind == "together":
        return [f"{path}.{line}".lstrip(".") for line in context["problems"].split("\n")]
    model, field = _place(loc, root)
    if kind == "missing":
        return [f"{path}: expected {EXPECTED_VALUES.get((model.__name__, field), 'a value')}, received nothing"]
    if kind == "extra_forbidden":
        known = [entry.alias or name for name, entry in model.model_fields.items()]
        word = str(loc[-1])
        return [problem(path, "one of " + ", ".join(known) if known else "no parameters", word, nearest(word, known))]
    if kind == "literal_error":
        known = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        meant = nearest(detail["input"], known) or _misplaced(detail["input"], field)
        return [problem(path, "one of " + ", ".join(known), detail["input"], meant)]
    plain = {
        "single": str(context.get("what")),
        "model_type": "a table",
        "dict_type": "a table",
        "list_type": "a list",
        "too_short": "at least one entry",
        "bool_type": "true or false",
    }
    what = plain.get(kind) or EXPECTED_VALUES.get((model.__name__, field)) or detail["msg"].removeprefix("Input should be ")
    meant = ""
    if kind == "model_type":
        meant = _table_meant(model, field, detail["input"])
    elif kind == "list_type" and isinstance(detail["input"], Mapping):
        meant = ", did you mean a list of one, [{...}]?"
    return [problem(path, what, detail["input"]) + meant]


MAIN_FIELD = {
    **dict.fromkeys(("SiteCheck", "StatisticsCheck"), "max_abs"),
    **dict.fromkeys(("Repair", "ResetBatchnorm"), "source"),
    "Snapshot": "every",
    "Limit": "times",
    "Magnitude": "min_abs",
    "ConditionTable": "consecutive",
    "Rollback": "depth",
    "LowerLr": "factor",
    "Clip": "global_clipnorm",
    "RecalibrateBatchnorm": "batches",
    "ResetSlots": "scope",
    "Quarantine": "max_batches",
    "Warn": "message",
    "Call": "function",
}
"""The field of a table that a bare value in place of the table probably means."""


def _table_meant(model: Any, field: str, value: Any) -> str:
    """Return a suggestion for the table that a bare value probably means, `""` where there is none."""
    table = _model_in(model.model_fields[field].annotation) if field else None
    chief = MAIN_FIELD.get(table.__name__) if table is not None else None
    if table is None or chief is None:
        return ""
    try:
        table.model_validate({chief: value})
    except ValidationError:
        return ""
    return f", did you mean {json.dumps({chief: value})}?"


VOCABULARIES: dict[str, tuple[str, ...]] = {"on": SITES, "kind": KINDS, "when": MOMENTS, "cause": CAUSES}
"""The fields of a rule whose words are easily confused."""


def _misplaced(word: object, field: str) -> str:
    """Return the field to which a word in the wrong field of a rule belongs, `""` where there is none."""
    others = {name: words for name, words in VOCABULARIES.items() if field in VOCABULARIES and name != field}
    found = ((name, word if word in words else nearest(word, words)) for name, words in others.items())
    return next((f'{name} = "{meant}"' for name, meant in found if meant), "")


def _place(loc: tuple[int | str, ...], root: Any) -> tuple[Any, str]:
    """Return the model and the name of the field of an error."""
    model, field, words = root, "", [part for part in loc if isinstance(part, str)]
    for depth, word in enumerate(words):
        if depth == 1 and words[0] == "layers":
            continue
        inner = _model_in(model.model_fields[field].annotation) if field in model.model_fields else None
        model, field = inner or model, "not_" if word == "not" else word
    return model, field


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)
