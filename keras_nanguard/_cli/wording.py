"""Translation of messages of Python functions for the command line: `overwrite=True` becomes
`--overwrite`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

__all__ = ["in_options", "option_words"]

_VALUE = r"=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,;()]*[^\s,;().])"

_ELSEWHERE = {"custom_objects": "--import"}
"""Options whose name differs from that of the argument."""


def option_words(command: argparse.ArgumentParser) -> dict[str, str]:
    """Return the options of a command by the names of the Python arguments; `""` for positional
    arguments."""
    found = {}
    for action in command._actions:
        if action.dest not in ("help", "mode"):
            found[action.dest if action.option_strings else "path"] = (
                action.option_strings[-1] if action.option_strings else ""
            )
    found.update(
        {argument: option for argument, option in _ELSEWHERE.items() if option in found.values()}
    )
    return found


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Return a message with each `argument=value` replaced by the option and its value.

    Args:
        text: the message.
        options: the options, from `option_words`.
    """
    if not options:
        return text

    def option_of(match: re.Match[str]) -> str:
        option, value = options[match[1]], match[2]
        if value == "True":
            return option
        if value == "None":
            return f"no {option}"
        plain = value.strip("'\"") if re.fullmatch(r"'[\w.*-]+'", value) else value
        return f"{option} {plain}" if option else value

    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    return re.sub(rf"(?<![\w-])({names}){_VALUE}", option_of, text)
