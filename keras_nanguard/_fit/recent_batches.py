"""The batches of the last steps, to run these steps again.

They are references that are released as new ones arrive. Remembering a batch costs an append and a
check of the shapes of its arrays, because batches may differ in size. All of them together never
exceed a fixed number of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras_nanguard._backends.shared import batches as step_data
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._keras import arrays as keras_arrays

MAX_BATCHES = 1024
"""Maximum number of remembered batches: a whole window of `Divergence`, at most 1000 steps, after
which a run may have to return to its first state.
"""


class Rerun(NamedTuple):
    """The steps that a rollback has undone, to be replayed from its snapshot.

    Attributes:
        snapshot: the snapshot.
        batches: the arguments of each step since then, `None` for one that is skipped.
        refused: the replayed steps that had been refused.
    """

    snapshot: Snapshot
    batches: tuple[Any, ...]
    refused: frozenset[int]


class _Entry(NamedTuple):
    """A step, its arguments as its transaction stores them, and their bytes: 0 if the next entry
    has the same ones.
    """

    step: int
    given: Any
    size: int
    refused: bool


class RecentBatches:
    """The arguments of the last committed steps, and of refused ones whose batch was good.

    Args:
        batch: returns the arguments of a step as they were given, from the form in which its
            transaction stores them; `None` if they are gone.
    """

    def __init__(self, batch: Callable[[Any], Any]):
        self._batch = batch
        self._entries: deque[_Entry] = deque()
        self._bytes = 0

    def push(self, step: int, given: Any, refused: bool = False) -> None:
        """Store the arguments of a step, in the form of its transaction. Runs in every step.

        Those of a `refused` step may be replayed after a rollback.
        """
        entries = self._entries
        last = entries[-1] if entries else None
        if last is not None and last.given is given:
            size, entries[-1] = last.size, last._replace(size=0)
        else:
            size = bytes_of(getattr(given, "tensors", given))
            self._bytes += size
        entries.append(_Entry(step, given, size, refused))
        while self._bytes > step_data.MAX_BYTES or len(entries) > MAX_BATCHES:
            self._bytes -= entries.popleft().size

    def blame(self, step: int) -> None:
        """Remove the arguments of the last step, because it must not be replayed."""
        if self._entries and self._entries[-1].step == step:
            self._entries[-1] = self._entries[-1]._replace(given=None)

    def restart(self) -> None:
        """Remove everything, because the next step starts from another state."""
        self._entries.clear()
        self._bytes = 0

    def return_to(self, step: int) -> None:
        """Remove the steps from this one on, which are to be replayed."""
        entries = self._entries
        while entries and entries[-1].step >= step:
            size = entries.pop().size
            if entries and entries[-1].given is not None and not entries[-1].size:
                entries[-1] = entries[-1]._replace(size=size)  # it has the same arguments
            else:
                self._bytes -= size

    def last(self, count: int) -> list[Any]:
        """Return the arguments of the last committed steps, at most this many, oldest first."""
        entries = [e for e in self._entries if e.given is not None and not e.refused]
        return [args for e in entries[-count:] if (args := self._batch(e.given)) is not None]

    def rerun(self, snapshot: Snapshot, step: int) -> Rerun | None:
        """Return the steps from a snapshot to this one, to be replayed; `None` if not all are
        known.
        """
        known = {entry.step: entry for entry in self._entries}
        known.setdefault(step, _Entry(step, None, 0, False))
        batches, refused = [], set()
        for number in range(snapshot.step, step + 1):
            entry = known.get(number)
            args = self._args(entry) if entry is not None else None
            if entry is None or (args is None and entry.given is not None):
                return None
            batches.append(args)
            if entry.refused and args is not None:
                refused.add(number)
        return Rerun(snapshot, tuple(batches), frozenset(refused))

    def _args(self, entry: _Entry) -> Any:
        return None if entry.given is None else self._batch(entry.given)


def bytes_of(value: Any) -> int:
    """Return the bytes of the arrays in a structure. Runs in every step."""
    if isinstance(value, (tuple, list)):
        total = 0
        for part in value:
            total += bytes_of(part)
        return total
    shape = getattr(value, "shape", None)
    if shape is None:
        return sum(map(bytes_of, value.values())) if isinstance(value, Mapping) else 0
    count = getattr(shape, "num_elements", None)
    if count is None:
        if not keras_arrays.is_convertible(value):
            return int(value.nbytes)
        if hasattr(value, "todense"):
            return bytes_of((value.data, value.indices))
        return int(value._nnz() * (value.element_size() + 8 * value.ndim))  # at most
    number = count()  # of TensorFlow
    if hasattr(value, "flat_values"):  # ragged
        return bytes_of((value.flat_values, value.nested_row_splits))
    if number is None or not hasattr(value, "device"):  # sparse
        return sum(bytes_of(getattr(value, name, None)) for name in ("values", "indices"))
    return int(number) * (int(value.dtype.size or 0) or 16)
