"""The file of a recording: which run writes it, and why it is not written."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import GuardError
from keras_nanguard._recording import database, recording
from keras_nanguard._recording.writer import INCIDENTS, Writer


class RunFile:
    """The file of a recording, over all fits of one guard.

    Attributes:
        writer: writes to it during a fit; `None` if there is no file.
    """

    def __init__(self) -> None:
        self.writer: Writer | None = None
        self._owners = set[str]()  # this guard has written a file of one of these
        self._problem = self._reported = ""
        self._opened = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which does not write."""
        return {**vars(self), "writer": None}

    def open(self, path: Path, load: Callable[[], None], end: Callable[[], None]) -> bool:
        """Begin to write; return whether everything recorded so far has to be written again.

        Args:
            path: the file.
            load: reads it, to continue what an earlier process has recorded.
            end: see `Writer`.
        """
        opened, self._opened = self._opened, True
        before, self._problem = self._problem, ""
        try:
            there = path.exists() and path.stat().st_size > 0
            if there and not opened:
                self._owners.add(recording.writer_of(path))
                load()
            elif there and recording.writer_of(path) not in self._owners:
                raise GuardError(f"{path} is in use by another run; use one directory per run")
            name = uuid.uuid4().hex
            self.writer = Writer(path, name, end)
        except Exception as error:  # noqa: BLE001  such as no thread: training continues
            self._problem = str(error) or type(error).__name__
            return False
        self._owners.add(name)
        return bool(before) or not there

    def fail(self, error: Exception) -> None:
        """Note an error outside of the file that keeps data from it."""
        self._problem = f"{type(error).__name__}: {error}"

    def problem(self) -> str:
        """Return once which file is not written, and why; `""` if all files are written."""
        found = self._problem or (self.writer.problem if self.writer is not None else "")
        if found and not found.startswith(INCIDENTS):
            found = f"{database.NAME} is not written: {found}"
        if found == self._reported:
            return ""
        self._reported = found or self._reported
        return found

    def close(self, hand_over: Callable[[Writer], None]) -> None:
        """Write the remaining data with `hand_over`, and close the file."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.ending = True
            writer.wait()
            if not writer.problem:
                hand_over(writer)
            writer.close()
            self._problem = writer.problem
