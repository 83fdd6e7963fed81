"""One trace, or one eager run, of the transaction: the body on each replica, what it writes and
computes, the verdict, and how it commits or is refused. `step` has the outline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tensorflow as tf

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import intercept, reductions
from keras_nanguard._backends.tensorflow.intercept import Accesses, StepRecord, Update
from keras_nanguard._backends.tensorflow.updates import Updates
from keras_nanguard._core.verdict import PERIOD, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

Places = tuple[tuple[str, str], ...]
"""`(site, path)` of each line of counts."""


class Retrace(Exception):
    """Raised during tracing if the step has to be traced again. Never leaves the library.

    Args:
        learned: what the next trace has to know.
    """

    ag_pass_through = True
    """AutoGraph raises an exception with this attribute as it is, instead of a copy."""

    def __init__(self, learned: interface.Learned):
        super().__init__()
        self.learned = learned


class TracedStep(interface.Transaction):
    """The facts about a step that its traces use and do not change."""

    body: Callable[..., Any]
    """The step as the user wrote it: `body(*args) -> outputs`."""

    model: Any
    """The model, if a Keras trainer runs the step."""

    refuse: bool
    """Whether bad steps are refused."""

    adapts_updates = True
    """Whether compiled updates are ordered, and keep the bits of Keras' own (see `Updates`)."""

    @property
    def immediate(self) -> bool:
        """Whether updates run immediately, when the body calls them."""
        return self.learned.updates_first or not self.refuse or bool(tf.executing_eagerly())


@dataclass(frozen=True)
class Body:
    """What one run of the body on one replica has done.

    Attributes:
        seen: its losses and updates.
        train_state: the train state after it.
        kept: `(variable, old value)`, by key, of what it may have written and a refusal restores;
            of what it has written, once it is inspected.
        scales: each optimizer with a loss scale, and its scale and counter before the update.
        accesses: what it reads and writes, once it is inspected and if a graph shows it.
    """

    args: Sequence[Any]
    outputs: Any
    seen: StepRecord
    train_state: TrainState
    kept: Mapping[int, tuple[Any, Any]]
    scales: Sequence[tuple[Any, Any, Any]]
    accesses: Accesses | None = None


@dataclass(frozen=True)
class Measured:
    """What the transaction has computed from one run of the body.

    Attributes:
        sums: `loss`, `gradients`, `statistics`, and, 0 if the updates are deferred, `weights` and
            `slots` of its `Verdict`: scalars of one dtype. Each is finite if all of its entries
            are, unless it overflows.
        scale: the smallest loss scale, one that is not finite if there is any, 1 if there is none;
            a scalar of the dtype of the sums.
        losses: the summed losses.
        looked_at: `(site, path, tensor)` of everything that a report counts.
    """

    body: Body
    sums: Sequence[Any]
    scale: Any
    losses: Sequence[Any]
    looked_at: Sequence[tuple[str, str, Any]]
    updates: Updates


class Counts(tf.experimental.ExtensionType):  # type: ignore[misc]
    """The bad entries of a step by place. `places` is constant in a trace of the step.

    Attributes:
        places: `(site, path)` of each line.
        lines: int64 of shape `(places, 3)`: NaN, infinite and all entries of each place, 0 if all
            of the sums were finite.
    """

    places: Places
    lines: tf.Tensor


class StepResult(NamedTuple):
    """The result of one step.

    Attributes:
        row: the numbers of its verdict, shape `(len(FIELDS),)`.
        bad: scalar bool, whether to report it: refused, and not because it was halted.
        replicas: int64 of shape `(replicas, 3)`: for each whether a number is bad, whether its data
            are, too, and its rows of the batch, -1 if unknown; 0 if all of the sums were finite.
    """

    outputs: Any
    row: Any
    counts: Counts
    bad: Any
    replicas: Any


class ReplicaTrace:
    """One replica in a trace or an eager run of a step; keeps old values while the body runs."""

    def __init__(self, transaction: TracedStep):
        self.transaction = transaction
        self.seen = StepRecord()
        self.holds_weights = transaction.immediate and transaction.refuse
        self.train_state = transaction.run.read_train_state()
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.scales: list[tuple[Any, Any, Any]] = []
        self.created: set[int] = set()
        """Keys of the variables that were created inside the step."""

    def run(self, args: Sequence[Any]) -> Body:
        """Keep the values that the body may write and a refusal restores; run the body."""
        state = self.train_state
        self.hold([*state.other, *state.metrics, *state.rates])
        self.hold(self.transaction.learned.untracked.values())
        if tf.executing_eagerly():  # a graph shows them
            self.hold(state.unlisted)
        if self.holds_weights:
            self.hold([*state.trainable, *state.slots])
        for optimizer in state.optimizers:
            self.note_scale(optimizer)
        outputs = self.transaction.body(*args)
        return Body(args, outputs, self.seen, state, self.kept, self.scales)

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
        if self.holds_weights:
            self.hold(found)
        if all(record.optimizer is not known for known, *_ in self.scales):
            self.note_scale(record.optimizer)

    def note_scale(self, optimizer: Any) -> None:
        """Store loss scale and counter of an optimizer, if it has one, before its update."""
        values = [v.value.read_value() for v in keras_optimizers.scales_of(optimizer)]
        if values:
            self.scales.append((optimizer, *values))

    def hold(self, variables: Iterable[Any]) -> None:
        """Keep the current values of variables (of Keras or TensorFlow) that are not kept yet."""
        for variable in map(self.local, variables):
            if id(variable.handle) not in self.kept:
                self.kept[id(variable.handle)] = variable, variable.read_value()

    def local(self, variable: Any) -> Any:
        """Return the TensorFlow variable behind a Keras one; any other variable unchanged."""
        return keras_variables.native(variable)

    def keys(self, variables: Iterable[Any]) -> set[int]:
        """Return the keys of these variables in a graph."""
        return {id(self.local(v).handle) for v in variables}

    def large_keys(self, state: TrainState) -> set[int]:
        """Return the keys of weights and slots."""
        return self.keys([*state.trainable, *state.slots])

    def known_keys(self, body: Body) -> set[int]:
        """Return the keys of all variables of this replica that are known to the step."""
        scales = (v for o, *_ in body.scales for v in keras_optimizers.scales_of(o))
        return self.large_keys(body.train_state) | body.kept.keys() | self.keys(scales)

    # What the graph shows

    def inspect(self, body: Body, graph: Any, start: int, foreign: Collection[int]) -> Body:
        """Return the body with what it has written; raise `Retrace` if this mode does not suit it.

        Args:
            start: mark of the graph at which the body begins.
            foreign: keys of the variables of other replicas.
        """
        accesses = Accesses(graph, start, body.seen.boundary, foreign)
        written, learned = accesses.written, self.transaction.learned
        if not self.holds_weights and not self.large_keys(body.train_state).isdisjoint(written):
            raise Retrace(replace(learned, updates_first=True))
        unknown = written.keys() - self.known_keys(body)
        found = {key: intercept.untracked(written[key]) for key in unknown}
        untracked = {key: variable for key, variable in found.items() if variable is not None}
        if untracked:
            raise Retrace(replace(learned, untracked={**learned.untracked, **untracked}))
        kept = {key: pair for key, pair in body.kept.items() if key in written}
        return replace(body, kept=kept, accesses=accesses)

    # What the step computes

    def measure(self, body: Body) -> Measured:
        """Sum up loss, gradients, written statistics, and weights and slots if they are written."""
        state, seen, transaction = body.train_state, body.seen, self.transaction
        kind = reductions.kind([*state.trainable, *state.slots])
        losses = seen.losses or transaction.losses(body.outputs)
        adapted = transaction.adapts_updates and not tf.executing_eagerly()
        updates = Updates(seen.records, state.optimizers, adapted)
        pairs = updates.gradients(transaction.immediate)
        written = self.statistics(body)
        after = (state.trainable, state.slots) if transaction.immediate else ((), ())
        sums = [
            reductions.add([tf.cast(loss, kind) for loss in losses], kind),
            reductions.squares([g for g, _ in pairs], kind),
            reductions.total(written, kind),
            *(reductions.total((v.value for v in part), kind) for part in after),
        ]
        scales = [tf.cast(scale, kind) for _, scale, _ in body.scales]
        scale = rules.common_scale(reductions.OPERATIONS, scales, tf.ones((), kind))
        paths = {id(self.local(v).handle): v.path for v in (*state.other, *state.trainable)}
        found = [("outputs", name, tensor) for name, tensor in seen.outputs]
        found += [("gradients", v.path, gradient) for gradient, v in pairs]
        found += [("statistics", paths.get(id(v.handle), v.name), v) for v in written]
        for site, part in zip(("weights", "slots"), after):
            found += [(site, v.path, self.local(v)) for v in part]
        looked_at = [place for place in found if reductions.is_inexact(place[2])]
        return Measured(body, sums, scale, losses, looked_at, updates)

    def statistics(self, body: Body) -> list[Any]:
        """Return what the body has written and is judged besides weights and slots."""
        state, tolerated = body.train_state, self.transaction.learned.tolerated
        others = self.large_keys(state) | self.keys(state.unjudged) | tolerated
        kept = [variable for key, (variable, _) in body.kept.items() if key not in others]
        return list(filter(reductions.is_inexact, kept))


# Commit or refuse


def commit(measured: Measured) -> list[Any]:
    """Run the deferred updates; return the sums over weights and slots."""
    measured.updates.run()
    body, dtype = measured.body, measured.scale.dtype
    return reductions.update_sums(body.train_state, body.seen.records, dtype)


def refuse(body: Body, loss: Any, gradients: Any, halted: Any, is_alone: bool) -> None:
    """Restore the kept values, and update each loss scale, given the sums of the verdict; only if
    its replica is alone, each by the gradients of its own optimizer.
    """
    for variable, old in body.kept.values():
        variable.assign(old)
    for optimizer, old, steps in body.scales:
        own = _of_optimizer(body, optimizer, gradients) if is_alone else gradients
        initial = tf.cast(optimizer.initial_scale, old.dtype)
        numbers = loss, own, old, steps, initial, halted
        after = rules.learned_scale(reductions.OPERATIONS, *numbers)
        for variable, value in zip(keras_optimizers.scales_of(optimizer), after):
            variable.value.assign(value)


def _of_optimizer(body: Body, optimizer: Any, gradients: Any) -> Any:
    """Return the sum over the gradients of all optimizers, 0 if those of this one are finite."""
    records = body.seen.records
    if all(record.optimizer is optimizer for record in records):
        return gradients
    own = [g for record in records if record.optimizer is optimizer for g, _ in record.pairs]
    return tf.where(reductions.all_finite(own), tf.zeros_like(gradients), gradients)


def look(measured: Measured) -> tuple[Any, Any, Any]:
    """Return whether all entries but those of outputs are finite, the counts of all, and the row of
    `StepResult.replicas`.
    """
    args = measured.body.args
    counts = reductions.counts([tensor for _, _, tensor in measured.looked_at])
    decide = tf.constant([site != "outputs" for site, _, _ in measured.looked_at], tf.int64)
    bad = tf.reduce_sum(counts[:, :2] * decide[:, tf.newaxis])
    finite = reductions.all_finite(measured.losses) & (bad == 0)
    given = [t for t in tf.nest.flatten(args, expand_composites=True) if tf.is_tensor(t)]
    given_bad = ~finite & ~reductions.all_finite(given)
    dense = [t for t in tf.nest.flatten(args) if isinstance(t, tf.Tensor) and t.shape.rank]
    rows = tf.shape(dense[0], tf.int64)[0] if dense else tf.constant(-1, tf.int64)
    blame = [tf.cast(~finite, tf.int64), tf.cast(given_bad, tf.int64), rows]
    return finite, counts, tf.stack(blame)


class StepTrace(intercept.Intercept):
    """One trace (or one eager run) of a step on all of its replicas; usually there is one.

    In this order: `run` inside the context, `inspect`, `measure` of each replica, `decide`.
    """

    def __init__(self, transaction: TracedStep, replicas: Sequence[ReplicaTrace]):
        self.transaction, self.replicas = transaction, replicas
        optimizers = replicas[0].train_state.optimizers
        super().__init__(transaction.model, optimizers, transaction.immediate)
        self.start = intercept.mark(self.graph)

    def here(self) -> ReplicaTrace:
        """Return the calling replica."""
        return self.replicas[0]

    def each(self, function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
        """Call a function with the value of each replica, on that replica; return the results."""
        return list(map(function, values))

    def seen(self) -> StepRecord:
        return self.here().seen

    def on_update(self, record: Update) -> None:
        self.here().on_update(record)

    def note_created(self, variable: Any) -> None:
        for replica in self.replicas:
            replica.hold([variable])
        self.replicas[0].created |= self.replicas[0].keys([variable])
        with tf.init_scope():
            self.transaction.run.note_created(variable, variable.numpy())

    def run(self, args: Sequence[Any]) -> Body:
        """Run the body on the calling replica, inside the context."""
        with self.creating():
            return self.here().run(args)

    def inspect(self, bodies: Sequence[Body]) -> list[Body]:
        """Return the bodies with what they have written, or raise `Retrace` for another mode."""
        train_state = self.transaction.run.read_train_state()
        found: list[Body] = []
        shared: set[int] = set()
        for body in bodies:
            # The first replica handles what all of them share.
            kept = {key: pair for key, pair in body.kept.items() if key not in shared}
            shared |= kept.keys()
            found.append(replace(body, train_state=train_state, kept=kept))
        if self.graph is None or not self.transaction.refuse:
            return found
        pairs = list(zip(self.replicas, found))
        owned = [replica.known_keys(body) for replica, body in pairs]
        others = [set().union(*owned[:n], *owned[n + 1 :]) for n in range(len(owned))]
        return [
            replica.inspect(body, self.graph, self.start, foreign)
            for (replica, body), foreign in zip(pairs, others)
        ]

    def decide(
        self, outputs: Any, measured: Sequence[Measured], halted: Any, number: Any
    ) -> StepResult:
        """Compute one verdict, and let each replica commit or refuse.

        Args:
            halted: scalar bool, whether it is refused regardless of its numbers.
            number: the number of the step, a scalar int64.
        """
        transaction, dtype = self.transaction, measured[0].scale.dtype
        finite, counts, replicas = self._examined(measured)
        numbers = self._numbers(measured, finite)
        scales = [numbers.scale] if measured[0].body.scales else []
        may_commit = rules.may_commit(reductions.OPERATIONS, finite, scales, halted)
        # Logs pass through the conditional. Without that TensorFlow's graph optimizer multiplies
        # the factors of an update (of the scale of a BatchNormalization) in another order than in a
        # plain step, which may differ in the last bit.
        logs = [] if transaction.model is None else components(outputs)

        def committed() -> list[Any]:
            return [*self._commit(measured, numbers), *map(tf.identity, logs)]

        def refused() -> list[Any]:
            return [*self._refuse(measured, numbers, halted), *map(tf.identity, logs)]

        weights, slots, *passed = tf.cond(may_commit, committed, refused)
        verdict = numbers._replace(
            refused=tf.cast(~may_commit if transaction.refuse else tf.constant(False), dtype),
            weights=weights,
            slots=slots,
            step=tf.cast(number % PERIOD, dtype),
            halted=tf.cast(halted, dtype),
        )
        outputs = outputs if transaction.model is None else packed(outputs, passed)
        return StepResult(outputs, tf.stack(list(verdict)), counts, ~may_commit & ~halted, replicas)

    def _numbers(self, measured: Sequence[Measured], finite: Any) -> Verdict:
        """Return the sums over all replicas and the loss scale, in a verdict with nothing else.

        Args:
            finite: scalar bool, whether all entries are finite.
        """
        scale = measured[0].scale
        sums = [reductions.add(s, scale.dtype) for s in zip(*(one.sums for one in measured))]
        loss, gradients, statistics, weights, slots = (reductions.settled(s, finite) for s in sums)
        return Verdict(False, loss, gradients, statistics, weights, slots, scale)

    def _commit(self, measured: Sequence[Measured], numbers: Verdict) -> list[Any]:
        """Run the deferred updates; return the sums over weights and slots."""
        if self.transaction.immediate:
            return [numbers.weights, numbers.slots]
        return self._update(measured)

    def _refuse(self, measured: Sequence[Measured], numbers: Verdict, halted: Any) -> list[Any]:
        """Restore the state, if bad steps are refused; return the sums over weights and slots."""
        if self.transaction.refuse:
            given = numbers.loss, numbers.gradients, halted, len(measured) == 1
            self.each(lambda one: refuse(one.body, *given), measured)
        return [numbers.weights, numbers.slots]

    def _update(self, measured: Sequence[Measured]) -> list[Any]:
        """Run the deferred updates; return the sums over weights and slots.

        Raise `Retrace` if the rest of a body depends on them: their graph shows what they access.
        """
        found = self.each(commit, measured)
        traced = tf.compat.v1.get_default_graph()
        for accesses in filter(None, (one.body.accesses for one in measured)):
            if accesses.depend_on(traced):
                raise Retrace(replace(self.transaction.learned, updates_first=True))
        return [reductions.add(sums, measured[0].scale.dtype) for sums in zip(*found)]

    def _examined(self, measured: Sequence[Measured]) -> tuple[Any, Counts, Any]:
        """Return whether all entries of the step are finite, and `counts` and `replicas` as in
        `StepResult`. Entries are only read if a sum is not finite.
        """
        places = [(site, path) for one in measured for site, path, _ in one.looked_at]

        def looked() -> tuple[Any, Any, Any]:
            finite, counts, replicas = zip(*self.each(look, measured))
            return tf.reduce_all(finite), tf.concat(counts, 0), tf.stack(replicas)

        trusted = tf.math.is_finite(tf.add_n([s for one in measured for s in one.sums]))
        shapes = (len(places), 3), (len(measured), 3)
        nothing = tf.constant(True), *(tf.zeros(shape, tf.int64) for shape in shapes)
        finite, counts, replicas = tf.cond(trusted, lambda: nothing, looked)
        return finite, Counts(tuple(places), counts), replicas


def components(structure: Any) -> list[Any]:
    """Return the dense tensors in a structure."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def packed(structure: Any, tensors: Iterable[Any]) -> Any:
    """Put dense tensors back into a structure of tensors, or of their specs."""
    rest = iter(tensors)
    leaves = tf.nest.flatten(structure, expand_composites=True)
    parts = [None if leaf is None else next(rest) for leaf in leaves]
    return tf.nest.pack_sequence_as(structure, parts, expand_composites=True)
