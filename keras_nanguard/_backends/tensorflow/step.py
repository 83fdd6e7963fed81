"""The transaction on TensorFlow.

In words::

    keep      references to the small state (statistics, seeds, metrics)      no copy: TensorFlow copies on write
    run       the user's step, its optimizers' updates deferred
    verdict   loss, gradients and written statistics finite, loss scale valid
    if so:    the updates run now, by fused kernels where there are some (see `fused_updates`); weights and slots are read once
    if not:   the small state is given back, the loss scale learns, the counts are filed for the host

The verdict is known before anything large is written, so nothing large is ever copied. Deferring is right only where the rest of
the step does not depend on it: it reads nothing that the updates write (a GAN does), and writes nothing that they read or write (a
rate that it sets after its update; sharpness-aware minimisation). The graph shows it. Where it is not so, and in eager execution, the
updates run where the step asks for them; the old values of all that it writes are kept, and written back on a refusal.

Decided with one `tf.cond`: selecting old or new for each variable costs a pass over all of them.

Where memory has no room for all gradients at once, the step runs twice, once for the verdict; see `judged_first`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.tensorflow import judged_first, outputs as step_outputs, reports, staged_batches
from keras_nanguard._backends.tensorflow.execution import StepTrace
from keras_nanguard._core.verdict import FIELDS, PERIOD, Verdict
from keras_nanguard._keras.train_state import TrainState

__all__ = ["Transaction"]


class Transaction:
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        train_state: callable that returns the `TrainState` at the time of tracing.
        model: the model whose `compute_loss` returns the loss, or `None`.
        logs: the body returns Keras logs, which a refused step replaces by those of the restored metrics.
        jit: compile the body with XLA. The filing of a refused step stays outside of the cluster.
        counted: how many steps run between two looks of the host, where they are several: the step then counts itself,
            keeps the row of each, and stands still after one that committed a bad state until the host has healed it.
        capacity: how many reports of refused steps are kept between two looks of the host.
        note_created: called with each variable that is created inside the step, and its first value.
        refuse: refuse bad steps; without it the step runs as it is, and its verdict is reported all the same.
        batches: who has the batches of the last steps: `"host"`, `"graph"` or, of refused ones only, `"reports"`.
        say: prints a line.

    Attributes:
        given: what the last execution was given; something with a method `batch(step)` where it was several steps.
        keeps_undo: whether old values of weights and slots are kept.
        shortage: what is said where memory has no room for the gradients beside the state; `None` before anyone has looked.

    Calling it returns what `read` takes apart on the host: the outputs, and the row of numbers of a `Verdict`.
    """

    is_transaction = True

    judged = None
    """No run of the step is cheaper than an eager one."""

    reused = False
    """Whether it was traced for an earlier run."""

    def __init__(
        self,
        body: Callable[..., Any],
        train_state: Callable[[], TrainState],
        *,
        model: Any = None,
        logs: bool = False,
        jit: bool,
        counted: int = 0,
        capacity: int = 8,
        note_created: Callable[[Any, Any], None],
        refuse: bool,
        batches: str = "host",
        say: Callable[[str], None],
    ):
        self.body = self.replayed = body
        self.train_state, self.model = train_state, model
        self.jit, self.counted, self.note_created = jit, counted, note_created
        self.refuse, self.keeps_undo = refuse, False
        self.shortage: str | None = None
        self.say, self.said = say, False
        self.untracked: dict[int, Any] = {}
        self.tolerated: set[int] = set()
        self.report_queue = reports.ReportQueue(capacity, None if batches == "reports" else self._refused_batch)
        self.stored = staged_batches.Stored() if batches == "graph" else None
        self.given: Any = self.stored
        self.outputs = step_outputs.LogOutputs(model) if logs else step_outputs.PlainOutputs()
        self.compiled = (
            tf.function(self._run, jit_compile=True, reduce_retracing=True, autograph=False) if jit else None
        )
        if counted:
            with tf.init_scope():
                self.counter = tf.Variable(-1, dtype=tf.int64, trainable=False)
                self.halted = tf.Variable(False, trainable=False)
                self.rows = tf.Variable(-tf.ones((counted, len(FIELDS)), tf.float64), trainable=False)  # of no step yet

    def __call__(self, *args: Any) -> Any:
        if self.stored is not None:
            self.stored.put(args, self.counter.read_value() + 1)
        if self._runs_twice():
            outputs, row, counts = judged_first.run(self, args)
            self._say_so()
        elif self.compiled is None or tf.executing_eagerly():
            outputs, row, _ = self._run(*args)
            self.note(row)
            return self.outputs.join(outputs, row)
        else:
            outputs, row, counts = self.compiled(*args)
        self.note(row)
        reported = row[0] > 0 if self.refuse else ~tf.math.is_finite(tf.reduce_sum(row))
        tf.cond(reported, lambda: self.report_queue.put(row, counts, args), lambda: tf.constant(False))
        return self.outputs.join(outputs, row)

    def _runs_twice(self) -> bool:
        """Whether the step that is traced has to compute its gradients twice, as memory cannot hold them all beside the state."""
        if tf.executing_eagerly() or self.keeps_undo or not self.refuse:
            return False
        if self.shortage is None:
            self.shortage = judged_first.shortage(self.train_state())
        return bool(self.shortage)

    def _say_so(self) -> None:
        if not self.said:
            self.said = True
            self.say(str(self.shortage))

    def read(self, result: Any) -> tuple[Any, Verdict]:
        """Return the outputs and the verdict of one call, on the host."""
        if self.stored is not None:
            self.stored.shrink(self.counted)
        outputs, row = self.outputs.split(result)
        return outputs, Verdict.of(row)

    def give(self, batches: Sequence[Any]) -> None:
        """Note what the host gives to the steps of the execution to come: the arguments of each."""
        self.given = staged_batches.Execution(batches, int(self.counter) + len(batches)) if self.counted else batches[0]

    def batch(self, step: int, given: Any) -> Any:
        """Return the arguments of an earlier step, given what its execution was given; `None` where they are gone."""
        return given.batch(step) if hasattr(given, "batch") else given

    def _refused_batch(self, verdict: Verdict) -> Any:
        if not self.counted:
            return self.given
        last = int(self.counter)
        return self.batch(last - (last - verdict.step) % PERIOD, self.given)

    def note(self, row: Any) -> None:
        """Keep the row of a step until the host looks, where it does not look after every step."""
        if self.counted:
            place = self.counter.read_value() % self.counted
            self.rows.assign(tf.tensor_scatter_nd_update(self.rows.read_value(), [[place]], [tf.cast(row, tf.float64)]))

    def verdicts(self, start: int, end: int) -> list[Verdict]:
        """Return the verdicts of the steps from `start` up to `end`, of those that ran since the last look."""
        known = {verdict.step: verdict for verdict in map(Verdict.of, self.rows.numpy().tolist())}
        return [known[step % PERIOD] for step in range(max(start, end - self.counted), end)]

    def release_run(self) -> None:
        """Release the run that is over."""
        self.train_state, self.note_created = (lambda: TrainState.of(self.model)), (lambda variable, value: None)
        self.report_queue.take()
        self.release()

    def release(self) -> None:
        """Release the batches of the last steps."""
        self.given = self.stored
        if self.stored is not None:
            self.stored.clear()

    def rebind(self, train_state: Callable[[], TrainState], note_created: Callable[[Any, Any], None]) -> None:
        """Go to work for another run on the same model, as if made for it; the arguments are as above."""
        self.train_state, self.note_created, self.reused = train_state, note_created, True
        self.resume()
        if self.stored is not None:
            self.stored.fill()

    def inherit(self, other: Transaction) -> None:
        """Start with what another transaction around the same body has found out."""
        self.keeps_undo, self.untracked, self.tolerated = other.keeps_undo, other.untracked, other.tolerated
        self.shortage, self.said = other.shortage, other.said

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Let these variables be infinite."""
        self.tolerated |= {id(v.value.handle) for v in variables}

    def resume(self) -> None:
        """Let the step go on after the host has healed the state."""
        if self.counted:
            self.halted.assign(False)

    def recount(self, step: int) -> None:
        """Let the next step be this number."""
        if self.counted:
            self.counter.assign(step - 1)

    def trace(self, spec: Any) -> None:
        """Trace the step for arguments like this, without running it."""
        tf.function(self, autograph=False).get_concrete_function(spec)

    def _run(self, *args: Any) -> tuple[Any, Any, Any]:
        return StepTrace(self, self.keeps_undo_copies).complete(args)

    @property
    def keeps_undo_copies(self) -> bool:
        """Whether the old values of weights and slots are kept, too, because updates are not deferred."""
        return self.refuse and (self.keeps_undo or tf.executing_eagerly())

    def count(self) -> tuple[Any, Any]:
        """Count the step that begins; returns whether it has to stand still, and its number."""
        if not self.counted:
            return tf.constant(False), tf.constant(0, tf.int64)
        step = self.counter.read_value() + 1
        self.counter.assign(step)
        return self.halted.read_value(), step

    def note_poison(self, immediate: bool, update_sums: Sequence[Any]) -> None:
        """Stand still from here on, where the step that has just committed left bad weights or slots behind."""
        if self.counted and not immediate:
            self.halted.assign(~tf.math.is_finite(update_sums[0] + update_sums[1]))
