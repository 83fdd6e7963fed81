"""The batches of the last committed steps: references that are let go again as others come.

Remembering a batch costs an append. What one array of it takes is asked for once in a while, so that the batches never
hold on to more than a fixed number of bytes. Which state they go on from is asked for when something has gone wrong.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_nanguard._fit._snapshot import Snapshot

__all__ = ["MOST", "Approach", "Recent", "held", "owned", "room"]

MOST = 128
"""Batches that are remembered: a few more than lie between two snapshots by default."""

MOST_BYTES = 64 << 20
"""Bytes of batches that are remembered; a batch larger than that is not."""

AGAIN = 64
"""Steps after which the size of a batch is looked at again."""


@dataclass(frozen=True)
class Approach:
    """The steps that led up to an incident.

    Attributes:
        snapshot: the state that they are to be run from.
        steps: their numbers.
        batches: the arguments of each.
        exact: whether they are all the steps that were committed since the snapshot.
    """

    snapshot: Snapshot
    steps: tuple[int, ...]
    batches: tuple[Any, ...]
    exact: bool


class Recent:
    """What the last committed steps were given."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Any]] = deque(maxlen=MOST)
        self._origin: Snapshot | None = None
        self._since = self._look_in = 0

    def push(self, step: int, given: Any) -> None:
        """Remember what a committed step was given, in the form that its transaction hands it out. Runs in every step."""
        self._entries.append((step, given))
        self._look_in -= 1
        if self._look_in < 0:
            self._fit(given)

    def _fit(self, given: Any) -> None:
        """Make the room as large as the bytes of a batch let it be."""
        self._look_in = AGAIN - 1
        most = room(keras.tree.flatten(getattr(given, "tensors", given)))
        if most != self._entries.maxlen:
            self._entries = deque(self._entries, maxlen=most)

    def restart(self, step: int, origin: Snapshot | None = None) -> None:
        """Forget everything: the steps from this one on go on from another state, that of a snapshot or one of no name."""
        self._entries.clear()
        self._origin, self._since = origin, step

    def last(self, count: int, batch: Callable[[int, Any], Any]) -> list[Any]:
        """Return the arguments of the last steps, at most so many, oldest first; `batch` is as below."""
        found = [batch(step, given) for step, given in list(self._entries)[-count:]]
        return [args for args in found if args is not None]

    def approach(self, snapshots: Sequence[Snapshot], batch: Callable[[int, Any], Any]) -> Approach | None:
        """Return the steps that led up to this moment, from the earliest snapshot from which all of them are known.

        Where they are known from none, those that are known, and the newest snapshot: the same data from a sound state.

        Args:
            snapshots: those that are at hand, oldest first.
            batch: returns the arguments of a step, `None` where they are gone.
        """
        found = [(step, batch(step, given)) for step, given in self._entries]
        gone = max((number for number, (_, args) in enumerate(found) if args is None), default=-1)
        known = found[gone + 1 :]
        if not known:
            return None
        cut = gone >= 0 or len(found) == self._entries.maxlen
        first = known[0][0] if cut else self._since
        since = [s for s in snapshots if s.step >= first]
        if since and any(step >= since[0].step for step, _ in known):
            return _approach(since[0], [(step, args) for step, args in known if step >= since[0].step], True)
        origin = self._origin or (snapshots[-1] if snapshots else None)
        return _approach(origin, known, origin is self._origin and not cut) if origin is not None else None


def _approach(snapshot: Snapshot, known: Sequence[tuple[int, Any]], exact: bool) -> Approach:
    return Approach(snapshot, tuple(step for step, _ in known), tuple(args for _, args in known), exact)


def held(args: Any) -> Any:
    """Return arguments as they will still be after later steps: NumPy arrays that someone may write to are copied."""
    return keras.tree.map_structure(owned, args)


def owned(value: Any) -> Any:
    """Return a value as it is, and a copy of a NumPy array that someone may write to."""
    return value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value


def room(leaves: Iterable[Any]) -> int:
    """Return how many batches of these arrays may be remembered."""
    size = sum(_bytes(leaf) for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    return min(MOST, MOST_BYTES // max(size, 1))


def _bytes(leaf: Any) -> int:
    if hasattr(leaf, "nbytes"):
        return int(leaf.nbytes)
    return math.prod(int(n) for n in leaf.shape) * int(getattr(leaf.dtype, "size", None) or 16)
