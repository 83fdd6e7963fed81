"""The transaction under `tf.distribute.MirroredStrategy`: one verdict for all replicas.

In outline::

    each replica   keeps its small state, runs the user's step with deferred updates, computes sums
    all together   add up the sums: one verdict
    yes            the updates run on each replica, where Keras sums the gradients no
    each replica restores its own copy of the small state; the batch is reported

A conditional around code that merges replicas must be outside of any replica. So each replica calls
`merge_call`, like `LossScaleOptimizer`, and the decision is made there. All replicas are traced
into one graph, one after the other. The handle of each variable's copy shows which replica writes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.tensorflow import graph
from keras_nanguard._backends.tensorflow.decision import StepResult, decide, places_of
from keras_nanguard._backends.tensorflow.execution import StepTrace
from keras_nanguard._backends.tensorflow.intercept import Intercept
from keras_nanguard._backends.tensorflow.step import Transaction


class MirroredTransaction(Transaction):
    """A `Transaction` that every replica of a strategy calls inside `Strategy.run`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.replayed = self._on_one_replica

    def _on_one_replica(self, *args: Any) -> Any:
        """Run the body outside of the strategy, on the whole batch.

        If a replica received no rows, run it on an empty batch, as that replica did.
        """
        dealt, rows = self.report_queue.dealt, batches.row_count(args)
        if 0 in dealt and sum(dealt) == rows:
            args = tf.nest.map_structure(lambda t: t[:0] if _has_rows(t, rows) else t, args)
        return self.body(*args)

    def run(self, *args: Any) -> Any:
        merge = tf.distribute.get_replica_context().merge_call
        step = merge(lambda strategy: _Step(self, strategy))
        share = step.share()
        outputs = step.run(share, args)
        merge(step.inspect)
        share.measure(outputs)
        merge(step.decide)
        return outputs, step.result.row

    def tolerate(self, variables: Sequence[Any]) -> None:
        parts = self.model.distribute_strategy.experimental_local_results
        self.tolerated |= {id(part.handle) for v in variables for part in parts(v.value)}

    def trace(self, spec: Any) -> None:
        run = self.model.distribute_strategy.run
        traced = tf.function(lambda data: run(self, args=(data,)), autograph=False)
        traced.get_concrete_function(spec)


class _Share(StepTrace):
    """The part of one replica in a step.

    Args:
        transaction: see `StepTrace`.
        strategy: the strategy.
        number: the replica, from 0.
    """

    adapts_updates = False
    """False: all replicas trace their updates at the same time, so an override for one applies to
    all."""

    def __init__(self, transaction: Any, strategy: Any, number: int):
        super().__init__(transaction)
        self.strategy, self.number = strategy, number

    def local(self, variable: Any) -> Any:
        """Return this replica's copy of a variable, or its only copy."""
        parts = self.strategy.experimental_local_results(super().local(variable))
        return parts[min(self.number, len(parts) - 1)]

    def owned_keys(self) -> set[int]:
        """Return the keys of the variables of this replica."""
        train_state = self.train_state
        scales = [v for pair in train_state.scales for v in pair]
        keys = self.keys([*train_state.trainable, *train_state.slots, *scales])
        return keys | {id(v.handle) for v, _ in self.kept}


class _Step:
    """One trace (or one eager run) of a step of all replicas; created and used outside of them.

    Attributes:
        result: the result of the step, without its outputs.
    """

    result: StepResult

    def __init__(self, transaction: Any, strategy: Any):
        self.transaction, self.strategy = transaction, strategy
        self.counted = transaction.steps.begin()
        numbers = range(strategy.num_replicas_in_sync)
        self.shares = [_Share(transaction, strategy, number) for number in numbers]
        self.first = first = self.shares[0]
        self.start = graph.mark(first.graph)
        intercept = Intercept(
            transaction.model,
            first.train_state.optimizers,
            transaction.immediate,
            self._note_created,
            seen=lambda: self.share().seen,
            asked=lambda record: self.share().asked(record),
        )
        self.intercept, self.watched = intercept, ExitStack()
        self.watched.enter_context(intercept)

    def share(self) -> _Share:
        """Return the part of the calling replica."""
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self.shares[int(tf.get_static_value(number))]

    def run(self, share: _Share, args: Sequence[Any]) -> Any:
        """Run the body on one replica; return its outputs."""
        try:
            share.keep()
            if share is not self.first:  # it handles what all replicas share
                common = {id(v.handle) for v, _ in self.first.kept}
                share.kept = [(v, old) for v, old in share.kept if id(v.handle) not in common]
            share.args = args
            with self.intercept.creating():
                return self.transaction.body(*args)
        except BaseException:
            self.watched.close()
            raise

    def _note_created(self, variable: Any) -> None:
        self.first.note_created(variable)
        for share in self.shares[1:]:
            share.hold([variable])

    def inspect(self, strategy: Any) -> None:
        """Inspect the trace once all replicas are in it."""
        self.watched.close()
        for share in self.shares:
            share.train_state = self.transaction.train_state()
        if self.first.graph is None or not self.transaction.refuse:
            return
        owned = [share.owned_keys() for share in self.shares]
        for share in self.shares:
            others = [keys for other, keys in zip(self.shares, owned) if other is not share]
            share.inspect(self.start, set().union(*others))

    def decide(self, strategy: Any) -> None:
        """Compute one verdict, let every replica commit or refuse, and store the result."""
        transaction, shares = self.transaction, self.shares
        transaction.places = places_of(shares)
        halted, number = self.counted
        self.result = decide(shares, None, halted, number, self._each)
        transaction.file(self.result, tf.nest.map_structure(_whole, *(s.args for s in shares)))

    def _each(self, function: Callable[[StepTrace], Any]) -> list[Any]:
        """Call a function on each replica; return the results in their order."""
        results: dict[int, Any] = {}

        def call() -> None:
            share = self.share()
            results[share.number] = function(share)

        self.strategy.extended.call_for_each_replica(call)
        return [results[share.number] for share in self.shares]


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, tf.Tensor) and bool(value.shape.rank) and value.shape[0] == rows


def _whole(*parts: Any) -> Any:
    """Join the parts of the batch of all replicas.

    Data without rows are the same on all replicas, and so are data that are not distributed.
    """
    if all(part is parts[0] for part in parts):
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return parts[0] if parts[0].shape.rank == 0 else tf.concat(parts, 0)
