"""What may lie beside a recording: nothing that makes SQLite write to another file, or remove one."""

from __future__ import annotations

import os
from pathlib import Path

from keras_nanguard._core.errors import GuardError, expected

__all__ = ["check"]

_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")
"""The last bytes of a journal that names another file, as SQLite writes it for a transaction over several databases."""


def check(file: Path) -> None:
    """Raise where SQLite would write to another file than this one, or remove one.

    Whoever opens a database to write to it rolls back what a journal beside it says; SQLite then removes the file that the journal
    names as that of all databases of its transaction. A recording is never one of several.

    Raises:
        GuardError: if it would.
    """
    remedy = "Give the guard a directory of its own, or remove the file."
    if file.is_symlink():
        raise GuardError(expected(f"a recording at {file}", "a link", remedy))
    journal = file.with_name(f"{file.name}-journal")
    if journal.is_file() and journal.stat().st_size >= len(_NAMES_ANOTHER):
        with journal.open("rb") as opened:
            opened.seek(-len(_NAMES_ANOTHER), os.SEEK_END)
            if opened.read() == _NAMES_ANOTHER:
                raise GuardError(expected(f"the journal of one recording at {journal}", "one that names another file", remedy))
