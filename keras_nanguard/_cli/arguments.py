"""How commands are declared, and the arguments that several of them have."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from keras_nanguard._files.problems import STATISTICS_LIMIT

Argument: TypeAlias = Callable[[argparse.ArgumentParser], object]
"""Adds an argument to the parser of a command."""

Run: TypeAlias = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments and returns the exit code."""

COMMANDS: dict[str, tuple[Run, tuple[Argument, ...]]] = {}
"""Every command by its name: what runs it, and its arguments in the order of the help."""


def command(*arguments: Argument) -> Callable[[Run], Run]:
    """Return a decorator that makes a function a command: `check_policy` becomes `check-policy`."""

    def declare(run: Run) -> Run:
        COMMANDS[run.__name__.replace("_", "-")] = run, arguments
        return run

    return declare


def argument(names: str, metavar: str | None, text: str, **settings: Any) -> Argument:
    """Return an argument with its names, as `-o --output`, and its help; other settings are those
    of `ArgumentParser.add_argument`."""
    settings |= {"metavar": metavar, "help": text}
    return lambda parser: parser.add_argument(*names.split(), **settings)


def several(name: str, metavar: str, text: str, **settings: Any) -> Argument:
    """Return an option that can be repeated."""
    return argument(name, metavar, text, action="append", default=[], **settings)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return lambda parser: parser.add_argument(name, action="store_true", help=text)


def choice(dest: str, **texts: str) -> Argument:
    """Return options of which one can be given, each with its help; the first is the default."""
    shared: dict[str, Any] = {"dest": dest, "action": "store_const", "default": next(iter(texts))}

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for name, text in texts.items():
            group.add_argument(f"--{name}", const=name, help=text, **shared)

    return add


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Return a type of arguments: a number from `low` to `high`."""

    def number(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            bounds = f"of {low:g} or above" if high == math.inf else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, received {text}")
        return value

    number.__name__ = kind.__name__  # as argparse names it
    return number


def count(name: str, text: str, default: int | None = None) -> Argument:
    """Return an option that is a whole number above 0."""
    return argument(name, "NUMBER", text, type=number(int, 1), default=default)


# Arguments of several commands

FILES = (
    "a .keras, .weights.h5, .h5 or .npz file, the .json index of sharded weights, or an Orbax"
    " checkpoint"
)
"""The files of models, in words."""

MODEL = argument("path", "MODEL", "a .keras file of a whole model")
JSON = flag("--json", "print JSON, one document per line")

_STATISTICS = "magnitude that no moving statistic may exceed (default: 1e6)"
LIMITS = (
    argument("--limit", "NUMBER", "magnitude that no value may exceed", type=float),
    argument("--statistics-limit", "NUMBER", _STATISTICS, type=float, default=STATISTICS_LIMIT),
)


def new_file(default: str) -> tuple[Argument, Argument]:
    """Return the options for a new file."""
    new = argument("-o --output", "FILE", f"the new file (default: {default})")
    return new, flag("--overwrite", "replace an existing output")


def only(what: str) -> Argument:
    """Return the option that selects variables or layers."""
    return several("--only", "PATTERN", f"only {what} whose path matches: '*bn*'")
