"""A step whose gradients have no room beside the state: it computes them twice.

The first program runs the step for its verdict alone. Each gradient is summed up and given up; the small state is given back. Where the
step is to commit, the second program runs the whole step again, from the same state and with the same random numbers, and each weight is
updated when its gradient is there, as without a guard. Only the verdict passes from the one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.tensorflow import graph, reductions, reports
from keras_nanguard._backends.tensorflow.execution import Retrace, StepTrace
from keras_nanguard._core import memory
from keras_nanguard._core.verdict import FIELDS
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["run", "shortage"]

_GRADIENTS, _SCALE = FIELDS.index("gradients"), FIELDS.index("scale")

BESIDE = 0.5
"""What updates take beside the gradients, in sizes of these: 0.3 to 0.6 was measured with Adam. See campaigns/results/memory.md."""


def shortage(train_state: TrainState) -> str:
    """Return a line for the user where the gradients, and what an update takes beside them, have no room in the memory of the host.

    On an accelerator they need none there. Slots that no update has written yet are there, and take no memory yet.
    """
    if tf.config.list_logical_devices("GPU"):
        return ""
    fresh = [o for o in train_state.optimizers if o.built and not _has_updated(o)]
    slots = sum(keras_variables.bytes_of(v) for o in fresh for v in o.variables)
    if memory.room_for((1 + BESIDE) * train_state.gradient_bytes + slots):
        return ""
    return memory.gradients_twice(train_state.gradient_bytes, slots)


def _has_updated(optimizer: Any) -> bool:
    with tf.init_scope():
        return bool(keras_optimizers.inner(optimizer).iterations.numpy())


def run(owner: Any, args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Put both programs into the graph; returns the outputs, the row, and the counts.

    Raises:
        Retrace: where the updates cannot be deferred, or where the step would not do the same a second time: it draws random numbers by a
            state that nobody can give back, or writes to a table.
    """
    outputs, row, counts = _program(owner, lambda: VerdictTrace(owner, False).complete_first(args))
    leaves = tf.nest.flatten(outputs, expand_composites=True)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]

    def commit() -> list[Any]:
        again, update_sums = _program(owner, lambda: JudgedTrace(owner, False).complete_second(args, row[_GRADIENTS]))
        flat = tf.nest.flatten(again, expand_composites=True)
        return [tf.concat([row[:_SCALE - 2], update_sums, row[_SCALE:]], 0), *(flat[place] for place in places)]

    row, *kept = tf.cond(row[0] > 0, lambda: [row, *(leaves[place] for place in places)], commit)
    for place, leaf in zip(places, kept):
        leaves[place] = leaf
    return tf.nest.pack_sequence_as(outputs, leaves, expand_composites=True), row, counts


def _program(owner: Any, body: Callable[[], Any]) -> Any:
    """Return what a function of its own returns, compiled if the step is."""
    return tf.function(body, jit_compile=True if owner.jit else None, autograph=False)()


class VerdictTrace(StepTrace):
    """The first program: nothing of the step stays but its verdict, and what a refusal learns; a good one teaches nothing."""

    def complete_first(self, args: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Run the body, and give back what it wrote; returns what a refusal returns, the row, and the counts.

        Bad entries of gradients are not counted: they would all be held for it.
        """
        outputs = self.run(args)
        if self.writes_elsewhere or graph.draws(self.graph):
            self.owner.shortage = ""
            raise Retrace
        places = [place for place in reports.places(self) if place[0] != "gradients"]
        self.owner.report_queue.places = tuple((site, path) for site, path, _ in places)
        nothing = tf.zeros((len(places), 3), tf.int64)
        counts = tf.cond(self.may_commit, lambda: nothing, lambda: reductions.counts([tensor for _, _, tensor in places]))
        weight_sum, slot_sum, *flat = self.refuse(outputs)
        return self.owner.outputs.pack(flat, outputs), self.row(~self.may_commit, [weight_sum, slot_sum]), counts


class JudgedTrace(StepTrace):
    """The second program: the whole step, known to be good up to its updates. Each runs when its gradient is there."""

    updates_wait = False

    def complete_second(self, args: Sequence[Any], gradients: Any) -> tuple[Any, Any]:
        """Run the body and its updates, given the sum over the gradients; returns the outputs, and the sums over weights and slots."""
        start = graph.mark(self.graph)
        outputs = self.observed(args)
        self.note_after_update(start)
        start = graph.mark(self.graph)
        self.update()
        self.check_deferred(start)
        kind = reductions.kind([*self.train_state.trainable, *self.train_state.slots])
        update_sums = reductions.update_sums(self.train_state, self.seen.records, gradients, kind)
        self.owner.note_poison(False, update_sums)
        return self.owner.outputs.pack(self.owner.outputs.committed(outputs), outputs), tf.stack(update_sums)
