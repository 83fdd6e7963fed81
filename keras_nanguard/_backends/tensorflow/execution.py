"""One trace, or one eager run, of the transaction on TensorFlow; `step` has its outline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import tensorflow as tf

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import graph, reductions, updates
from keras_nanguard._backends.tensorflow.intercept import Intercept, Seen, Update
from keras_nanguard._core.verdict import PERIOD
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


class Retrace(Exception):
    """Raised during tracing if the step has to be traced again in another mode. Never leaves the
    library.

    Attributes:
        untracked: a variable that the step writes and that Keras does not track; `None` if updates
            must run where the body calls them.
    """

    def __init__(self, untracked: graph.Untracked | None = None):
        super().__init__()
        self.untracked = untracked


class StepResult(NamedTuple):
    """The result of one step.

    Attributes:
        outputs: its outputs.
        row: the numbers of its verdict, shape `(len(FIELDS),)`.
        counts: int64 of shape `(places, 3)`: NaN, infinite and all entries of each place, 0 if all
            of its sums were finite.
        bad: scalar bool, whether to report it: refused, and not because it was halted.
    """

    outputs: Any
    row: Any
    counts: Any
    bad: Any


class StepTrace:
    """One trace (or one eager run) of the transaction; on one replica, if there are several.

    Args:
        transaction: the `Transaction`, which has how it is traced.
        halted: scalar bool, whether the step is refused regardless of its numbers.
        step: its number, a scalar int64.

    Attributes:
        places: `(site, path)` of each line of the counts, once the body has run.
    """

    adapts_updates = True
    """Whether updates are ordered and fused, and keep the bits of Keras' own (see `updates`)."""

    def __init__(self, transaction: Any, halted: Any, step: Any):
        self.transaction, self.halted, self.step = transaction, halted, step
        self.seen = Seen()
        self.keeps_undo = transaction.immediate and transaction.refuse
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.train_state = transaction.train_state()
        self.kept: list[tuple[Any, Any]] = []
        self.scales: list[Any] = []
        self.created: set[int] = set()
        """Keys of the variables that were created inside the step."""
        self.after_update: dict[int, bool] = {}
        """Keys of the variables that the body reads (`False`) or writes (`True`) after its first
        update."""

    def complete(self, args: Sequence[Any]) -> StepResult:
        """Run the body as a transaction."""
        self.keep()
        start = graph.mark(self.graph)
        outputs = self.observed(args)
        if self.graph is not None and self.transaction.refuse:
            self.inspect(start)
        self.measure(outputs)
        self.judge()
        return self.result(*self._decide(outputs))

    def _decide(self, outputs: Any) -> tuple[Any, Sequence[Any]]:
        """Commit or refuse; return the outputs, and the sums over weights and slots.

        Logs pass through the conditional. Without that TensorFlow's graph optimizer multiplies the
        factors of an update (of the scale of a BatchNormalization) in another order than in a
        plain step, which may differ in the last bit.
        """
        leaves = tf.nest.flatten(outputs, expand_composites=True) if self.transaction.logs else []
        leaves = [leaf for leaf in leaves if leaf is not None]

        def commit() -> list[Any]:
            sums = self.commit()
            self.check_deferred()
            return [*sums, *map(tf.identity, leaves)]

        weights, slots, *passed = tf.cond(
            self.may_commit, commit, lambda: [*self.refuse(), *map(tf.identity, leaves)]
        )
        if self.transaction.logs:
            rest = iter(passed)
            outputs = tf.nest.map_structure(
                lambda leaf: None if leaf is None else next(rest), outputs, expand_composites=True
            )
        return outputs, (weights, slots)

    def result(self, outputs: Any, update_sums: Sequence[Any]) -> StepResult:
        """Return the result, given the outputs and the sums over weights and slots."""
        bad = ~self.may_commit & ~self.halted
        return StepResult(outputs, self.row(update_sums), self.counts, bad)

    # The body, and what it may write

    def observed(self, args: Sequence[Any]) -> Any:
        """Run the body and record the calls of its optimizers; return its outputs."""
        transaction, optimizers = self.transaction, self.train_state.optimizers
        intercept = Intercept(
            *(transaction.model, optimizers, transaction.immediate, self.note_created),
            seen=lambda: self.seen,
            asked=self.asked,
        )
        with intercept, intercept.creating():
            outputs = transaction.body(*args)
        self.train_state = transaction.train_state()
        return outputs

    def keep(self) -> None:
        """Keep the values that the body may write and a refusal restores."""
        self.hold([*self.train_state.other, *self.train_state.metrics, *self.train_state.rates])
        if self.graph is None:  # a graph shows them
            self.hold(self.train_state.unlisted)
        self.kept += [(v, v.read_value()) for v in self.transaction.untracked.values()]
        if self.keeps_undo:
            self.hold([*self.train_state.trainable, *self.train_state.slots])
        for pair in self.train_state.scales:
            self.note_scale(*pair)

    def asked(self, record: Update) -> None:
        """Store what is unknown before the body calls this update, which has not run yet.

        These are weights of no known model, and the scale of an optimizer that the body builds.
        """
        known = self.keys(self.train_state.trainable) | self.created
        found = [v for v in record.variables if self.keys([v]).isdisjoint(known)]
        self.created |= self.keys(found)
        with tf.init_scope():
            for variable in found:
                native = keras_variables.native(variable)
                self.transaction.note_created(native, keras_variables.read(variable))
        if self.keeps_undo:
            kept = {id(v.handle) for v, _ in self.kept}
            self.hold([v for v in found if self.keys([v]).isdisjoint(kept)])
        if keras_optimizers.is_loss_scaled(record.optimizer):
            scale = record.optimizer.dynamic_scale
            noted = [*self.train_state.scales, *(pair[2:] for pair in self.scales)]
            if id(scale) not in {id(other) for other, _ in noted}:
                self.note_scale(scale, record.optimizer.step_counter)

    def note_scale(self, scale: Any, counter: Any) -> None:
        """Store a loss scale: value and counter at this point of the program, and the variables."""
        values = scale.value.read_value(), counter.value.read_value()
        self.scales.append((*values, scale, counter))

    def hold(self, variables: Sequence[Any]) -> None:
        """Keep the present values of variables (of Keras or TensorFlow)."""
        for variable in map(self.local, variables):
            self.kept.append((variable, variable.read_value()))

    def local(self, variable: Any) -> Any:
        """Return the TensorFlow variable behind a Keras one; any other variable is returned
        unchanged.
        """
        return variable if isinstance(variable, tf.Variable) else variable.value

    def keys(self, variables: Iterable[Any]) -> set[int]:
        """Return the keys of these variables in a graph."""
        return {id(self.local(v).handle) for v in variables}

    def note_created(self, variable: Any) -> None:
        """Store a variable that is created inside the step."""
        self.hold([variable])
        self.created |= self.keys([variable])
        with tf.init_scope():
            self.transaction.note_created(variable, variable.numpy())

    # What the graph shows

    def inspect(self, start: int, foreign: Set[int] = frozenset()) -> None:
        """Keep only what the body writes; raise `Retrace` if this mode does not suit it.

        Args:
            start: mark of the graph at which the body begins.
            foreign: keys of the variables of another replica, whose body is in the graph after this
                one.
        """
        known = {id(v.handle) for v, _ in self.kept} | foreign
        large = self.keys([*self.train_state.trainable, *self.train_state.slots])
        known |= self.keys(v for pair in self.train_state.scales for v in pair)
        written: set[int] = set()
        for access in graph.accesses(self.graph, start, self.seen.boundary):
            if access.after_mark and access.key not in foreign:
                before = self.after_update.get(access.key, False)
                self.after_update[access.key] = access.writes or before
            if not access.writes:
                continue
            if access.key in large and not self.keeps_undo:
                raise Retrace
            if access.key not in known | large:
                untracked = graph.untracked(access.handle)
                if untracked is not None:
                    raise Retrace(untracked)
            written.add(access.key)
        self.kept = [(v, old) for v, old in self.kept if id(v.handle) in written]

    def check_deferred(self) -> None:
        """Raise `Retrace` if the rest of the body depends on updates that were deferred.

        The graph of the conditional has them, and reads what they have written.
        """
        if self.graph is None or not self.after_update:
            return
        for access in graph.accesses(tf.compat.v1.get_default_graph()):
            after = self.after_update.get(access.key)
            if after or (access.writes and after is not None):
                raise Retrace

    # The verdict

    def measure(self, outputs: Any) -> None:
        """Sum up loss, gradients and written statistics, and weights and slots if they were
        written, too.
        """
        state, seen, transaction = self.train_state, self.seen, self.transaction
        self.kind = kind = reductions.kind([*state.trainable, *state.slots])
        others = self.keys([*state.metrics, *state.trainable, *state.slots]) | transaction.tolerated
        kept = [v for v, _ in self.kept if id(v.handle) not in others]
        self.written = list(filter(reductions.can_be_bad, kept))
        self.losses = seen.losses or transaction.losses(outputs)
        self.loss = reductions.add([tf.cast(loss, kind) for loss in self.losses], kind)
        self.pairs = [(g, v) for r in seen.records for g, v in r.pairs if g is not None]
        self.products: dict[int, Any] = {}
        if self.graph is not None and not transaction.jit and self.adapts_updates:
            if transaction.immediate:
                self.pairs = [(updates.read_apart(g), v) for g, v in self.pairs]
            else:
                self.products = updates.unread_products(g for g, _ in self.pairs)
        self.gradients = reductions.squares([g for g, _ in self.pairs], kind)
        self.statistics = reductions.total(self.written, kind)
        scales = [s for s, _, _, _ in self.scales]
        self.scale = tf.cast(tf.reduce_min(scales), kind) if scales else tf.ones((), kind)
        self.update_sums = [tf.zeros((), kind)] * 2
        if transaction.immediate:
            parts = (state.trainable, state.slots)
            self.update_sums = [reductions.total((v.value for v in p), kind) for p in parts]
        self.counted = self._places()
        self.places = tuple((site, path) for site, path, _ in self.counted)

    def _places(self) -> list[tuple[str, str, Any]]:
        """Return `(site, path, tensor)` of everything that a report counts."""
        state, paths = self.train_state, {}
        for variable in (*state.other, *state.trainable, *state.rates):
            paths[id(self.local(variable).handle)] = variable.path
        found = [("outputs", name, tensor) for name, tensor in self.seen.outputs]
        found += [("gradients", v.path, gradient) for gradient, v in self.pairs]
        found += [("statistics", paths.get(id(v.handle), v.name), v) for v in self.written]
        if self.transaction.immediate:
            found += [("weights", v.path, self.local(v)) for v in state.trainable]
            found += [("slots", v.path, self.local(v)) for v in state.slots]
        return [(*place, t) for *place, t in found if reductions.can_be_bad(t)]

    @property
    def sums(self) -> list[Any]:
        """The sums of the decision."""
        return [self.loss, self.gradients, self.statistics, *self.update_sums]

    def judge(self) -> None:
        """Decide whether the step may commit; check each entry if a sum is not finite."""
        nothing = tf.zeros((len(self.places), 3), tf.int64)
        trusted = tf.math.is_finite(reductions.add(self.sums, self.kind))
        finite, self.counts = tf.cond(trusted, lambda: (tf.constant(True), nothing), self.look)
        self.settle(finite)

    def look(self) -> tuple[Any, Any]:
        """Return whether all entries are finite, and the counts of each place."""
        counts = reductions.counts([tensor for _, _, tensor in self.counted])
        decide = tf.constant([site != "outputs" for site, _ in self.places], tf.int64)
        bad = tf.reduce_sum(counts[:, :2] * decide[:, tf.newaxis])
        return reductions.all_finite(self.losses) & (bad == 0), counts

    def settle(self, finite: Any) -> None:
        """Store the decision, given whether all entries are finite."""
        settled = [reductions.settled(s, finite) for s in self.sums]
        self.loss, self.gradients, self.statistics, *self.update_sums = settled
        self.may_commit = finite & ~self.halted
        if self.scales:
            self.may_commit &= rules.scale_is_valid(reductions.OPERATIONS, self.scale)

    def row(self, update_sums: Sequence[Any]) -> Any:
        """Return the row of numbers, given the sums over weights and slots."""
        refused = ~self.may_commit if self.transaction.refuse else tf.constant(False)
        first = [tf.cast(refused, self.kind), self.loss, self.gradients, self.statistics]
        last = [tf.cast(part, self.kind) for part in (self.step % PERIOD, self.halted)]
        return tf.stack([*first, *update_sums, self.scale, *last])

    # Commit or refuse

    def commit(self) -> list[Any]:
        """Run the deferred updates; return the sums over weights and slots."""
        if self.transaction.immediate:
            return list(self.update_sums)
        adapted = self.adapts_updates and not self.transaction.jit
        optimizers = self.train_state.optimizers if adapted else ()
        updates.run(self.seen.records, optimizers, self.products)
        return reductions.update_sums(self.train_state, self.seen.records, self.kind)

    def refuse(self) -> list[Any]:
        """Restore the kept values; return the same as `commit`."""
        if self.transaction.refuse:
            for variable, old in self.kept:
                variable.assign(old)
            self._learn_scale()
        return list(self.update_sums)

    def _learn_scale(self) -> None:
        """Update each loss scale after a refusal."""
        scaled = filter(keras_optimizers.is_loss_scaled, self.train_state.optimizers)
        first = {id(o.dynamic_scale): o.initial_scale for o in scaled if o.built}
        operations, seen = reductions.OPERATIONS, (self.loss, self.gradients)
        for old, steps, scale, counter in self.scales:
            initial = tf.cast(first[id(scale)], old.dtype)
            after = rules.learned_scale(operations, *seen, old, steps, initial)
            scale.value.assign(after[0])
            counter.value.assign(after[1])
