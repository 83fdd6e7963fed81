"""Checks the files next to a recording: none may make SQLite write to or remove another file."""

from __future__ import annotations

import os
from pathlib import Path

from keras_nanguard._core.errors import GuardError, expected

__all__ = ["check"]

_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")
"""The last bytes of a journal that names another file, as SQLite writes it for a transaction over
several databases.
"""


def check(file: Path) -> None:
    """Raise if SQLite would write to another file than this one, or remove one.

    When a database is opened for writing, SQLite rolls back a journal next to it, and removes the
    file that the journal names as the common one of all databases in its transaction. A recording
    never takes part in such a transaction.

    Raises:
        GuardError: in that case.
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
