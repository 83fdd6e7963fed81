"""The schema of policy files: pydantic models generated from the records, for validation and the published JSON Schema.

Each model is generated from the dataclass of its values, so that a bound, a choice or a new action is written once.
`python -m keras_nanguard._policy.schema` prints the JSON Schema. Needs pydantic. Imports no backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field as Described,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import PydanticCustomError, core_schema

from keras_nanguard._core.incident import CAUSES, KINDS, SITES
from keras_nanguard._policy import actions
from keras_nanguard._policy.actions import ACTIONS, Action
from keras_nanguard._policy.conditions import CONDITIONS, Count, Not, Several
from keras_nanguard._policy.fields import raise_problems, shown
from keras_nanguard._policy.presets import NO_PRESET, PRESETS, VERSION
from keras_nanguard._policy.problems import problems_of
from keras_nanguard._policy.rules import Limit, Magnitude, Rule
from keras_nanguard._policy.settings import LAYER_SITES, Checks, Snapshot
from keras_nanguard._policy.tables import EXPECTED_VALUES, MODELS, OneKey, checked_printable, described, model, table_of

__all__ = ["ActionTable", "PolicyTable", "action_from_dict", "action_from_file", "json_schema", "problems_in"]

class _ShortForm:
    """Allows a short form of a value, which `lengthen` converts to the long one.

    `short` is the JSON Schema of the short form; None: one element of the list that the long form is.
    """

    def __init__(self, lengthen: Callable[[Any], Any], short: dict[str, Any] | None = None):
        self._lengthen, self._short = lengthen, short

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._lengthen, handler(source))

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        long = handler(core)
        return {"anyOf": [self._short or long["items"], long]}


def _with_short_form(annotation: Any, short: _ShortForm) -> Any:
    return Annotated[annotation, short]


def _one_or_more(item: Any) -> Any:
    several = Annotated[list[item], Described(min_length=1)]
    return _with_short_form(several, _ShortForm(lambda given: given if isinstance(given, list) else [given]))


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _optional(annotation: Any, **description: Any) -> tuple[Any, Any]:
    return annotation, Described(default=None, **description)


# Actions: a name, or a table with the name as its only key.

ActionTable = model(
    "ActionTable",
    "one action: a name, or a table { name = {...} }",
    {name: _optional(table_of(kind, _camel(name))) for name, kind in ACTIONS.items()},
    base=OneKey,
)
NAMES = [name for name, kind in ACTIONS.items() if name != "call"]  # a call needs the name of its function
NAME_ALONE = _ShortForm(lambda given: {given: {}} if isinstance(given, str) else given, {"enum": NAMES, "type": "string"})
Actions = _one_or_more(_with_short_form(ActionTable, NAME_ALONE))

# Conditions: a table with one key, which may contain further conditions.


NESTED_CONDITIONS: Any = Annotated[list["ConditionTable"], Described(min_length=1)]  # type: ignore[valid-type]


def _condition(kind: type[Any]) -> tuple[Any, Any]:
    doc = (kind.__doc__ or "").split("\n")[0]
    if issubclass(kind, Several):
        return _optional(NESTED_CONDITIONS, description=doc)
    if kind is Not:
        return _optional("ConditionTable", alias="not", description=doc)
    if issubclass(kind, Count):
        table_of(kind, _camel(kind.name))
        annotation, entry = described(fields(kind)[0], "ConditionTable")
        EXPECTED_VALUES["ConditionTable", kind.name] = EXPECTED_VALUES.pop(("ConditionTable", "steps"))
        return Annotated[annotation, entry.metadata[0], entry.metadata[1]], Described(
            default=None, description=doc
        )
    return _optional(table_of(kind, _camel(kind.name)), description=doc)


ConditionTable = model(
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


ACTIONS_PLACEHOLDER = {"$comment": "actions"}
"""Placeholder in the JSON Schema for the schema of `do`, which `json_schema` inserts."""

LimitTable = table_of(Limit, "Limit")
RungTable = model(
    "RungTable",
    "What is done once the limit above is exhausted.",
    {
        "do": (Actions, ...),
        "limit": _optional(LimitTable),
        "otherwise": _optional(_with_short_form("RungTable", _ShortForm(_rung, ACTIONS_PLACEHOLDER))),
    },
)
RungTable.model_rebuild(_types_namespace={"RungTable": RungTable, "Actions": Actions})
Otherwise = _with_short_form(RungTable, _ShortForm(_rung, ACTIONS_PLACEHOLDER))

UnlessTable = model(
    "Unless",
    "Exceptions, for which the rule ignores an incident.",
    {"on": _optional(_one_or_more(Literal[SITES])), "cause": _optional(_one_or_more(Literal[CAUSES]))},
)
Glob = Annotated[str, Described(min_length=1, max_length=200), AfterValidator(checked_printable)]
RuleTable = table_of(
    Rule,
    "Rule",
    alone=False,
    on=_optional(_one_or_more(Literal[SITES]), description="sites that the rule matches, all if omitted"),
    kind=_optional(_one_or_more(Literal[KINDS]), description="kinds of trouble, all if omitted"),
    layer=_optional(_one_or_more(Glob), description="globs of Keras paths, all if omitted"),
    cause=_optional(_one_or_more(Literal[CAUSES]), description="causes of the diagnosis"),
    magnitude=_optional(table_of(Magnitude, "Magnitude"), description="minimum severity of a finding"),
    unless=_optional(UnlessTable),
    after=_optional(ConditionTable, description="condition under which the rule fires, each time if omitted"),
    do=_optional(Actions, description="what is done"),
    limit=_optional(LimitTable, description="how often, before `otherwise` follows"),
    otherwise=_optional(Otherwise, description="what is done once the limit is exhausted"),
)

# The sections, and the whole.


def _site(name: str) -> tuple[Any, Any]:
    record = next(entry.default for entry in fields(Checks) if entry.name == name)
    kind = type(record)
    found = MODELS.get(kind) or table_of(kind, kind.__name__, alone=False)
    switch = _ShortForm(lambda given: {"enabled": given} if isinstance(given, bool) else given, {"type": "boolean"})
    return _optional(_with_short_form(found, switch))


ChecksTable = model(
    "Checks",
    "Which sites are checked, and their limits.",
    {entry.name: _site(entry.name) for entry in fields(Checks)},
)
LayerTable = model(
    "LayerChecks",
    "Checks that differ for the layers that match a glob.",
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


Title = Annotated[str, Described(max_length=200), AfterValidator(checked_printable)]
PolicyTable = model(
    "PolicyTable",
    "A policy of keras_nanguard.",
    {
        "version": (Literal[VERSION], Described(default=VERSION, description="version of the format of policy files")),
        "preset": (Literal[(NO_PRESET, *PRESETS)], Described(default="recover", description="preset that the policy is based on")),
        "title": (Title, Described(default="", description="one line about the policy")),
        "refuse": (bool, Described(default=True, description="whether bad steps are refused")),
        "checks": _optional(ChecksTable),
        "snapshot": _optional(table_of(Snapshot, "Snapshot", alone=False)),
        "rules": _optional(Annotated[_list_of(RuleTable), Described(max_length=200), AfterValidator(_names_once)]),
        "layers": _optional(_dict_of(LayerTable), description="checks that differ, by glob of Keras paths"),
    },
)


def problems_in(document: Mapping[str, Any]) -> list[str]:
    """Return every problem of a policy document, each with its path; an empty list where it is valid."""
    return problems_of(PolicyTable, document)


def action_from_file(item: object) -> Action:
    """Return the action of `"rollback"` or `{ lower_lr = { factor = 0.5 } }` in a policy file.

    Raises:
        PolicyError: if the action or a parameter is unknown, or a value is out of range.
    """
    table = {item: {}} if isinstance(item, str) else item
    if not isinstance(table, Mapping) or len(table) != 1:
        raise_problems([f"expected {ActionTable.__doc__}, received {shown(item)}"], "the action")
    raise_problems(problems_of(ActionTable, table), "the action")
    return actions.validated(table)


def action_from_dict(data: Mapping[str, Any]) -> Action:
    """Rebuild an action from `Action.to_dict()`.

    Raises:
        PolicyError: as in `action_from_file`.
    """
    given = dict(data)
    return action_from_file({str(given.pop("action", None)): given})


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of policy files, as published in `policies/policy.schema.json`."""
    raw = PolicyTable.model_json_schema()
    schema = _pruned(raw, {"anyOf": raw["$defs"]["Rule"]["properties"]["do"]["anyOf"]})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "keras_nanguard policy"}


def _pruned(value: Any, actions: Any) -> Any:
    """Remove what no editor needs, generated titles and null defaults, and insert the actions."""
    if isinstance(value, list):
        return [_pruned(inner, actions) for inner in value]
    if not isinstance(value, dict):
        return value
    if value == ACTIONS_PLACEHOLDER:
        return _pruned(actions, actions)
    named = "type" in value or "$ref" in value or "anyOf" in value
    drop = {"title"} if named and isinstance(value.get("title"), str) else set()
    drop |= {"default"} if "default" in value and value["default"] is None else set()
    return {key: _pruned(inner, actions) for key, inner in value.items() if key not in drop}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1, sort_keys=True))
