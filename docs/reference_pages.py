"""Write the pages of the reference that are made from the code: fields of a policy, actions, the command line.

    python docs/reference_pages.py

`tests/docs/test_reference.py` fails if a page differs from this output.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_nanguard._cli.parser import parser
from keras_nanguard._core.literals import CAUSES, SITES
from keras_nanguard._policy.policy import json_schema
from keras_nanguard.actions import ACTIONS

FOLDER = Path(__file__).parent / "reference"
SCHEMA = Path(__file__).parents[1] / "keras_nanguard" / "policies" / "policy.schema.json"
MADE = "<!-- Made from the code by docs/reference_pages.py: do not edit. -->\n\n"


NAMED = {
    CAUSES: "[cause](../causes.md)",
    SITES: "[site](../policies.md#rules)",
    tuple(ACTIONS): "[action](#actions-do)",
}
"""Links for long lists of names, by their members."""

SECTIONS = {
    "Snapshots: `[snapshot]`": "Snapshot",
    "`[divergence]`": "Divergence",
    "`[loss_scale]`": "LossScale",
    "`[statistics]`": "Statistics",
    "Limits: `[[limits]]`": "Limit",
    "Rules: `[[rules]]`": "Rule",
}
"""The headings of the tables of a policy, with the models that they are made from."""


# The fields of a policy


def policy_fields() -> str:
    """Return the page about every field that a policy file may have."""
    schema = json_schema()
    defined = schema["$defs"]
    lines = [
        "# Fields of a policy file",
        "",
        "Every field that a policy file may have, with its type, default and bounds, from the JSON Schema in",
        "`keras_nanguard/policies/policy.schema.json`. [Policies](../policies.md) explains how they work together.",
        "",
        "## Top level",
        "",
        *_table(schema, defined),
    ]
    for heading, name in SECTIONS.items():
        lines += ["", f"## {heading}", "", _described(defined[name]), "", *_table(defined[name], defined)]
    lines += ["", "## Actions: `do`", "", "A name, or a table with the name as its key: `{ lower_lr = { factor = 0.5 } }`."]
    for name, action in ACTIONS.items():
        model = defined[action.__name__]
        kind = "Ends training." if action.terminal else "Counts against `action_budget`." if action.changes else ""
        lines += ["", f"### `{name}`", "", f"{_described(model)} {kind}".strip()]
        lines += ["", *_table(model, defined)] if model.get("properties") else []
    return MADE + "\n".join(lines) + "\n"


def _described(model: dict[str, Any]) -> str:
    return re.sub(r" \(see `\w+`\)", "", model["description"])


def _table(model: dict[str, Any], defined: dict[str, Any]) -> Iterator[str]:
    """Yield the rows of a table of fields."""
    required = model.get("required", ())
    yield "| field | type | default | means |"
    yield "|---|---|---|---|"
    for name, field in model["properties"].items():
        default = "required" if name in required else _default(field)
        meaning = _described({"description": field.get("description") or _referred(field, defined)}).rstrip(".")
        meaning = meaning[:1].lower() + meaning[1:]
        yield f"| `{name}` | {_type(field, defined)} | {default} | {meaning} |"


def _default(field: dict[str, Any]) -> str:
    """Return the default of a field; that of a table or list is in its file."""
    value = field.get("default")
    return f"`{_value(value)}`" if isinstance(value, (bool, int, float, str)) else ""


def _referred(field: dict[str, Any], defined: dict[str, Any]) -> str:
    """Return the description of the table that a field refers to."""
    options = [field, *field.get("anyOf", ()), field.get("items", {})]
    names = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
    return defined[names[0]].get("description", "").rstrip(".") if names else ""


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value:.10g}"


def _type(field: dict[str, Any], defined: dict[str, Any]) -> str:
    """Return the type of a field in a few words."""
    if "const" in field:
        return f"`{_value(field['const'])}`"
    if "enum" in field:
        return NAMED.get(tuple(field["enum"])) or " or ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        kinds = list(dict.fromkeys(_type(option, defined) for option in field["anyOf"] if option.get("type") != "null"))
        lists = [kind for kind in kinds if kind.startswith("list")]
        return " or ".join([*(kind for kind in kinds if kind not in lists), *(["a list of them"] if lists else [])])
    if "$ref" in field:
        return "table"
    if field.get("type") == "array":
        return "list of tables" if "$ref" in field.get("items", {}) else "list"
    return f"{field.get('type', 'value').replace('object', 'table')}{_bounds(field)}"


def _bounds(field: dict[str, Any]) -> str:
    """Return the bounds of a number, without those that only catch typing errors."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[name]:.10g}" for name, sign in signs.items() if name in field and field[name] < 1e6]
    return f" {', '.join(found)}" if found else ""


# The command line


def command_line() -> str:
    """Return the page about every command and option."""
    root = parser()
    commands = next(action for action in root._actions if isinstance(action, argparse._SubParsersAction))
    lines = [
        "# Commands and options",
        "",
        "`keras-nanguard COMMAND`, or `python -m keras_nanguard COMMAND`. [Command line](../cli.md) has exit codes and examples.",
    ]
    for name, command in commands.choices.items():
        lines += ["", f"## {name}", "", command.description or "", "", "```console", f"$ {_usage(command)}", "```", ""]
        lines += ["| argument | means |", "|---|---|"]
        lines += [_argument(action) for action in command._actions]
    return MADE + "\n".join(lines) + "\n"


def _usage(command: argparse.ArgumentParser) -> str:
    return " ".join(command.format_usage().removeprefix("usage: ").split())


def _argument(action: argparse.Action) -> str:
    """Return the row of one argument."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    value = action.metavar or choices or action.dest.upper()
    value = value if isinstance(value, str) else " ".join(value)
    takes = action.nargs != 0
    names = [f"`{option} {value}`" if takes else f"`{option}`" for option in action.option_strings] or [f"`{value}`"]
    return f"| {', '.join(names)} | {(action.help or '').replace('|', chr(92) + '|')} |"


def schema() -> str:
    """Return the JSON schema of policy files."""
    return json.dumps(json_schema(), indent=1) + "\n"


WRITTEN = {
    FOLDER / "policy_fields.md": policy_fields,
    FOLDER / "command_line.md": command_line,
    SCHEMA: schema,
}
"""What makes the text of each file."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path, make in WRITTEN.items():
        path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
