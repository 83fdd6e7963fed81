"""Reports of steps to the host from inside the compiled step.

There is a report of each refused step and, if an execution has several steps, the row of numbers of
each. Both wait in queues on the host. Neither side ever waits for the other: a step adds no report
if the queue is full, and the host takes what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.tensorflow.decision import StepResult
from keras_nanguard._core.verdict import FIELDS, PERIOD, Report, Verdict

CAPACITY = 256
"""Maximum number of waiting reports. A later refused step has only its row."""

Places = tuple[tuple[str, str], ...]
"""`(site, path)` of each line of counts."""


class ReportQueue:
    """Stores the reports of refused steps until the host takes them.

    Waiting batches take at most `batches.MAX_BYTES`; the first one is always stored. A healthy
    step stores nothing.

    Args:
        batch: returns the batch of the last step, if the host has it; `None` stores each batch with
            its report.

    Attributes:
        dealt: number of rows of each replica in the last taken batch; none without replicas.
    """

    def __init__(self, batch: Callable[[], Any] | None):
        self._batch = batch
        self.dealt: tuple[int, ...] = ()
        self._traced: list[tuple[Places, Any]] = []
        self._queues: dict[tuple[Any, ...], Any] = {}

    def put(self, result: StepResult, places: Places, args: Any) -> Any:
        """Store one report; return a scalar bool, so that it can be a branch of a conditional.

        Args:
            result: the result of the step.
            places: site and path of each line of its counts.
            args: the arguments of the step.
        """
        row, counts, replicas = result.row, result.counts, result.replicas
        args = args if self._batch is None else ()
        leaves = [tf.convert_to_tensor(t) for t in _leaves(args)]
        self._traced.append((places, tf.nest.map_structure(_spec, args)))
        number = tf.constant(len(self._traced) - 1, tf.int64)
        with tf.device("CPU:0"):
            queue = self._queue(tuple(t.dtype for t in (number, counts, replicas, *leaves)))

            def enqueue() -> Any:
                waiting = queue.size()
                room = tf.cast(waiting + 1, tf.int64) * _nbytes(leaves) <= batches.MAX_BYTES
                kept = room | (waiting == 0)
                head = [tf.cast(row, tf.float64), kept, number]
                queue.enqueue([*head, counts, replicas, *(_if_kept(kept, t) for t in leaves)])
                return tf.constant(True)

            return tf.cond(queue.size() < CAPACITY, enqueue, lambda: tf.constant(False))

    def _queue(self, dtypes: tuple[Any, ...]) -> Any:
        if dtypes not in self._queues:
            with tf.init_scope(), tf.device("CPU:0"):
                queue = tf.queue.FIFOQueue(CAPACITY, [tf.float64, tf.bool, *dtypes])
                self._queues[dtypes] = queue
        return self._queues[dtypes]

    def take(self) -> list[Report]:
        """Return and remove the reports, in the order of the steps."""
        reports = []
        for queue in self._queues.values():
            for _ in range(int(queue.size())):
                row, kept, number, counts, dealt, *leaves = queue.dequeue()
                verdict = Verdict.of(row.numpy().tolist())
                places, specs = self._traced[int(number)]
                filed = _packed(specs, leaves) if kept else None
                batch = filed if self._batch is None else self._batch()
                blamed, self.dealt = map(tuple, dealt.numpy().T.tolist())
                replicas = tuple(np.flatnonzero(blamed).tolist())
                reports.append(Report(verdict, places, np.asarray(counts), batch, replicas))
        return sorted(reports, key=lambda report: report.verdict.step)


class UncountedSteps:
    """The steps of a program whose host reads the verdict of each before the next one begins."""

    def begin(self) -> tuple[Any, Any]:
        """Begin a step; return whether it has to be refused, and its number: scalar bool, int64."""
        return tf.constant(False), tf.constant(0, tf.int64)

    def end(self, row: Any, refuse: bool) -> None:
        """End a step, given its row of numbers; `refuse`: whether bad steps are refused."""

    def verdicts(self, start: int, end: int) -> list[Verdict]:
        """Return the verdicts of the steps from `start` to before `end`, since the last call."""
        raise NotImplementedError

    def resume(self) -> None:
        """Allow steps to commit again after the host has repaired the state."""

    def recount(self, step: int) -> None:
        """Set the number of the next step."""


class CountedSteps(UncountedSteps):
    """Steps of which any number may run before the host reads their verdicts: they are counted, the
    row of each waits for the host, and after one that left a bad state all are refused.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self._number = tf.Variable(-1, dtype=tf.int64, trainable=False)
            self._halted = tf.Variable(False, trainable=False)
            with tf.device("CPU:0"):
                self._rows = tf.queue.FIFOQueue(-1, [tf.float64], [(len(FIELDS),)])  # no limit

    def begin(self) -> tuple[Any, Any]:
        step = self._number.read_value() + 1
        self._number.assign(step)
        return self._halted.read_value(), step

    def end(self, row: Any, refuse: bool) -> None:
        with tf.device("CPU:0"):
            self._rows.enqueue([tf.cast(row, tf.float64)])
        if refuse:
            verdict = Verdict(*tf.unstack(row))
            is_bad = ~tf.math.is_finite(verdict.weights + verdict.slots)
            left_bad = is_bad & tf.equal(verdict.refused, 0)
            self._halted.assign(self._halted.read_value() | left_bad)

    def verdicts(self, start: int, end: int) -> list[Verdict]:
        known = {verdict.step: verdict for verdict in self._taken()}
        return [known[step % PERIOD] for step in range(start, end)]

    def resume(self) -> None:
        self._halted.assign(False)

    def recount(self, step: int) -> None:
        self._number.assign(step - 1)
        self._taken()

    def _taken(self) -> list[Verdict]:
        with tf.device("CPU:0"):
            rows = self._rows.dequeue_many(self._rows.size())
        return [Verdict.of(row) for row in rows.numpy().tolist()]


def _spec(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


def _leaves(args: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(args, expand_composites=True) if leaf is not None]


def _packed(specs: Any, leaves: Sequence[Any]) -> Any:
    """Put component tensors back into their structure."""
    rest, flat = iter(leaves), tf.nest.flatten(specs, expand_composites=True)
    parts = [None if spec is None else next(rest) for spec in flat]
    return tf.nest.pack_sequence_as(specs, parts, expand_composites=True)


def _nbytes(leaves: Sequence[Any]) -> Any:
    """Return the bytes of component tensors as a scalar int64; 16 for each string."""
    sizes = [tf.size(leaf, tf.int64) * (leaf.dtype.size or 16) for leaf in leaves]
    return tf.add_n(sizes) if sizes else tf.constant(0, tf.int64)


def _if_kept(kept: Any, leaf: Any) -> Any:
    """Return a tensor, without its entries if it is not kept; a scalar unchanged."""
    if not leaf.shape.rank:
        return leaf
    return leaf[: tf.where(kept, tf.shape(leaf, tf.int64)[0], 0)]
