"""The transaction on TensorFlow.

In words::

    keep      references to the small state (statistics, seeds, metrics); TensorFlow copies on write
    run       the user's step, its optimizers' updates deferred
    verdict   are the sums over loss, gradients and written statistics finite? if a sum is not, are
              all entries? is the loss scale valid?
    yes       the updates run, by fused kernels if there are some; weights and slots are read once
    no        the small state is restored, the loss scale is updated
    report    the bad entries of a refused step are counted, and filed for the host with its batch

The verdict is known before anything large is written, so nothing large is ever copied. Updates are
deferred only if the rest of the step does not depend on them: it reads nothing that they write (as
a GAN does), and writes nothing that they read or write (as with a rate set after the update, or
sharpness-aware minimisation). The graph shows this. Otherwise, and in eager execution, the updates
run immediately; the old values of everything that the step writes are kept, and restored on a
refusal.

Decided with one `tf.cond`: selecting old or new for each variable costs a pass over all of them.

The rows of numbers, and the reports of bad steps, wait for the host in queues. Neither side ever
waits for the other: a step adds no report if the queue is full, and the host takes what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from keras_nanguard._backends.interface import Executed, Run
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.tensorflow.intercept import has_hidden_state
from keras_nanguard._backends.tensorflow.kernels import same_bits
from keras_nanguard._backends.tensorflow.replica import (
    Inspected,
    ReplicaTrace,
    Retrace,
    TracedStep,
)
from keras_nanguard._backends.tensorflow.trace import (
    Places,
    StepResult,
    StepTrace,
    components,
    packed,
)
from keras_nanguard._core.verdict import FIELDS, Report, Verdict

CAPACITY = 256
"""Maximum number of waiting reports. A later refused step has only its row."""


class Transaction(TracedStep):
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        of_trainer: whether a Keras trainer runs the step: it returns logs, and the model's
            `compute_loss` returns the loss.
        jit: compile the body with XLA. Filing a refused step stays outside of the cluster.
        counted: any number of steps may run before the host reads their verdicts. The step then
            counts itself and files its row. After a step that committed a bad state all steps are
            refused until the host takes their results.
        refuse: whether bad steps are refused; otherwise they commit, and only their verdict is
            reported.
        host_has_batches: otherwise each report stores its batch.
        take: how the host takes the next batch from the iterator, if it does; `testing` wraps this.

    Calling it returns the outputs of the body, and the row of numbers of its verdict.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        run: Run,
        *,
        of_trainer: bool,
        jit: bool,
        counted: bool = False,
        refuse: bool,
        host_has_batches: bool = True,
        take: Callable[[Any], Any] | None = None,
    ):
        self.body = self.replayed = body
        self.run, self.model = run, run.model if of_trainer else None
        self.jit, self.counted, self.refuse = jit, counted, refuse
        self.adapts_updates = self.adapts_updates and not jit
        if self.adapts_updates:
            same_bits()  # creates variables: within a trace, TensorFlow would trace the step twice
        self.take = take
        self.losses = batches.losses_in_logs if of_trainer else batches.scalars
        self.rows = Rows(counted)
        self.reports = Reports(with_batches=not host_has_batches)
        self._compiled: Callable[..., StepResult] = self._complete
        if jit:
            how = {"jit_compile": True, "reduce_retracing": True, "autograph": False}
            self._compiled = tf.function(self._complete, **how)

    def __call__(self, *args: Any) -> Any:
        return self.execute(*args)

    def execute(self, *args: Any) -> Any:
        """Run the body once as a transaction; `testing` wraps this."""
        complete = self._complete if tf.executing_eagerly() else self._compiled
        result = complete(*self.rows.begin(), *args)
        self.rows.end(result.row, self.refuse)
        self.reports.add(result, args)
        return result.outputs, result.row

    def _complete(self, halted: Any, number: Any, *args: Any) -> StepResult:
        """Run or trace the body, and decide.

        Args:
            halted: whether it is refused regardless of its numbers.
            number: the number of the step.
        """
        trace = StepTrace(self, [ReplicaTrace(self)])
        with trace:
            outputs = trace.run(args)
        (found,) = self._inspected(trace)
        return trace.decide(outputs, [trace.here().measure(outputs, found)], halted, number)

    def _inspected(self, trace: StepTrace) -> list[Inspected]:
        """Return what the bodies of the replicas have written; raise `Retrace` if the step has to
        be traced again, as Keras uses its second trace. That is so if an optimizer that scales the
        loss was built in this trace, because until then it scales by a constant, or if the body
        listed no weights for an update because they were created later.
        """
        hidden = trace.graph is not None and has_hidden_state(trace.graph)
        self.learned = replace(self.learned, has_hidden_state=hidden)
        found = trace.inspect()
        has_new_scale = any(optimizer.built for optimizer in trace.unbuilt)
        if has_new_scale or (trace.is_empty and trace.creates):
            raise Retrace(self.learned)
        return found

    # For the host, between two runs

    def take_reports(self, arguments: Any = None) -> list[Report]:
        return self.reports.take(arguments)

    def results(self, executed: Executed) -> list[tuple[Verdict, Report | None]]:
        reports = {r.verdict.step: r for r in self.take_reports(executed.arguments)}
        verdicts = self.rows.take() if self.counted else [executed.verdict]
        return [(verdict, reports.get(verdict.step)) for verdict in verdicts]

    def drop_results(self) -> None:
        super().drop_results()
        self.rows.take()

    def keys_of(self, variable: Any) -> Iterable[int]:
        copies = getattr(variable.value, "values", (variable.value,))  # one per replica
        return [id(copy.handle) for copy in copies]

    def trace(self, spec: Any) -> None:
        """Trace the step for arguments like this, without running it."""
        tf.function(self, autograph=False).get_concrete_function(spec)

    def release_run(self) -> None:
        del self.run
        self.drop_results()


class Rows:
    """The numbers of steps that may run before the host reads their verdicts: they are counted, the
    row of each complete one waits for the host, and after one that left a bad state all are
    refused.

    Args:
        counted: whether they may. Otherwise the host reads the verdict of each step before the next
            one begins, and no number is stored.
    """

    def __init__(self, counted: bool):
        self.counted = counted
        with tf.init_scope():
            self._number = tf.Variable(-1, dtype=tf.int64, trainable=False)
            self._halted = tf.Variable(False, trainable=False)
            with tf.device("CPU:0"):
                self._rows = tf.queue.FIFOQueue(-1, [tf.float64], [(len(FIELDS),)])  # no limit

    # In the step

    def begin(self) -> tuple[Any, Any]:
        """Begin a step; return whether it has to be refused, and its number: scalar bool, int64."""
        if not self.counted:
            return tf.constant(False), tf.constant(0, tf.int64)
        number = self._number.read_value() + 1
        self._number.assign(number)
        return self._halted.read_value(), number

    def end(self, row: Any, refuse: bool) -> None:
        """End a step.

        Args:
            row: the numbers of its verdict.
            refuse: whether bad steps are refused.
        """
        if not self.counted:
            return
        with tf.device("CPU:0"):
            self._rows.enqueue([tf.cast(row, tf.float64)])
        if refuse:
            verdict = Verdict(*tf.unstack(row))
            is_bad = ~tf.math.is_finite(verdict.weights + verdict.slots)
            left_bad = is_bad & tf.equal(verdict.refused, 0)
            self._halted.assign(self._halted.read_value() | left_bad)

    # On the host

    def last(self) -> Verdict | None:
        """Return the last verdict that the host has not taken, `None` if there is none."""
        rows = self._dequeued()
        self._rows.enqueue_many([rows])
        return next((Verdict.of(row) for row in rows.numpy()[-1:].tolist()), None)

    def take(self) -> list[Verdict]:
        """Return and remove the verdicts, in the order of the steps, and allow steps to commit."""
        if not self.counted:
            return []
        verdicts = [Verdict.of(row) for row in self._dequeued().numpy().tolist()]
        if any(verdict.halted or not verdict.finite for verdict in verdicts):
            self._halted.assign(False)
        return verdicts

    def _dequeued(self) -> Any:
        with tf.device("CPU:0"):
            return self._rows.dequeue_many(self._rows.size())


class Reports:
    """The reports of the bad steps of a transaction, until the host takes them.

    Waiting batches take at most `batches.MAX_BYTES`; the first one is always stored. A healthy
    step stores no report.

    Args:
        with_batches: each report stores its batch, which the host does not have.
    """

    def __init__(self, with_batches: bool):
        self.with_batches = with_batches
        self._layouts: list[tuple[Places, Any]] = []
        """The places, and the specs of the batch, of each kind of report."""
        self._queues: dict[tuple[Any, ...], Any] = {}

    # In the step

    def add(self, result: StepResult, args: Any) -> None:
        """Store the report of a step if it is bad, from its result and its arguments."""
        tf.cond(result.bad, lambda: self._put(result, args), lambda: tf.constant(False))

    def _put(self, result: StepResult, args: Any) -> Any:
        """Store one report; return a scalar bool, because it is a branch of a conditional."""
        args = args if self.with_batches else ()
        leaves = [tf.convert_to_tensor(t) for t in components(args)]
        specs = [None if v is None else tf.type_spec_from_value(v) for v in tf.nest.flatten(args)]
        layout = (result.counts.places, tf.nest.pack_sequence_as(args, specs))
        if layout not in self._layouts:  # an eager step comes here in every step
            self._layouts.append(layout)
        number = tf.constant(self._layouts.index(layout), tf.int64)
        kinds = tuple(leaf.dtype for leaf in leaves)
        with tf.device("CPU:0"):
            if kinds not in self._queues:
                head = [tf.float64, tf.bool, tf.int64, tf.int64, tf.int64]
                with tf.init_scope(), tf.device("CPU:0"):
                    self._queues[kinds] = tf.queue.FIFOQueue(CAPACITY, [*head, *kinds])
            queue = self._queues[kinds]

            def enqueue() -> Any:
                waiting = queue.size()
                room = tf.cast(waiting + 1, tf.int64) * _nbytes(leaves) <= batches.MAX_BYTES
                kept = room | (waiting == 0)
                numbers = [number, result.counts.lines, result.replicas]
                parts = [_if_kept(kept, leaf) for leaf in leaves]
                queue.enqueue([tf.cast(result.row, tf.float64), kept, *numbers, *parts])
                return tf.constant(True)

            return tf.cond(queue.size() < CAPACITY, enqueue, lambda: tf.constant(False))

    # On the host

    def take(self, given: Any) -> list[Report]:
        """Return and remove the reports, in the order of the steps.

        Args:
            given: the batch of the last step, if they have none.
        """
        reports = []
        for queue in self._queues.values():
            for _ in range(int(queue.size())):
                row, kept, number, counts, replicas, *leaves = queue.dequeue()
                places, specs = self._layouts[int(number)]
                batch = given
                if self.with_batches:
                    batch = packed(specs, leaves) if kept else None
                found: dict[tuple[str, str], Any] = {}  # a place may be on several replicas
                for place, count in zip(places, counts.numpy()):
                    found[place] = found.get(place, 0) + count
                blamed, batch = _blamed(replicas.numpy(), batch)
                verdict = Verdict.of(row.numpy().tolist())
                lines = np.reshape([*found.values()], (-1, 3))
                reports.append(Report(verdict, tuple(found), lines, batch, blamed))
        return sorted(reports, key=lambda report: report.verdict.step)


def _blamed(replicas: np.ndarray[Any, Any], batch: Any) -> tuple[tuple[int, ...], Any]:
    """Return the replicas to blame for a bad step, none if there is only one, and its batch.

    Replicas with bad data are to blame, else those with a bad number. If those have received no
    rows, the batch is one without rows.
    """
    if len(replicas) == 1:
        return (), batch
    bad, given_bad, rows = replicas.T
    blamed = np.flatnonzero(given_bad if given_bad.any() else bad)
    if len(blamed) and not rows[blamed].any():
        count = rows.sum()

        def emptied(value: Any) -> Any:
            has_rows = isinstance(value, tf.Tensor) and value.shape.rank
            return value[:0] if has_rows and value.shape[0] == count else value

        batch = tf.nest.map_structure(emptied, batch)
    return tuple(blamed.tolist()), batch


def _nbytes(leaves: list[Any]) -> Any:
    """Return the bytes of component tensors as a scalar int64; 16 for each string."""
    sizes = [tf.size(leaf, tf.int64) * (leaf.dtype.size or 16) for leaf in leaves]
    return tf.add_n(sizes) if sizes else tf.constant(0, tf.int64)


def _if_kept(kept: Any, leaf: Any) -> Any:
    """Return a tensor, without its entries if it is not kept; a scalar unchanged."""
    if not leaf.shape.rank:
        return leaf
    return leaf[: tf.where(kept, tf.shape(leaf, tf.int64)[0], 0)]
