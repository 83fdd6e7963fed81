"""One trace, or one eager run, of the transaction on TensorFlow; `step` has its outline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import exact_products, fused_updates, graph, ordered_updates, reductions, reports
from keras_nanguard._backends.tensorflow.intercept import Intercept, Seen, Update
from keras_nanguard._core.verdict import PERIOD
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables

__all__ = ["Retrace", "StepTrace"]


class Retrace(Exception):
    """Tracing found that the step has to be traced anew in another mode. Never leaves the library."""


class StepTrace:
    """One trace (or one eager run) of the transaction; on one replica, where there are several.

    Args:
        owner: the `Transaction`.
        keeps_undo: whether old values of weights and slots are kept.
    """

    updates_wait = True
    """Whether the updates wait for the last gradient, so that those of large weights have to be kept from running all at once."""

    def __init__(self, owner: Any, keeps_undo: bool):
        self.owner, self.keeps_undo, self.seen = owner, keeps_undo, Seen()
        self.immediate = keeps_undo or not owner.refuse
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.train_state = owner.train_state()
        self.kept: list[tuple[Any, Any]] = []
        self.scales: list[Any] = []
        self.created: set[int] = set()
        """Keys of what was noted as new to the run."""
        self.products: dict[int, Any] = {}
        self.writes_elsewhere = False
        """Whether the body writes to what is no variable (a table, a queue, a summary), and what nobody can give back."""
        self.after_update: dict[int, bool] = {}
        """What the body reads (`False`) or writes (`True`) after it has asked for its first update."""

    def complete(self, args: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Run the body as a transaction; returns its outputs, the row, and the counts where they were not filed."""
        return self._decide(self.run(args), args)

    def run(self, args: Sequence[Any]) -> Any:
        """Run the body with its updates deferred, and judge it; returns its outputs."""
        self.keep()
        halted, step = self.owner.count()
        start = graph.mark(self.graph)
        outputs = self.observed(args)
        if self.graph is not None and self.owner.refuse:
            self.inspect(start)
        self.measure(outputs)
        self.judge(halted, step)
        return outputs

    def observed(self, args: Sequence[Any]) -> Any:
        """Run the body and note what it hands to its optimizers; returns its outputs."""
        with (
            self.owner.outputs.watched(),
            Intercept(self.owner.model, self.train_state.optimizers, self.immediate, self.note_created, asked=self.asked) as self.seen,
        ):
            outputs = self.owner.body(*args)
        self.train_state = self.owner.train_state()
        return outputs

    def keep(self) -> None:
        """Hold on to what the body may write and what a refusal gives back."""
        self.hold([*self.train_state.other, *self.train_state.metrics, *self.train_state.rates])
        if self.graph is None:  # a graph shows them
            self.hold(self.train_state.unlisted)
        self.kept += [(variable, variable.read_value()) for variable in self.owner.untracked.values()]
        if self.keeps_undo:
            self.hold([*self.train_state.trainable, *self.train_state.slots])
        for pair in self.train_state.scales:
            self.note_scale(*pair)

    def asked(self, record: Update) -> None:
        """Get to know what was unknown until an update was asked for, which has not run yet.

        Weights that no known model holds, and the scale of an optimizer that is built by the body.
        """
        known = self.keys(self.train_state.trainable) | self.created
        found = [v for v in record.variables if self.keys([v]).isdisjoint(known)]
        self.created |= self.keys(found)
        with tf.init_scope():
            for variable in found:
                self.owner.note_created(keras_variables.native(variable), keras_variables.read(variable))
        if self.keeps_undo:
            kept = {id(v.handle) for v, _ in self.kept}
            self.hold([v for v in found if self.keys([v]).isdisjoint(kept)])
        if keras_optimizers.is_loss_scaled(record.optimizer):
            scale, noted = record.optimizer.dynamic_scale, [*self.train_state.scales, *(pair[2:] for pair in self.scales)]
            if id(scale) not in {id(other) for other, _ in noted}:
                self.note_scale(scale, record.optimizer.step_counter)

    def note_scale(self, scale: Any, counter: Any) -> None:
        """Note a loss scale: value and counter as they are at this point of the program, and the variables."""
        self.scales.append((scale.value.read_value(), counter.value.read_value(), scale, counter))

    def hold(self, variables: Sequence[Any]) -> None:
        """Hold on to the values that variables (Keras' or TensorFlow's own) have at this point of the program."""
        for variable in map(self.local, variables):
            self.kept.append((variable, variable.read_value()))

    def local(self, variable: Any) -> Any:
        """Return TensorFlow's own variable behind one of Keras', and any other one as it is."""
        return variable if isinstance(variable, tf.Variable) else variable.value

    def keys(self, variables: Iterable[Any]) -> set[int]:
        """Return the keys of these variables in a graph."""
        return {id(self.local(v).handle) for v in variables}

    def note_created(self, variable: Any) -> None:
        self.hold([variable])
        self.created |= self.keys([variable])
        with tf.init_scope():
            self.owner.note_created(variable, variable.numpy())

    def inspect(self, start: int, foreign: Iterable[int] = ()) -> None:
        """Read the trace: keep only what the body writes; ask for another trace where this mode does not suit it.

        Variables that are `foreign` are looked after by another replica.
        """
        known = {id(v.handle) for v, _ in self.kept}.union(foreign)
        large = self.keys([*self.train_state.trainable, *self.train_state.slots])
        known |= self.keys(v for pair in self.train_state.scales for v in pair)
        written: set[int] = set()
        for access in self.note_after_update(start):
            if not access.writes:
                continue
            if access.key in large and not self.keeps_undo:
                self._save()
            if access.key not in known | large:
                if (untracked := graph.untracked(access.handle)) is not None:
                    self.owner.untracked[access.key] = untracked
                    raise Retrace
                self.writes_elsewhere = True
            written.add(access.key)
        self.kept = [(v, old) for v, old in self.kept if id(v.handle) in written]

    def note_after_update(self, start: int) -> list[graph.Access]:
        """Note what the body, which begins at this mark, reads or writes after its first update; returns all that it does."""
        accesses = list(graph.accesses(self.graph, start, self.seen.boundary))
        for access in accesses:
            if access.after_mark:
                self.after_update[access.key] = access.writes or self.after_update.get(access.key, False)
        return accesses

    def _save(self) -> None:
        """Ask for a trace in which updates run where the body asks for them."""
        self.owner.keeps_undo = True
        raise Retrace

    def check_deferred(self, start: int = 0) -> None:
        """Ask for another trace where the rest of the body depends on the updates, traced just now, not being deferred.

        They begin at the mark `start` of the graph that they stand in.
        """
        if self.graph is None or not self.after_update:
            return
        for access in graph.accesses(tf.compat.v1.get_default_graph(), start):
            if access.key in self.after_update and (access.writes or self.after_update[access.key]):
                self._save()

    def measure(self, outputs: Any) -> None:
        """Sum up loss, gradients and the statistics that were written, and weights and slots where they are written, too."""
        train_state, seen = self.train_state, self.seen
        self.kind = kind = reductions.kind([*train_state.trainable, *train_state.slots])
        others = self.keys([*train_state.metrics, *train_state.trainable, *train_state.slots]) | self.owner.tolerated
        self.written = [v for v, _ in self.kept if id(v.handle) not in others and reductions.can_be_bad(v)]
        self.loss = reductions.add([tf.cast(loss, kind) for loss in seen.losses or self.owner.outputs.losses(outputs)], kind)
        pairs = [(g, v) for record in seen.records for g, v in record.pairs if g is not None]
        plain = self.graph is None or self.owner.jit
        self.products = {} if plain or self.immediate else exact_products.unread(g for g, _ in pairs)
        self.gradients_of = [(g if plain or not self.immediate else exact_products.beside(g), v) for g, v in pairs]
        self.gradients = reductions.squares([g for g, _ in self.gradients_of], kind)
        self.statistics = reductions.total(self.written, kind)
        scales = [s for s, _, _, _ in self.scales]
        self.scale = tf.cast(tf.reduce_min(scales), kind) if scales else tf.ones((), kind)
        self.update_sums: Sequence[Any] = []
        if self.immediate:
            parts = ([keras_variables.native(v) for v in part] for part in (train_state.trainable, train_state.slots))
            self.update_sums = [reductions.exact(part, kind) for part in parts]

    def judge(self, halted: Any, step: Any) -> None:
        """Decide, from the sums, whether the step may commit."""
        self.step, self.halt = tf.cast(step % PERIOD, self.kind), tf.cast(halted, self.kind)
        sums = [self.loss, self.gradients, *([self.statistics] if self.written else []), *self.update_sums]
        allowed = rules.may_commit(reductions.OPERATIONS, sums, self.scale if self.scales else None)
        self.may_commit = allowed & ~halted if self.owner.counted else allowed

    def row(self, refused: Any, update_sums: Sequence[Any]) -> Any:
        """Return the row of numbers; `update_sums` are the sums over weights and slots."""
        first = [tf.cast(refused, self.kind), self.loss, self.gradients, self.statistics]
        return tf.stack([*first, *update_sums, self.scale, self.step, self.halt])

    def _decide(self, outputs: Any, args: Sequence[Any]) -> tuple[Any, Any, Any]:
        places = reports.places(self)
        nothing = tf.zeros((len(places), 3), tf.int64)
        outside = self.owner.jit and self.graph is not None

        def commit() -> list[Any]:
            flat = self.commit(outputs)
            self.owner.note_poison(self.immediate, flat)
            return [*flat, *([nothing] if outside else [])]

        def refuse() -> list[Any]:
            counts = reductions.counts([tensor for _, _, tensor in places])  # before the statistics are given back
            flat = self.refuse(outputs)
            if not outside:
                self.owner.report_queue.put(self.row(self.owner.refuse, flat[:2]), counts, args)
            return [*flat, *([counts] if outside else [])]

        self.owner.report_queue.places = tuple((site, path) for site, path, _ in places)
        weight_sum, slot_sum, *flat = tf.cond(self.may_commit, commit, refuse)
        counts = flat.pop() if outside else None
        refused = ~self.may_commit if self.owner.refuse else tf.constant(False)
        return self.owner.outputs.pack(flat, outputs), self.row(refused, [weight_sum, slot_sum]), counts

    def commit(self, outputs: Any) -> list[Any]:
        """Run the deferred updates and read what they wrote; returns these sums, and the outputs."""
        if self.immediate:
            return [*self.update_sums, *self.owner.outputs.committed(outputs)]
        self.update()
        self.check_deferred()
        update_sums = reductions.update_sums(self.train_state, self.seen.records, self.gradients, self.kind)
        return [*update_sums, *self.owner.outputs.committed(outputs)]

    def update(self) -> None:
        """Run the deferred updates."""
        optimizers = () if self.owner.jit else self.train_state.optimizers
        waiting = optimizers if self.updates_wait else ()
        with ordered_updates.one_by_one(waiting), exact_products.in_sight(optimizers), fused_updates.fused(optimizers):
            for record in self.seen.records:
                record.grads = exact_products.again(record.grads, self.products)
                record.run()

    def refuse(self, outputs: Any) -> list[Any]:
        """Give back what was kept; returns the same as `commit`."""
        update_sums = self.update_sums or [tf.zeros((), self.kind)] * 2
        if not self.owner.refuse:
            return [*update_sums, *self.owner.outputs.committed(outputs)]
        for variable, old in self.kept:
            variable.assign(old)
        self._learn_scale()
        return [*update_sums, *self.owner.outputs.refused(outputs)]

    def _learn_scale(self) -> None:
        """Let each loss scale learn from the refusal."""
        scaled = filter(keras_optimizers.is_loss_scaled, self.train_state.optimizers)
        first = {id(o.dynamic_scale): o.initial_scale for o in scaled if o.built}
        for old, steps, scale, counter in self.scales:
            initial = tf.cast(first[id(scale)], old.dtype)
            scale_after, counter_after = rules.learned_scale(reductions.OPERATIONS, self.loss, self.gradients, old, steps, initial)
            scale.value.assign(scale_after)
            counter.value.assign(counter_after)
