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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.interface import Run
from keras_nanguard._backends.shared.batches import losses_in_logs, scalars
from keras_nanguard._backends.tensorflow.intercept import has_hidden_state
from keras_nanguard._backends.tensorflow.reports import Reports, Rows, StepResult
from keras_nanguard._backends.tensorflow.trace import (
    Body,
    Measured,
    ReplicaTrace,
    StepTrace,
    TracedStep,
)
from keras_nanguard._core.verdict import Report, Verdict


class Transaction(TracedStep):
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        run: the run that it belongs to.
        of_trainer: whether a Keras trainer runs the step: it returns logs, and the model's
            `compute_loss` returns the loss.
        jit: compile the body with XLA. Filing a refused step stays outside of the cluster.
        counted: any number of steps may run before the host reads their verdicts. The step then
            counts itself and files its row. After a step that committed a bad state all steps are
            refused until the host has repaired it.
        refuse: whether bad steps are refused; otherwise they commit, and only their verdict is
            reported.
        host_has_batches: the host sets `given`; otherwise each report stores its batch.
        take: how the host takes the next batch from the iterator, if it does; `testing` wraps this.

    Attributes:
        given: the arguments of the next or last step, if the host has them.

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
        self.take = take
        self.losses = losses_in_logs if of_trainer else scalars
        self.rows = Rows(counted)
        self.reports = Reports(with_batches=not host_has_batches)
        self._compiled: Callable[..., StepResult] = self._traced
        if jit:
            how = {"jit_compile": True, "reduce_retracing": True, "autograph": False}
            self._compiled = tf.function(self._traced, **how)

    def __call__(self, *args: Any) -> Any:
        return self.execute(*args)

    def execute(self, *args: Any) -> Any:
        """Run the body once as a transaction; `testing` wraps this."""
        traced = self._traced if tf.executing_eagerly() else self._compiled
        result = traced(*self.rows.begin(), *args)
        self.rows.end(result.row, self.refuse)
        self.reports.add(result, args)
        return result.outputs, result.row

    def _traced(self, halted: Any, number: Any, *args: Any) -> StepResult:
        trace = StepTrace(self, [ReplicaTrace(self)])
        with trace:
            body = trace.run(args)
        (body,) = self._inspected(trace, [body])
        return trace.decide(body.outputs, [trace.here().measure(body)], halted, number)

    def _inspected(self, trace: StepTrace, bodies: Sequence[Body]) -> list[Body]:
        self.has_hidden_state = trace.graph is not None and has_hidden_state(trace.graph)
        return trace.inspect(bodies)

    # For the host, between two runs

    def take_reports(self) -> list[Report]:
        return self.reports.take(self.given)

    def verdicts(self, start: int, end: int) -> list[Verdict]:
        return self.rows.verdicts(start, end)

    def tolerate(self, variables: Sequence[Any]) -> None:
        copies = [getattr(v.value, "values", (v.value,)) for v in variables]  # one per replica
        tolerated = frozenset(id(copy.handle) for each in copies for copy in each)
        self.learned = replace(self.learned, tolerated=self.learned.tolerated | tolerated)

    def resume(self) -> None:
        self.rows.resume()

    def recount(self, step: int) -> None:
        self.rows.recount(step)

    def trace(self, spec: Any) -> None:
        """Trace the step for arguments like this, without running it."""
        tf.function(self, autograph=False).get_concrete_function(spec)

    def release_run(self) -> None:
        del self.run
        self.take_reports()
        self.given = None


class MirroredTransaction(Transaction):
    """A `Transaction` that every replica of a `tf.distribute.MirroredStrategy` calls inside
    `Strategy.run`: one verdict for all of them.

    In outline::

        each replica   keeps its small state, runs the user's step with deferred updates, sums up
        all together   add up the sums: one verdict
        yes            the updates run on each replica, where Keras sums the gradients
        no             each replica restores its own copy of the small state; the batch is reported

    A conditional around code that merges replicas must be outside of any replica. So each replica
    calls `merge_call`, like `LossScaleOptimizer`, and the decision is made there. All replicas are
    traced into one graph, one after the other. The handle of each variable's copy shows which
    replica writes it.
    """

    adapts_updates = False
    """False: all replicas trace their updates at the same time, so an override for one applies to
    all."""

    def execute(self, *args: Any) -> Any:
        merge = tf.distribute.get_replica_context().merge_call
        begun = merge(lambda strategy: self.rows.begin())
        trace = merge(lambda strategy: _MirroredTrace(self, strategy).__enter__())

        def inspected(strategy: Any, body: Any) -> list[Body]:
            return self._inspected(trace, strategy.experimental_local_results(body))

        bodies = merge(inspected, args=(trace.run(args),))
        own = bodies[trace.number()]

        def end(strategy: Any, measured: Any) -> Any:
            result = trace.decide(None, strategy.experimental_local_results(measured), *begun)
            whole = tf.nest.map_structure(_whole, *(body.args for body in bodies))
            self.rows.end(result.row, self.refuse)
            self.reports.add(result, whole)
            return result.row

        return own.outputs, merge(end, args=(trace.here().measure(own),))

    def trace(self, spec: Any) -> None:
        run = self.model.distribute_strategy.run
        traced = tf.function(lambda data: run(self, args=(data,)), autograph=False)
        traced.get_concrete_function(spec)


class _MirroredReplica(ReplicaTrace):
    """One of several replicas in a step; `number` counts them from 0."""

    def __init__(self, transaction: TracedStep, strategy: Any, number: int):
        super().__init__(transaction)
        self.strategy, self.number = strategy, number

    def local(self, variable: Any) -> Any:
        """Return this replica's copy of a variable, or its only copy."""
        parts = self.strategy.experimental_local_results(super().local(variable))
        return parts[min(self.number, len(parts) - 1)]

    def measure(self, body: Body) -> Measured:
        """Sum up its part of the step.

        Keras averages logs; losses are made to be added up. The sum of squares of the gradients is
        at least that of their sums over the replicas.
        """
        measured, count = super().measure(body), self.strategy.num_replicas_in_sync
        loss, gradients, *others = measured.sums
        loss = loss if body.seen.losses else loss / count
        return replace(measured, sums=[loss, gradients * count, *others])


class _MirroredTrace(StepTrace):
    """One trace (or one eager run) of a step of all replicas; entered, inspected and decided
    outside of them. The context ends when it is inspected, or when a replica fails.
    """

    def __init__(self, transaction: TracedStep, strategy: Any):
        numbers = range(strategy.num_replicas_in_sync)
        super().__init__(transaction, [_MirroredReplica(transaction, strategy, n) for n in numbers])
        self.strategy = strategy

    def run(self, args: Sequence[Any]) -> Body:
        try:
            return super().run(args)
        except BaseException:
            self.__exit__()
            raise

    def inspect(self, bodies: Sequence[Body]) -> list[Body]:
        self.__exit__()
        return super().inspect(bodies)

    def number(self) -> int:
        """Return the number of the calling replica."""
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return int(tf.get_static_value(number))

    def here(self) -> ReplicaTrace:
        return self.replicas[self.number()]

    def each(self, function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
        results: dict[int, Any] = {}

        def call() -> None:
            results[self.number()] = function(values[self.number()])

        self.strategy.extended.call_for_each_replica(call)
        return [results[number] for number in range(len(values))]


def _whole(*parts: Any) -> Any:
    """Join the parts of the batch of all replicas, except data that are the same on all of them."""
    if all(part is parts[0] for part in parts):
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return parts[0] if parts[0].shape.rank == 0 else tf.concat(parts, 0)
