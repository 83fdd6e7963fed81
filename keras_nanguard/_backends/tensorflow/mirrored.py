"""The transaction of a step that every replica of a `tf.distribute.MirroredStrategy` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.tensorflow.replica import (
    Inspected,
    Measured,
    ReplicaTrace,
    TracedStep,
)
from keras_nanguard._backends.tensorflow.step import Transaction
from keras_nanguard._backends.tensorflow.trace import StepTrace


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
        outputs = trace.run(args)
        found = merge(lambda strategy: self._inspected(trace))[trace.number()]

        def end(strategy: Any, measured: Any) -> Any:
            result = trace.decide(None, strategy.experimental_local_results(measured), *begun)
            whole = tf.nest.map_structure(_whole, *(replica.args for replica in trace.replicas))
            self.rows.end(result.row, self.refuse)
            self.reports.add(result, whole)
            return result.row

        return outputs, merge(end, args=(trace.here().measure(outputs, found),))

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

    def measure(self, outputs: Any, found: Inspected) -> Measured:
        """Sum up its part of the step.

        Keras averages logs; losses are made to be added up. The sum of squares of the gradients is
        at least that of their sums over the replicas.
        """
        measured, count = super().measure(outputs, found), self.strategy.num_replicas_in_sync
        loss, gradients, *others = measured.sums
        loss = loss if self.seen.losses else loss / count
        return replace(measured, sums=[loss, gradients * count, *others])


class _MirroredTrace(StepTrace):
    """One trace (or one eager run) of a step of all replicas; entered, inspected and decided
    outside of them. The context ends when it is inspected, or when a replica fails.
    """

    def __init__(self, transaction: TracedStep, strategy: Any):
        numbers = range(strategy.num_replicas_in_sync)
        super().__init__(transaction, [_MirroredReplica(transaction, strategy, n) for n in numbers])
        self.strategy = strategy

    def run(self, args: Sequence[Any]) -> Any:
        try:
            return super().run(args)
        except BaseException:
            self.__exit__()
            raise

    def inspect(self) -> list[Inspected]:
        self.__exit__()
        return super().inspect()

    def number(self) -> int:
        """Return the number of the calling replica."""
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return int(tf.get_static_value(number))

    def here(self) -> ReplicaTrace:
        return self.replicas[self.number()]

    def each(
        self, function: Callable[[ReplicaTrace, Any], Any], values: Sequence[Any]
    ) -> list[Any]:
        results: dict[int, Any] = {}

        def call() -> None:
            number = self.number()
            results[number] = function(self.replicas[number], values[number])

        self.strategy.extended.call_for_each_replica(call)
        return [results[number] for number in range(len(values))]


def _whole(*parts: Any) -> Any:
    """Join the parts of the batch of all replicas, except data that are the same on all of them."""
    if all(part is parts[0] for part in parts):
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return parts[0] if parts[0].shape.rank == 0 else tf.concat(parts, 0)
