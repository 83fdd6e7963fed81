"""One trace, or one eager run, of the transaction on all replicas: the verdict, and its result.
`replica` has what each replica does, `step` the outline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import intercept, reductions
from keras_nanguard._backends.tensorflow.intercept import StepRecord, Update
from keras_nanguard._backends.tensorflow.replica import (
    Inspected,
    Measured,
    ReplicaTrace,
    Retrace,
    TracedStep,
)
from keras_nanguard._core.verdict import PERIOD, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers

Places = tuple[tuple[str, str], ...]
"""`(site, path)` of each line of counts."""


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


class StepTrace(intercept.Intercept):
    """One trace (or one eager run) of a step on all of its replicas; usually there is one.

    In this order: `run` inside the context, `inspect`, `measure` of each replica, `decide`.

    Attributes:
        unbuilt: the optimizers that scale the loss and were not built before this trace; none in
            an eager run.
        creates: whether variables were created while the body was traced.
    """

    def __init__(self, transaction: TracedStep, replicas: Sequence[ReplicaTrace]):
        self.transaction, self.replicas = transaction, replicas
        super().__init__(transaction.model, replicas[0].train_state.found, transaction.immediate)
        self.start = intercept.mark(self.graph)
        scaling = filter(keras_optimizers.is_loss_scaled, replicas[0].train_state.found)
        self.unbuilt = [o for o in scaling if self.graph is not None and not o.built]
        self.creates = False

    def here(self) -> ReplicaTrace:
        """Return the calling replica."""
        return self.replicas[0]

    def each(
        self, function: Callable[[ReplicaTrace, Any], Any], values: Sequence[Any]
    ) -> list[Any]:
        """Call a function with each replica and its value, on that replica; return the results."""
        return list(map(function, self.replicas, values))

    def seen(self) -> StepRecord:
        return self.here().seen

    def on_update(self, record: Update) -> None:
        self.here().on_update(record)

    def note_created(self, variable: Any) -> None:
        self.creates = self.graph is not None
        for replica in self.replicas:
            replica.note_created(variable)
        with tf.init_scope():
            self.transaction.run.note_created(variable, variable.numpy())

    def run(self, args: Sequence[Any]) -> Any:
        """Run the body on the calling replica, inside the context; return its outputs."""
        with self.creating():
            return self.here().run(args)

    def inspect(self) -> list[Inspected]:
        """Return what the bodies of the replicas have written; raise `Retrace` for another mode."""
        run = self.transaction.run
        train_state = run.read_train_state()
        self.transaction.tolerate(run.tolerate_created())
        found: list[Inspected] = []
        shared: set[int] = set()
        for replica in self.replicas:
            # The first replica handles what all of them share.
            held = {key: pair for key, pair in replica.held.items() if key not in shared}
            shared |= held.keys()
            found.append(Inspected(train_state, held))
        if self.graph is None or not self.transaction.refuse:
            return found
        pairs = list(zip(self.replicas, found))
        owned = [replica.known_keys(one) for replica, one in pairs]
        others = [set().union(*owned[:n], *owned[n + 1 :]) for n in range(len(owned))]
        return [
            replica.inspect(one, self.graph, self.start, foreign)
            for (replica, one), foreign in zip(pairs, others)
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
        scales = [numbers.scale] if self.replicas[0].scales else []
        may_commit = rules.may_commit(reductions.OPERATIONS, finite, scales, halted)
        # Logs pass through the conditional. Without that TensorFlow's graph optimizer multiplies
        # the factors of an update (of the scale of a BatchNormalization) in another order than in a
        # plain step, which may differ in the last bit.
        logs = [] if transaction.model is None else components(outputs)

        def committed() -> list[Any]:
            now = transaction.immediate
            sums = [numbers.weights, numbers.slots] if now else self._update(measured)
            return [*sums, *map(tf.identity, logs)]

        def refused() -> list[Any]:
            if transaction.refuse:
                given = numbers.loss, numbers.gradients, halted, len(measured) == 1
                self.each(lambda replica, one: replica.refuse(one.inspected, *given), measured)
            return [numbers.weights, numbers.slots, *map(tf.identity, logs)]

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

    def _update(self, measured: Sequence[Measured]) -> list[Any]:
        """Run the deferred updates; return the sums over weights and slots.

        Raise `Retrace` if the rest of a body depends on them: their graph shows what they access.
        """
        found = self.each(ReplicaTrace.commit, measured)
        graph = tf.compat.v1.get_default_graph()
        for accesses in filter(None, (one.inspected.accesses for one in measured)):
            if accesses.depend_on(graph):
                raise Retrace(replace(self.transaction.learned, updates_first=True))
        return [reductions.add(sums, measured[0].scale.dtype) for sums in zip(*found)]

    def _examined(self, measured: Sequence[Measured]) -> tuple[Any, Counts, Any]:
        """Return whether all entries of the step are finite, and `counts` and `replicas` as in
        `StepResult`. Entries are only read if a sum is not finite.
        """
        places = [place for one in measured for place in one.places]

        def looked() -> tuple[Any, Any, Any]:
            finite, counts, replicas = zip(*self.each(ReplicaTrace.look, measured))
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
