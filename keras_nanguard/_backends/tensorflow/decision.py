"""Decides whether a step commits, once its body has run on every replica; usually there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.tensorflow import reductions
from keras_nanguard._backends.tensorflow.execution import StepTrace, Sums
from keras_nanguard._core.verdict import PERIOD, Verdict


class StepResult(NamedTuple):
    """The result of one step.

    Attributes:
        outputs: its outputs.
        row: the numbers of its verdict, shape `(len(FIELDS),)`.
        counts: int64 of shape `(places, 3)`: NaN, infinite and all entries of each place, 0 if all
            of the sums were finite.
        bad: scalar bool, whether to report it: refused, and not because it was halted.
        replicas: int64 of shape `(n, 2)`: for each replica whether it is to blame, and its rows of
            the batch, -1 if unknown. Replicas with bad data are to blame, else those with a bad
            number. `n` is 0 for a single one.
    """

    outputs: Any
    row: Any
    counts: Any
    bad: Any
    replicas: Any


Each = Callable[[Callable[[StepTrace], Any]], list[Any]]
"""Calls a function on each trace of a step, on its replica; returns the results in order."""


def decide(
    traces: Sequence[StepTrace], outputs: Any, halted: Any, step: Any, each: Each
) -> StepResult:
    """Compute one verdict of a step, and let each of its replicas commit or refuse.

    Args:
        traces: the `StepTrace` of each replica, measured; usually one.
        outputs: what the step returns.
        halted: scalar bool, whether it is refused regardless of its numbers.
        step: its number, a scalar int64.
        each: see `Each`.
    """
    first, transaction = traces[0], traces[0].transaction
    finite, replicas, counts = _examined(traces, each)
    sums = [reductions.settled(s, finite) for s in _joined(traces)]
    loss, gradients, statistics, *written = sums
    scales = [first.measures.scale] if first.scales else []
    may_commit = rules.may_commit(reductions.OPERATIONS, finite, scales, halted)
    # Logs pass through the conditional. Without that TensorFlow's graph optimizer multiplies the
    # factors of an update (of the scale of a BatchNormalization) in another order than in a plain
    # step, which may differ in the last bit.
    leaves = tf.nest.flatten(outputs, expand_composites=True) if transaction.logs else []
    present = [leaf for leaf in leaves if leaf is not None]

    def commit() -> list[Any]:
        after = written
        if not transaction.immediate:
            after = list(map(_total, zip(*each(lambda trace: trace.commit()))))
            for trace in traces:
                trace.check_deferred()
        return [*after, *map(tf.identity, present)]

    def refuse() -> list[Any]:
        if transaction.refuse:
            each(lambda trace: trace.refuse(loss, gradients))
        return [*written, *map(tf.identity, present)]

    weights, slots, *passed = tf.cond(may_commit, commit, refuse)
    if transaction.logs:
        rest = iter(passed)
        leaves = [None if leaf is None else next(rest) for leaf in leaves]
        outputs = tf.nest.pack_sequence_as(outputs, leaves, expand_composites=True)
    scale = first.measures.scale
    verdict = Verdict(
        refused=tf.cast(~may_commit if transaction.refuse else tf.constant(False), scale.dtype),
        loss=loss,
        gradients=gradients,
        statistics=statistics,
        weights=weights,
        slots=slots,
        scale=scale,
        step=tf.cast(step % PERIOD, scale.dtype),
        halted=tf.cast(halted, scale.dtype),
    )
    return StepResult(outputs, tf.stack(list(verdict)), counts, ~may_commit & ~halted, replicas)


def _examined(traces: Sequence[StepTrace], each: Each) -> tuple[Any, Any, Any]:
    """Return whether all entries of a step are finite, and `replicas` and `counts` as in
    `StepResult`. Entries are only read if a sum is not finite.
    """
    places, several = places_of(traces), len(traces) > 1
    nobody = tf.zeros(len(traces) if several else 0, tf.bool)

    def look() -> tuple[Any, Any, Any]:
        found, counts = zip(*each(lambda trace: trace.look()))
        if not several:
            return found[0], nobody, counts[0]
        finite, given_bad = tf.stack(found), tf.stack(each(lambda trace: trace.given_bad()))
        given_bad &= ~finite
        lines = [[[places.index(place)] for place in trace.places] for trace in traces]
        shape = (len(places), 3)
        spread = [tf.scatter_nd(at, n, shape) if at else n for at, n in zip(lines, counts)]
        blamed = tf.where(tf.reduce_any(given_bad), given_bad, ~finite)
        return tf.reduce_all(finite), blamed, tf.add_n(spread)

    trusted = tf.math.is_finite(_total([s for trace in traces for s in trace.measures.sums]))
    nothing = tf.constant(True), nobody, tf.zeros((len(places), 3), tf.int64)
    finite, blamed, counts = tf.cond(trusted, lambda: nothing, look)
    rows = tf.stack([trace.rows() for trace in traces]) if several else tf.zeros(0, tf.int64)
    return finite, tf.stack([tf.cast(blamed, tf.int64), rows], 1), counts


def places_of(traces: Iterable[StepTrace]) -> tuple[tuple[str, str], ...]:
    """Return `(site, path)` of each line of the counts of a step."""
    return tuple(dict.fromkeys(place for trace in traces for place in trace.places))


def _joined(traces: Sequence[StepTrace]) -> Sums:
    """Return the sums over all replicas."""
    sums = Sums(*map(_total, zip(*(trace.measures.sums for trace in traces))))
    number = len(traces)
    if number == 1:
        return sums
    # Logs, which Keras averages; losses are made to be added up.
    loss = sums.loss if traces[0].seen.losses else sums.loss / number
    # At least the sum of squares of the sums of the gradients.
    return sums._replace(loss=loss, gradients=sums.gradients * number)


def _total(scalars: Iterable[Any]) -> Any:
    return tf.add_n(list(scalars))
