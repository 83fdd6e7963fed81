"""The batches of the last committed steps, as references that are released as new ones arrive.

Remembering a batch costs an append and a look at the shapes of its arrays, because batches may
differ in size. All of them together never exceed a fixed number of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_nanguard._backends.shared import batch_memory
from keras_nanguard._fit.snapshots import Snapshot

__all__ = ["Approach", "Recent", "Rerun"]


MAX_APPROACH = 256
"""Maximum number of batches of an `Approach`: more than two default intervals between snapshots."""


@dataclass(frozen=True)
class Approach:
    """The steps before an incident.

    Attributes:
        snapshot: the state to run them from.
        steps: their numbers.
        batches: the arguments of each.
        exact: whether they are all steps that were committed since the snapshot.
    """

    snapshot: Snapshot
    steps: tuple[int, ...]
    batches: tuple[Any, ...]
    exact: bool


@dataclass(frozen=True)
class Rerun:
    """The steps that a rollback has undone, to be replayed from its snapshot.

    Attributes:
        snapshot: the snapshot.
        batches: the arguments of each step since then, `None` for one that is skipped.
        refused: the replayed steps that had been refused.
    """

    snapshot: Snapshot
    batches: tuple[Any, ...]
    refused: frozenset[int] = frozenset()


class Recent:
    """The arguments of the last committed steps, and of refused ones whose batch was good."""

    def __init__(self) -> None:
        self._refused: set[int] = set()
        self._entries: deque[tuple[int, Any]] = deque()
        self._sizes: deque[int] = (
            deque()
        )  # of the last entry of those that share their arguments, 0 of the others
        self._bytes = self._since = 0
        self._cut = False
        self._origin: Snapshot | None = None

    def push_refused(self, step: int, given: Any) -> None:
        """Store the arguments of a refused step, which may be replayed after a rollback."""
        self._refused.add(step)
        self.push(step, given)

    def blame(self, step: int) -> None:
        """Remove the arguments of the last step, because it must not be replayed."""
        if self._entries and self._entries[-1][0] == step:
            self._entries[-1] = (step, None)

    def rerun(
        self, snapshot: Snapshot, step: int, batch: Callable[[int, Any], Any]
    ) -> Rerun | None:
        """Return the steps from a snapshot to this one, to be replayed; `None` if not all are
        known.

        Args:
            snapshot: the state to run them from.
            step: the last of them.
            batch: see `approach`.
        """
        known = {
            number: (given if given is None else batch(number, given), given is None)
            for number, given in self._entries
            if number >= snapshot.step
        }
        numbers = range(snapshot.step, step + 1)
        if not all(number in known or number == step for number in numbers):
            return None
        found = [known.get(number, (None, True)) for number in numbers]
        if any(args is None and not skipped for args, skipped in found):
            return None
        batches = tuple(args for args, _ in found)
        again = (
            number
            for number, args in zip(numbers, batches)
            if args is not None and number in self._refused
        )
        return Rerun(snapshot, batches, frozenset(again))

    def push(self, step: int, given: Any) -> None:
        """Store the arguments of a committed step, in the form of its transaction. Runs in every
        step.
        """
        if hasattr(given, "part"):
            given = given.part(step)
        if self._entries and self._entries[-1][1] is given:
            size, self._sizes[-1] = self._sizes[-1], 0
        else:
            size = batch_memory.bytes_of(getattr(given, "tensors", given))
            self._bytes += size
        self._entries.append((step, given))
        self._sizes.append(size)
        while self._entries and (
            self._bytes > batch_memory.MAX_BYTES or len(self._entries) > batch_memory.MAX_BATCHES
        ):
            self._refused.discard(self._entries.popleft()[0])
            self._bytes -= self._sizes.popleft()
            self._cut = True

    def restart(self, step: int, origin: Snapshot | None = None) -> None:
        """Remove everything, because the steps from this one on start from another state."""
        self._entries.clear()
        self._sizes.clear()
        self._refused.clear()
        self._bytes, self._cut = 0, False
        self._origin, self._since = origin, step

    def return_to(self, step: int) -> None:
        """Remove the steps from this one on, which are to be replayed."""
        while self._entries and self._entries[-1][0] >= step:
            self._refused.discard(self._entries.pop()[0])
            self._bytes -= self._sizes.pop()

    def last(self, count: int, batch: Callable[[int, Any], Any]) -> list[Any]:
        """Return the arguments of the last steps, at most this many, oldest first. For `batch` see
        `approach`.
        """
        entries = [
            (step, given)
            for step, given in self._entries
            if given is not None and step not in self._refused
        ]
        found = [batch(step, given) for step, given in entries[-count:]]
        return [args for args in found if args is not None]

    def approach(
        self, snapshots: Sequence[Snapshot], batch: Callable[[int, Any], Any]
    ) -> Approach | None:
        """Return the steps before this moment, from the earliest snapshot since which all of them
        are known.

        If there is no such snapshot, return the known steps and the newest snapshot: the same data
        from a good state.

        Args:
            snapshots: the available ones, oldest first.
            batch: returns the arguments of a step, or `None` if they are gone.
        """
        entries = list(self._entries)[-MAX_APPROACH:]
        found = [
            (step, None if given is None else batch(step, given))
            for step, given in entries
            if step not in self._refused
        ]
        gone = max((number for number, (_, args) in enumerate(found) if args is None), default=-1)
        known = found[gone + 1 :]
        if not known:
            return None
        cut = gone >= 0 or self._cut or len(entries) < len(self._entries)
        first = known[0][0] if cut else self._since
        since = [s for s in snapshots if s.step >= first]
        since = [
            s for s in since if s.step
        ] or since  # the start is kept for other reasons, and is far from here
        if since and any(step >= since[0].step for step, _ in known):
            return _approach(
                since[0], [(step, args) for step, args in known if step >= since[0].step], True
            )
        origin = self._origin or (snapshots[-1] if snapshots else None)
        return (
            _approach(origin, known, origin is self._origin and not cut)
            if origin is not None
            else None
        )


def _approach(snapshot: Snapshot, known: Sequence[tuple[int, Any]], exact: bool) -> Approach:
    return Approach(
        snapshot, tuple(step for step, _ in known), tuple(args for _, args in known), exact
    )
