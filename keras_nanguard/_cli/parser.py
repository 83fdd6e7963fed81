"""The command line: `keras-nanguard`, or `python -m keras_nanguard`.

argparse instead of Typer: Typer 0.29 imports pydantic to convert any argument, which takes 0.14 s
of the 0.3 s that `scan` may take to start (0.32 s of processor time with it, 0.18 s without).
argcomplete completes words in the shell: it reads this parser, and is imported only then.
Every command imports its dependencies when it runs: `--help` loads only this file, and no command
that reads files imports Keras.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from keras_nanguard._cli import commands as command_functions
from keras_nanguard._cli.commands import CLEAN, FOUND as FOUND, MISUSE, option_words
from keras_nanguard._core.errors import NanGuardError, no_backend
from keras_nanguard._files.repair_report import CHOICES, RepairOptions
from keras_nanguard._version import __version__

_EXIT_CODES = "exit codes: 0 clean, 1 something was found, 2 the command could not be executed"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_FILES = (
    "a .keras, .weights.h5, .h5 or .npz file, the .json index of sharded weights, or an Orbax"
    " checkpoint"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the command-line arguments; those of the process by default.

    Returns:
        The exit code: 0 clean, 1 found, 2 misuse. Errors are printed to stderr in one sentence.
    """
    words: dict[str, str] = {}
    _print_what_can_be_encoded()
    root = parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell requests completions
        import argcomplete

        argcomplete.autocomplete(root)
    try:
        given = root.parse_args(arguments)
        words = given.words = option_words(given.command)
        code = int(given.run(given))
        sys.stdout.flush()
        return code
    except SystemExit as leaving:  # argparse exits like this, after --help (0) and on misuse (2)
        return leaving.code if isinstance(leaving.code, int) else MISUSE
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except KeyboardInterrupt:
        print("keras-nanguard: interrupted; no partial file was left.", file=sys.stderr)
        return 130
    except Exception as error:
        if sys.flags.dev_mode:  # python -X dev
            raise
        command_functions.print_error(_explained(error), words)
        return MISUSE


def _explained(error: Exception) -> Exception:
    """Return an error whose message is one sentence for the user of a command."""
    if isinstance(error, NanGuardError):
        return error
    if isinstance(error, ModuleNotFoundError) and (text := no_backend(error)):
        return NanGuardError(text)
    if isinstance(error, OSError) and error.filename:  # what cannot be read is an error of ours
        reason = str(error.strerror or error).rstrip(".")
        return NanGuardError(f"{error.filename} cannot be written: {reason}.")
    if isinstance(error, OSError):
        return NanGuardError(f"{str(error.strerror or error).rstrip('.')}.")
    failed = f"the command failed, {type(error).__name__}: {error}"
    return NanGuardError(f"{failed} (python -X dev shows where)")


def _print_what_can_be_encoded() -> None:
    """Let names that the output cannot encode (a pipe in ASCII) be printed with question marks, and
    not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    description = "Guards Keras 3 training against NaN and Inf: checks models, files and policies."
    root = argparse.ArgumentParser(
        prog="keras-nanguard", description=description, epilog=_EXIT_CODES, allow_abbrev=False
    )
    version = "print the version and exit"
    root.add_argument("--version", action="version", version=__version__, help=version)
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_scan, _repair, _recalibrate, _lint, _diagnose, _check_policy, _replay, _report):
        add(commands)
    _watch(commands)
    _demo(commands)
    return root


def _command(
    commands: Commands, name: str, run: command_functions.Command, summary: str
) -> argparse.ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}."
    command = commands.add_parser(
        name, help=summary, description=description, epilog=_EXIT_CODES, allow_abbrev=False
    )
    command.set_defaults(run=run, command=command)
    return command


def _scan(commands: Commands) -> None:
    summary = "find NaN, Inf and values out of range in model files, without building the model"
    command = _command(commands, "scan", command_functions.scan, summary)
    command.add_argument("paths", nargs="+", metavar="FILE", help=_FILES)
    _flag(command, "--notes", "also list harmless observations, such as kernels of zeros")
    _limits(command)
    _json(command)


def _repair(commands: Commands) -> None:
    summary = "replace the bad values of a model file, and nothing else, in a new file"
    command = _command(commands, "repair", command_functions.repair, summary)
    command.add_argument("path", metavar="FILE", help=_FILES)
    _output(command, "NAME.repaired.EXT")
    for name, choices in CHOICES.items():
        text = f"what replaces bad {name} (default: {getattr(RepairOptions(), name)})"
        command.add_argument(f"--{name}", choices=choices, help=text)
    source = "good file of the same model; statistics and weights then default to source"
    _file(command, "--source", source)
    _only(command, "variables")
    _limits(command)
    _flag(command, "--in-place", "replace the file; the old one is kept as FILE.bak")
    _flag(command, "--dry-run", "list what would change and write nothing")
    _count(command, "--seed", "seed for the weights of --weights initial", low=0)
    _json(command)


def _recalibrate(commands: Commands) -> None:
    summary = "re-estimate the statistics of BatchNormalization from data, in a new file"
    command = _command(commands, "recalibrate", command_functions.recalibrate, summary)
    _model(command)
    _file(command, "--data", "an .npz or .npy file with the inputs (x)", required=True)
    _output(command, "NAME.repaired.keras")
    _count(command, "--steps", "number of batches to run (default: all)")
    _count(command, "--batch-size", "number of rows per batch (default: 32)", default=32)
    _only(command, "layers")
    _json(command)


def _lint(commands: Commands) -> None:
    summary = "check a model for numeric hazards before it is trained"
    command = _command(commands, "lint", command_functions.lint, summary)
    _model(command)
    _file(command, "--data", "an .npz file with inputs (x) and targets (y) to check, too")
    ignore = "disable a rule"
    command.add_argument("--ignore", action="append", metavar="RULE", default=[], help=ignore)
    _json(command)


def _diagnose(commands: Commands) -> None:
    summary = (
        "run one batch in inference and training mode, and report the first bad layer and the cause"
    )
    command = _command(commands, "diagnose", command_functions.diagnose, summary)
    _model(command)
    _file(command, "--data", "an .npz or .npy file: inputs (x), targets (y)", required=True)
    _count(command, "--rows", "number of rows of the data to run (default: 32)", default=32)
    _json(command)


def _check_policy(commands: Commands) -> None:
    summary = "check a policy, and explain what it will do and which parts of it have no effect"
    command = _command(commands, "check-policy", command_functions.check_policy, summary)
    policy = "a .toml, .yaml or .json file, or the name of a preset"
    command.add_argument("policy", metavar="POLICY", help=policy)
    _file(command, "--model", f"a file of the model, to check names against: {_FILES}")
    _json(command)


def _replay(commands: Commands) -> None:
    summary = "run the bad step of an incident bundle again and diagnose it"
    command = _command(commands, "replay", command_functions.replay, summary)
    command.add_argument("bundle", metavar="BUNDLE", help="folder of the incident: Incident.bundle")
    _file(command, "--model", "a .keras file, if the bundle contains no configuration")
    own, listed = "module to import with custom classes and functions of the model", "append"
    command.add_argument(
        "--import", dest="own", metavar="MODULE", action=listed, default=[], help=own
    )
    modes = command.add_mutually_exclusive_group()
    for mode in ("eager", "graph", "xla"):
        text = f"run the step in {mode} mode" if mode != "xla" else "compile the step with XLA"
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=text)
    command.add_argument("--dtype", choices=("float32",), help="compute everything in this dtype")
    command.add_argument("--device", metavar="NAME", help="device to run on, such as CPU:0")
    _flag(command, "--plain", "only run the step, without counterfactuals")
    _json(command)


def _report(commands: Commands) -> None:
    summary = "show what happened in a guarded run, or compare several runs"
    command = _command(commands, "report", command_functions.report, summary)
    kinds = (
        "the directory that was given to NanGuard, a .json or .jsonl file of guard.report,"
        " or a bundle; several are compared"
    )
    command.add_argument("paths", nargs="+", metavar="REPORT", help=kinds)
    written = "write a .html page, or a .md, .json or .jsonl file, instead of printing"
    command.add_argument("-o", "--output", metavar="FILE", help=written)
    _json(command)


def _watch(commands: Commands) -> None:
    summary = (
        "follow a guarded run in the terminal: curves, incidents, and remaining budgets of the"
        " policy"
    )
    command = _command(commands, "watch", command_functions.watch, summary)
    directory = "the directory that was given to NanGuard"
    command.add_argument("directory", metavar="DIR", help=directory)
    interval = "seconds between two updates (default: 1)"
    kind = _number(float, 0.05, 3600)
    command.add_argument("--interval", type=kind, default=1.0, metavar="SECONDS", help=interval)
    _flag(
        command, "--once", "print one frame and exit; the default if the output is not a terminal"
    )


def _demo(commands: Commands) -> None:
    summary = (
        "train a small network on data with five corrupted images, with and without the guard,"
        " and on clean data"
    )
    _command(commands, "demo", command_functions.demo, summary)


def _number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Return a type of arguments: a number from `low` to `high`."""

    def number(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            bounds = f"of {low:g} or above" if high == math.inf else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, received {text}")
        return value

    number.__name__ = kind.__name__  # as argparse names it
    return number


def _model(command: argparse.ArgumentParser) -> None:
    text = "a .keras or legacy .h5 file of a whole model"
    command.add_argument("path", metavar="MODEL", help=text)


def _file(command: argparse.ArgumentParser, name: str, text: str, required: bool = False) -> None:
    command.add_argument(name, required=required, metavar="FILE", help=text)


def _flag(command: argparse.ArgumentParser, name: str, text: str) -> None:
    command.add_argument(name, action="store_true", help=text)


def _count(command: argparse.ArgumentParser, name: str, text: str, **more: Any) -> None:
    kind = _number(int, more.pop("low", 1))
    command.add_argument(name, type=kind, metavar="NUMBER", help=text, **more)


def _output(command: argparse.ArgumentParser, default: str) -> None:
    text = f"the new file (default: {default})"
    command.add_argument("-o", "--output", metavar="FILE", help=text)
    _flag(command, "--overwrite", "replace an existing output")


def _only(command: argparse.ArgumentParser, what: str) -> None:
    text = f"only {what} whose path matches: '*bn*'"
    command.add_argument("--only", action="append", metavar="PATTERN", default=[], help=text)


def _limits(command: argparse.ArgumentParser) -> None:
    limit = "magnitude that no value may exceed"
    command.add_argument("--limit", type=float, metavar="NUMBER", help=limit)
    statistics = "magnitude that no moving statistic may exceed (default: 1e6)"
    command.add_argument("--statistics-limit", type=float, metavar="NUMBER", help=statistics)


def _json(command: argparse.ArgumentParser) -> None:
    _flag(command, "--json", "print JSON, one document per line")
