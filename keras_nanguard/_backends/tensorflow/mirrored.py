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
from keras_nanguard._backends.tensorflow import graph, reductions
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

        If a replica received no rows, the result for an empty batch is the one to find.
        """
        dealt, rows = self.report_queue.dealt, batches.row_count(args)
        if 0 in dealt and sum(dealt) == rows:
            args = tf.nest.map_structure(lambda t: t[:0] if _has_rows(t, rows) else t, args)
        return self.body(*args)

    def run(self, *args: Any) -> Any:
        merge = tf.distribute.get_replica_context().merge_call
        step = merge(lambda strategy: _Step(self, strategy, *self.count()))
        share = step.share()
        step.run(share, args)
        merge(step.inspect)
        share.measure(share.outputs)
        merge(step.decide)
        merge(lambda strategy: self._report(step))
        return share.outputs, step.result.row

    def _report(self, step: _Step) -> None:
        batch = tf.nest.map_structure(_whole, *(share.args for share in step.shares))
        self.file(step.result, step.places, batch, step.replicas)

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
        transaction, halted, step: see `StepTrace`.
        strategy: the strategy.
        number: the replica, from 0.
    """

    adapts_updates = False
    """False: all replicas trace their updates at the same time, so an override for one applies to
    all."""

    def __init__(self, transaction: Any, halted: Any, step: Any, strategy: Any, number: int):
        super().__init__(transaction, halted, step)
        self.strategy, self.number = strategy, number
        self.args: Sequence[Any] = ()
        self.outputs: Any = None

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

    def given_bad(self) -> Any:
        """Return whether the data of this replica are bad, a scalar bool."""
        given = [t for t in tf.nest.flatten(self.args, expand_composites=True) if t is not None]
        return ~reductions.all_finite(given)

    def rows(self) -> Any:
        """Return the number of its rows, a scalar int64; -1 if unknown."""
        leaves = tf.nest.flatten(self.args)
        dense = [t for t in leaves if isinstance(t, tf.Tensor) and t.shape.rank]
        return tf.shape(dense[0], tf.int64)[0] if dense else tf.constant(-1, tf.int64)


class _Step:
    """One trace (or one eager run) of a step of all replicas; created and used outside of them.

    Attributes:
        result: the result of the step, without its outputs.
        places: site and path of each line of the counts.
        replicas: for each replica whether it is to blame, and its rows of the batch, as for
            `ReportQueue.put`. Replicas with bad data are to blame, else those with a bad number.
    """

    result: Any
    replicas: Any

    def __init__(self, transaction: Any, strategy: Any, halted: Any, step: Any):
        self.transaction, self.strategy = transaction, strategy
        numbers = range(strategy.num_replicas_in_sync)
        self.shares = [_Share(transaction, halted, step, strategy, number) for number in numbers]
        self.first = first = self.shares[0]
        self.places: tuple[tuple[str, str], ...] = ()
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

    def run(self, share: _Share, args: Sequence[Any]) -> None:
        """Run the body on one replica."""
        try:
            share.keep()
            if share is not self.first:  # it handles what all replicas share
                common = {id(v.handle) for v, _ in self.first.kept}
                share.kept = [(v, old) for v, old in share.kept if id(v.handle) not in common]
            share.args = args
            with self.intercept.creating():
                share.outputs = self.transaction.body(*args)
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
        """Compute one verdict, and let every replica commit or refuse."""
        shares, first = self.shares, self.first
        self.places = tuple(dict.fromkeys(place for share in shares for place in share.places))
        trusted = tf.math.is_finite(tf.add_n([s for share in shares for s in share.sums]))
        none = tf.zeros(len(shares), tf.bool), tf.zeros((len(self.places), 3), tf.int64)
        finite, given_bad, counts = tf.cond(trusted, lambda: (~none[0], *none), self._look)
        self.replicas = None
        if len(shares) > 1:
            blamed = tf.where(tf.reduce_any(given_bad), given_bad, ~finite)
            rows = tf.stack([share.rows() for share in shares])
            self.replicas = tf.stack([tf.cast(blamed, tf.int64), rows], 1)
        self._join_sums(tf.reduce_all(finite))

        def commit() -> list[Any]:
            sums = self._each(_Share.commit)
            for share in shares:
                share.check_deferred()
            return list(map(_total, zip(*sums)))

        def refuse() -> list[Any]:
            return list(map(_total, zip(*self._each(_Share.refuse))))

        update_sums = tf.cond(first.may_commit, commit, refuse)
        first.counts = counts
        self.result = first.result(None, update_sums)

    def _look(self) -> tuple[Any, Any, Any]:
        """Return for each replica whether everything is finite, whether its data are bad, and
        counts.
        """

        def look(share: _Share) -> tuple[Any, Any, Any]:
            finite, found = share.look()
            lines = [[self.places.index(place)] for place in share.places]
            counts = tf.scatter_nd(lines, found, (len(self.places), 3)) if lines else found
            return finite, ~finite & share.given_bad(), counts

        finite, given_bad, counts = zip(*self._each(look))
        return tf.stack(finite), tf.stack(given_bad), tf.add_n(counts)

    def _join_sums(self, finite: Any) -> None:
        """Give each replica the sums of all, and so the verdict."""
        shares, number = self.shares, len(self.shares)
        loss, gradients, statistics, *update_sums = map(_total, zip(*(s.sums for s in shares)))
        if not self.first.seen.losses:  # logs, which Keras averages; losses are made to be added up
            loss /= number
        gradients *= number  # at least the sum of squares of their sum
        for share in shares:
            share.loss, share.gradients, share.statistics = loss, gradients, statistics
            share.update_sums = update_sums
            share.settle(finite)

    def _each(self, function: Callable[[_Share], Any]) -> list[Any]:
        """Call a function on each replica; return the results in their order."""
        results: dict[int, Any] = {}

        def call() -> None:
            share = self.share()
            results[share.number] = function(share)

        self.strategy.extended.call_for_each_replica(call)
        return [results[share.number] for share in self.shares]


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, tf.Tensor) and bool(value.shape.rank) and value.shape[0] == rows


def _total(tensors: Any) -> Any:
    return tf.add_n(list(tensors))


def _whole(*parts: Any) -> Any:
    """Join the parts of the batch of all replicas.

    Data without rows are the same on all replicas, and so are data that are not distributed.
    """
    if all(part is parts[0] for part in parts):
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return parts[0] if parts[0].shape.rank == 0 else tf.concat(parts, 0)
