"""One run of the transaction on PyTorch; `step` has its outline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import group, reductions, reports
from keras_nanguard._backends.torch.compiled_step import Compiled
from keras_nanguard._backends.torch.intercept import Intercept, StandIns
from keras_nanguard._backends.torch.modules import local
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.undo_log import Expected, UndoLog
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

__all__ = ["FRESH", "Parts", "StepRun"]

FRESH = 2
"""Number of first steps for which the train state is read each time and everything is kept, to find
what they write.

The second step shows whether the loop adds to existing gradients, as one that accumulates over
steps does.
"""


REFUSED, UNDOABLE, COMMITTED = range(3)
"""Decisions about a step, the most careful first. `UNDOABLE`: it is updated with the old values
kept, and checked again.
"""


class Parts:
    """A train state, and the tensors in it by role."""

    def __init__(self, train_state: TrainState):
        self.train_state = train_state
        self.other = [v.value for v in train_state.other]
        self.weights_and_slots = [v.value for v in (*train_state.trainable, *train_state.slots)]
        self.metrics = {id(v.value) for v in train_state.metrics}
        updated = (*train_state.trainable, *train_state.slots)
        self.holders = [getattr(v, "of", v.value) for v in updated]  # what has a gradient
        self.judged_elsewhere = self.metrics | {id(t) for t in self.weights_and_slots}
        self.judged_elsewhere |= {
            id(v.value)
            for v in (*(s for pair in train_state.scales for s in pair), *train_state.rates)
        }
        self.results = {id(tensor) for tensor in train_state.results}
        self.unlisted = [keras_variables.native(v) for v in train_state.unlisted]
        listed = {id(t) for t in (*self.other, *self.weights_and_slots)}
        self.unlisted = [
            t for t in self.unlisted if isinstance(t, torch.Tensor) and id(t) not in listed
        ]
        for variable in train_state.other:  # buffers of a torch module: torch itself writes them
            if not isinstance(variable, keras.Variable) and not isinstance(
                variable.value, torch.nn.Parameter
            ):
                self.unlisted.append(variable.value)
        self.paths = {id(v.value): v.path for v in (*train_state.trainable, *train_state.other)}
        self.tensors = {id(v): keras_variables.native(v) for v in train_state.trainable}
        self.expected = Expected()
        self.statistics_rows, self.update_rows = (
            reductions.StandingRows(),
            reductions.StandingRows(),
        )
        self.kind = reductions.kind(self.weights_and_slots)
        self.slots = {id(o): reductions.slots_of(train_state, o) for o in train_state.optimizers}
        self.small_state = [*self.other, *(v.value for v in train_state.metrics)]
        self.all = [*self.other, *self.weights_and_slots, *(v.value for v in train_state.metrics)]
        attributes = keras_layers.attributes_of(train_state.layers)
        self._tensors = [
            (held, name) for held, name, value in attributes if isinstance(value, torch.Tensor)
        ]

    def attributes(self, every: bool) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the attributes of layers that are tensors, or all attributes (each may become
        one), with present values.
        """
        if every:
            return keras_layers.attributes_of(self.train_state.layers)
        return [(held, name, held.get(name)) for held, name in self._tensors]


def _equal(tensor: Any, other: Any, nan: bool) -> bool:
    """Whether two tensors of one shape and dtype have the same values; with `nan`, NaN equals
    NaN.
    """
    if not nan:
        return bool(torch.equal(tensor, other))
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


class StepRun:
    """One run of the transaction."""

    seen: Any

    def __init__(self, owner: Any):
        self.owner, self.parts = owner, owner.parts
        self.train_state = self.parts.train_state
        self.may_commit: bool | None = None
        self.error: BaseException | None = None
        self.created_count = 0
        self.update_sums = [0.0, 0.0]
        self.undoable = False
        self.is_shared = owner.agreement is not None and owner.agreement.count > 1
        self.left_by_previous = False
        self.compiled: Any = None

    def complete(self, args: Sequence[Any]) -> Any:
        owner, parts = self.owner, self.parts
        fresh = owner.steps < FRESH
        kept = [*owner.untracked.values(), *(parts.other if fresh else ())]
        adds = not owner.stock and (
            fresh or owner.adds_to_gradients or owner.model is None
        )  # what a step finds stays alive until its end
        held = [(t, t.grad) for t in parts.holders if t.grad is not None] if adds else []
        self.grads = [(t, grad, local(grad)._version) for t, grad in held]
        if fresh and not owner.stock and owner.refuse:
            kept += parts.weights_and_slots
        if (fresh or owner.adds_to_gradients) and owner.refuse:
            kept += [local(grad) for _, grad, _ in self.grads]
        if owner.jit and not fresh:
            self.compiled = owner.compiled = owner.compiled or Compiled(
                owner.body, owner.model, self.train_state.optimizers
            )
            self.undo_log = UndoLog(
                (), self._note_created, [*parts.unlisted, *parts.small_state, *kept], watch=False
            )
        else:
            writes = (
                None
                if owner.stock
                else lambda tensor: self.seen.before_write(tensor, parts.metrics)
            )
            self.undo_log = UndoLog(
                kept,
                self._note_created,
                parts.unlisted,
                writes=writes,
                expected=None if fresh else parts.expected,
            )
        before = [(t, t._version) for t in (parts.small_state if owner.stock else parts.all)]
        self.attributes = parts.attributes(every=fresh)
        outputs = None
        body = self.compiled.body if self.compiled else owner.body
        stand_ins = (
            self.compiled.stand_ins
            if self.compiled
            else StandIns(owner.model, self.train_state.optimizers)
        )
        with (
            self.undo_log,
            Intercept(stand_ins, self._asked, parts.paths, parts.tensors) as self.seen,
        ):
            try:
                outputs = body(*args)
            except Exception as error:
                if not (owner.refuse and self.may_commit is not True and is_numeric(error)):
                    self._abandon()
                    if self.is_shared:
                        group.leave(error)
                    raise
                self.error = error
        versions = [(local(grad)._version, version) for _, grad, version in self.grads]
        owner.adds_to_gradients |= any(now != version for now, version in versions)
        if self.created_count:
            owner.stale = True
        if self.may_commit is None:
            self._judge(outputs)
        return self._conclude(outputs, args, before)

    def close(self) -> None:
        """Release the gradients. A run and the replacements of its body refer to each other and
        would wait for the garbage collector.
        """
        vars(self).clear()

    def _asked(self, record: Update) -> str:
        """Return when an update runs, and build its optimizer now, as Keras would, so that its
        variables are noted.
        """
        if record.build():
            self.owner.stale = True
        if not self.owner.refuse:
            return "now"
        if not self.owner.stock:
            return "later" if self.compiled is None else "kept"
        if self.may_commit is None:
            self._judge(None)
        return "never" if not self.may_commit else "kept" if self.undoable else "now"

    def _note_created(self, variable: Any) -> None:
        tensor = variable.value
        if not tensor.is_meta:
            self.created_count += 1
            self.owner.note_created(tensor, keras_variables.read(variable))

    def _abandon(self) -> None:
        """Undo a step that ends in an exception. After its update nothing is kept and nothing can
        be undone.
        """
        if self.owner.refuse and not self.may_commit:
            self._undo()

    def _undo(self) -> None:
        """Undo every write, and every replacement of a tensor in an attribute of a layer."""
        self.seen.give_back()
        self.undo_log.give_back()
        keras_layers.give_back_tensors(self.attributes)

    def _judge(self, outputs: Any) -> None:
        """Compute and read the verdict: the only place where the host waits for the device."""
        owner, seen = self.owner, self.seen
        if self.created_count:
            self._read_anew()
        kind = self.parts.kind
        apart = (
            self.parts.judged_elsewhere | owner.tolerated
            if owner.tolerated
            else self.parts.judged_elsewhere
        )
        written = self.undo_log.written
        self.statistics = [t for t in written if id(t) not in apart and reductions.can_be_bad(t)]
        losses = seen.losses or owner.outputs.losses(outputs)
        gradients = self._gradients()
        sums = [reductions.added(losses, kind), reductions.squares(gradients, kind)]
        sums.append(reductions.total(self.statistics, kind, self.parts.statistics_rows))
        scales = [self._before(scale.value).to(kind) for scale, _ in self.train_state.scales]
        early = bool(seen.undo) or not owner.refuse
        update_sums = self._update_sums(math.inf) if early and reductions.is_away(sums[1]) else ()
        numbers, scales, now, previous = reductions.looked_at(
            sums, scales, update_sums, owner.unread
        )
        owner.unread = ()
        if not math.isfinite(numbers[2]) and self._tolerate_constants():
            numbers[2] = float(reductions.total(self.statistics, kind))
        self.loss = reductions.confirmed(numbers[0], losses)
        self.gradients = reductions.confirmed(numbers[1], gradients, power=2)
        self.statistic = reductions.confirmed(numbers[2], self.statistics)
        if self.error is not None and math.isfinite(self.gradients):
            self.loss = math.nan
        self.scale = min(scales, default=1.0)
        valid = all(rules.scale_is_valid(rules.NUMBERS, scale) for scale in scales)
        may_commit = self.error is None and valid
        may_commit = may_commit and rules.may_commit(
            rules.NUMBERS, [self.loss, self.gradients, self.statistic]
        )
        if early:
            may_commit = self._read_update_sums(now) and may_commit
        if not math.isfinite(sum(previous)) and not all(
            bool(torch.isfinite(t).all()) for t in self.parts.weights_and_slots
        ):
            self.update_sums, self.left_by_previous, may_commit = previous, True, False
        self.own = self.loss, self.gradients, self.statistic, *self.update_sums
        overflown = not math.isfinite(numbers[1])  # so large that the update may overflow, too
        self._agree(REFUSED if not may_commit else UNDOABLE if overflown else COMMITTED)

    def _agree(self, outcome: int) -> None:
        """Return the common decision of all processes: the most careful one."""
        if self.is_shared:
            outcome = self._agreed(outcome)
        self.may_commit, self.undoable = outcome > REFUSED, outcome == UNDOABLE

    def _agreed(self, outcome: int) -> int:
        """Return the common decision; the numbers of the verdict become the means over all
        processes. One message.
        """
        agreement = self.owner.agreement
        flags = [outcome == REFUSED, outcome == UNDOABLE, agreement.has_news]
        numbers = [self.loss, self.gradients, self.statistic, self.scale, *self.update_sums]
        sums = group.summed([*map(float, flags), *numbers], "their verdict on a step")
        means = (number / agreement.count for number in sums[len(flags) :])
        self.loss, self.gradients, self.statistic, self.scale, *self.update_sums = means
        refused, undoable, agreement.news = (number > 0 for number in sums[: len(flags)])
        return REFUSED if refused else UNDOABLE if undoable else COMMITTED

    def _gradients(self) -> list[Any]:
        """Return the gradients of this step: of its updates, or those left by an exception before
        the first update.
        """
        if self.error is None or self.seen.records:
            return [gradient for record in self.seen.records for gradient in record.gradients]
        return [local(t.grad) for t in self.parts.holders if t.grad is not None]

    def _tolerate_constants(self) -> bool:
        """Exclude unwritten buffers that are infinite on purpose; return whether there are any.

        Values that an earlier call has left in a layer may be NaN, too. For a running statistic
        this would hide the fault.
        """
        old, uncounted, results = self.undo_log.old, self.undo_log.uncounted, self.parts.results
        found = [t for t in self.statistics if id(t) in uncounted]
        found = [t for t in found if _equal(t, old[id(t)][1], nan=id(t) in results)]
        found = [t for t in found if not torch.isfinite(t).all()]
        self.owner.tolerated |= {id(t) for t in found}
        self.statistics = [t for t in self.statistics if id(t) not in self.owner.tolerated]
        return bool(found)

    def _before(self, tensor: Any) -> Any:
        kept = self.undo_log.old.get(id(tensor))
        return tensor.detach() if kept is None else kept[1]

    def _updated(self, gradients: float) -> tuple[list[Any], list[Any]]:
        """Return the weights and slots to read after the updates; see `reductions.updated`."""
        known, steps = self.parts.slots, self.owner.steps
        return reductions.updated(self.train_state, self.seen.records, known, gradients, steps)

    def _update_sums(self, gradients: float) -> tuple[Any, Any]:
        """Return the sums over the weights and slots that were updated, on the device."""
        return reductions.update_sums(
            self._updated(gradients), self.parts.kind, self.parts.update_rows
        )

    def _read_anew(self) -> None:
        """Read the train state, of which the step has created a part."""
        self.parts = Parts(self.owner.read_train_state())
        self.train_state = self.parts.train_state

    def _conclude(self, outputs: Any, args: Sequence[Any], before: list[tuple[Any, int]]) -> Any:
        owner = self.owner
        self._find_untracked(before)
        self.parts.expected.add(self.undo_log.owner)
        owner.keeps_undo |= bool(self.seen.undo) and not self.undoable
        if self.may_commit and self.undoable and owner.refuse:
            self.seen.make()
            self._agree(COMMITTED if self._read_update_sums() else REFUSED)
            self.undoable = True
        if not self.may_commit:
            places = reports.places(self)
            owner.report_queue.places = tuple((site, path) for site, path, _ in places)
            counts = reductions.counts([tensor for _, _, tensor in places])
            loss, gradients, statistic, weights, slots = self.own
            own = Verdict(owner.refuse, loss, gradients, statistic, weights, slots, self.scale)
            owner.report_queue.put(own, counts, args, left_by_previous=self.left_by_previous)
        if self.may_commit or not owner.refuse:
            self.seen.make(keep=False)
            if self._note_slots():
                self._read_anew()
            if owner.refuse and not self.undoable:
                self._read_later()
            owner.verdict = self._verdict(False)
            return outputs
        self._undo()
        self._clear_gradients()
        self._learn_scale()
        owner.verdict = self._verdict(True)
        return outputs

    def _note_slots(self) -> bool:
        """Store variables that the updates have created outside of Keras; return whether there are
        any.
        """
        created = [found for record in self.seen.records for found in record.created()]
        for tensor, value in created:
            self.owner.note_created(tensor, value)
        self.owner.stale |= bool(created)
        return bool(created)

    def _read_update_sums(self, numbers: Sequence[float] = ()) -> bool:
        """Read the sums over the updated state now; return whether all of its entries are finite.

        Args:
            numbers: the sums, if they have been read.
        """
        if not numbers:
            (numbers,) = reductions.looked_at(self._update_sums(self.gradients))
        if not math.isfinite(sum(numbers)):
            read = self._updated(self.gradients)
            numbers = [
                reductions.confirmed(number, tensors) for number, tensors in zip(numbers, read)
            ]
        self.update_sums = list(numbers)
        return math.isfinite(sum(numbers))

    def _read_later(self) -> None:
        """Read the sums over the updated state.

        They are read with the verdict of the next step if the host would otherwise wait for the
        device again, or if other processes need them.
        """
        update_sums = self._update_sums(self.gradients)
        if self.is_shared or reductions.is_away(update_sums[0]):
            self.owner.unread = update_sums
        else:
            (self.update_sums,) = reductions.looked_at(update_sums)

    def _verdict(self, refused: bool) -> Verdict:
        weights, slots = self.update_sums
        return Verdict(
            refused, self.loss, self.gradients, self.statistic, weights, slots, self.scale
        )

    def _find_untracked(self, before: list[tuple[Any, int]]) -> None:
        """Store tensors that were written in place outside of Keras, which are kept before each
        later step.
        """
        known = self.undo_log.owner if self.compiled is None else self.undo_log.old
        changed = [t for t, version in before if t._version != version and id(t) not in known]
        if changed:
            updated = {
                id(t)
                for record in self.seen.records
                if record not in self.seen.waiting
                for t in record.state()
            }
            changed = [t for t in changed if id(t) not in updated]
        if (
            self.owner.jit and self.compiled is None
        ):  # a compiled step does not show what it assigns to
            kept = {id(t) for t in (self.parts.all if self.owner.stock else self.parts.small_state)}
            changed += [self.undo_log.old[key][0] for key in self.undo_log.owner if key not in kept]
        self.owner.untracked.update({id(t): t for t in changed})

    def _clear_gradients(self) -> None:
        """Remove the gradients of a refused step, for a body that accumulates them."""
        for tensor in self.parts.holders:
            tensor.grad = None
        for tensor, grad, _ in self.grads:
            tensor.grad = grad

    def _learn_scale(self) -> None:
        """Update each loss scale after a refusal."""
        for optimizer in self.train_state.optimizers:
            if not (keras_optimizers.is_loss_scaled(optimizer) and optimizer.built):
                continue
            scale, counter = optimizer.dynamic_scale, optimizer.step_counter
            before = float(scale.value), int(counter.value)
            after = rules.learned_scale(
                rules.NUMBERS, self.loss, self.gradients, *before, optimizer.initial_scale
            )
            scale.assign(after[0])
            counter.assign(after[1])
