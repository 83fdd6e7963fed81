"""The command line: `keras-nanguard`, or `python -m keras_nanguard`.

argcomplete completes words in the shell: it reads this parser, and is imported only then.
Every command imports its dependencies when it runs: `--help` loads only this package, and no
command that reads files imports Keras.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from keras_nanguard._cli.commands import COMMANDS
from keras_nanguard._cli.output import MISUSE, flush, print_error
from keras_nanguard._core.errors import NanGuardError, no_backend
from keras_nanguard._version import __version__

_EXIT_CODES = "exit codes: 0 clean, 1 something was found, 2 the command could not be executed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the command-line arguments; those of the process by default.

    Returns:
        The exit code: 0 clean, 1 found, 2 misuse. Errors are printed to stderr in one sentence.
    """
    given = argparse.Namespace(output=None)
    _prepare_output()
    root = parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell requests completions
        import argcomplete

        argcomplete.autocomplete(root)
    try:
        root.parse_args(arguments, given)
        return int(given.run(given))
    except SystemExit as leaving:  # argparse exits like this, after --help (0) and on misuse (2)
        return leaving.code if isinstance(leaving.code, int) else MISUSE
    except KeyboardInterrupt:
        print("keras-nanguard: interrupted; no partial file was left.", file=sys.stderr)
        return 130
    except Exception as error:
        if sys.flags.dev_mode:  # python -X dev
            raise
        print_error(_explained(error, given.output))
        return MISUSE
    finally:
        for stream in (sys.stdout, sys.stderr):  # a library may have printed, too
            flush(stream)


def _explained(error: Exception, new: str | None) -> Exception:
    """Return an error whose message is one sentence for the user of a command; `new` is the file
    that it was told to write.
    """
    if isinstance(error, NanGuardError):
        return error
    if isinstance(error, ModuleNotFoundError) and (text := no_backend(error)):
        return NanGuardError(text)
    if isinstance(error, OSError):
        from keras_nanguard._core.atomic_files import BESIDE

        name = str(error.filename or "")
        is_output = bool(new) and (name == new or BESIDE in name)  # or its temporary file
        place = f"{new} cannot be written: " if is_output else f"{name}: " if name else ""
        return NanGuardError(f"{place}{str(error.strerror or error).rstrip('.')}.")
    failed = f"the command failed, {type(error).__name__}: {error}"
    return NanGuardError(f"{failed} (python -X dev shows where)")


def _prepare_output() -> None:
    """Let names that the output cannot encode (a pipe in ASCII) be printed with question marks, and
    not end a command, nor a closed output (`>&-`)."""
    closed = [one or open(os.devnull, "w") for one in (sys.stdout, sys.stderr)]  # noqa: SIM115
    sys.stdout, sys.stderr = closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    common: dict[str, Any] = {"epilog": _EXIT_CODES, "allow_abbrev": False}
    description = "Guards Keras 3 training against NaN and Inf: checks models, files and policies."
    root = argparse.ArgumentParser(prog="keras-nanguard", description=description, **common)
    version = "print the version and exit"
    root.add_argument("--version", action="version", version=__version__, help=version)
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (run, arguments) in COMMANDS.items():
        text = " ".join((run.__doc__ or "").partition("\n\n")[0].split())
        summary = f"{text[0].lower()}{text[1:]}".rstrip(".")
        own = commands.add_parser(name, help=summary, description=text, **common)
        own.set_defaults(run=run)
        for add in arguments:
            add(own)
    return root
