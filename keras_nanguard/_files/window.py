"""A section of a file with the interface of a file."""

from __future__ import annotations

import io
import os
from typing import Any

__all__ = ["Window"]


class Window(io.RawIOBase):
    """A read-only section of a file, such as an uncompressed member of a zip archive.

    Args:
        descriptor: descriptor of an open file, which the caller closes.
        start: offset of the first byte.
        size: number of bytes.
    """

    def __init__(self, descriptor: int, start: int, size: int):
        super().__init__()
        self._descriptor, self._start, self._size, self._at = descriptor, start, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position and return it."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer up to the end of the section and return the number of bytes."""
        done = self.read_at(self._at, buffer)
        self._at += done
        return done

    def read_at(self, offset: int, buffer: Any) -> int:
        """Fill the buffer from an offset, independent of the position, and return the number of bytes."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - offset)]
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._start + offset + done)
            if count == 0:
                break
            done += count
        return done
