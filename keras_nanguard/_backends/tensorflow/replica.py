"""One replica in a trace, or an eager run, of the transaction: its body, what that writes and
computes, and how it commits or is refused. `trace` has the verdict of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import intercept, reductions
from keras_nanguard._backends.tensorflow.intercept import Accesses, StepRecord, Update
from keras_nanguard._backends.tensorflow.updates import Updates
from keras_nanguard._core.finiteness import is_inexact
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState


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
class Inspected:
    """What one run of the body has written.

    Attributes:
        train_state: the train state after it.
        restores: `(variable, old value)`, by key, of what a refusal restores: of what it has
            written if a graph shows that, else of all that it may have written.
        accesses: what it reads and writes, if a graph shows it.
    """

    train_state: TrainState
    restores: Mapping[int, tuple[Any, Any]]
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
        places: `(site, path)` of everything that a report counts.
        readings: the tensors of each site, in the same order.
    """

    inspected: Inspected
    sums: Sequence[Any]
    scale: Any
    losses: Sequence[Any]
    places: Sequence[tuple[str, str]]
    readings: Mapping[str, reductions.Reading]
    updates: Updates


class ReplicaTrace:
    """One replica in a trace or an eager run of a step.

    Attributes:
        args: the arguments of the body, once it runs.
        seen: the losses and updates of the body.
        held: `(variable, old value)`, by key, of what it may have written.
        scales: each optimizer with a loss scale, and its scale and counter before the update.
        created: keys of the variables that were created inside the step.
    """

    def __init__(self, transaction: TracedStep):
        self.transaction = transaction
        self.args: Sequence[Any] = ()
        self.seen = StepRecord()
        self.holds_weights = transaction.immediate and transaction.refuse
        self.train_state = transaction.run.read_train_state()
        self.held: dict[int, tuple[Any, Any]] = {}
        self.scales: list[tuple[Any, Any, Any]] = []
        self.created: set[int] = set()

    def run(self, args: Sequence[Any]) -> Any:
        """Hold the values that the body may write and a refusal restores; return its outputs."""
        self.args, state = args, self.train_state
        self.hold([*state.other, *state.metrics, *state.rates])
        self.hold(self.transaction.learned.untracked.values())
        if tf.executing_eagerly():  # a graph shows them
            self.hold(state.unlisted)
        if self.holds_weights:
            self.hold([*state.trainable, *state.slots])
        for optimizer in state.optimizers:
            self.note_scale(optimizer)
        return self.transaction.body(*args)

    def on_update(self, record: Update) -> None:
        """Store what becomes known with this update, which has not run yet: weights that belong to
        no known model, the variables of an optimizer of a layer, and the scale of an optimizer that
        the body builds.
        """
        run, variables = self.transaction.run, list(record.variables)
        if record.optimizer in self.train_state.unused:
            keras_optimizers.note_use(run.model, record.optimizer)
            variables += record.optimizer.variables
        known = self.keys(self.train_state.trainable) | self.created
        found = [v for v in variables if self.keys([v]).isdisjoint(known)]
        self.created |= self.keys(found)
        with tf.init_scope():
            for variable in found:
                run.note_created(keras_variables.native(variable), keras_variables.read(variable))
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
        """Hold the current values of variables (of Keras or TensorFlow) that are not held yet."""
        for variable in map(self.local, variables):
            if id(variable.handle) not in self.held:
                self.held[id(variable.handle)] = variable, variable.read_value()

    def note_created(self, variable: Any) -> None:
        """Store that a variable was created inside the step, and its first value."""
        self.hold([variable])
        self.created |= self.keys([variable])

    def local(self, variable: Any) -> Any:
        """Return the TensorFlow variable behind a Keras one; any other variable unchanged."""
        return keras_variables.native(variable)

    def keys(self, variables: Iterable[Any]) -> set[int]:
        """Return the keys of these variables in a graph."""
        return {id(self.local(v).handle) for v in variables}

    def large_keys(self, state: TrainState) -> set[int]:
        """Return the keys of weights and slots."""
        return self.keys([*state.trainable, *state.slots])

    def known_keys(self, found: Inspected) -> set[int]:
        """Return the keys of all variables of this replica that are known to the step."""
        scales = (v for o, *_ in self.scales for v in keras_optimizers.scales_of(o))
        return self.large_keys(found.train_state) | found.restores.keys() | self.keys(scales)

    # What the graph shows

    def inspect(
        self, found: Inspected, graph: Any, start: int, foreign: Collection[int]
    ) -> Inspected:
        """Return what the graph of a body shows; raise `Retrace` if this mode does not suit it.

        Args:
            start: mark of the graph at which the body begins.
            foreign: keys of the variables of other replicas.
        """
        accesses = Accesses(graph, start, self.seen.boundary, foreign)
        written, learned = accesses.written, self.transaction.learned
        if not self.holds_weights and not self.large_keys(found.train_state).isdisjoint(written):
            raise Retrace(replace(learned, updates_first=True))
        unknown = written.keys() - self.known_keys(found)
        behind = {key: intercept.untracked(written[key]) for key in unknown}
        untracked = {key: variable for key, variable in behind.items() if variable is not None}
        if untracked:
            raise Retrace(replace(learned, untracked={**learned.untracked, **untracked}))
        restores = {key: pair for key, pair in found.restores.items() if key in written}
        return replace(found, restores=restores, accesses=accesses)

    # What the step computes

    def measure(self, outputs: Any, found: Inspected) -> Measured:
        """Sum up loss, gradients, written statistics, and weights and slots if they are written.

        Args:
            outputs: those of the body.
        """
        state, seen, transaction = found.train_state, self.seen, self.transaction
        dtype = reductions.sum_dtype([*state.trainable, *state.slots])
        losses = seen.losses or transaction.losses(outputs)
        adapted = transaction.adapts_updates and not tf.executing_eagerly()
        updates = Updates(seen.records, state.optimizers, adapted, transaction.immediate)
        after = (state.trainable, state.slots) if transaction.immediate else ((), ())
        paths = {id(self.local(v).handle): v.path for v in (*state.other, *state.trainable)}
        checked: dict[str, list[tuple[str, Any]]] = {
            "outputs": seen.outputs,
            "gradients": [(v.path, gradient) for gradient, v in updates.gradients],
            "statistics": [(paths.get(id(v.handle), v.name), v) for v in self.statistics(found)],
            "weights": [(v.path, self.local(v)) for v in after[0]],
            "slots": [(v.path, self.local(v)) for v in after[1]],
        }
        read = {site: reductions.Reading(t for _, t in pairs) for site, pairs in checked.items()}
        places = [(site, p) for site, pairs in checked.items() for p, t in pairs if is_inexact(t)]
        sums = [
            reductions.add([tf.cast(loss, dtype) for loss in losses], dtype),
            read["gradients"].squares(dtype),
            *(read[site].total(dtype) for site in ("statistics", "weights", "slots")),
        ]
        scales = [tf.cast(scale, dtype) for _, scale, _ in self.scales]
        scale = rules.common_scale(reductions.OPERATIONS, scales, tf.ones((), dtype))
        return Measured(found, sums, scale, losses, places, read, updates)

    def statistics(self, found: Inspected) -> list[Any]:
        """Return what the body has written and is judged besides weights and slots."""
        state, tolerated = found.train_state, self.transaction.learned.tolerated
        others = self.large_keys(state) | self.keys(state.unjudged) | tolerated
        written = [variable for key, (variable, _) in found.restores.items() if key not in others]
        return list(filter(is_inexact, written))

    # Commit or refuse

    def commit(self, measured: Measured) -> list[Any]:
        """Run the deferred updates; return the sums over weights and slots. Their entries are read
        if a sum is not finite.
        """
        measured.updates.run()
        records, dtype = self.seen.records, measured.scale.dtype
        weights = keras_variables.unique(v for r in records for v in r.variables)
        written = {id(v) for r in records for v in r.optimizer.variables}
        slots = [v for v in measured.inspected.train_state.slots if id(v) in written]
        natives = [map(keras_variables.native, part) for part in (weights, slots)]
        parts = [reductions.Reading(part, joins=True) for part in natives]
        sums = [part.total(dtype) for part in parts]

        def checked() -> list[Any]:
            finite = parts[0].all_finite() & parts[1].all_finite()
            return [reductions.settled(s, finite) for s in sums]

        trusted = tf.math.is_finite(reductions.add(sums, dtype))
        return list(tf.cond(trusted, lambda: list(sums), checked))

    def refuse(
        self, found: Inspected, loss: Any, gradients: Any, halted: Any, is_alone: bool
    ) -> None:
        """Restore the old values, and update each loss scale, given the sums of the verdict; only
        if the replica is alone, each by the gradients of its own optimizer.
        """
        for variable, old in found.restores.values():
            variable.assign(old)
        for optimizer, old, steps in self.scales:
            own = self.of_optimizer(optimizer, gradients) if is_alone else gradients
            initial = tf.cast(optimizer.initial_scale, old.dtype)
            numbers = loss, own, old, steps, initial, halted
            after = rules.scale_after_refusal(reductions.OPERATIONS, *numbers)
            for variable, value in zip(keras_optimizers.scales_of(optimizer), after):
                variable.value.assign(value)

    def of_optimizer(self, optimizer: Any, gradients: Any) -> Any:
        """Return the sum over all gradients, 0 if those of this optimizer are finite."""
        records = self.seen.records
        if all(record.optimizer is optimizer for record in records):
            return gradients
        own = [g for record in records if record.optimizer is optimizer for g, _ in record.pairs]
        return tf.where(reductions.all_finite(own), tf.zeros_like(gradients), gradients)

    def look(self, measured: Measured) -> tuple[Any, Any, Any]:
        """Return whether all entries but those of outputs are finite, the counts of all, and the
        row of `StepResult.replicas`.
        """
        counts = tf.concat([reading.counts() for reading in measured.readings.values()], 0)
        decide = tf.constant([site != "outputs" for site, _ in measured.places], tf.int64)
        bad = tf.reduce_sum(counts[:, :2] * decide[:, tf.newaxis])
        finite = reductions.all_finite(measured.losses) & (bad == 0)
        given = [t for t in tf.nest.flatten(self.args, expand_composites=True) if tf.is_tensor(t)]
        given_bad = ~finite & ~reductions.all_finite(given)
        dense = [t for t in tf.nest.flatten(self.args) if isinstance(t, tf.Tensor) and t.shape.rank]
        rows = tf.shape(dense[0], tf.int64)[0] if dense else tf.constant(-1, tf.int64)
        blame = [tf.cast(~finite, tf.int64), tf.cast(given_bad, tf.int64), rows]
        return finite, counts, tf.stack(blame)
