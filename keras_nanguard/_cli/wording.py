"""Messages of Python functions in the words of the command line: `overwrite=True` becomes `--overwrite`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

__all__ = ["in_options", "option_words"]

_VALUE = r"=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,;()]*[^\s,;().])"

_ELSEWHERE = {"custom_objects": "--import"}
"""Arguments of Python functions whose option has another name."""


def option_words(command: argparse.ArgumentParser) -> dict[str, str]:
    """Return the options of a command by the names of the arguments of Python that they stand for; `""` for what has no dashes."""
    found = {}
    for action in command._actions:
        if action.dest not in ("help", "mode"):
            found[action.dest if action.option_strings else "path"] = action.option_strings[-1] if action.option_strings else ""
    found.update({argument: option for argument, option in _ELSEWHERE.items() if option in found.values()})
    return found


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Return a message with its `argument=value` written as the option and its value.

    Args:
        text: the message.
        options: as `option_words` returns them.
    """
    if not options:
        return text

    def said(match: re.Match[str]) -> str:
        option, value = options[match[1]], match[2]
        if value == "True":
            return option
        if value == "None":
            return f"no {option}"
        plain = value.strip("'\"") if re.fullmatch(r"'[\w.*-]+'", value) else value
        return f"{option} {plain}" if option else value

    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    return re.sub(rf"(?<![\w-])({names}){_VALUE}", said, text)
