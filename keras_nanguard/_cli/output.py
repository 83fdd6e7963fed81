"""What commands print: reports and errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from keras_nanguard._core.plain_values import one_line, plain

CLEAN, FOUND, MISUSE = 0, 1, 2
"""The exit codes."""


def print_error(error: Exception) -> None:
    """Print an error in one line."""
    say(f"keras-nanguard: {one_line(error)}", sys.stderr)


def say(text: object, stream: TextIO | None = None) -> None:
    """Print to a stream, by default stdout. If its reader has closed it, as `head` does, nothing
    more is printed, and the exit code is that of the command."""
    stream = stream or sys.stdout
    with suppress(BrokenPipeError):
        print(text, file=stream)
    flush(stream)


def flush(stream: TextIO) -> None:
    """Write what was printed to a stream. If its reader has closed it, nothing more is written.
    Otherwise Python would end with the exit code 120.
    """
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show(report: Any, as_json: bool) -> int:
    """Print a report: JSON if requested, its table on a terminal, plain lines to a pipe or file;
    and return the exit code."""
    if as_json:
        print_json(report.to_dict())
    elif sys.stdout.isatty() and hasattr(report, "__rich__"):
        from rich.console import Console

        Console().print(report)
    else:
        say(report)
    return CLEAN if report.ok else FOUND


def print_json(document: Any) -> None:
    """Print strict JSON: NaN and Inf are strings, as in every record of this library."""
    say(json.dumps(plain(document), allow_nan=False))


@contextmanager
def progress() -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr if that is a terminal; it disappears at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
