"""One trace, or one eager run, of the transaction: the body on each replica, what it writes and
computes, the verdict, and how it commits or is refused. `step` has the outline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import intercept, reductions, updates
from keras_nanguard._backends.tensorflow.intercept import Accesses, Seen, Update
from keras_nanguard._backends.tensorflow.reports import StepResult, components, packed
from keras_nanguard._core.verdict import PERIOD, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


class Retrace(Exception):
    """Raised during tracing if the step has to be traced again, with what the `TracedStep` has
    learned. Never leaves the library.
    """


class TracedStep(interface.Transaction):
    """A step, and what its traces have found.

    Attributes:
        run: the run that it belongs to.
        refuse: whether bad steps are refused.
        hidden: whether operations have a random generator of their own, or call the host.
    """

    run: interface.Run
    refuse: bool
    hidden: bool

    adapts_updates = True
    """Whether its updates are ordered, and keep the bits of Keras' own (see `updates`)."""

    @property
    def immediate(self) -> bool:
        """Whether updates run immediately, when the body calls them."""
        return self.learned.keeps_undo or not self.refuse or bool(tf.executing_eagerly())


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


class StepTrace:
    """The part of one replica in a trace (or an eager run) of a step.

    Attributes:
        args: the arguments of the body.
        kept: `(variable, old value)`, by key, of what the body may write and a refusal restores.
        scales: each optimizer with a loss scale, and its scale and counter before the update.
        sums: the sums over its own numbers, once the body has run.
        scale: the smallest loss scale, 1 if there is none; a scalar of the dtype of the sums.
        losses: the summed losses.
        looked_at: `(site, path, tensor)` of everything that a report counts.
    """

    sums: Sums
    scale: Any
    losses: list[Any]
    looked_at: list[tuple[str, str, Any]]
    accesses: Accesses | None = None
    """What the body reads and writes, if a graph shows it."""

    def __init__(self, transaction: TracedStep):
        self.transaction = transaction
        self.args: Sequence[Any] = ()
        self.seen = Seen()
        self.keeps_undo = transaction.immediate and transaction.refuse
        self.train_state = transaction.run.read_train_state()
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.scales: list[tuple[Any, Any, Any]] = []
        self.created: set[int] = set()
        """Keys of the variables that were created inside the step."""
        self.products: dict[int, Any] = {}
        """Gradients to multiply again in their update, from `updates.unread_products`."""

    # The body, and what it may write

    def keep(self) -> None:
        """Keep the values that the body may write and a refusal restores."""
        state = self.train_state
        self.hold([*state.other, *state.metrics, *state.rates])
        self.hold(self.transaction.learned.untracked.values())
        if tf.executing_eagerly():  # a graph shows them
            self.hold(state.unlisted)
        if self.keeps_undo:
            self.hold([*state.trainable, *state.slots])
        for optimizer in state.optimizers:
            self.note_scale(optimizer)

    def on_update(self, record: Update) -> None:
        """Store what becomes known with this update, which has not run yet: weights that belong to
        no known model, and the scale of an optimizer that the body builds.
        """
        known = self.keys(self.train_state.trainable) | self.created
        found = [v for v in record.variables if self.keys([v]).isdisjoint(known)]
        self.created |= self.keys(found)
        with tf.init_scope():
            for variable in found:
                native = keras_variables.native(variable)
                self.transaction.run.note_created(native, keras_variables.read(variable))
        if self.keeps_undo:
            self.hold(found)
        if all(record.optimizer is not known for known, *_ in self.scales):
            self.note_scale(record.optimizer)

    def note_scale(self, optimizer: Any) -> None:
        """Store the loss scale of an optimizer, if it has one: value and counter at this point of
        the program.
        """
        values = [v.value.read_value() for v in keras_optimizers.scales_of(optimizer)]
        if values:
            self.scales.append((optimizer, *values))

    def hold(self, variables: Iterable[Any]) -> None:
        """Keep the current values of variables (of Keras or TensorFlow) that are not kept yet."""
        for variable in map(self.local, variables):
            if id(variable.handle) not in self.kept:
                self.kept[id(variable.handle)] = variable, variable.read_value()

    def local(self, variable: Any) -> Any:
        """Return the TensorFlow variable behind a Keras one; any other variable is returned
        unchanged.
        """
        return keras_variables.native(variable)

    def keys(self, variables: Iterable[Any]) -> set[int]:
        """Return the keys of these variables in a graph."""
        return {id(self.local(v).handle) for v in variables}

    @property
    def large_keys(self) -> set[int]:
        """The keys of weights and slots."""
        return self.keys([*self.train_state.trainable, *self.train_state.slots])

    @property
    def known_keys(self) -> set[int]:
        """The keys of all variables of this replica that are known to the step."""
        scales = (v for o, *_ in self.scales for v in keras_optimizers.scales_of(o))
        return self.large_keys | self.kept.keys() | self.keys(scales)

    # What the graph shows

    def inspect(self, graph: Any, start: int, foreign: Collection[int]) -> None:
        """Keep only what the body writes; raise `Retrace` if this mode does not suit it.

        Args:
            graph: the graph of the step.
            start: mark of the graph at which the body begins.
            foreign: keys of the variables of other replicas.
        """
        self.accesses = Accesses(graph, start, self.seen.boundary, foreign)
        self.transaction.hidden = intercept.has_hidden_state(graph)
        written = self.accesses.written
        if not self.keeps_undo and not self.large_keys.isdisjoint(written):
            self.must_be_immediate()
        unknown = written.keys() - self.known_keys
        found = {key: intercept.untracked(written[key]) for key in unknown}
        untracked = {key: variable for key, variable in found.items() if variable is not None}
        if untracked:
            learned = self.transaction.learned
            untracked = {**learned.untracked, **untracked}
            self.transaction.learned = replace(learned, untracked=untracked)
            raise Retrace
        self.kept = {key: pair for key, pair in self.kept.items() if key in written}

    def check_deferred(self) -> None:
        """Raise `Retrace` if the rest of the body depends on updates that were deferred.

        The graph of the conditional has them, and reads what they have written.
        """
        traced = tf.compat.v1.get_default_graph()
        if self.accesses is not None and self.accesses.depend_on(traced):
            self.must_be_immediate()

    def must_be_immediate(self) -> None:
        """Have the step traced again with updates that run immediately."""
        self.transaction.learned = replace(self.transaction.learned, keeps_undo=True)
        raise Retrace

    # What the step computes

    def measure(self, outputs: Any) -> None:
        """Sum up loss, gradients and written statistics, and weights and slots if they were
        written, too.
        """
        state, seen, transaction = self.train_state, self.seen, self.transaction
        kind = reductions.kind([*state.trainable, *state.slots])
        others = self.large_keys | self.keys(state.metrics) | transaction.learned.tolerated
        kept = [v for key, (v, _) in self.kept.items() if key not in others]
        written = list(filter(reductions.can_be_bad, kept))
        self.losses = seen.losses or transaction.losses(outputs)
        pairs = [pair for record in seen.records for pair in record.pairs]
        if transaction.adapts_updates and not tf.executing_eagerly():
            if transaction.immediate:
                pairs = [(updates.read_apart(g), v) for g, v in pairs]
            else:
                self.products = updates.unread_products(g for g, _ in pairs)
        after = (state.trainable, state.slots) if transaction.immediate else ((), ())
        self.sums = Sums(
            reductions.add([tf.cast(loss, kind) for loss in self.losses], kind),
            reductions.squares([g for g, _ in pairs], kind),
            reductions.total(written, kind),
            *(reductions.total((v.value for v in part), kind) for part in after),
        )
        scales = [scale for _, scale, _ in self.scales]
        self.scale = tf.cast(tf.reduce_min(scales), kind) if scales else tf.ones((), kind)
        paths = {
            id(self.local(v).handle): v.path for v in (*state.other, *state.trainable, *state.rates)
        }
        found = [("outputs", name, tensor) for name, tensor in seen.outputs]
        found += [("gradients", v.path, gradient) for gradient, v in pairs]
        found += [("statistics", paths.get(id(v.handle), v.name), v) for v in written]
        for site, part in zip(("weights", "slots"), after):
            found += [(site, v.path, self.local(v)) for v in part]
        self.looked_at = [place for place in found if reductions.can_be_bad(place[2])]

    def look(self) -> tuple[Any, Any, Any]:
        """Return whether all entries are finite, a scalar bool; the counts of each place; and its
        row of `StepResult.replicas`.
        """
        counts = reductions.counts([tensor for _, _, tensor in self.looked_at])
        decide = tf.constant([site != "outputs" for site, _, _ in self.looked_at], tf.int64)
        bad = tf.reduce_sum(counts[:, :2] * decide[:, tf.newaxis])
        finite = reductions.all_finite(self.losses) & (bad == 0)
        given = [t for t in tf.nest.flatten(self.args, expand_composites=True) if tf.is_tensor(t)]
        given_bad = ~finite & ~reductions.all_finite(given)
        dense = [t for t in tf.nest.flatten(self.args) if isinstance(t, tf.Tensor) and t.shape.rank]
        rows = tf.shape(dense[0], tf.int64)[0] if dense else tf.constant(-1, tf.int64)
        blame = [tf.cast(~finite, tf.int64), tf.cast(given_bad, tf.int64), rows]
        return finite, counts, tf.stack(blame)

    # Commit or refuse

    def commit(self) -> list[Any]:
        """Run the deferred updates; return the sums over weights and slots."""
        optimizers = self.train_state.optimizers if self.transaction.adapts_updates else ()
        updates.run(self.seen.records, optimizers, self.products)
        return reductions.update_sums(self.train_state, self.seen.records, self.scale.dtype)

    def refuse(self, loss: Any, gradients: Any, halted: Any) -> None:
        """Restore the kept values, and update each loss scale, given the sums of the verdict."""
        for variable, old in self.kept.values():
            variable.assign(old)
        numbers = reductions.OPERATIONS, loss, gradients
        for optimizer, old, steps in self.scales:
            initial = tf.cast(optimizer.initial_scale, old.dtype)
            after = rules.learned_scale(*numbers, old, steps, initial, halted)
            for variable, value in zip(keras_optimizers.scales_of(optimizer), after):
                variable.value.assign(value)


class Step(intercept.Intercept):
    """One trace (or one eager run) of a step on all of its replicas; usually there is one.

    Args:
        transaction: the step.
        traces: the part of each replica.
    """

    def __init__(self, transaction: TracedStep, traces: Sequence[StepTrace]):
        self.transaction, self.traces = transaction, traces
        optimizers = traces[0].train_state.optimizers
        super().__init__(transaction.model, optimizers, transaction.immediate)
        self.start = intercept.mark(self.graph)

    def here(self) -> StepTrace:
        """Return the part of the calling replica."""
        return self.traces[0]

    def each(self, function: Callable[[StepTrace], Any]) -> list[Any]:
        """Call a function on each part, on its replica; return the results in order."""
        return [function(trace) for trace in self.traces]

    def seen(self) -> Seen:
        return self.here().seen

    def on_update(self, record: Update) -> None:
        self.here().on_update(record)

    def note_created(self, variable: Any) -> None:
        for trace in self.traces:
            trace.hold([variable])
        self.traces[0].created |= self.traces[0].keys([variable])
        with tf.init_scope():
            self.transaction.run.note_created(variable, variable.numpy())

    def run(self, args: Sequence[Any]) -> Any:
        """Run the body on the calling replica, inside the context; return its outputs."""
        trace = self.here()
        trace.args = args
        trace.keep()
        with self.creating():
            return self.transaction.body(*args)

    def inspect(self) -> None:
        """Find what the body has written, once all replicas have run it."""
        train_state = self.transaction.run.read_train_state()
        shared: set[int] = set()
        for trace in self.traces:
            trace.train_state = train_state
            # The first replica handles what all of them share.
            trace.kept = {key: pair for key, pair in trace.kept.items() if key not in shared}
            shared |= trace.kept.keys()
        if self.graph is not None and self.transaction.refuse:
            owned = [trace.known_keys for trace in self.traces]
            for number, trace in enumerate(self.traces):
                foreign = set().union(*owned[:number], *owned[number + 1 :])
                trace.inspect(self.graph, self.start, foreign)

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """`(site, path)` of each line of the counts."""
        return tuple((site, path) for trace in self.traces for site, path, _ in trace.looked_at)

    def decide(self, outputs: Any, halted: Any, number: Any) -> StepResult:
        """Compute one verdict, and let each replica commit or refuse.

        Args:
            outputs: what the step returns.
            halted: scalar bool, whether it is refused regardless of its numbers.
            number: the number of the step, a scalar int64.
        """
        transaction, first = self.transaction, self.traces[0]
        dtype = first.scale.dtype
        finite, counts, replicas = self._examined()
        sums = [reductions.add(s, dtype) for s in zip(*(trace.sums for trace in self.traces))]
        settled = [reductions.settled(s, finite) for s in sums]
        loss, gradients, statistics, *written = settled
        scales = [first.scale] if first.scales else []
        may_commit = rules.may_commit(reductions.OPERATIONS, finite, scales, halted)
        # Logs pass through the conditional. Without that TensorFlow's graph optimizer multiplies
        # the factors of an update (of the scale of a BatchNormalization) in another order than in a
        # plain step, which may differ in the last bit.
        logs = [] if transaction.model is None else components(outputs)

        def commit() -> list[Any]:
            after = written
            if not transaction.immediate:
                found = zip(*self.each(lambda trace: trace.commit()))
                after = [reductions.add(s, dtype) for s in found]
                for trace in self.traces:
                    trace.check_deferred()
            return [*after, *map(tf.identity, logs)]

        def refuse() -> list[Any]:
            if transaction.refuse:
                self.each(lambda trace: trace.refuse(loss, gradients, halted))
            return [*written, *map(tf.identity, logs)]

        weights, slots, *passed = tf.cond(may_commit, commit, refuse)
        verdict = Verdict(
            tf.cast(~may_commit if transaction.refuse else tf.constant(False), dtype),
            *(loss, gradients, statistics, weights, slots),
            scale=first.scale,
            step=tf.cast(number % PERIOD, dtype),
            halted=tf.cast(halted, dtype),
        )
        outputs = outputs if transaction.model is None else packed(outputs, passed)
        return StepResult(outputs, tf.stack(list(verdict)), counts, ~may_commit & ~halted, replicas)

    def _examined(self) -> tuple[Any, Any, Any]:
        """Return whether all entries of the step are finite, and `counts` and `replicas` as in
        `StepResult`. Entries are only read if a sum is not finite.
        """

        def look() -> tuple[Any, Any, Any]:
            finite, counts, replicas = zip(*self.each(lambda trace: trace.look()))
            return tf.reduce_all(finite), tf.concat(counts, 0), tf.stack(replicas)

        sums = [s for trace in self.traces for s in trace.sums]
        trusted = tf.math.is_finite(tf.add_n(sums))
        shapes = (len(self.places), 3), (len(self.traces), 3)
        nothing = tf.constant(True), *(tf.zeros(shape, tf.int64) for shape in shapes)
        return tf.cond(trusted, lambda: nothing, look)  # type: ignore[no-any-return]
