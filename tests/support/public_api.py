"""The public interface of the library as lines of text, one fact per line, read from the code.

    python tests/support/public_api.py > tests/public_api.txt

The public interface consists of `docs/reference/api.md`, the command line, the fields of a policy,
the closed lists of words, the logs of a fit, the contents of a recording, and the file formats with
their numbers. Types are omitted, because accepting more of them breaks no program.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SURFACE = Path(__file__).parents[1] / "public_api.txt"
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"

OF_A_GUARD = ("incidents", "policy", "directory")
"""Attributes of a guard that its docstring or its arguments name."""

def listed(family: str) -> tuple[str, ...]:
    """Return the words of a closed list as in `tests/public_api.txt`: `listed("cause")`."""
    written = SURFACE.read_text(encoding="utf-8").splitlines()
    return tuple(line.removeprefix(f"{family} ") for line in written if line.startswith(f"{family} "))


def lines() -> list[str]:
    """Return every fact about the public interface."""
    parts = (names(), documented(), actions(), errors(), command_line(), policy_fields(), words(), logs(), recording(), formats())
    return [line for part in parts for line in part]


def names() -> Iterator[str]:
    """Names that can be imported."""
    for module in ("keras_nanguard", "keras_nanguard.actions", "keras_nanguard.errors", "keras_nanguard.testing"):
        for name in sorted(importlib.import_module(module).__all__):
            yield f"name {module}.{name}"


def documented() -> Iterator[str]:
    """The contents of the reference, with arguments and attributes."""
    directive = re.compile(r"^\.\. auto(class|function):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)
    for kind, path, options in directive.findall(REFERENCE.read_text("utf-8")):
        module, name = path.rsplit(".", 1)
        value = getattr(importlib.import_module(module), name)
        if kind == "function":
            yield f"function {name}{signature(value)}"
            continue
        listed = re.search(r":members: *(.*)", options)
        members = [word.strip() for word in listed[1].split(",")] if listed and listed[1] else []
        yield from of_class(value, members, everything=bool(listed) and not members)
        if name == "NanGuard":
            yield from (f"attribute NanGuard.{attribute}" for attribute in OF_A_GUARD)


def of_class(value: type, members: list[str], everything: bool) -> Iterator[str]:
    """A class: its arguments or fields, its methods and its properties."""
    name = value.__name__
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield f"field {name}.{field.name}{default_of(field)}"
    elif hasattr(value, "model_fields"):  # the fields of a policy are those of its schema
        yield f"class {name}"
    else:
        yield f"class {name}{signature(value.__init__)}"
    found = {attribute for attribute in vars(value) if attribute[0] != "_"} if everything else set()
    found -= {name for name in found if name.startswith("model_")}
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    for attribute in sorted((found | set(members)) - fields):
        member = inspect.getattr_static(value, attribute)
        if isinstance(member, property):
            yield f"property {name}.{attribute}"
        elif callable(getattr(value, attribute)):
            yield f"method {name}.{attribute}{signature(getattr(value, attribute))}"


def actions() -> Iterator[str]:
    """The actions of policies, with their parameters."""
    for name, action in importlib.import_module("keras_nanguard.actions").ACTIONS.items():
        yield f"action {name} ({action.__name__})"
        for parameter, field in action.model_fields.items():
            default = "" if field.is_required() else f" = {field.default!r}"
            yield f"action {name}: {parameter}{default}"


def errors() -> Iterator[str]:
    """The errors, and their built-in base classes."""
    module = importlib.import_module("keras_nanguard.errors")
    for name in sorted(module.__all__):
        error = getattr(module, name)
        classes = [base.__name__ for base in error.__mro__[1:] if base not in (object, BaseException, Exception)]
        yield f"error {name}: {', '.join(classes) or 'Exception'}"
        if "__init__" in vars(error):
            yield f"error {name}{signature(error.__init__)}"
            yield from (f"attribute {name}.{argument}" for argument in inspect.signature(error).parameters if argument != "message")
        yield from (f"property {name}.{attribute}" for attribute, member in vars(error).items() if isinstance(member, property))


def command_line() -> Iterator[str]:
    """The commands with their arguments and options, and the exit codes."""
    codes = importlib.import_module("keras_nanguard._cli.output")
    for name in ("CLEAN", "FOUND", "MISUSE"):
        yield f"exit code {getattr(codes, name)}: {name.lower()}"
    module = importlib.import_module("keras_nanguard._cli.parser")
    commands = next(a for a in module.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    for name, parser in commands.items():
        yield f"command {name}"
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction):
                said = ", ".join(action.option_strings) or action.dest.upper()
                yield f"command {name}: {said}" + (f" of {', '.join(map(str, action.choices))}" if action.choices else "")


def policy_fields() -> Iterator[str]:
    """The fields of a policy file, with their defaults."""
    schema = importlib.import_module("keras_nanguard._policy.policy").json_schema()
    tables = {"": schema, **schema["$defs"]}
    for table, described in sorted(tables.items()):
        for name, field in sorted(described.get("properties", {}).items()):
            yield f"policy {table or 'file'}.{name}" + (f" = {field['default']!r}" if "default" in field else "")


def words() -> Iterator[str]:
    """The closed lists of words."""
    literals = importlib.import_module("keras_nanguard._core.literals")
    for name in sorted(literals.__all__):
        said = name.replace("Fault", "Fault ").lower()
        yield from (f"{said} {word}" for word in sorted(getattr(literals, name).__args__))
    for name in sorted(importlib.import_module("keras_nanguard._recording.recording").EventKind.__args__):
        yield f"event {name}"
    for name in sorted(importlib.import_module("keras_nanguard._files.problems").PROBLEMS):
        yield f"problem of a file {name}"
    for rule in sorted(importlib.import_module("keras_nanguard._lint").RULES):
        yield f"lint rule {rule}"


def logs() -> Iterator[str]:
    """The keys that a guard adds to the logs of an epoch."""
    module = importlib.import_module("keras_nanguard._fit.fit_logs")
    yield f"log {module.REFUSED}"
    documentation = importlib.import_module("keras_nanguard").NanGuard.__doc__ or ""
    yield from (f"log {name}" for name in sorted(re.findall(rf"`({module.OWN}\w+)`", documentation)))


def recording() -> Iterator[str]:
    """The columns of a recording and the tables of its file."""
    records = importlib.import_module("keras_nanguard._recording.database")
    yield from (f"recording steps.{name}" for name in records.STEP_COLUMNS)
    statuses = {getattr(records, name): name.lower() for name in ("COMMITTED", "REFUSED", "OVERFLOW")}
    yield from (f"recording status {number}: {name}" for number, name in sorted(statuses.items()))
    yield f"bad samples: {', '.join(importlib.import_module('keras_nanguard._report.files').SAMPLE_COLUMNS)}"
    for statement in importlib.import_module("keras_nanguard._recording.database").SCHEMA.values():
        yield f"recording.sqlite: {statement}"


def formats() -> Iterator[str]:
    """The file formats, with the numbers that are written."""
    for name, (module, constant) in sorted(FORMATS.items()):
        yield f"format {name}: {getattr(importlib.import_module(f'keras_nanguard.{module}'), constant)}"


FORMATS = {
    "policy": ("_policy.policy", "VERSION"),
    "incident": ("_core.incident", "FORMAT"),
    "bundle": ("_files.bundles", "FORMAT"),
    "snapshot": ("_fit.snapshot_files", "FORMAT"),
    "guard state": ("_fit.recovery", "FORMAT"),
    "recording": ("_recording.database", "FORMAT"),
    "scan report": ("_files.reports", "FORMAT"),
    "repair report": ("_files.reports", "FORMAT"),
    "recalibrate report": ("_files.reports", "FORMAT"),
    "lint report": ("_lint", "FORMAT"),
    "examination": ("_diagnose.diagnose", "FORMAT"),
    "replay": ("_diagnose.replay", "FORMAT"),
    "checked policy": ("_cli.commands", "CHECKED_POLICY"),
    "compared runs": ("_cli.commands", "COMPARED_RUNS"),
}
"""Each format: the module and the constant with its number."""


def difference(frozen: list[str], found: list[str]) -> str:
    """Return the differences between two lists of facts, in words; `""` if there are none."""
    gone = [line for line in frozen if line not in found]
    new = [line for line in found if line not in frozen]
    if not gone and not new:
        return ""
    parts = ["The public surface has changed:", *(f"  - {line}" for line in gone), *(f"  + {line}" for line in new)]
    if gone:
        parts.append("What is gone or renamed breaks programs: deprecate it first, as CONTRIBUTING.md says under Deprecations.")
    return "\n".join([*parts, "If that is meant: python tests/support/public_api.py > tests/public_api.txt, and a line in CHANGELOG.md."])


def signature(value: Any) -> str:
    """Return the arguments of a function with their defaults, without types."""
    parameters = [p for p in inspect.signature(value).parameters.values() if p.name not in ("self", "cls")]
    shown = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(shown))


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field, as in a signature."""
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is dataclasses.MISSING else " = ..."


if __name__ == "__main__":
    print("\n".join(lines()))
