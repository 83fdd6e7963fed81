"""One run of the transaction on PyTorch; `step` has its outline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import Compiled, Intercept
from keras_nanguard._backends.torch.modules import local
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.parts import Parts, as_tensors
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)

__all__ = ["FRESH", "StepResult", "StepRun"]

FRESH = 2
"""Number of first steps in which the train state is read each time and everything is kept, to find
the tensors that a step writes.

The second step shows whether the loop adds to existing gradients, as one that accumulates over
steps does.
"""


REFUSE, CHECK, COMMIT = range(3)
"""Decisions about a step, the most careful first. `CHECK`: it is updated with the old values kept,
and checked again.
"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a guarded step.

    Attributes:
        outputs: what the body returned; `None` if it raised an exception about a bad number.
        verdict: the numbers of the step; means over all processes, if there are several.
        report: its report, `None` if it is healthy.
        unread: the norms of the updated weights and slots, if they are still on a device. They are
            read with the verdict of the next step.
        has_created: whether it has created variables, so that the train state has to be read again.
    """

    outputs: Any
    verdict: Verdict
    report: Report | None
    unread: tuple[Any, ...]
    has_created: bool


def _equal(tensor: Any, other: Any, nan: bool) -> bool:
    """Whether two tensors of one shape and dtype have the same values; with `nan`, NaN equals
    NaN.
    """
    if not nan:
        return bool(torch.equal(tensor, other))
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


class StepRun:
    """One run of the transaction.

    Args:
        owner: the `Transaction`.
        args: the arguments of the body.

    Attributes:
        decision: one of `REFUSE`, `CHECK` and `COMMIT`, `None` before it was made.
        verdict: the numbers so far.
        own: the same of this process alone.
        weights_before: the norm of the weights after the last step.
        error: the exception about a bad number that ended the body, if any.
        foreign: the `id` of the optimizers whose slots other code has written before the step.
        statistics: the written statistics that are judged.
        seen: the calls of optimizers and loss.
        is_read: whether the verdict has the norms of the updated weights and slots.
    """

    seen: Intercept
    statistics: list[Any]

    def __init__(self, owner: Any, args: Sequence[Any]):
        self.owner, self.parts, self.args = owner, owner.parts, args
        self.fresh = owner.steps < FRESH
        self.decision: int | None = None
        self.is_read = self.left_by_previous = self.has_created = False
        self.verdict = self.own = Verdict(False, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        self.weights_before = owner.verdict.weights
        self.error: BaseException | None = None
        self.is_shared = owner.agreement is not None and owner.agreement.count > 1

    def complete(self) -> StepResult:
        """Run the step; commit or refuse it."""
        owner, parts = self.owner, self.parts
        versions, known = parts.slot_versions(), owner.slot_versions
        self.foreign = {key for key, counted in versions.items() if known.get(key) != counted}
        adds = self.fresh or owner.adds_to_gradients
        found = [] if owner.stock or not adds else [(t, t.grad) for t in parts.holders]
        # What a step finds stays alive until its end.
        self.grads = [(t, grad, local(grad)._version) for t, grad in found if grad is not None]
        self.compiled = self._compiled_body()
        self.undo_log = self._undo_log()
        before = [(t, t._version) for t in (parts.small_state if owner.stock else parts.all)]
        self.attributes = parts.attributes(every=self.fresh)
        outputs = self._run_body()
        added = [(local(grad)._version, version) for _, grad, version in self.grads]
        owner.adds_to_gradients |= any(now != version for now, version in added)
        if self.decision is None:
            self._judge(outputs)
        self._find_untracked(before)
        result = self._concluded(outputs)
        owner.slot_versions = self.parts.slot_versions()
        return result

    def close(self) -> None:
        """Release the gradients. A run and what records it refer to each other and would wait for
        the garbage collector.
        """
        if "seen" in vars(self):
            self.seen.release()
        vars(self).clear()

    # Running the body

    def _compiled_body(self) -> Compiled | None:
        """Return the compiled body, once the first steps have shown what it writes."""
        owner = self.owner
        if not owner.jit or self.fresh:
            return None
        if owner.compiled is None:
            optimizers = self.parts.train_state.optimizers
            owner.compiled = Compiled(owner.body, owner.model, optimizers)
        return owner.compiled  # type: ignore[no-any-return]

    def _undo_log(self) -> UndoLog:
        """Return the undo log, with what has to be kept before the body runs."""
        owner, parts = self.owner, self.parts
        kept = [*owner.untracked.values(), *(parts.other if self.fresh else ())]
        if self.fresh and not owner.stock and owner.refuse:
            kept += parts.weights_and_slots
        if (self.fresh or owner.adds_to_gradients) and owner.refuse:
            kept += [local(grad) for _, grad, _ in self.grads]
        if self.compiled is not None:
            uncounted = [*parts.unlisted, *parts.small_state, *kept]
            return UndoLog((), self._note_created, uncounted, watch=False)
        writes = None if owner.stock else lambda t: self.seen.before_write(t, parts.metrics)
        return UndoLog(kept, self._note_created, parts.unlisted, writes=writes)

    def _run_body(self) -> Any:
        """Run the body and return its outputs; `None` if it raised an exception about a bad
        number.
        """
        owner, parts, compiled = self.owner, self.parts, self.compiled
        body = owner.body if compiled is None else compiled.body
        self.seen = compiled or owner.intercept_of(parts.train_state.optimizers)
        watches = not owner.stock and compiled is None
        names, log = (parts.paths, parts.natives), self.undo_log
        with log, self.seen.running(self._asked, *names, log, watches):
            try:
                return body(*self.args)
            except Exception as error:
                if not (owner.refuse and not self.decision and is_numeric(error)):
                    self._abandon(error)
                    raise
                self.error = error
                return None

    def _asked(self, record: Update) -> str:
        """Return when an update runs, and build its optimizer now, as Keras would, so that its
        variables are noted.
        """
        self.has_created |= record.build()
        if not self.owner.refuse:
            return "now"
        if not self.owner.stock:
            return "later" if self.compiled is None else "kept"
        if self.decision is None:
            self._judge(None)
        return ("never", "kept", "now")[self.decision or REFUSE]

    def _note_created(self, variable: Any) -> None:
        tensor = variable.value
        if not tensor.is_meta:
            self.has_created = True
            self.owner.note_created(tensor, keras_variables.read(variable))

    def _abandon(self, error: Exception) -> None:
        """Undo a step that ends in an exception. After its update nothing is kept and nothing can
        be undone.
        """
        if self.owner.refuse and not self.decision:
            self._undo()
        if self.is_shared:
            host.leave(error)

    def _undo(self) -> None:
        """Undo every write, and every replacement of a tensor in an attribute of a layer."""
        self.undo_log.give_back()
        keras_layers.give_back_tensors(self.attributes)

    # The verdict

    def _judge(self, outputs: Any) -> None:
        """Compute and read the verdict: the only place where the host waits for the device."""
        owner, seen = self.owner, self.seen
        if self.has_created:
            self._read_anew()
        self.statistics = self._written_statistics()
        losses = [loss.detach() for loss in seen.losses or owner.losses(outputs)]
        gradients = self._gradients()
        scalars = [loss.sum() if loss.ndim else loss for loss in losses]
        sums = (scalars, reductions.norms(gradients), reductions.norms(self.statistics))
        scales = [self._before(s.value) for s, _ in self.parts.train_state.scales]
        early = seen.early or not owner.refuse
        update_norms = self._update_norms(math.inf) if early and reductions.is_away(sums[1]) else ()
        read = reductions.looked_at(*sums, scales, *owner.unread, *update_norms)
        found, squares, statistic = sum(read[0]), reductions.squares_of(read[1]), read[2]
        if not math.isfinite(sum(statistic)) and self._tolerate_constants():
            (statistic,) = reductions.looked_at(reductions.norms(self.statistics))
        loss = reductions.confirmed_sum(found, losses)
        gradient = reductions.confirmed_squares(squares, gradients)
        if self.error is not None and math.isfinite(gradient):
            loss = math.nan
        norm = reductions.confirmed_norm(statistic, self.statistics)
        self.verdict = Verdict(False, loss, gradient, norm, 0.0, 0.0, min(read[3], default=1.0))
        if early:
            self._read_update_norms(read[-2:] if update_norms else ())
            self.is_read = not seen.waiting
        previous = [reductions.norm_of(norms) for norms in read[4 : 4 + len(owner.unread)]]
        if not math.isfinite(sum(previous)) and not all(
            bool(torch.isfinite(t).all()) for t in self.parts.weights_and_slots
        ):
            self.left_by_previous = True
            self.verdict = self.verdict._replace(weights=previous[0], slots=previous[1])
        valid = all(rules.scale_is_valid(rules.NUMBERS, scale) for scale in read[3])
        self.own = self.verdict
        if self.error is not None or not (valid and self.verdict.finite):
            self._decide(REFUSE)
        else:  # gradients whose norm overflows are so large that the update may overflow, too
            self._decide(COMMIT if math.isfinite(squares) else CHECK)

    def _decide(self, decision: int) -> None:
        """Decide as all processes do: the most careful one counts. The numbers of the verdict
        become the means over all of them. One message.
        """
        if self.is_shared:
            agreement, verdict = self.owner.agreement, self.verdict
            flags = [decision == REFUSE, decision == CHECK, agreement.has_news]
            numbers = [*map(float, flags), *verdict[1:7]]
            sums = host.summed(numbers, "the verdict on a step")
            refuse, check, agreement.news = (number > 0 for number in sums[:3])
            self.verdict = Verdict(False, *(number / agreement.count for number in sums[3:]))
            decision = REFUSE if refuse else CHECK if check else COMMIT
        self.decision = decision

    def _written_statistics(self) -> list[Any]:
        apart = self.parts.judged_elsewhere | self.owner.tolerated
        written = self.undo_log.written
        return [t for t in written if id(t) not in apart and reductions.can_be_bad(t)]

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
        """Return the weights and slots to read after the updates."""
        parts: Parts = self.parts
        bounded = gradients + 0.5 * self.weights_before * self.weights_before
        return parts.updated(self.seen.records, bounded, self.owner.steps, self.foreign)

    def _update_norms(self, gradients: float) -> tuple[list[Any], list[Any]]:
        """Return the norms of the weights and slots that were updated, on the device."""
        together, separate = self._updated(gradients)
        return reductions.norms(together), reductions.norms(separate)

    def _read_update_norms(self, norms: Sequence[Sequence[float]] = ()) -> None:
        """Read the norms of the updated state into the verdict.

        Args:
            norms: the norms, if they have been read.
        """
        gradients = self.verdict.gradients
        norms = norms or reductions.looked_at(*self._update_norms(gradients))
        if math.isfinite(sum(map(sum, norms))):
            weights, slots = map(reductions.norm_of, norms)
        else:
            pairs = zip(norms, self._updated(gradients))
            weights, slots = (reductions.confirmed_norm(*pair) for pair in pairs)
        self.verdict = self.verdict._replace(weights=weights, slots=slots)

    def _read_anew(self) -> None:
        """Read the train state again, because the step has created a part of it."""
        self.parts = Parts(self.owner.read_train_state())

    # Commit or refuse

    def _concluded(self, outputs: Any) -> StepResult:
        """Commit or refuse the step; return its result."""
        owner = self.owner
        owner.keeps_undo |= self.seen.early and self.decision != CHECK
        if self.decision == CHECK and owner.refuse:
            self.seen.make()
            self._read_update_norms()
            finite = math.isfinite(self.verdict.weights + self.verdict.slots)
            self._decide(COMMIT if finite else REFUSE)
            self.is_read = True
        report = self._report() if self.decision == REFUSE else None
        unread: tuple[Any, ...] = ()
        if self.decision or not owner.refuse:
            unread = self._commit()
        else:
            self._refuse()
        return StepResult(outputs, self.verdict, report, unread, self.has_created)

    def _commit(self) -> tuple[Any, ...]:
        """Run the deferred updates; return the norms of the updated state, if they are not read
        now.

        They are read with the verdict of the next step if the host would otherwise wait for the
        device again, or if other processes need them.
        """
        self.seen.make(keep=False)
        created = [found for record in self.seen.records for found in record.created()]
        for tensor, value in created:
            self.owner.note_created(tensor, value)
        if created:
            self.has_created, self.is_read = True, False
            self._read_anew()
        if not self.owner.refuse or self.is_read:
            return ()
        update_norms = self._update_norms(self.verdict.gradients)
        if self.is_shared or reductions.is_away(update_norms[0]):
            return update_norms
        weights, slots = map(reductions.norm_of, reductions.looked_at(*update_norms))
        self.verdict = self.verdict._replace(weights=weights, slots=slots)
        return ()

    def _refuse(self) -> None:
        """Undo the step. For a body that accumulates gradients, those from before it are
        restored.
        """
        self._undo()
        for tensor in self.parts.holders:
            tensor.grad = None
        for tensor, grad, _ in self.grads:
            tensor.grad = grad
        self._learn_scale()
        self.verdict = self.verdict._replace(refused=True)

    def _learn_scale(self) -> None:
        """Update each loss scale after a refusal."""
        loss, gradients = self.verdict.loss, self.verdict.gradients
        for optimizer in self.parts.train_state.optimizers:
            if not (keras_optimizers.is_loss_scaled(optimizer) and optimizer.built):
                continue
            scale, counter = optimizer.dynamic_scale, optimizer.step_counter
            before = float(scale.value), int(counter.value)
            after = rules.learned_scale(
                rules.NUMBERS, loss, gradients, *before, optimizer.initial_scale
            )
            scale.assign(after[0])
            counter.assign(after[1])

    def _report(self) -> Report:
        """Return the report of a bad step, with the counts of this process. No argument of the step
        is copied.
        """
        places = self._places()
        return Report(
            self.own._replace(refused=self.owner.refuse),
            tuple((site, path) for site, path, _ in places),
            reductions.counts([tensor for _, _, tensor in places]),
            as_tensors(self.args),
            left_by_previous=self.left_by_previous,
        )

    def _places(self) -> list[tuple[str, str, Any]]:
        """Return `(site, path, tensor)` of everything that a report counts."""
        seen, state = self.seen, self.parts.train_state
        paths = {**{key: v.path for key, v in self.undo_log.owner.items()}, **self.parts.paths}
        found = [("outputs", name, t) for name, t in seen.outputs]
        found += [("gradients", v.path, g) for record in seen.records for g, v in record.pairs]
        if self.error is not None and not seen.records:
            grads = [(v.path, getattr(v, "of", v.value).grad) for v in state.trainable]
            found += [("gradients", path, local(grad)) for path, grad in grads if grad is not None]
        found += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in self.statistics]
        if seen.early or not self.owner.refuse:
            for site, variables in (("weights", state.trainable), ("slots", state.slots)):
                bad = (v for v in variables if reductions.can_be_bad(v.value))
                found += [(site, v.path, v.value) for v in bad]
        return found

    def _find_untracked(self, before: list[tuple[Any, int]]) -> None:
        """Store tensors that were written in place outside of Keras, which are kept before each
        later step.
        """
        owner, parts, seen = self.owner, self.parts, self.seen
        known = self.undo_log.owner if self.compiled is None else self.undo_log.old
        changed = [t for t, version in before if t._version != version and id(t) not in known]
        if changed:
            run = [record for record in seen.records if record not in seen.waiting]
            updated = {id(t) for record in run for t in record.state()}
            changed = [t for t in changed if id(t) not in updated]
        if owner.jit and self.compiled is None:  # a compiled step does not show what it assigns to
            kept = {id(t) for t in (parts.all if owner.stock else parts.small_state)}
            changed += [self.undo_log.old[key][0] for key in self.undo_log.owner if key not in kept]
        owner.untracked.update({id(t): t for t in changed})
