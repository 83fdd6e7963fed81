"""The transaction on TensorFlow.

In words::

    keep      references to the small state (statistics, seeds, metrics)      no copy: TensorFlow copies on write
    run       the user's step, its optimizers' updates put off
    verdict   loss, gradients and written statistics finite, loss scale sound
    if so:    the updates run now, by fused kernels where there are some (see `_fused`); weights and slots are read once
    if not:   the small state is given back, the loss scale learns, batch and counts are filed for the host

The verdict is known before anything large is written, so nothing large is ever copied. A step that reads its weights
after an update (a GAN), writes them itself (sharpness-aware minimisation) or runs eagerly cannot be put off: there the
old values of everything it writes are kept, and the updates are undone on a refusal.

Decided with one `tf.cond`: selecting old or new for each variable costs a pass over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from keras_nanguard import _state
from keras_nanguard._step import _batches, _fused, _graph, _outputs, _reports, _sums
from keras_nanguard._step._intercept import Intercept, Seen
from keras_nanguard._step._verdict import FIELDS, PERIOD, Verdict

__all__ = ["Retrace", "Run", "Transaction"]


class Retrace(Exception):
    """Tracing found that the step has to be traced anew in another mode. Never leaves the library."""


class Transaction:
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        anatomy: callable that returns the `Anatomy` at the time of tracing.
        model: the model whose `compute_loss` tells the loss, or `None`.
        logs: the body returns Keras logs, which a refused step replaces by those of the restored metrics.
        jit: compile the body with XLA. The filing of a refused batch stays outside of the cluster.
        counted: how many steps run between two looks of the host, where they are several: the step then counts itself,
            keeps the row of each, and stands still after one that committed a bad state until the host has healed it.
        capacity: how many refused batches are kept between two looks of the host.
        born: called with each variable that comes into being inside the step, and its first value.
        refuse: refuse bad steps; without it the step runs as it is, and its verdict and batch are told all the same.
        stores: keep the batches of the last steps for the host.

    Attributes:
        given: the number of executions so far; of a loop's step, what the last one was given.
        saving: whether old values of weights and slots are kept.

    Calling it returns what `read` takes apart on the host: the outputs, and a row in the order of `Verdict.FIELDS`.
    """

    is_transaction = True

    served = False
    """Whether it was traced for an earlier run."""

    def __init__(
        self,
        body: Callable[..., Any],
        anatomy: Callable[[], _state.Anatomy],
        *,
        model: Any = None,
        logs: bool = False,
        jit: bool = False,
        counted: int = 0,
        capacity: int = 8,
        born: Callable[[Any, Any], None] = lambda variable, value: None,
        refuse: bool = True,
        stores: bool = False,
    ):
        self.body, self.anatomy, self.model = body, anatomy, model
        self.jit, self.counted, self.born = jit, counted, born
        self.refuse, self.saving = refuse, False
        self.strays: dict[int, Any] = {}
        self.tolerated: set[int] = set()
        self.files = _reports.Files(capacity)
        self.stored = _batches.Stored() if stores else None
        self.given: Any = 0
        self.outputs = _outputs.LogOutputs(model) if logs else _outputs.PlainOutputs()
        self.compiled = (
            tf.function(self._run, jit_compile=True, reduce_retracing=True, autograph=False) if jit else None
        )
        if counted:
            with tf.init_scope():
                self.counter = tf.Variable(-1, dtype=tf.int64, trainable=False)
                self.halted = tf.Variable(False, trainable=False)
                self.rows = tf.Variable(-tf.ones((counted, len(FIELDS)), tf.float64), trainable=False)  # of no step yet

    def __call__(self, *args: Any) -> Any:
        if self.stored is not None:
            self.stored.put(args)
        if self.compiled is None or tf.executing_eagerly():
            outputs, row, _ = self._run(*args)
            self.note(row)
            return self.outputs.join(outputs, row)
        outputs, row, counts = self.compiled(*args)
        self.note(row)
        told = row[0] > 0 if self.refuse else ~tf.math.is_finite(tf.reduce_sum(row))
        tf.cond(told, lambda: self.files.put(row, counts, args), lambda: tf.constant(False))
        return self.outputs.join(outputs, row)

    def read(self, result: Any) -> tuple[Any, list[float]]:
        """Return the outputs and the row of numbers of one call, on the host."""
        if self.stored is not None:
            self.given += 1
            if not self.stored.fitted:
                self.stored.fit()
        return self.outputs.split(result)

    def batch(self, step: int, given: Any) -> Any:
        """Return the arguments of an earlier step, `None` where they are gone."""
        if self.stored is None:
            return given
        return self.stored.batch(int(self.counter) - step if self.counted else self.given - given)

    def note(self, row: Any) -> None:
        """Keep the row of a step until the host looks, where it does not look after every step."""
        if self.counted:
            place = self.counter.read_value() % self.counted
            self.rows.assign(tf.tensor_scatter_nd_update(self.rows.read_value(), [[place]], [tf.cast(row, tf.float64)]))

    def verdicts(self, start: int, end: int) -> list[Verdict]:
        """Return the verdicts of the steps from `start` up to `end`, of those that ran since the last look."""
        rows = {int(row[FIELDS.index("step")]): row for row in self.rows.numpy().tolist()}
        return [Verdict.of(rows[step % PERIOD]) for step in range(max(start, end - self.counted), end)]

    def rest(self) -> None:
        """Let go of the run that is over."""
        self.anatomy, self.born = (lambda: _state.Anatomy.of(self.model)), (lambda variable, value: None)
        self.files.take()

    def serve(self, anatomy: Callable[[], _state.Anatomy], born: Callable[[Any, Any], None]) -> None:
        """Go to work for another run on the same model, as if made for it; the arguments are as above."""
        self.anatomy, self.born, self.served = anatomy, born, True
        self.resume()
        if self.stored is not None:
            self.stored.fill()

    def inherit(self, other: Transaction) -> None:
        """Start with what another transaction around the same body has found out."""
        self.saving, self.strays, self.tolerated = other.saving, other.strays, other.tolerated

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Let these variables be infinite."""
        self.tolerated |= {id(v.value.handle) for v in variables}

    def resume(self) -> None:
        """Tell the step that the host has healed the state."""
        if self.counted:
            self.halted.assign(False)

    def recount(self, step: int) -> None:
        """Let the next step be this number."""
        if self.counted:
            self.counter.assign(step - 1)

    def trace(self, spec: Any) -> None:
        """Trace the step for arguments like this, without running it."""
        tf.function(self, autograph=False).get_concrete_function(spec)

    def _run(self, *args: Any) -> tuple[Any, Any, Any]:
        return Run(self, self.keeps_all).complete(args)

    @property
    def keeps_all(self) -> bool:
        """Whether the old values of weights and slots are kept, too, because updates are not put off."""
        return self.refuse and (self.saving or tf.executing_eagerly())

    def count(self) -> tuple[Any, Any]:
        """Count the step that begins; returns whether it has to stand still, and its number."""
        if not self.counted:
            return tf.constant(False), tf.constant(0, tf.int64)
        step = self.counter.read_value() + 1
        self.counter.assign(step)
        return self.halted.read_value(), step

    def note_poison(self, through: bool, ends: Sequence[Any]) -> None:
        """Stand still from here on, where the step that has just committed left bad weights or slots behind."""
        if self.counted and not through:
            self.halted.assign(~tf.math.is_finite(ends[0] + ends[1]))


class Run:
    """One trace (or one eager run) of the transaction; on one replica, where there are several.

    Args:
        owner: the transaction.
        saving: whether old values of weights and slots are kept.
    """

    def __init__(self, owner: Transaction, saving: bool):
        self.owner, self.saving, self.seen = owner, saving, Seen()
        self.through = saving or not owner.refuse
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.anatomy = owner.anatomy()
        self.kept: list[tuple[Any, Any]] = []
        self.scales: list[Any] = []

    def complete(self, args: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Run the body as a transaction; returns its outputs, the row, and the counts where they were not filed."""
        self.keep()
        halted, step = self.owner.count()
        start = _graph.mark(self.graph) if self.graph is not None else 0
        with Intercept(self.owner.model, self.anatomy.optimizers, self.through, self.born) as self.seen:
            outputs = self.owner.body(*args)
        self.anatomy = self.owner.anatomy()
        if not (self.scales or self.through):  # an optimizer that was built by the body, and has written nothing yet
            self.scales = self.old_scales()
        if self.graph is not None and self.owner.refuse:
            self.inspect(start)
        self.measure(outputs)
        self.judge(halted, step)
        return self._decide(outputs, args)

    def keep(self) -> None:
        """Hold on to what the body may write and what a refusal gives back."""
        self.hold([*self.anatomy.other, *self.anatomy.metrics])
        if self.graph is None:  # a graph tells of them itself
            self.hold(self.anatomy.unlisted)
        self.kept += [(stray, stray.read_value()) for stray in self.owner.strays.values()]
        if self.saving:
            self.hold([*self.anatomy.trainable, *self.anatomy.slots])
        self.scales = self.old_scales()

    def old_scales(self) -> list[Any]:
        """Return the loss scales: value and counter as they are at this point of the program, and the variables."""
        return [(s.value.read_value(), c.value.read_value(), s, c) for s, c in self.anatomy.scales]

    def hold(self, variables: Sequence[Any]) -> None:
        """Hold on to the values that variables (Keras' or TensorFlow's own) have at this point of the program."""
        for variable in map(self.local, variables):
            self.kept.append((variable, variable.read_value()))

    def local(self, variable: Any) -> Any:
        """Return TensorFlow's own variable behind one of Keras', and any other one as it is."""
        return variable if isinstance(variable, tf.Variable) else variable.value

    def keys(self, variables: Iterable[Any]) -> set[int]:
        """Return what tells these variables from others in a graph."""
        return {id(self.local(v).handle) for v in variables}

    def born(self, variable: Any) -> None:
        self.hold([variable])
        with tf.init_scope():
            self.owner.born(variable, variable.numpy())

    def inspect(self, start: int, foreign: Iterable[int] = ()) -> None:
        """Read the trace: keep only what the body writes; ask for another trace where this mode cannot serve it.

        Variables that are `foreign` are looked after by another replica.
        """
        known = {id(v.handle) for v, _ in self.kept}.union(foreign)
        heavy = self.keys([*self.anatomy.trainable, *self.anatomy.slots])
        ours = self.keys([*(v for pair in self.anatomy.scales for v in pair), *self.anatomy.rates])
        written: set[int] = set()
        for access in _graph.accesses(self.graph, start, self.seen.boundary):
            handle = _graph.eager_handle(access.handle)
            key = id(handle)
            if key in heavy and not self.saving and (access.writes or access.late):
                self.owner.saving = True
                raise Retrace
            stray = access.writes and key not in known | heavy | ours
            if stray and handle is not None and access.dtype is not None:
                self.owner.strays[key] = _graph.Stray(handle, access.dtype)
                raise Retrace
            if access.writes:
                written.add(key)
        if self.seen.nested and not self.saving:
            self.owner.saving = True
            raise Retrace
        self.kept = [(v, old) for v, old in self.kept if id(v.handle) in written]

    def measure(self, outputs: Any) -> None:
        """Sum up loss, gradients and the statistics that were written, and weights and slots where they are written, too."""
        anatomy, seen = self.anatomy, self.seen
        self.kind = kind = _sums.kind([*anatomy.trainable, *anatomy.slots])
        others = self.keys([*anatomy.metrics, *anatomy.trainable, *anatomy.slots]) | self.owner.tolerated
        self.written = [v for v, _ in self.kept if id(v.handle) not in others and _sums.can_be_bad(v)]
        self.loss = _sums.add([tf.cast(loss, kind) for loss in seen.losses or self.owner.outputs.losses(outputs)], kind)
        self.gradients = _sums.squares(seen.gradients, kind)
        self.statistics = _sums.total(self.written, kind)
        scales = [s for s, _, _, _ in self.scales]
        self.scale = tf.cast(tf.reduce_min(scales), kind) if scales else tf.ones((), kind)
        self.ends: Sequence[Any] = []
        if self.through:
            self.ends = [_sums.exact([_state.native(v) for v in part], kind) for part in (anatomy.trainable, anatomy.slots)]

    def judge(self, halted: Any, step: Any) -> None:
        """Decide, from the sums, whether the step may commit."""
        self.step, self.halt = tf.cast(step % PERIOD, self.kind), tf.cast(halted, self.kind)
        told = [self.loss, self.gradients, *([self.statistics] if self.written else []), *self.ends]
        finite = tf.math.is_finite(tf.add_n(told))
        if self.scales:
            finite &= tf.math.is_finite(self.scale) & (self.scale > 0)
        self.fine = finite & ~halted if self.owner.counted else finite

    def row(self, refused: Any, ends: Sequence[Any]) -> Any:
        """Return the row of numbers; `ends` are the sums over weights and slots."""
        first = [tf.cast(refused, self.kind), self.loss, self.gradients, self.statistics]
        return tf.stack([*first, *ends, self.scale, self.step, self.halt])

    def _decide(self, outputs: Any, args: Sequence[Any]) -> tuple[Any, Any, Any]:
        places = _reports.places(self)
        nothing = tf.zeros((len(places), 3), tf.int64)
        outside = self.owner.jit and self.graph is not None

        def commit() -> list[Any]:
            flat = self.commit(outputs)
            self.owner.note_poison(self.through, flat)
            return [*flat, *([nothing] if outside else [])]

        def refuse() -> list[Any]:
            counts = _sums.counts([tensor for _, _, tensor in places])  # before the statistics are given back
            flat = self.refuse(outputs)
            if not outside:
                self.owner.files.put(self.row(self.owner.refuse, flat[:2]), counts, args)
            return [*flat, *([counts] if outside else [])]

        self.owner.files.rows = tuple((site, path) for site, path, _ in places)
        weight_sum, slot_sum, *flat = tf.cond(self.fine, commit, refuse)
        counts = flat.pop() if outside else None
        refused = ~self.fine if self.owner.refuse else tf.constant(False)
        return self.owner.outputs.pack(flat, outputs), self.row(refused, [weight_sum, slot_sum]), counts

    def commit(self, outputs: Any) -> list[Any]:
        """Run the updates that were put off and read what they wrote; returns these sums, and what the outputs need."""
        if self.through:
            return [*self.ends, *self.owner.outputs.committed(outputs)]
        self.update()
        ends = _sums.ends(self.anatomy, self.seen.records, self.gradients, self.kind)
        return [*ends, *self.owner.outputs.committed(outputs)]

    def update(self) -> None:
        """Run the updates that were put off."""
        with nullcontext() if self.owner.jit else _fused.fused(self.anatomy.optimizers):
            for record in self.seen.records:
                record.run()

    def refuse(self, outputs: Any) -> list[Any]:
        """Give back what was kept; returns the same as `commit`."""
        ends = self.ends or [tf.zeros((), self.kind)] * 2
        if not self.owner.refuse:
            return [*ends, *self.owner.outputs.committed(outputs)]
        for variable, old in self.kept:
            variable.assign(old)
        self._learn_scale()
        return [*ends, *self.owner.outputs.refused(outputs)]

    def _learn_scale(self) -> None:
        """Halve the loss scale where the gradients alone were bad; never to 0, and out of 0, Inf and NaN again."""
        blamed = tf.math.is_finite(self.loss) & ~tf.math.is_finite(self.gradients)
        for (old, steps, scale, counter), optimizer in zip(self.scales, _scaled(self.anatomy.optimizers)):
            sound = tf.math.is_finite(old) & (old > 0)
            lower = tf.maximum(old * 0.5, tf.cast(_state.FLOOR, old.dtype))
            kept = tf.where(blamed, tf.minimum(lower, old), old)
            scale.value.assign(tf.where(sound, kept, tf.cast(optimizer.initial_scale, old.dtype)))
            counter.value.assign(tf.where(blamed | ~sound, tf.zeros_like(steps), steps))


def _scaled(optimizers: Sequence[Any]) -> list[Any]:
    return [o for o in optimizers if _state.is_loss_scaled(o) and o.built]
