"""The transaction under `tf.distribute.MirroredStrategy`: one verdict for all replicas.

In words::

    each replica      keeps its small state, runs the user's step with the updates deferred, sums up what it saw
    all together      add the sums up: one verdict
    if so:            the updates run on each replica, which is where Keras adds the gradients up
    if not:           each replica gives back its own copy of the small state; batch and replicas are filed for the host

A conditional around code that merges replicas must itself be outside of any replica. So each replica calls
`merge_call`, as `LossScaleOptimizer` does, and the decision stands in there. What a replica writes is distinguished from what the
others write by the handle of its own copy of each variable: all replicas are traced into one graph, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import graph, reductions, reports
from keras_nanguard._backends.tensorflow.execution import StepTrace
from keras_nanguard._backends.tensorflow.intercept import Intercept
from keras_nanguard._backends.tensorflow.step import Transaction

__all__ = ["MirroredTransaction"]


class MirroredTransaction(Transaction):
    """A `Transaction` that every replica of a strategy calls within `Strategy.run`."""

    def __call__(self, *args: Any) -> Any:
        context = tf.distribute.get_replica_context()
        step = context.merge_call(lambda strategy: _Step(self, strategy))
        share = step.share()
        step.run(share, args)
        context.merge_call(step.inspect)
        share.measure(share.outputs)
        context.merge_call(step.decide)
        share.outputs = self.outputs.pack(share.flat, share.outputs)
        joined = context.merge_call(step.join)
        return (share.outputs, step.row) if joined is None else joined

    def tolerate(self, variables: Sequence[Any]) -> None:
        strategy = self.model.distribute_strategy
        self.tolerated |= {id(part.handle) for v in variables for part in strategy.experimental_local_results(v.value)}

    def trace(self, spec: Any) -> None:
        strategy = self.model.distribute_strategy
        tf.function(lambda data: strategy.run(self, args=(data,)), autograph=False).get_concrete_function(spec)


class _Share(StepTrace):
    """One replica's part of a step."""

    def __init__(self, owner: Transaction, strategy: Any, number: int):
        super().__init__(owner, owner.keeps_undo_copies)
        self.strategy, self.number = strategy, number
        self.args: Sequence[Any] = ()
        self.outputs: Any = None
        self.flat: list[Any] = []

    def local(self, variable: Any) -> Any:
        """Return this replica's copy of a variable, or the only one there is."""
        parts = self.strategy.experimental_local_results(super().local(variable))
        return parts[min(self.number, len(parts) - 1)]

    def check_deferred(self, start: int = 0) -> None:
        """Wait until the updates of all replicas are in the graph."""

    def check_after_update(self) -> None:
        """The same, when they are."""
        super().check_deferred()

    def claims(self) -> set[int]:
        """Return the keys of the variables that this replica looks after."""
        train_state = self.train_state
        scales = [v for pair in train_state.scales for v in pair]
        keys = self.keys([*train_state.trainable, *train_state.slots, *scales])
        return keys | {id(v.handle) for v, _ in self.kept}

    def blame(self, may_commit: Any) -> Any:
        """Return whether this replica saw something bad, and whether it was given something bad."""
        given = reductions.exact([t for t in tf.nest.flatten(self.args, expand_composites=True) if t is not None], self.kind)
        return tf.stack([~may_commit, ~may_commit & ~tf.math.is_finite(given)])


class _Step:
    """One trace (or one eager run) of a step of all replicas; made, and asked to decide, outside of every replica."""

    def __init__(self, owner: Transaction, strategy: Any):
        self.owner, self.strategy = owner, strategy
        self.shares = [_Share(owner, strategy, number) for number in range(strategy.num_replicas_in_sync)]
        self.first = first = self.shares[0]
        self.halted, self.step = owner.count()
        self.start = graph.mark(first.graph)
        self.row: Any = None
        optimizers = first.train_state.optimizers
        self.intercept = Intercept(
            *(owner.model, optimizers, first.immediate, self._note_created),
            seen=lambda: self.share().seen,
            asked=lambda record: self.share().asked(record),
        )
        self.watched = ExitStack()
        self.watched.enter_context(owner.outputs.watched())
        self.watched.enter_context(self.intercept)

    def share(self) -> _Share:
        """Return the part of the replica that asks."""
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self.shares[int(tf.get_static_value(number))]

    def run(self, share: _Share, args: Sequence[Any]) -> None:
        """Run the body on one replica."""
        try:
            share.keep()
            if share is not self.first:  # what the replicas have in common is looked after by the first
                common = {id(v.handle) for v, _ in self.first.kept}
                share.kept = [(v, old) for v, old in share.kept if id(v.handle) not in common]
            share.args = args
            with self.intercept.creating():
                share.outputs = self.owner.body(*args)
        except BaseException:
            self.watched.close()
            raise

    def _note_created(self, variable: Any) -> None:
        self.first.note_created(variable)
        for share in self.shares[1:]:
            share.hold([variable])

    def inspect(self, strategy: Any) -> None:
        """Read the trace once all replicas are in it."""
        self.watched.close()
        for share in self.shares:
            share.train_state = self.owner.train_state()
        if self.first.graph is None or not self.owner.refuse:
            return
        claims = [share.claims() for share in self.shares]
        for share in self.shares:
            others = [keys for other, keys in zip(self.shares, claims) if other is not share]
            share.inspect(self.start, set().union(*others))

    def decide(self, strategy: Any) -> None:
        """Come to one verdict, and have every replica act on it."""
        shares, first, owner = self.shares, self.first, self.owner
        may_commit = [rules.may_commit(reductions.OPERATIONS, [s.loss, s.gradients, s.statistics, *s.update_sums]) for s in shares]
        loss = _total(s.loss for s in shares)
        if not first.seen.losses:  # read from the logs, which Keras averages; its losses are made to be added up
            loss /= len(shares)
        gradients = _total(s.gradients for s in shares) * len(shares)  # at least the sum of squares of their sum
        statistics = _total(s.statistics for s in shares)
        update_sums = [_total(parts) for parts in zip(*(s.update_sums for s in shares))]
        for share in shares:
            share.loss, share.gradients, share.statistics, share.update_sums = loss, gradients, statistics, update_sums
        first.judge(self.halted, self.step)
        places = [[(site, path) for site, path, _ in reports.places(share)] for share in shares]
        owner.report_queue.places = rows = tuple(dict.fromkeys(place for each in places for place in each))

        def counts(share: _Share) -> Any:
            lines = [[rows.index(place)] for place in places[share.number]]
            found = reductions.counts([tensor for _, _, tensor in reports.places(share)])
            return tf.scatter_nd(lines, found, (len(rows), 3))

        def commit() -> list[Any]:
            flat = self._flat(self._each(lambda share: share.commit(share.outputs)))
            for share in shares:
                share.check_after_update()
            owner.note_poison(first.immediate, flat)
            return flat

        def refuse() -> list[Any]:
            counted = tf.add_n(self._each(counts))
            flat = self._flat(self._each(lambda share: share.refuse(share.outputs)))
            blamed = self._each(lambda share: share.blame(may_commit[share.number]))
            batch = tf.nest.map_structure(_whole, *(share.args for share in shares))
            owner.report_queue.put(first.row(owner.refuse, flat[:2]), counted, batch, _blamed(blamed))
            return flat

        weights, slots, *flat = tf.cond(first.may_commit, commit, refuse)
        for share, part in zip(shares, _parted(flat, len(shares))):
            share.flat = part
        self.row = first.row(~first.may_commit if owner.refuse else tf.constant(False), [weights, slots])
        owner.note(self.row)

    def _each(self, function: Callable[[_Share], Any]) -> list[Any]:
        """Call a function on each replica; returns the results in their order."""
        results: dict[int, Any] = {}

        def call() -> None:
            share = self.share()
            results[share.number] = function(share)

        self.strategy.extended.call_for_each_replica(call)
        return [results[share.number] for share in self.shares]

    def _flat(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Add up the sums over weights and slots, which come first; the rest stays apart."""
        return [*(_total(update_sums) for update_sums in zip(*(p[:2] for p in parts))), *(t for p in parts for t in p[2:])]

    def join(self, strategy: Any) -> Any:
        """Return what leaves the compiled step, logs averaged as Keras does it; `None` where Keras has to do it."""
        leaves = [tf.nest.flatten(share.outputs) for share in self.shares]
        if not all(tf.is_tensor(t) and t.dtype.is_floating and t.shape.rank == 0 for part in leaves for t in part):
            return None
        means = [tf.reduce_mean(parts, axis=0) for parts in zip(*leaves)]
        return self.owner.outputs.join(tf.nest.pack_sequence_as(self.first.outputs, means), self.row)


def _total(tensors: Any) -> Any:
    return tf.add_n(list(tensors))


def _parted(items: Sequence[Any], parts: int) -> Iterator[list[Any]]:
    size = len(items) // parts
    return (list(items[i * size : (i + 1) * size]) for i in range(parts))


def _whole(*parts: Any) -> Any:
    """Put the batch together again; what has no rows is the same on all replicas, and so is what is not dealt out."""
    if all(part is parts[0] for part in parts):
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return parts[0] if parts[0].shape.rank == 0 else tf.concat(parts, 0)


def _blamed(flags: Sequence[Any]) -> Any:
    """Return for each of several replicas whether it is to blame: those that were given bad data before the others."""
    if len(flags) == 1:
        return ()
    saw, given = tf.unstack(tf.stack(flags), axis=1)
    return tf.where(tf.reduce_any(given), given, saw)
