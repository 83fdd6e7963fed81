"""The schema of policy files: pydantic models made from the records, for validation and for the published JSON Schema.

Each model is made from the dataclass that the value ends up in, so that a bound, a choice or a new action is written
once. Print the JSON Schema with `python -m keras_nanguard._policy._schema`. Needs pydantic; level 0: imports no backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
    model_validator,
)
from pydantic import Field as Described
from pydantic_core import PydanticCustomError, core_schema

from keras_nanguard._incident import CAUSES, KINDS, SITES
from keras_nanguard._policy._conditions import CONDITIONS, AllOf, AnyOf, Consecutive, Not, Total
from keras_nanguard._policy._config import NO_PRESET, PRESETS, VERSION
from keras_nanguard._policy._fields import MOST, contradictions, made, plain_type, printable, shown, wording
from keras_nanguard._policy._rules import Limit, Magnitude, Rule
from keras_nanguard._policy._settings import LAYER_SITES, Checks, Snapshot
from keras_nanguard.actions import ACTIONS

__all__ = ["MODELS", "WORDINGS", "ActionTable", "PolicyTable", "json_schema"]

WORDINGS: dict[tuple[str, str], str] = {}
"""What a field of a model expects, in words, by the names of model and field."""


MODELS: dict[type[Any], Any] = {}
"""The model of each record."""


class Table(BaseModel):
    """A table of a policy file: no unknown words, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OneKey(Table):
    """A table whose one key says what it is."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @model_validator(mode="before")
    @classmethod
    def _single(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and len(given) != 1:
            raise PydanticCustomError("single", "{what}", {"what": cls.__doc__})
        return given


def _model(
    name: str, doc: str, entries: Mapping[str, Any], base: type[Table] = Table, checks: Mapping[str, Any] | None = None
) -> Any:
    """Return a model made at run time; nothing of it is known to a type checker."""
    make: Any = create_model
    return make(name, __base__=base, __doc__=doc, __validators__=dict(checks or {}), **entries)


def _described(entry: Field[Any], model: str) -> tuple[Any, Any]:
    """Return annotation and description of one field of a record, as pydantic wants them."""
    meta, kind = entry.metadata, plain_type(entry)
    WORDINGS[model, entry.name] = wording(entry)
    annotation: Any = {"int": int, "float": float, "str": str, "bool": bool}[kind]
    bounds = dict(meta["bounds"])
    if meta["choices"]:
        annotation = Literal[meta["choices"]]
    elif kind == "str":
        bounds = {"pattern": meta["pattern"]} if meta["pattern"] else {"max_length": meta["longest"]}
        annotation = Annotated[str, AfterValidator(_printable)]
    elif kind == "int":
        bounds = {"ge": 0, "le": MOST, **bounds}
    unit = f" ({meta['unit']})" if meta["unit"] else ""
    default = ... if entry.default is MISSING else entry.default
    return annotation, Described(default=default, description=f"{meta['meaning']}{unit}", **bounds)


def _printable(text: str) -> str:
    if not printable(text):
        raise PydanticCustomError("printable", "printable")
    return text


def _table_of(record: type[Any], name: str, alone: bool = True, **more: Any) -> Any:
    """Return the model of a record; `alone`: no other document is laid under it, so fields are checked together too."""
    described = {entry.name: _described(entry, name) for entry in fields(record) if "meaning" in entry.metadata}

    def together(table: Table) -> Table:
        given = {word: getattr(table, word) for word in described if word in table.model_fields_set}
        found = contradictions(made(record, given))
        if found:
            raise PydanticCustomError("together", "{problems}", {"problems": "\n".join(found)})
        return table

    checks = {"together": model_validator(mode="after")(together)} if alone else {}
    MODELS[record] = _model(name, (record.__doc__ or "").split("\n")[0], described | more, checks=checks)
    return MODELS[record]


class _Short:
    """Lets a value also be written in a short form, which `lengthen` turns into the long one.

    `short` is the JSON Schema of the short form; None: it is one entry of the list that the long form is.
    """

    def __init__(self, lengthen: Callable[[Any], Any], short: dict[str, Any] | None = None):
        self._lengthen, self._short = lengthen, short

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._lengthen, handler(source))

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        long = handler(core)
        return {"anyOf": [self._short or long["items"], long]}


def _also(annotation: Any, short: _Short) -> Any:
    return Annotated[annotation, short]


def _one_or_more(item: Any) -> Any:
    several = Annotated[list[item], Described(min_length=1)]
    return _also(several, _Short(lambda given: given if isinstance(given, list) else [given]))


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _optional(annotation: Any, **description: Any) -> tuple[Any, Any]:
    return annotation, Described(default=None, **description)


# Actions: a word, or a table with the word as its one key.

ActionTable = _model(
    "ActionTable",
    "one action: a name, or a table { name = {...} }",
    {name: _optional(_table_of(kind, _camel(name))) for name, kind in ACTIONS.items()},
    base=OneKey,
)
WORDS = [name for name, kind in ACTIONS.items() if name != "call"]  # a call needs the name of its function
WORD = _Short(lambda given: {given: {}} if isinstance(given, str) else given, {"enum": WORDS, "type": "string"})
Action = _also(ActionTable, WORD)
Actions = _one_or_more(Action)

# Conditions: a table with one key, which may hold conditions again.


CONDITIONS_INSIDE: Any = Annotated[list["ConditionTable"], Described(min_length=1)]  # type: ignore[valid-type]


def _condition(kind: type[Any]) -> tuple[Any, Any]:
    doc = (kind.__doc__ or "").split("\n")[0]
    if kind in (AnyOf, AllOf):
        return _optional(CONDITIONS_INSIDE, description=doc)
    if kind is Not:
        return _optional("ConditionTable", alias="not", description=doc)
    if kind in (Consecutive, Total):
        _table_of(kind, _camel(kind.name))
        annotation, described = _described(fields(kind)[0], "ConditionTable")
        WORDINGS["ConditionTable", kind.name] = WORDINGS.pop(("ConditionTable", "steps"))
        return Annotated[annotation, described.metadata[0], described.metadata[1]], Described(
            default=None, description=doc
        )
    return _optional(_table_of(kind, _camel(kind.name)), description=doc)


ConditionTable = _model(
    "ConditionTable",
    "one condition: a table { name = ... } (combine several with any or all)",
    {("not_" if kind is Not else name): _condition(kind) for name, kind in CONDITIONS.items()},
    base=OneKey,
)
ConditionTable.model_rebuild(_types_namespace={"ConditionTable": ConditionTable})

# Rules: a first rung, and in `otherwise` the next one.


def _rung(given: Any) -> Any:
    known = isinstance(given, Mapping) and {"do", "limit", "otherwise"} & set(given)
    return given if known else {"do": given}


ACTIONS_HERE = {"$comment": "actions"}
"""Stands in the JSON Schema for the schema of `do`, until `json_schema` puts it there."""

LimitTable = _table_of(Limit, "Limit")
RungTable = _model(
    "RungTable",
    "What is done once the limit above is used up.",
    {
        "do": (Actions, ...),
        "limit": _optional(LimitTable),
        "otherwise": _optional(_also("RungTable", _Short(_rung, ACTIONS_HERE))),
    },
)
RungTable.model_rebuild(_types_namespace={"RungTable": RungTable, "Actions": Actions})
Otherwise = _also(RungTable, _Short(_rung, ACTIONS_HERE))

UnlessTable = _model(
    "Unless",
    "What makes the rule pass an incident by.",
    {"on": _optional(_one_or_more(Literal[SITES])), "cause": _optional(_one_or_more(Literal[CAUSES]))},
)
Glob = Annotated[str, Described(min_length=1, max_length=200), AfterValidator(_printable)]
RuleTable = _table_of(
    Rule,
    "Rule",
    alone=False,
    on=_optional(_one_or_more(Literal[SITES]), description="sites that the rule looks at, all if left out"),
    kind=_optional(_one_or_more(Literal[KINDS]), description="kinds of trouble, all if left out"),
    layer=_optional(_one_or_more(Glob), description="globs of Keras paths, all if left out"),
    cause=_optional(_one_or_more(Literal[CAUSES]), description="causes that the diagnosis may name"),
    magnitude=_optional(_table_of(Magnitude, "Magnitude"), description="how bad a finding has to be"),
    unless=_optional(UnlessTable),
    after=_optional(ConditionTable, description="the condition under which it fires, each time if left out"),
    do=_optional(Actions, description="what is done"),
    limit=_optional(LimitTable, description="how often, before `otherwise` takes over"),
    otherwise=_optional(Otherwise, description="what is done once the limit is used up"),
)

# The sections, and the whole.


def _site(name: str) -> tuple[Any, Any]:
    record = next(entry.default for entry in fields(Checks) if entry.name == name)
    kind = type(record)
    model = MODELS.get(kind) or _table_of(kind, kind.__name__, alone=False)
    switch = _Short(lambda given: {"enabled": given} if isinstance(given, bool) else given, {"type": "boolean"})
    return _optional(_also(model, switch))


ChecksTable = _model(
    "Checks",
    "Which sites are looked at, and within which limits.",
    {entry.name: _site(entry.name) for entry in fields(Checks)},
)
LayerTable = _model(
    "LayerChecks",
    "Checks that differ for the layers that meet a glob.",
    {site: _site(site) for site in LAYER_SITES},
)


def _list_of(model: Any) -> Any:
    return list[model]


def _dict_of(model: Any) -> Any:
    return dict[Glob, model]


def _names_once(rules: list[Any]) -> list[Any]:
    names = [rule.name for rule in rules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PydanticCustomError("single", "{what}", {"what": f"one rule named {shown(twice)}"})
    return rules


Title = Annotated[str, Described(max_length=200), AfterValidator(_printable)]
PolicyTable = _model(
    "PolicyTable",
    "A policy of keras_nanguard.",
    {
        "version": (Literal[VERSION], Described(default=VERSION, description="number of this form of policy files")),
        "preset": (Literal[(NO_PRESET, *PRESETS)], Described(default="recover", description="what it builds on")),
        "title": (Title, Described(default="", description="one line about the policy")),
        "refuse": (bool, Described(default=True, description="whether bad steps are refused")),
        "checks": _optional(ChecksTable),
        "snapshot": _optional(_table_of(Snapshot, "Snapshot", alone=False)),
        "rules": _optional(Annotated[_list_of(RuleTable), Described(max_length=200), AfterValidator(_names_once)]),
        "layers": _optional(_dict_of(LayerTable), description="checks that differ, by glob of Keras paths"),
    },
)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of policy files, as published in `policies/policy.schema.json`."""
    raw = PolicyTable.model_json_schema()
    schema = _pruned(raw, {"anyOf": raw["$defs"]["Rule"]["properties"]["do"]["anyOf"]})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "keras_nanguard policy"}


def _pruned(value: Any, actions: Any) -> Any:
    """Leave out what no editor needs, titles made from names and defaults that say null, and put the actions in."""
    if isinstance(value, list):
        return [_pruned(inner, actions) for inner in value]
    if not isinstance(value, dict):
        return value
    if value == ACTIONS_HERE:
        return _pruned(actions, actions)
    named = "type" in value or "$ref" in value or "anyOf" in value
    drop = {"title"} if named and isinstance(value.get("title"), str) else set()
    drop |= {"default"} if "default" in value and value["default"] is None else set()
    return {key: _pruned(inner, actions) for key, inner in value.items() if key not in drop}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1, sort_keys=True))
