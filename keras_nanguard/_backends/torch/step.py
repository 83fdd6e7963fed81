"""The transaction on PyTorch.

In words::

    keep      torch's generators and buffers; the rest of the small state is copied as the step writes it
    run       the user's step; what it asks its optimizers for waits
    verdict   loss, gradients and written statistics finite, loss scale sound: one row of numbers, one look at the device
    if so:    the updates are made; weights and slots are read once
    if not:   everything that was written is given back, the loss scale learns, batch and counts are filed

Of Keras' own train step everything that can make it bad is known when it asks for its update, so the verdict is given
there and nothing large is ever copied. Any other step may go on after an update in any way it likes: there an update
waits until the step ends, or until something touches what it reads or writes. In that case it is made on the spot, and
undone on a refusal, which costs one copy of what it writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.shared.proof import FULL_READ_INTERVAL
from keras_nanguard._backends.torch import outputs as step_outputs
from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.batches import Given
from keras_nanguard._backends.torch.compiled_step import Compiled
from keras_nanguard._backends.torch.intercept import Intercept, StandIns
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import KerasUpdate, Update
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["Transaction"]

_FRESH = 2
"""Steps for which the anatomy is read anew each time, and everything is kept: what they write is then known."""

_REFRESH = 100
"""Steps between two readings of the anatomy later on."""



class ReportQueue:
    """The reports of refused steps: references, until the host takes them."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def put(self, report: Report) -> None:
        """File one report."""
        self._reports.append(report)

    def take(self) -> list[Report]:
        """Return and forget what was filed."""
        reports, self._reports = self._reports, []
        return reports


class Transaction:
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        anatomy: callable that returns the current `TrainState`.
        model: the model whose `compute_loss` tells the loss, or `None`.
        logs: the body returns Keras logs.
        stock: the body is Keras' own train step, after whose update nothing can go wrong.
        jit: compile the body, once it is known what it writes.
        compiled: the body as an earlier run has compiled it.
        born: called with each variable that comes into being inside the step, and its first value.
        refuse: refuse bad steps; without it the step runs as it is, and its verdict and batch are told all the same.
        agree: called with whether a step is fine here; returns whether it is fine everywhere.

    Attributes:
        verdict: the verdict on the last step.
        given: the arguments of the last step.
        strays: what the body writes in place past Keras, by `id`.
        saving: whether an update had to be made before its step was through.
    """

    reused = False
    """What is kept from one run to the next is a compiled body alone."""

    counted = False

    def __init__(
        self,
        body: Callable[..., Any],
        train_state: Callable[[], TrainState],
        *,
        model: Any = None,
        logs: bool = False,
        stock: bool = False,
        jit: bool = False,
        compiled: Compiled | None = None,
        note_created: Callable[[Any, Any], None] = lambda variable, value: None,
        refuse: bool = True,
        agree: Callable[[bool], bool] = bool,
    ):
        self.body = self.replayed = body
        self.read_train_state, self.model = train_state, model
        self.stock, self.note_created, self.refuse, self.agree = stock, note_created, refuse, agree
        self.jit, self.compiled = jit, compiled
        self.report_queue = ReportQueue()
        self.outputs = step_outputs.LogOutputs() if logs else step_outputs.PlainOutputs()
        self.tolerated: set[int] = set()
        self.untracked: dict[int, Any] = {}
        self.keeps_undo = False
        self.steps = 0
        self.verdict = Verdict(False, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        self.given: Any = None
        self.unread: tuple[Any, ...] = ()  # what the step before has left behind, on a device
        self.stale = True

    def __call__(self, *args: Any) -> Any:
        if self.stale or self.steps < _FRESH or self.steps % _REFRESH == 0:
            self.parts = _Parts(self.read_train_state())
            self.stale = False
        self.given = Given(args)
        run = _StepRun(self)
        try:
            return run.complete(args)
        finally:
            self.steps += 1
            run.close()

    def inherit(self, other: Transaction) -> None:
        """Start with what another transaction around the same body has found out."""
        self.untracked, self.tolerated, self.keeps_undo = other.untracked, other.tolerated, other.keeps_undo
        self.steps = min(other.steps, 1)

    def batch(self, step: int, given: Given) -> Any:
        """Return the arguments of an earlier step, `None` where someone has written over them."""
        return None if given.args is None else keras.tree.map_structure(_as_tensor, tuple(given.args))

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Let these variables be infinite."""
        self.tolerated |= {id(v.value) for v in variables}

    def release_run(self) -> None:
        """Let go of the run that is over."""
        self.given = None

    def resume(self) -> None:
        """Nothing has to be told: each step asks anew."""

    def recount(self, step: int) -> None:
        """The host counts."""


class _Parts:
    """An anatomy, and the tensors in it by role."""

    def __init__(self, train_state: TrainState):
        self.train_state = train_state
        self.other = [v.value for v in train_state.other]
        self.weights_and_slots = [v.value for v in (*train_state.trainable, *train_state.slots)]
        self.metrics = {id(v.value) for v in train_state.metrics}
        self.judged_elsewhere = self.metrics | {id(t) for t in self.weights_and_slots}
        self.judged_elsewhere |= {id(v.value) for v in (*(s for pair in train_state.scales for s in pair), *train_state.rates)}
        self.unlisted = [keras_variables.native(v) for v in train_state.unlisted]
        listed = {id(t) for t in (*self.other, *self.weights_and_slots)}
        self.unlisted = [t for t in self.unlisted if isinstance(t, torch.Tensor) and id(t) not in listed]
        for variable in train_state.other:  # buffers of a torch module: torch itself writes them
            if not isinstance(variable, keras.Variable) and not isinstance(variable.value, torch.nn.Parameter):
                self.unlisted.append(variable.value)
        self.paths = {id(v.value): v.path for v in (*train_state.trainable, *train_state.other)}
        self.kind = reductions.kind(self.weights_and_slots)
        self.slots = {id(o): reductions.slots_of(train_state, o) for o in train_state.optimizers}
        self.small_state = [*self.other, *(v.value for v in train_state.metrics)]
        self.all = [*self.other, *self.weights_and_slots, *(v.value for v in train_state.metrics)]


class _StepRun:
    """One run of the transaction."""

    def __init__(self, owner: Transaction):
        self.owner, self.parts = owner, owner.parts
        self.train_state = self.parts.train_state
        self.may_commit: bool | None = None
        self.error: BaseException | None = None
        self.created_count = 0
        self.update_sums = [0.0, 0.0]
        self.left_by_previous = False
        self.compiled: Any = None
        self.seen: Any = None

    def complete(self, args: Sequence[Any]) -> Any:
        owner, parts = self.owner, self.parts
        fresh = owner.steps < _FRESH
        kept = [*owner.untracked.values(), *(parts.other if fresh else ())]
        if fresh and not owner.stock and owner.refuse:
            kept += parts.weights_and_slots
        if owner.jit and not fresh:
            self.compiled = owner.compiled = owner.compiled or Compiled(owner.body, owner.model, self.train_state.optimizers)
            self.undo_log = UndoLog((), self._note_created, [*parts.unlisted, *parts.small_state, *kept], watch=False)
        else:
            writes = None if owner.stock else lambda tensor: self.seen.before_write(tensor, parts.metrics)
            self.undo_log = UndoLog(kept, self._note_created, parts.unlisted, writes=writes)
        before = [(t, t._version) for t in (parts.small_state if owner.stock else parts.all)]
        grads = [t for t in parts.weights_and_slots if t.grad is not None]
        self.grads = [(t, t.grad, t.grad._version) for t in grads] if not owner.stock and owner.model is None else []
        outputs = None
        body = self.compiled.body if self.compiled else owner.body
        stand_ins = self.compiled.stand_ins if self.compiled else StandIns(owner.model, self.train_state.optimizers)
        with self.undo_log, Intercept(stand_ins, self._asked, parts.paths) as self.seen:
            try:
                outputs = body(*args)
            except Exception as error:
                if not (owner.refuse and self.may_commit is not True and is_numeric(error)):
                    self._abandon()
                    raise
                self.error = error
        if self.created_count:
            owner.stale = True
        if self.may_commit is None:
            self._judge(outputs)
        return self._conclude(outputs, args, before)

    def close(self) -> None:
        """Let go of the gradients: a run and what stands around its body know each other, and would wait for the garbage collector."""
        vars(self).clear()

    def _asked(self, record: Update) -> str:
        """Say when an update is to be made."""
        if not self.owner.refuse:
            return "now"
        if not self.owner.stock:
            return "later" if self.compiled is None else "kept"
        if self.may_commit is None:
            self._judge(None)
        return "now" if self.may_commit else "never"

    def _note_created(self, variable: Any) -> None:
        tensor = variable.value
        if not tensor.is_meta:
            self.created_count += 1
            self.owner.note_created(tensor, keras_variables.read(variable))

    def _abandon(self) -> None:
        """Undo a step that ends in an exception."""
        if self.owner.refuse:
            self.seen.give_back()
            self.undo_log.give_back()

    def _judge(self, outputs: Any) -> None:
        """Compute the verdict, and look at it: the one place where the host waits for the device."""
        owner, seen = self.owner, self.seen
        if self.created_count:
            self.parts = _Parts(owner.read_train_state())
            self.train_state = self.parts.train_state
        kind = self.parts.kind
        apart = self.parts.judged_elsewhere | owner.tolerated
        written = self.undo_log.written
        self.statistics = [t for t in written if id(t) not in apart and reductions.can_be_bad(t)]
        losses = seen.losses or owner.outputs.losses(outputs)
        loss = sum((entry.detach().sum().to(kind) for entry in losses), torch.zeros((), dtype=kind))
        told = [loss, reductions.squares([g for r in seen.records for g in r.gradients], kind)]
        told.append(reductions.total(self.statistics, kind))
        scales = [self._before(scale.value).to(kind) for scale, _ in self.train_state.scales]
        early = bool(seen.undo) or not owner.refuse
        update_sums = self._update_sums(math.inf) if early and reductions.is_away(told[1]) else ()
        numbers, scales, now, late = reductions.looked_at(told, scales, update_sums, owner.unread)
        owner.unread = ()
        if not math.isfinite(numbers[2]) and self._tolerate_constants():
            numbers[2] = float(reductions.total(self.statistics, kind))
        self.loss, self.gradients, self.statistic = numbers
        if self.error is not None:
            self.loss = math.nan
        self.scale = min(scales, default=1.0)
        valid = all(rules.scale_is_valid(rules.NUMBERS, scale) for scale in scales)
        may_commit = self.error is None and valid and rules.may_commit(rules.NUMBERS, numbers)
        if early:
            self.update_sums = now or reductions.looked_at(self._update_sums(self.gradients))[0]
            may_commit = may_commit and rules.may_commit(rules.NUMBERS, self.update_sums)
        if not math.isfinite(sum(late)) and not all(bool(torch.isfinite(t).all()) for t in self.parts.weights_and_slots):
            self.update_sums, self.left_by_previous, may_commit = late, True, False
        self.may_commit = owner.agree(may_commit)

    def _tolerate_constants(self) -> bool:
        """Leave out buffers that nobody has written and that are infinite on purpose; returns whether there are some."""
        old, uncounted = self.undo_log.old, self.undo_log.uncounted
        found = [t for t in self.statistics if id(t) in uncounted and torch.equal(t, old[id(t)][1])]
        found = [t for t in found if not torch.isfinite(t).all()]
        self.owner.tolerated |= {id(t) for t in found}
        self.statistics = [t for t in self.statistics if id(t) not in self.owner.tolerated]
        return bool(found)

    def _before(self, tensor: Any) -> Any:
        kept = self.undo_log.old.get(id(tensor))
        return tensor.detach() if kept is None else kept[1]

    def _update_sums(self, gradients: float) -> tuple[Any, Any]:
        """Return the sums over the weights and slots that were updated, on the device."""
        turn = self.owner.steps % FULL_READ_INTERVAL == 0
        stale = self.created_count or self.owner.stale
        slots = {} if stale else self.parts.slots
        return reductions.update_sums(self.train_state, self.seen.records, slots, gradients, turn, self.parts.kind)

    def _conclude(self, outputs: Any, args: Sequence[Any], before: list[tuple[Any, int]]) -> Any:
        owner = self.owner
        self._find_untracked(before)
        owner.keeps_undo |= bool(self.seen.undo)
        if not self.may_commit:
            batch = keras.tree.map_structure(_as_tensor, tuple(args))
            verdict = self._verdict(owner.refuse)
            owner.report_queue.put(Report(verdict, *self._places(), batch, left_by_previous=self.left_by_previous))
        if self.may_commit or not owner.refuse:
            self.seen.make(keep=False)
            for tensor, value in [found for record in self.seen.records for found in record.created()]:
                owner.note_created(tensor, value)
                owner.stale = True
            if self.seen.records and owner.refuse:
                self._note_ends()
            owner.verdict = self._verdict(False)
            return outputs
        self.seen.give_back()
        self.undo_log.give_back()
        self._clear_gradients()
        self._learn_scale()
        owner.verdict = self._verdict(True)
        return outputs

    def _note_ends(self) -> None:
        """Read them: at once, or, where the host would have to wait for a device once more, with the verdict of the next step."""
        update_sums = self._update_sums(self.gradients)
        if reductions.is_away(update_sums[0]):
            self.owner.unread = update_sums
        else:
            self.update_sums = reductions.looked_at(update_sums)[0]

    def _verdict(self, refused: bool) -> Verdict:
        weights, slots = self.update_sums
        return Verdict(refused, self.loss, self.gradients, self.statistic, weights, slots, self.scale)

    def _find_untracked(self, before: list[tuple[Any, int]]) -> None:
        """Note what was written in place past Keras, to be kept before each step from now on."""
        known = self.undo_log.owner if self.compiled is None else self.undo_log.old
        changed = [t for t, version in before if t._version != version and id(t) not in known]
        if changed and not self.owner.stock and self.seen.records:
            updated = {id(t) for record in self.seen.records if record not in self.seen.waiting for t in record.state()}
            changed = [t for t in changed if id(t) not in updated]
        if self.owner.jit and self.compiled is None:  # a compiled step will not tell what it assigns to
            kept = {id(t) for t in (self.parts.all if self.owner.stock else self.parts.small_state)}
            changed += [self.undo_log.old[key][0] for key in self.undo_log.owner if key not in kept]
        self.owner.untracked.update({id(t): t for t in changed})

    def _clear_gradients(self) -> None:
        """Leave no gradient of a refused step behind, for a body that adds to what it finds."""
        for tensor in self.parts.weights_and_slots:
            tensor.grad = None
        for tensor, grad, _ in self.grads:
            tensor.grad = grad

    def _learn_scale(self) -> None:
        """Let each loss scale learn from the refusal."""
        for optimizer in self.train_state.optimizers:
            if not keras_optimizers.is_loss_scaled(optimizer) or not self._built(optimizer):
                continue
            scale, counter = optimizer.dynamic_scale, optimizer.step_counter
            before = float(scale.value), int(counter.value)
            after = rules.learned_scale(rules.NUMBERS, self.loss, self.gradients, *before, optimizer.initial_scale)
            scale.assign(after[0])
            counter.assign(after[1])

    def _built(self, optimizer: Any) -> bool:
        """Build an optimizer whose first update was refused, so that its loss scale can learn."""
        if not optimizer.built:
            asked = [r for r in self.seen.records if isinstance(r, KerasUpdate) and r.optimizer is optimizer and r.given]
            for record in asked[:1]:
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(record.given)
                optimizer.built = self.owner.stale = True
        return bool(optimizer.built)

    def _places(self) -> tuple[tuple[tuple[str, str], ...], list[tuple[int, int, int]]]:
        """Return where to look for what was bad, and how many entries are bad in each place."""
        places = [("outputs", name, t) for name, t in self.seen.outputs]
        places += [("gradients", v.path, g) for record in self.seen.records for g, v in record.pairs]
        paths = {**{key: v.path for key, v in self.undo_log.owner.items()}, **self.parts.paths}
        places += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in self.statistics]
        if self.seen.undo or not self.owner.refuse:
            for site, variables in (("weights", self.train_state.trainable), ("slots", self.train_state.slots)):
                places += [(site, v.path, v.value) for v in variables if reductions.can_be_bad(v.value)]
        rows = tuple((site, path) for site, path, _ in places)
        return rows, reductions.counts([t for _, _, t in places])


def _as_tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind != "O" else value
