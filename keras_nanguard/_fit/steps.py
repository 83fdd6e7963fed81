"""The steps of one fit: their counts, the batches of the last ones, to run these steps again, and
when the tasks between two steps are due.

The batches are references that are released as new ones arrive. Remembering one costs an append and
a check of the shapes of its arrays, because batches may differ in size. All of them together never
exceed a fixed number of bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._backends.shared import batches as step_data
from keras_nanguard._keras import arrays as keras_arrays
from keras_nanguard._recording.database import OVERFLOW, REFUSED
from keras_nanguard._recording.recording import Totals

MOST_PARTS = 100
"""Number of parts up to which a structure within an object of the user's is looked into."""

LEFT_OUT = -1
"""The status of a step that a replay has left out. Others are in `_recording.database`."""

MAX_BATCHES = 1024
"""Maximum number of remembered batches: a whole window of `Divergence`, at most 1000 steps, after
which a run may have to return to its first state.
"""


# Counts


class Time(NamedTuple):
    """A moment between two steps of a fit.

    Attributes:
        step: number of complete steps, including refused ones.
        good: number of committed steps that no rollback has undone.
        epoch: the epoch.
        batch: number of batches of this epoch that are complete or will be skipped.
    """

    step: int
    good: int
    epoch: int
    batch: int

    def __str__(self) -> str:
        """Return it in words: `after 5 steps`."""
        steps = "1 step" if self.step == 1 else f"{self.step} steps"
        return f"after {steps}" if self.step else "before the first step"


@dataclass(slots=True)
class Epoch:
    """The counts of one epoch. A replayed step may be of an earlier one, which has ended.

    Attributes:
        number: its number, from 0.
        first: its first step.
        rollbacks: number of rollbacks before it.
        skipped: batches so far that were not trained on in this run.
        resumed: batches that an earlier run has trained on.
    """

    number: int = 0
    first: int = 0
    rollbacks: int = 0
    skipped: int = 0
    resumed: int = 0

    @property
    def start(self) -> int:
        """The step that its first batch would be if each batch were a step."""
        return self.first - self.skipped


class Counts:
    """The counters of one fit. All may read its attributes; its methods, one for each event, change
    them.

    Attributes:
        step: complete train steps, including refused ones.
        committed: committed steps that were not replayed since.
        good: those of them that no rollback has undone.
        uncommitted: the steps without an update: each `REFUSED` and not replayed since, an
            `OVERFLOW` under loss scaling, which is no incident, or `LEFT_OUT` of a replay.
        run_again: further steps that were refused, undone by a rollback, and replayed.
        rollbacks: number of rollbacks, with those of earlier fits.
        restored: the step of the last restored snapshot, `None` before the first rollback.
        skip_batches: number of the next batches that are not trained on.
        last_refused: whether the last step was refused.
        epoch: the counts of the current epoch.
    """

    def __init__(self) -> None:
        self.step = self.committed = self.good = 0
        self.rollbacks = self.skip_batches = self.run_again = 0
        self.uncommitted = dict[int, int]()
        self.last_refused = False
        self.restored: int | None = None
        self.epoch = Epoch()
        self._replayed = 0  # the first step that is not replayed
        # First step, epoch, and its `start` then: of each epoch, and after skipped batches.
        self._places: deque[tuple[int, int, int]] = deque(maxlen=MAX_BATCHES + 1)

    # Steps

    def advance(self) -> None:
        """Continue with the next step."""
        self.step += 1

    def judge(self, refused: bool) -> None:
        """Note whether the current step was refused."""
        self.last_refused = refused

    def commit(self) -> None:
        """Count the current step as committed, and its state as good. This runs in every step."""
        self.committed += 1
        self.good += 1
        self.last_refused = False

    def refuse(self, overflow: bool = False) -> None:
        """Count the current step as refused, perhaps as an ordinary `overflow`."""
        self.last_refused = True
        self.uncommitted[self.step] = OVERFLOW if overflow else REFUSED

    def roll_back(self, skip_batches: int) -> None:
        """Count a rollback, after which some batches are skipped."""
        self.rollbacks += 1
        self.skip_batches += skip_batches

    def follow(self, rollbacks: int) -> None:
        """Continue the count of rollbacks of an earlier fit."""
        self.rollbacks = self.epoch.rollbacks = rollbacks

    # Replays

    def go_back(self, time: Time, rerun: Rerun | None) -> None:
        """Note that a snapshot of this time was restored.

        Args:
            rerun: the steps since then if they are replayed. Then counting continues from there.
        """
        undone, self.restored, self.good = self.good - time.good, time.step, time.good
        if rerun is not None:
            self._replayed = max(self._replayed, time.step + len(rerun.batches))
            self.step, self.committed = time.step, self.committed - undone
            self.run_again += len(rerun.refused)
            for step in rerun.refused:
                self.uncommitted.pop(step, None)

    def leave_out(self) -> None:
        """Pass over a step of a replay."""
        self.uncommitted.setdefault(self.step, LEFT_OUT)
        self.step += 1

    def end_replay(self, left_out: int, refused: bool) -> None:
        """Continue after the replays, in which the last steps were left out; the last step before
        them was refused or not.
        """
        for _ in range(left_out):
            self.leave_out()
        self.last_refused = refused

    # Batches and epochs

    def begin_epoch(self, epoch: int) -> None:
        """Begin counting batches and refused steps of an epoch."""
        self.epoch = Epoch(epoch, self.step, self.rollbacks)
        self._place()

    def resume_epoch(self, batches: int) -> None:
        """Skip the batches that an earlier run has trained on in this epoch; metrics continue."""
        self.skip_batches = self.epoch.resumed = batches

    def skip_batch(self) -> None:
        """Count a batch of this epoch that is not trained on."""
        self.skip_batches = max(self.skip_batches - 1, 0)
        self.epoch.skipped += 1
        self._place()

    def _place(self) -> None:
        """Note which batch of this epoch the next step has."""
        if self._places and self._places[-1][0] == self.step:
            self._places.pop()
        self._places.append((self.step, self.epoch.number, self.epoch.start))

    def place(self, step: int) -> tuple[int, int]:
        """Return epoch and batch of a step, both from 0; a replay may be of an earlier epoch."""
        for first, epoch, start in reversed(self._places):
            if step >= first:
                return epoch, step - start
        return self.epoch.number, max(step - self.epoch.start, 0)

    @property
    def state(self) -> tuple[int, int]:
        """A key of the current state, which is the same until a step commits or is undone."""
        return self.committed, self.rollbacks

    def _number(self, *statuses: int, first: int = 0) -> int:
        """Return how many steps from the first one on have one of these statuses."""
        steps = self.uncommitted.items()
        return sum(step >= first and status in statuses for step, status in steps)

    @property
    def refused(self) -> int:
        """Number of refused steps that were not replayed since."""
        return self._number(REFUSED, OVERFLOW)

    @property
    def overflows(self) -> int:
        """Number of those of them that were ordinary overflows."""
        return self._number(OVERFLOW)

    @property
    def epoch_refused(self) -> int:
        """Number of refused steps of this epoch."""
        return self._number(REFUSED, OVERFLOW, first=self.epoch.first)

    @property
    def epoch_overflows(self) -> int:
        """Number of those of them that were ordinary overflows."""
        return self._number(OVERFLOW, first=self.epoch.first)

    @property
    def totals(self) -> Totals:
        """The numbers of steps that a summary has."""
        return Totals(self.step, self.refused, self.overflows, self.run_again)

    @property
    def now(self) -> Time:
        """The current time. Before a replayed step it is as it was then."""
        epoch, batch = self.place(self.step)
        skipped = self.skip_batches if self.step >= self._replayed else 0
        return Time(self.step, self.good, epoch, batch + skipped)

    @property
    def epoch_committed(self) -> int:
        """Number of committed steps of this epoch."""
        without = self._number(REFUSED, OVERFLOW, LEFT_OUT, first=self.epoch.first)
        return self.step - self.epoch.first - without + self.epoch.resumed

    @property
    def idle(self) -> bool:
        """Whether no step of this epoch has committed yet, so that its metrics are empty. This runs
        in every step.
        """
        steps = range(self.epoch.first, self.step)
        return not self.epoch.resumed and all(step in self.uncommitted for step in steps)


# Batches


class Rerun(NamedTuple):
    """The steps that a rollback has undone, to be replayed from its snapshot.

    Attributes:
        batches: the arguments of each step since then, `None` for one that is skipped.
        refused: the replayed steps that had been refused.
    """

    batches: tuple[Any, ...]
    refused: frozenset[int]

    @property
    def replayed(self) -> int:
        """Number of steps that run again, without those that are skipped."""
        return sum(args is not None for args in self.batches)


class _Entry(NamedTuple):
    """A step, its arguments as its transaction stores them, their bytes (0 if the next entry has
    the same ones), and whether it was refused.
    """

    step: int
    given: Any
    size: int
    refused: bool


class RecentBatches:
    """The arguments of the last committed steps, and of refused ones whose batch was good.

    Args:
        access: runs these steps; its transaction stores their arguments in a form of its own.

    Attributes:
        newest: the arguments of the last step in this form, even if they are too large to be
            remembered for longer.
    """

    def __init__(self, access: StateAccess):
        self._access, self.newest = access, None
        self._entries: deque[_Entry] = deque()
        self._bytes = 0

    def as_given(self, stored: Any) -> Any:
        """Return the arguments of a step as they were given; `None` if they are gone, as is what
        an iterator among them has yielded.

        Args:
            stored: those that the step has returned.
        """
        gone = stored is None or step_data.takes_iterator(stored)
        return None if gone else self._access.transaction.batch(stored)

    def push(self, step: int, given: Any, refused: bool = False) -> None:
        """Store the arguments of a step, in the form of its transaction. Runs in every step.

        Those of a refused step may be replayed after a rollback.
        """
        entries, self.newest = self._entries, given
        last = entries[-1] if entries else None
        if last is not None and last.given is given:
            size, entries[-1] = last.size, last._replace(size=0)
        else:
            size = bytes_of(given)
            self._bytes += size
        entries.append(_Entry(step, given, size, refused))
        while self._bytes > step_data.MAX_BYTES or len(entries) > MAX_BATCHES:
            self._bytes -= entries.popleft().size

    def mark_bad(self, step: int) -> None:
        """Remove the arguments of the last step, because it must not be replayed."""
        if self._entries and self._entries[-1].step == step:
            self._entries[-1] = self._entries[-1]._replace(given=None)

    def restart(self) -> None:
        """Forget the steps so far, because the next one starts from another state."""
        self._entries.clear()
        self._bytes = 0

    def release(self) -> None:
        """Remove everything."""
        self.restart()
        self.newest = None

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
        return [args for e in entries[-count:] if (args := self.as_given(e.given)) is not None]

    def rerun(self, first: int, last: int) -> Rerun | None:
        """Return the steps from one to another, `None` if not all are known."""
        entries = {entry.step: entry for entry in self._entries}
        entries.setdefault(last, _Entry(last, None, 0, True))
        batches, refused = [], set[int]()
        for number in range(first, last + 1):
            entry = entries.get(number)
            if entry is None:
                return None
            args = self.as_given(entry.given)
            if args is None and entry.given is not None:
                return None
            batches.append(args)
            if args is not None and entry.refused:
                refused.add(number)
        return Rerun(tuple(batches), frozenset(refused))


def bytes_of(value: Any) -> int:
    """Return the bytes of the arrays in a structure, 0 if they are unknown: an argument of a step
    may be anything, such as a list that contains itself. Runs in every step.
    """
    try:
        return _bytes_of(value)
    except Exception:  # noqa: BLE001  a custom object, or one that is nested too deeply
        return 0


def _bytes_of(value: Any, levels: int = 2) -> int:
    """Return the bytes of the arrays in a structure.

    Args:
        value: arrays, and structures or objects of them.
        levels: how many objects within each other are looked into: a graph keeps its arrays in a
            store of its own.
    """
    if isinstance(value, (tuple, list)):
        total = 0
        for part in value:
            total += _bytes_of(part, levels)
        return total
    shape = getattr(value, "shape", None)
    if shape is None:
        if isinstance(value, Mapping):
            return sum(_bytes_of(part, levels) for part in value.values())
        held, kind = getattr(value, "__dict__", None), type(value)  # a property may be slow
        if (
            not (held and levels)
            or hasattr(kind, "state_dict")
            or hasattr(kind, "trainable_variables")
        ):
            return 0  # also a module, a layer, an optimizer
        return sum(_bytes_of(part, levels - 1) for part in held.values() if _is_small(part))
    count = getattr(shape, "num_elements", None)
    if count is None:
        if not keras_arrays.is_convertible(value):
            size = getattr(value, "nbytes", None)
            if size is None:  # a table of pandas, a variable of Keras
                size = 8 * math.prod(shape) if isinstance(shape, tuple) else 0
            return int(size)
        if hasattr(value, "todense"):
            return _bytes_of((value.data, value.indices))
        return int(value._nnz() * (value.element_size() + 8 * value.ndim))  # at most
    number = count()  # of TensorFlow
    if hasattr(value, "flat_values"):  # ragged
        return _bytes_of((value.flat_values, value.nested_row_splits))
    if number is None or not hasattr(value, "device"):  # sparse
        return sum(_bytes_of(getattr(value, name, None)) for name in ("values", "indices"))
    return int(number) * (int(value.dtype.size or 0) or 16)


def _is_small(value: Any) -> bool:
    """Whether a structure has few parts, unlike a vocabulary. Arrays count as one."""
    if hasattr(value, "shape") or not hasattr(value, "__len__"):
        return True
    try:
        return len(value) <= MOST_PARTS
    except Exception:  # noqa: BLE001  data without an end, a custom object
        return False


# Tasks between two steps


Task = Literal["changes", "rate", "checks", "divergence", "verify_snapshots", "snapshot"]
"""The tasks between two steps, in their order; `tasks.TASKS` has the function of each."""


class Due:
    """The step at which each task is due.

    Attributes:
        next: the earliest of these, infinity if none is due.
    """

    def __init__(self) -> None:
        self._steps: dict[Task, float] = {}
        self.next = math.inf

    def plan(self, task: Task, step: float) -> None:
        """Set the step at which a task is due, infinity for never."""
        self._steps[task] = step
        self.next = min(self._steps.values())

    def step_of(self, task: Task) -> float:
        """Return the step at which a task is due."""
        return self._steps.get(task, math.inf)
