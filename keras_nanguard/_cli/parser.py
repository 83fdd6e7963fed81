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
import os
import sys
from collections.abc import Sequence

from keras_nanguard._cli import commands as command_functions
from keras_nanguard._cli.commands import CLEAN, FOUND, MISUSE
from keras_nanguard._cli.wording import option_words
from keras_nanguard._core.errors import NanGuardError, no_backend

__all__ = ["CLEAN", "FOUND", "MISUSE", "main", "parser"]

_EXIT_CODES = "exit codes: 0 clean, 1 something was found, 2 the command could not be executed"

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
    if "_ARGCOMPLETE" in os.environ:  # a shell asks which words may follow
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
    return NanGuardError(
        f"the command failed, {type(error).__name__}: {error} (python -X dev shows where)"
    )


def _print_what_can_be_encoded() -> None:
    """Let names that the output cannot encode (a pipe in ASCII) be printed with question marks, and
    not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    root = argparse.ArgumentParser(
        prog="keras-nanguard",
        description=(
            "Guards Keras 3 training against NaN and Inf: checks models, files and policies."
        ),
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    root.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _scan,
        _repair,
        _recalibrate,
        _lint,
        _diagnose,
        _check_policy,
        _replay,
        _report,
        _watch,
        _demo,
    ):
        add(commands)
    return root


class _Version(argparse.Action):
    """Prints the installed version, which is looked up only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("keras-nanguard"))
        except PackageNotFoundError:
            print("unknown: not installed")
        parser.exit()


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: command_functions.Command,
) -> argparse.ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}."
    command = commands.add_parser(
        name, help=summary, description=description, epilog=_EXIT_CODES, allow_abbrev=False
    )
    command.set_defaults(run=run, command=command)
    return command


def _scan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "find NaN, Inf and values out of range in model files, without building the model"
    command = _command(commands, "scan", summary, command_functions.scan)
    command.add_argument("paths", nargs="+", metavar="FILE", help=_FILES)
    command.add_argument(
        "--notes",
        action="store_true",
        help="also list harmless observations, such as kernels of zeros",
    )
    _limits(command)
    _json(command)


def _repair(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "replace the bad values of a model file, and nothing else, in a new file"
    command = _command(commands, "repair", summary, command_functions.repair)
    command.add_argument("path", metavar="FILE", help=_FILES)
    command.add_argument(
        "-o", "--output", metavar="FILE", help="the new file (default: NAME.repaired.EXT)"
    )
    for name, default, kinds in (
        ("statistics", "initial", ("initial", "source", "keep")),
        ("weights", "keep", ("initial", "zeros", "ones", "source", "keep")),
    ):
        command.add_argument(
            f"--{name}", choices=kinds, help=f"what replaces bad {name} (default: {default})"
        )
    command.add_argument(
        "--slots",
        choices=("reset", "source", "keep"),
        help="what to do with bad optimizer slots (default: reset)",
    )
    command.add_argument(
        "--source",
        metavar="FILE",
        help="good file of the same model; statistics and weights then default to source",
    )
    command.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        default=[],
        help="only variables whose path matches: '*bn*'",
    )
    _limits(command)
    command.add_argument(
        "--in-place", action="store_true", help="replace the file; the old one is kept as FILE.bak"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="list what would change and write nothing"
    )
    command.add_argument("--overwrite", action="store_true", help="replace an existing output")
    command.add_argument(
        "--seed", type=_seed, metavar="NUMBER", help="seed for the weights of --weights initial"
    )
    _json(command)


def _recalibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "re-estimate the statistics of BatchNormalization from data, in a new file"
    command = _command(commands, "recalibrate", summary, command_functions.recalibrate)
    command.add_argument(
        "path", metavar="MODEL", help="a .keras or legacy .h5 file of a whole model"
    )
    command.add_argument(
        "--data", required=True, metavar="FILE", help="an .npz or .npy file with the inputs (x)"
    )
    command.add_argument(
        "-o", "--output", metavar="FILE", help="the new file (default: NAME.repaired.keras)"
    )
    command.add_argument(
        "--steps", type=_count, metavar="NUMBER", help="number of batches to run (default: all)"
    )
    command.add_argument(
        "--batch-size",
        type=_count,
        default=32,
        metavar="NUMBER",
        help="number of rows per batch (default: 32)",
    )
    command.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        default=[],
        help="only layers whose path matches: '*bn*'",
    )
    command.add_argument("--overwrite", action="store_true", help="replace an existing output")
    _json(command)


def _lint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "check a model for numeric hazards before it is trained"
    command = _command(commands, "lint", summary, command_functions.lint)
    command.add_argument(
        "path", metavar="MODEL", help="a .keras or legacy .h5 file of a whole model"
    )
    command.add_argument(
        "--data", metavar="FILE", help="an .npz file with inputs (x) and targets (y) to check, too"
    )
    command.add_argument(
        "--ignore", action="append", metavar="RULE", default=[], help="disable a rule"
    )
    _json(command)


def _diagnose(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = (
        "find the first layer of a model with bad outputs on a batch, in inference and in training"
        " mode, and why"
    )
    command = _command(commands, "diagnose", summary, command_functions.diagnose)
    command.add_argument(
        "path", metavar="MODEL", help="a .keras or legacy .h5 file of a whole model"
    )
    command.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="an .npz or .npy file: inputs (x), targets (y)",
    )
    command.add_argument(
        "--rows",
        type=_count,
        default=32,
        metavar="NUMBER",
        help="number of rows of the data to run (default: 32)",
    )
    _json(command)


def _check_policy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "check a policy, and explain what it will do and which parts of it have no effect"
    command = _command(commands, "check-policy", summary, command_functions.check_policy)
    command.add_argument(
        "policy", metavar="POLICY", help="a .toml, .yaml or .json file, or the name of a preset"
    )
    command.add_argument(
        "--model", metavar="FILE", help=f"a file of the model, to check names against: {_FILES}"
    )
    _json(command)


def _replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "run the bad step of an incident bundle again and diagnose it"
    command = _command(commands, "replay", summary, command_functions.replay)
    command.add_argument("bundle", metavar="BUNDLE", help="folder of the incident: Incident.bundle")
    command.add_argument(
        "--model", metavar="FILE", help="a .keras file, if the bundle contains no configuration"
    )
    own = "module to import with custom classes and functions of the model"
    command.add_argument(
        "--import", dest="own", metavar="MODULE", action="append", default=[], help=own
    )
    modes = command.add_mutually_exclusive_group()
    for mode in ("eager", "graph", "xla"):
        modes.add_argument(
            f"--{mode}",
            dest="mode",
            action="store_const",
            const=mode,
            help=f"run the step in {mode} mode",
        )
    command.add_argument("--dtype", choices=("float32",), help="compute everything in this dtype")
    command.add_argument("--device", metavar="NAME", help="device to run on: CPU:0, GPU:0")
    command.add_argument(
        "--plain", action="store_true", help="only run the step, without counterfactuals"
    )
    _json(command)


def _report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show what happened in a guarded run, or compare several runs"
    command = _command(commands, "report", summary, command_functions.report)
    kinds = (
        "the directory that was given to NanGuard, a .json or .jsonl file of guard.report,"
        " or a bundle"
    )
    command.add_argument(
        "paths", nargs="+", metavar="REPORT", help=f"{kinds}; several are compared"
    )
    written = "write a .html page, or a .md, .json or .jsonl file, instead of printing"
    command.add_argument("-o", "--output", metavar="FILE", help=written)
    _json(command)


def _watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = (
        "follow a guarded run in the terminal: curves, incidents, what the policy may still do"
    )
    command = _command(commands, "watch", summary, command_functions.watch)
    command.add_argument(
        "directory", metavar="DIR", help="the directory that was given to NanGuard"
    )
    command.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default: 1)",
    )
    command.add_argument(
        "--once",
        action="store_true",
        help="show it once and exit, as where the output is no terminal",
    )


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, received {text}")
    return count


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or above, received {text}")
    return seed


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.05 to 3600 seconds, received {text}")
    return seconds


def _demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = (
        "train a small network on data with five corrupted images, with and without the guard,"
        " and without the five"
    )
    _command(commands, "demo", summary, command_functions.demo)


def _limits(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--limit", type=float, metavar="NUMBER", help="magnitude that no value may exceed"
    )
    summary = "magnitude that no moving statistic may exceed (default: 1e6)"
    command.add_argument("--statistics-limit", type=float, metavar="NUMBER", help=summary)


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, one document per line")
