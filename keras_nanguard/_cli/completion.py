"""Completion scripts for bash, zsh and fish, generated from the parser."""

from __future__ import annotations

import argparse
import shlex

__all__ = ["script"]


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a completion script.

    Args:
        parser: the parser of the whole command line.
        shell: `"bash"`, `"zsh"` or `"fish"`.

    Returns:
        The text, to be sourced by the shell.
    """
    commands = _commands(parser)
    return _fish(commands) if shell == "fish" else _bash(commands, zsh=shell == "zsh")


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _bash(commands: dict[str, argparse.ArgumentParser], zsh: bool) -> str:
    """Complete options after a dash, choices after their option, and files otherwise."""
    cases = []
    for name, command in commands.items():
        options = " ".join(option for action in command._actions for option in action.option_strings)
        cases.append(f'    {name}) options="{options}" ;;')
    choices = []
    for name, command in commands.items():
        for action in command._actions:
            if action.choices and action.option_strings:
                reply = f'COMPREPLY=($(compgen -W "{" ".join(action.choices)}" -- "$word")); return'
                choices.append(f'    "{name} {action.option_strings[-1]}") {reply} ;;')
    lines = [
        *(["autoload -U +X bashcompinit && bashcompinit"] if zsh else []),
        "_keras_nanguard() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" options=""',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$word")); return',
        "  fi",
        '  case "$command ${COMP_WORDS[COMP_CWORD-1]}" in',
        *choices,
        "  esac",
        '  case "$command" in',
        *cases,
        "  esac",
        '  case "$word" in',
        '    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;',
        '    *) COMPREPLY=($(compgen -f -- "$word")) ;;',
        "  esac",
        "}",
        "complete -o filenames -F _keras_nanguard keras-nanguard",
    ]
    return "\n".join(lines) + "\n"


def _fish(commands: dict[str, argparse.ArgumentParser]) -> str:
    lines = []
    for name, command in commands.items():
        description = shlex.quote(command.description or name)
        lines.append(f"complete -c keras-nanguard -n __fish_use_subcommand -a {name} -d {description}")
        for action in command._actions:
            for option in action.option_strings:
                kind = "-l" if option.startswith("--") else "-s"
                words = f" -xa {shlex.quote(' '.join(action.choices))}" if action.choices else ""
                lines.append(
                    f"complete -c keras-nanguard -n '__fish_seen_subcommand_from {name}' {kind} {option.lstrip('-')}"
                    f"{words} -d {shlex.quote(action.help or '')}"
                )
    return "\n".join(lines) + "\n"
