"""Takes the next batch while the accelerator, or another thread of the processor, computes a step.

The host waits for the verdict of each step. Without a guard Keras uses that time for the next batch; so does this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["Prefetch"]


class Prefetch:
    """An iterator that can take its next item before it is asked for.

    Args:
        source: the iterator whose items it gives, whose next item is the same whenever it is taken. It is not kept alive.
    """

    def __init__(self, source: Iterator[Any]):
        self._source = weakref.ref(source)
        self._held: tuple[Any, Exception | None] | None = None

    def is_of(self, source: Iterator[Any]) -> bool:
        """Whether it gives the items of this iterator."""
        return self._source() is source

    @property
    def holds(self) -> bool:
        """Whether it has an item that was not asked for yet."""
        return self._held is not None and self._held[1] is None

    def __iter__(self) -> Prefetch:
        return self

    def fetch(self) -> None:
        """Take the next item, or the exception in its place, which is raised when the item is asked for."""
        if self._held is None:
            try:
                self._held = self._next(), None
            except StopIteration as end:
                self._held = None, end.with_traceback(None)  # through its frames it would hold the fit
            except Exception as error:  # noqa: BLE001
                self._held = None, error

    def __next__(self) -> Any:
        if self._held is None:
            return self._next()
        (item, error), self._held = self._held, None
        if error is not None:
            raise error
        return item

    def _next(self) -> Any:
        source = self._source()
        if source is None:
            raise StopIteration
        return next(source)
