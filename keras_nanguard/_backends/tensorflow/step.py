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
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared.batches import losses_in_logs, scalars
from keras_nanguard._backends.tensorflow.decision import StepResult, decide, places_of
from keras_nanguard._backends.tensorflow.execution import Retrace, StepTrace
from keras_nanguard._backends.tensorflow.reports import CountedSteps, ReportQueue, UncountedSteps
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras.train_state import TrainState


class Transaction(interface.Transaction):
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        train_state: returns the `TrainState` at the time of tracing.
        model: the model whose `compute_loss` returns the loss, or `None`.
        logs: the body returns Keras logs.
        jit: compile the body with XLA. Filing a refused step stays outside of the cluster.
        counted: any number of steps may run before the host reads their verdicts. The step then
            counts itself and files its row, and its batch if it is refused. After a step that
            committed a bad state all steps are refused until the host has repaired it.
        note_created: called with each variable that is created inside the step, and its value.
        refuse: whether bad steps are refused; otherwise they commit, and only their verdict is
            reported.
        host_has_batches: the host takes each batch from the iterator, and sets `given`.

    Attributes:
        given: the arguments of the next or last step, if the host has them.
        keeps_undo: whether updates run immediately.

    Calling it returns the outputs of the body, and the row of numbers of its verdict.
    """

    is_transaction = True

    def __init__(
        self,
        body: Callable[..., Any],
        train_state: Callable[[], TrainState],
        *,
        model: Any = None,
        logs: bool = False,
        jit: bool,
        counted: bool = False,
        note_created: Callable[[Any, Any], None],
        refuse: bool,
        host_has_batches: bool = True,
    ):
        self.body = self.replayed = body
        self.train_state, self.model, self.note_created = train_state, model, note_created
        self.jit, self.counted, self.refuse = jit, counted, refuse
        self.keeps_undo, self.given = False, None
        self.untracked: dict[int, Any] = {}
        self.tolerated: set[int] = set()
        self.places: tuple[tuple[str, str], ...] = ()
        self.host_has_batches = host_has_batches
        self.report_queue = ReportQueue((lambda: self.given) if host_has_batches else None)
        self.logs, self.losses = logs, losses_in_logs if logs else scalars
        self._run: Callable[..., StepResult] = self._traced
        if jit:
            how = {"jit_compile": True, "reduce_retracing": True, "autograph": False}
            self._run = tf.function(self._traced, **how)
        self.steps = CountedSteps() if counted else UncountedSteps()

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def run(self, *args: Any) -> Any:
        """Run the body once as a transaction; `testing` wraps this."""
        run = self._traced if tf.executing_eagerly() else self._run
        result = run(*self.steps.begin(), *args)
        self.file(result, args)
        return result.outputs, result.row

    def _traced(self, halted: Any, step: Any, *args: Any) -> StepResult:
        trace = StepTrace(self)
        outputs = trace.run(args)
        self.places = places_of([trace])
        return decide([trace], outputs, halted, step, each=lambda function: [function(trace)])

    @property
    def immediate(self) -> bool:
        """Whether updates run immediately, when the body calls them."""
        return self.keeps_undo or not self.refuse or bool(tf.executing_eagerly())

    def file(self, result: StepResult, args: Sequence[Any]) -> None:
        """Store the result of a step for the host, and its arguments if it is bad."""
        self.steps.end(result.row, self.refuse)
        put, places = self.report_queue.put, self.places
        tf.cond(result.bad, lambda: put(result, places, args), lambda: tf.constant(False))

    def read(self, result: Any) -> tuple[Any, Verdict]:
        """Return the outputs and the verdict of one call, on the host."""
        outputs, row = result
        return outputs, Verdict.of(row.numpy().tolist())

    def take(self, data: Any) -> Any:
        """Take the next batch from the iterator, as Keras passes it to a step; `testing` wraps
        this.

        Raises:
            StopIteration: if there is none.
        """
        return keras.tree.map_structure(_present, next(data))

    def verdicts(self, start: int, end: int) -> list[Verdict]:
        return self.steps.verdicts(start, end)

    # Between two runs, and two traces

    def release_run(self) -> None:
        self.train_state = lambda: TrainState.of(self.model)
        self.note_created = lambda variable, value: None
        self.report_queue.take()
        self.given = None

    def rebind(
        self, train_state: Callable[[], TrainState], note_created: Callable[[Any, Any], None]
    ) -> None:
        """Use the transaction for another run on the same model; the arguments are as above."""
        self.train_state, self.note_created, self.reused = train_state, note_created, True
        self.resume()

    def inherit(self, other: Transaction) -> None:
        """Start with the findings of another transaction for the same body."""
        self.keeps_undo, self.untracked = other.keeps_undo, other.untracked
        self.tolerated = other.tolerated

    def learn(self, found: Retrace) -> None:
        """Store the findings of tracing for the next trace."""
        if found.untracked is None:
            self.keeps_undo = True
        else:
            self.untracked[id(found.untracked.handle)] = found.untracked

    def take_reports(self) -> list[Report]:
        """Return and remove the reports of refused steps, in their order."""
        return self.report_queue.take()

    def tolerate(self, variables: Sequence[Any]) -> None:
        self.tolerated |= {id(v.value.handle) for v in variables}

    def resume(self) -> None:
        self.steps.resume()

    def recount(self, step: int) -> None:
        self.steps.recount(step)

    def trace(self, spec: Any) -> None:
        """Trace the step for arguments like this, without running it."""
        tf.function(self, autograph=False).get_concrete_function(spec)


class Direct:
    """The train function of a model, one step in each execution, on a batch that the host takes
    from the iterator.

    In each execution Keras 3.15 does work that only several steps per execution need. The step is a
    function within a function, its outputs are wrapped in an optional, and two eager operations
    check it. `tf.function` also looks up the trace by the types of all arguments and captured
    values, although they are the same as in the step before. This takes 0.25 ms of a step of 0.6 ms
    (keras/src/backend/tensorflow/trainer.py, `_make_function`). With one step per execution this is
    not needed: the host takes the batch, which a diagnosis can then use, and looks up the trace
    once per iterator.

    Args:
        step: the train step, `step(data) -> outputs`.
        eager: whether it runs eagerly.
    """

    def __init__(self, step: Callable[[Any], Any], eager: bool):
        self._eager = eager
        self._function: Any = step
        if not eager:
            written = tf.autograph.experimental.do_not_convert(step)
            self._function = tf.function(written, reduce_retracing=True)
        self._iterator: Callable[[], Any] = lambda: None
        self._trace: Any = None

    def __call__(self, data: Any, iterator: Any) -> Any:
        """Run the step on the next batch of this iterator."""
        if self._eager or not isinstance(iterator, tf.data.Iterator):
            return self._function(data)
        if self._iterator() is not iterator:
            spec = keras.tree.map_structure(_present, iterator.element_spec)
            self._trace = self._function.get_concrete_function(spec)
            self._iterator = weakref.ref(iterator)
        return self._trace(data)

    def again(self, data: Any) -> Any:
        """Run the step on an earlier batch."""
        return (self._trace or self._function)(data)


def _present(value: Any) -> Any:
    """Return a component of a batch, or its spec; `None` for one that a generator omitted."""
    return None if isinstance(value, (tf.experimental.Optional, tf.OptionalSpec)) else value
