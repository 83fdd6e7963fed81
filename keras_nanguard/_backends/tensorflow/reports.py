"""What refused steps leave behind, filed from inside the compiled step for the host to pick up.

A queue on the host's side of the graph: a healthy step never touches it. Neither side ever waits for the other: the
step files nothing where the queue is full, and the host takes what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_nanguard._backends.tensorflow import reductions
from keras_nanguard._backends.tensorflow.staged_batches import Layouts
from keras_nanguard._core.verdict import Report, Verdict

__all__ = ["ReportQueue", "places"]


class ReportQueue:
    """Files and hands out the reports of refused steps.

    Args:
        capacity: how many are kept until the host looks; what comes on top is counted by the verdict, not kept.
        batch: returns the batch of a step, given its verdict; `None` where each report has to hold a reference to its own.

    Attributes:
        places: `(site, path)` of each row of counts in the trace that runs now.
    """

    def __init__(self, capacity: int, batch: Callable[[Verdict], Any] | None):
        self.capacity, self._batch = capacity, batch
        self.places: tuple[tuple[str, str], ...] = ()
        self._layouts = Layouts()
        self._places: dict[int, tuple[tuple[str, str], ...]] = {}
        self._queues: dict[tuple[Any, ...], Any] = {}

    def put(self, row: Any, counts: Any, args: Any, blamed: Any = ()) -> Any:
        """File one report; returns a scalar bool, so that it can stand in a conditional.

        Args:
            row: the numbers of the step.
            counts: a line for each of `places`.
            args: what the step was called with.
            blamed: for each replica, where there are several, whether it saw something bad.
        """
        number, leaves = self._layouts.flat(args if self._batch is None else ())
        self._places[number] = self.places
        items = [tf.constant(number, tf.int64), tf.cast(row, tf.float64), counts, tf.cast(blamed, tf.bool), *leaves]
        with tf.device("CPU:0"):
            queue = self._queue(tuple(t.dtype for t in items))

            def enqueue() -> Any:
                queue.enqueue(items)
                return tf.constant(True)

            return tf.cond(queue.size() < self.capacity, enqueue, lambda: tf.constant(False))

    def _queue(self, dtypes: tuple[Any, ...]) -> Any:
        if dtypes not in self._queues:
            with tf.init_scope(), tf.device("CPU:0"):
                self._queues[dtypes] = tf.queue.FIFOQueue(self.capacity, list(dtypes))
        return self._queues[dtypes]

    def take(self) -> list[Report]:
        """Return and forget what was filed, in the order of the steps."""
        reports = []
        for queue in self._queues.values():
            for _ in range(int(queue.size())):
                layout, row, counts, blamed, *leaves = queue.dequeue()
                number = int(layout)
                verdict = Verdict.of(row.numpy().tolist())
                batch = self._layouts.packed(number, leaves) if self._batch is None else self._batch(verdict)
                replicas = tuple(np.flatnonzero(blamed).tolist())
                reports.append(Report(verdict, self._places[number], np.asarray(counts), batch, replicas))
        return sorted(reports, key=lambda report: report.verdict.step)


def places(run: Any) -> list[tuple[str, str, Any]]:
    """Return `(site, path, tensor)` of everything in one run of a step that is counted for a report."""
    train_state, seen = run.train_state, run.seen
    found = [("outputs", name, t) for name, t in seen.outputs]
    paths = {id(run.local(v).handle): v.path for v in (*train_state.other, *train_state.trainable, *train_state.rates)}
    found += [("gradients", v.path, g) for g, v in run.gradients_of]
    found += [("statistics", paths.get(id(v.handle), v.name), v) for v in run.written]
    if run.immediate:
        found += [("weights", v.path, v.value) for v in train_state.trainable if reductions.can_be_bad(v.value)]
        found += [("slots", v.path, v.value) for v in train_state.slots if reductions.can_be_bad(v.value)]
    return found
