"""One trace, or one eager run, of the transaction on one replica: the body, what it writes and
computes, and how it commits or is refused. `step` has the outline, `decision` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import tensorflow as tf

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import graph, reductions, updates
from keras_nanguard._backends.tensorflow.intercept import Intercept, Seen, Update
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


class Retrace(Exception):
    """Raised during tracing if the step has to be traced again in another mode. Never leaves the
    library.

    Attributes:
        untracked: a variable that the step writes and that Keras does not track; `None` if updates
            must run immediately.
    """

    def __init__(self, untracked: graph.Untracked | None = None):
        super().__init__()
        self.untracked = untracked


class Sums(NamedTuple):
    """The sums of the decision: scalars of one dtype. Each is finite if all of its entries are,
    unless it overflows.

    Attributes:
        loss: the sum of the losses.
        gradients: half the sum of squares.
        statistics: the sum of what the body wrote besides weights, slots and metrics.
        weights, slots: the sums after updates that ran immediately; else 0.
    """

    loss: Any
    gradients: Any
    statistics: Any
    weights: Any
    slots: Any


class Measures(NamedTuple):
    """What the step of one replica has computed.

    Attributes:
        sums: over its own numbers.
        scale: the smallest loss scale, 1 if there is none; a scalar of the dtype of the sums.
        losses: the summed losses.
        counted: `(site, path, tensor)` of everything that a report counts.
        products: gradients to multiply again in their update, from `updates.unread_products`.
    """

    sums: Sums
    scale: Any
    losses: list[Any]
    counted: list[tuple[str, str, Any]]
    products: dict[int, Any]


class StepTrace:
    """One trace (or one eager run) of the transaction on one replica.

    Args:
        transaction: the `Transaction`, which has how it is traced.

    Attributes:
        args: the arguments of the body.
        kept: `(variable, old value)` of what the body may write and a refusal restores.
        scales: of each loss scale its value and counter before the update, and their variables.
        measures: what it has computed, once the body has run.
    """

    adapts_updates = True
    """Whether updates are ordered, and keep the bits of Keras' own (see `updates`)."""

    measures: Measures

    def __init__(self, transaction: Any):
        self.transaction = transaction
        self.args: Sequence[Any] = ()
        self.seen = Seen()
        self.keeps_undo = transaction.immediate and transaction.refuse
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.train_state = transaction.train_state()
        self.kept: list[tuple[Any, Any]] = []
        self.scales: list[tuple[Any, Any, Any, Any]] = []
        self.created: set[int] = set()
        """Keys of the variables that were created inside the step."""
        self.accesses: graph.BodyAccesses | None = None
        """What the body reads and writes, if a graph shows it."""

    def run(self, args: Sequence[Any]) -> Any:
        """Run the body on a single replica; return its outputs."""
        transaction, self.args = self.transaction, args
        self.keep()
        start = graph.mark(self.graph)
        intercept = Intercept(
            transaction.model,
            self.train_state.optimizers,
            transaction.immediate,
            self.note_created,
            seen=lambda: self.seen,
            asked=self.asked,
        )
        with intercept, intercept.creating():
            outputs = transaction.body(*args)
        self.train_state = transaction.train_state()
        if self.graph is not None and transaction.refuse:
            self.inspect(start)
        self.measure(outputs)
        return outputs

    # The body, and what it may write

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
        """Store what becomes known with this update, which has not run yet: weights that belong to
        no known model, and the scale of an optimizer that the body builds.
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
        """Keep the current values of variables (of Keras or TensorFlow)."""
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
            foreign: keys of the variables of other replicas.
        """
        self.accesses = graph.BodyAccesses(self.graph, start, self.seen.boundary, foreign)
        written = self.accesses.written
        large = self.keys([*self.train_state.trainable, *self.train_state.slots])
        if not self.keeps_undo and not large.isdisjoint(written):
            raise Retrace
        known = large | {id(v.handle) for v, _ in self.kept}
        known |= self.keys(v for pair in self.train_state.scales for v in pair)
        for key, handle in written.items():
            untracked = None if key in known else graph.untracked(handle)
            if untracked is not None:
                raise Retrace(untracked)
        self.kept = [(v, old) for v, old in self.kept if id(v.handle) in written]

    def check_deferred(self) -> None:
        """Raise `Retrace` if the rest of the body depends on updates that were deferred.

        The graph of the conditional has them, and reads what they have written.
        """
        traced = tf.compat.v1.get_default_graph()
        if self.accesses is not None and self.accesses.depend_on(traced):
            raise Retrace

    # What the step computes

    def measure(self, outputs: Any) -> None:
        """Sum up loss, gradients and written statistics, and weights and slots if they were
        written, too.
        """
        state, seen, transaction = self.train_state, self.seen, self.transaction
        kind = reductions.kind([*state.trainable, *state.slots])
        others = self.keys([*state.metrics, *state.trainable, *state.slots]) | transaction.tolerated
        kept = [v for v, _ in self.kept if id(v.handle) not in others]
        written = list(filter(reductions.can_be_bad, kept))
        losses = seen.losses or transaction.losses(outputs)
        pairs = [(g, v) for r in seen.records for g, v in r.pairs if g is not None]
        products: dict[int, Any] = {}
        if self.graph is not None and not transaction.jit and self.adapts_updates:
            if transaction.immediate:
                pairs = [(updates.read_apart(g), v) for g, v in pairs]
            else:
                products = updates.unread_products(g for g, _ in pairs)
        weights = slots = tf.zeros((), kind)
        if transaction.immediate:
            weights = reductions.total((v.value for v in state.trainable), kind)
            slots = reductions.total((v.value for v in state.slots), kind)
        sums = Sums(
            reductions.add([tf.cast(loss, kind) for loss in losses], kind),
            reductions.squares([g for g, _ in pairs], kind),
            reductions.total(written, kind),
            weights,
            slots,
        )
        scales = [value for value, *_ in self.scales]
        scale = tf.cast(tf.reduce_min(scales), kind) if scales else tf.ones((), kind)
        self.measures = Measures(sums, scale, losses, self._places(pairs, written), products)

    def _places(self, pairs: Iterable[Any], written: Iterable[Any]) -> list[tuple[str, str, Any]]:
        """Return `(site, path, tensor)` of everything that a report counts.

        Args:
            pairs: `(gradient, variable)` of each update.
            written: the written statistics.
        """
        state, paths = self.train_state, {}
        for variable in (*state.other, *state.trainable, *state.rates):
            paths[id(self.local(variable).handle)] = variable.path
        found = [("outputs", name, tensor) for name, tensor in self.seen.outputs]
        found += [("gradients", v.path, gradient) for gradient, v in pairs]
        found += [("statistics", paths.get(id(v.handle), v.name), v) for v in written]
        if self.transaction.immediate:
            found += [("weights", v.path, self.local(v)) for v in state.trainable]
            found += [("slots", v.path, self.local(v)) for v in state.slots]
        return [(*place, t) for *place, t in found if reductions.can_be_bad(t)]

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """`(site, path)` of each line of its counts."""
        return tuple((site, path) for site, path, _ in self.measures.counted)

    def look(self) -> tuple[Any, Any]:
        """Return whether all entries are finite, a scalar bool, and the counts of each place."""
        counts = reductions.counts([tensor for _, _, tensor in self.measures.counted])
        decide = tf.constant([site != "outputs" for site, _ in self.places], tf.int64)
        bad = tf.reduce_sum(counts[:, :2] * decide[:, tf.newaxis])
        return reductions.all_finite(self.measures.losses) & (bad == 0), counts

    def given_bad(self) -> Any:
        """Return whether its data are bad, a scalar bool."""
        given = [t for t in tf.nest.flatten(self.args, expand_composites=True) if t is not None]
        return ~reductions.all_finite(given)

    def rows(self) -> Any:
        """Return the number of its rows, a scalar int64; -1 if unknown."""
        leaves = tf.nest.flatten(self.args)
        dense = [t for t in leaves if isinstance(t, tf.Tensor) and t.shape.rank]
        return tf.shape(dense[0], tf.int64)[0] if dense else tf.constant(-1, tf.int64)

    # Commit or refuse

    def commit(self) -> list[Any]:
        """Run the deferred updates; return the sums over weights and slots."""
        adapted = self.adapts_updates and not self.transaction.jit
        optimizers = self.train_state.optimizers if adapted else ()
        updates.run(self.seen.records, optimizers, self.measures.products)
        dtype = self.measures.scale.dtype
        return reductions.update_sums(self.train_state, self.seen.records, dtype)

    def refuse(self, loss: Any, gradients: Any) -> None:
        """Restore the kept values, and update each loss scale, given the sums of the verdict."""
        for variable, old in self.kept:
            variable.assign(old)
        scaled = filter(keras_optimizers.is_loss_scaled, self.train_state.optimizers)
        first = {id(o.dynamic_scale): o.initial_scale for o in scaled if o.built}
        for old, steps, scale, counter in self.scales:
            initial = tf.cast(first[id(scale)], old.dtype)
            after = rules.learned_scale(reductions.OPERATIONS, loss, gradients, old, steps, initial)
            scale.value.assign(after[0])
            counter.value.assign(after[1])
