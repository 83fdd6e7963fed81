"""One run of the transaction on PyTorch; `step` has its outline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions, reports
from keras_nanguard._backends.torch.arguments import as_tensors
from keras_nanguard._backends.torch.backup import Backup
from keras_nanguard._backends.torch.intercept import Compiled, Intercept
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.parts import Parts
from keras_nanguard._backends.torch.update_queue import UpdateQueue
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables

FRESH = 2
"""Number of first steps in which the train state is read each time and everything is kept, to find
the tensors that a step writes.

The second step shows whether the loop adds to existing gradients, as one that accumulates over
steps does.
"""


REFUSE, CHECK, COMMIT = range(3)
"""Decisions about a step, the most careful first. `CHECK`: it is updated with the old values kept,
and the updated state decides.
"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a guarded step.

    Attributes:
        outputs: what the body returned; `None` if it raised an exception about a bad number.
        verdict: the numbers of the step; means over all processes, if there are several.
        report: its report, `None` if it is healthy.
        unread: norms of the updated `weights` and `slots`, if they are still on a device. They are
            read with the verdict of the next step.
        has_created: whether it has created variables, so that the train state has to be read again.
    """

    outputs: Any
    verdict: Verdict
    report: Report | None
    unread: Mapping[str, Sequence[Any]]
    has_created: bool


class StepRun:
    """One run of the transaction.

    Args:
        owner: the `Transaction`.
        args: the arguments of the body.

    Attributes:
        seen: the calls of optimizers and loss.
        backup: what a refusal restores.
        updates: the updates that wait for the verdict.
        statistics: what the step has written besides its updates, as far as it is judged.
        decision: one of `REFUSE`, `CHECK` and `COMMIT`, `None` before it was made.
        verdict: the numbers so far.
        own: the same of this process alone.
        error: the exception about a bad number that ended the body, if any.
        is_read: whether the verdict has the norms of the updated weights and slots.
        left_by_previous: whether the previous step has left bad numbers in the state.
        has_created: whether the step has created variables.
    """

    seen: Intercept
    backup: Backup
    updates: UpdateQueue
    statistics: list[Any]

    def __init__(self, owner: Any, args: Sequence[Any]):
        self.owner, self.parts, self.args = owner, owner.parts, args
        self.fresh = owner.steps < FRESH
        self.decision: int | None = None
        self.is_read = self.left_by_previous = self.has_created = False
        self.verdict = self.own = Verdict(False, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        self.error: BaseException | None = None
        self.is_shared = owner.agreement is not None and owner.agreement.count > 1
        self.compiled = self._compiled_body()
        self.slots_written_outside = self.parts.slots_written_since(owner.slot_versions)

    def complete(self) -> StepResult:
        """Run the step; commit or refuse it."""
        owner = self.owner
        outputs = self._run_body()
        owner.adds_to_gradients |= self.backup.gradients_were_added_to
        if self.decision is None:
            self._judge(outputs)
        self._note_untracked()
        owner.keeps_undo |= self.updates.early and self.decision != CHECK
        if self.decision == CHECK and owner.refuse:
            self._check_update()
        refused = self.decision == REFUSE
        report = self._report() if refused else None
        unread: Mapping[str, Sequence[Any]] = {}
        if refused and owner.refuse:
            self._refuse()
        else:
            unread = self._commit()
        owner.slot_versions = self.parts.slot_versions()
        return StepResult(outputs, self.verdict, report, unread, self.has_created)

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

    def _run_body(self) -> Any:
        """Run the body and return its outputs; `None` if it raised an exception about a bad
        number.
        """
        owner, parts, compiled = self.owner, self.parts, self.compiled
        self.seen = compiled or owner.intercept_of(parts.train_state.optimizers)
        body = owner.body if compiled is None else compiled.body
        self.backup = Backup(
            owner,
            parts,
            everything=self.fresh,
            is_compiled=compiled is not None,
            note_created=self._note_created,
            before_write=None if owner.stock else self._before_write,
        )
        log, watches = self.backup.log, not owner.stock and compiled is None
        with log, self.seen.running(self._on_update), UpdateQueue(log, watches) as self.updates:
            try:
                return body(*self.args)
            except Exception as error:
                if not (owner.refuse and not self.decision and is_numeric(error)):
                    self._abandon(error)
                    raise
                self.error = error
                return None

    def _on_update(self, record: Update) -> None:
        """Run an update now if it may or must run before the end of the step."""
        owner, updates = self.owner, self.updates
        # The optimizer is built now, as Keras would, so that its variables are noted.
        self.has_created |= record.build()
        if record.is_immediate:
            updates.run(record, keep=True)
        elif not owner.refuse:
            updates.run(record)
        elif owner.stock:
            if self.decision is None:
                self._judge(None)
            if self.decision != REFUSE:
                updates.run(record, keep=self.decision == CHECK)
        elif self.compiled is not None:
            updates.run(record, keep=True)
        else:
            updates.defer(record)

    def _note_created(self, variable: Any) -> None:
        tensor = variable.value
        if not tensor.is_meta:
            self.has_created = True
            self.owner.note_created(tensor, keras_variables.read(variable))

    def _before_write(self, tensor: Any) -> None:
        """Run the deferred updates before Keras writes a tensor that they may read, such as a rate.
        None reads a metric.
        """
        if self.updates.waiting and id(tensor) not in self.parts.metrics:
            self.updates.flush(keep=True)

    def _abandon(self, error: Exception) -> None:
        """Undo a step that ends in an exception. After its update nothing is kept and nothing can
        be undone.
        """
        if self.owner.refuse and not self.decision:
            self.backup.undo()
        if self.is_shared:
            host.leave(error)

    def _note_untracked(self) -> None:
        """Store tensors that were written in place outside of Keras, which are kept before each
        later step.
        """
        owner, parts, log = self.owner, self.parts, self.backup.log
        changed = self.backup.unrecorded()
        if changed:
            run = [record for record in self.seen.records if record not in self.updates.waiting]
            updated = {id(t) for record in run for t in record.state()}
            changed = [t for t in changed if id(t) not in updated]
        if owner.jit and self.compiled is None:  # a compiled step does not show what it assigns to
            kept = {id(t) for t in (parts.all if owner.stock else parts.small_state)}
            changed += [log.old[key].tensor for key in log.writers if key not in kept]
        owner.untracked.update({id(t): t for t in changed})

    # The verdict

    @property
    def _is_updated(self) -> bool:
        """Whether an update has run before the verdict."""
        return self.updates.early or not self.owner.refuse

    def _judge(self, outputs: Any) -> None:
        """Compute and read the verdict: the only place where the host waits for the device."""
        owner, seen = self.owner, self.seen
        if self.has_created:
            self._read_anew()
        self.statistics = self._written_statistics()
        losses = [loss.detach() for loss in seen.losses or owner.losses(outputs)]
        gradients = self._gradients()
        is_updated = self._is_updated
        updated = self._updated(math.inf) if is_updated else {"weights": [], "slots": []}
        scales = [scale for scale, _ in self.parts.train_state.scales]
        read = reductions.read(
            {
                "losses": [loss.sum() if loss.ndim else loss for loss in losses],
                "gradients": reductions.norms(gradients),
                "statistics": reductions.norms(self.statistics),
                "scales": [self.backup.log.before(scale.value) for scale in scales],
                **{site: reductions.norms(tensors) for site, tensors in updated.items()},
                **{f"previous {site}": norms for site, norms in owner.unread.items()},
            }
        )
        if not math.isfinite(sum(read["statistics"])):
            self._tolerate_constants()
            read |= reductions.read({"statistics": reductions.norms(self.statistics)})
        loss = reductions.sum_of(read["losses"], losses)
        squares = reductions.squares_of(read["gradients"], gradients)
        if self.error is not None and math.isfinite(squares):
            loss = math.nan
        self.verdict = Verdict(
            False,
            loss,
            squares,
            statistics=reductions.norm_of(read["statistics"], self.statistics),
            weights=reductions.norm_of(read["weights"], updated["weights"]),
            slots=reductions.norm_of(read["slots"], updated["slots"]),
            scale=min(read["scales"], default=1.0),
        )
        self.is_read = is_updated and not self.updates.waiting
        self._judge_previous({site: read[f"previous {site}"] for site in owner.unread})
        self.own = self.verdict
        valid = all(rules.scale_is_valid(rules.NUMBERS, scale) for scale in read["scales"])
        if self.error is not None or not (valid and self.verdict.finite):
            self._decide(REFUSE)
        else:  # gradients whose squares overflow are so large that the update may overflow, too
            overflows = not math.isfinite(sum([norm * norm for norm in read["gradients"]]))
            self._decide(CHECK if overflows else COMMIT)

    def _judge_previous(self, unread: Mapping[str, Sequence[float]]) -> None:
        """Judge the state that the previous step has left, by norms that are read only now."""
        state = self.parts.weights_and_slots
        found = {site: reductions.norm_of(norms, state) for site, norms in unread.items()}
        if not all(map(math.isfinite, found.values())):
            self.left_by_previous = True
            weights, slots = found["weights"], found["slots"]
            self.verdict = self.verdict._replace(weights=weights, slots=slots)

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
        written = self.backup.log.written
        return [t for t in written if id(t) not in apart and reductions.can_be_bad(t)]

    def _gradients(self) -> list[Any]:
        """Return the gradients of this step: of its updates, or those left by an exception before
        the first update.
        """
        if self.error is None or self.seen.records:
            return [gradient for record in self.seen.records for gradient in record.gradients]
        return [gradient for _, gradient in self.parts.gradients()]

    def _tolerate_constants(self) -> None:
        """Exclude unwritten buffers that are infinite on purpose.

        Values that an earlier call has left in a layer may be NaN, too. For a running statistic
        this would hide the fault.
        """
        log, tolerated = self.backup.log, self.owner.tolerated
        for tensor in self.statistics:
            if id(tensor) in log.uncounted and not torch.isfinite(tensor).all():
                before, nan = log.before(tensor), id(tensor) in self.parts.results
                if torch.allclose(tensor, before, rtol=0.0, atol=0.0, equal_nan=nan):
                    tolerated.add(id(tensor))
        self.statistics = [t for t in self.statistics if id(t) not in tolerated]

    def _updated(self, gradients: float) -> dict[str, list[Any]]:
        """Return the updated `weights` and `slots` to read, given half the sum of squares of the
        gradients.
        """
        weights = self.owner.verdict.weights  # their norm, after the previous step
        bound = gradients + 0.5 * weights * weights
        due = rules.full_read_is_due(rules.NUMBERS, self.owner.steps, bound)
        parts: Parts = self.parts
        return parts.updated(self.seen.records, due, self.slots_written_outside)

    def _read_update(self) -> None:
        """Read the norms of the updated state into the verdict."""
        updated = self._updated(self.verdict.gradients)
        read = reductions.read({site: reductions.norms(t) for site, t in updated.items()})
        norm = {site: reductions.norm_of(read[site], t) for site, t in updated.items()}
        self.verdict = self.verdict._replace(weights=norm["weights"], slots=norm["slots"])

    def _read_anew(self) -> None:
        """Read the train state again, because the step has created a part of it."""
        self.parts = Parts(self.owner.read_train_state())

    # Commit or refuse

    def _check_update(self) -> None:
        """Run the deferred updates with the old values kept, and decide by what they have made."""
        self.updates.flush(keep=True)
        self._read_update()
        finite = math.isfinite(self.verdict.weights + self.verdict.slots)
        self._decide(COMMIT if finite else REFUSE)
        self.is_read = True

    def _commit(self) -> Mapping[str, Sequence[Any]]:
        """Run the deferred updates; return the norms of the updated state, if they are not read
        now.

        They are read with the verdict of the next step if the host would otherwise wait for the
        device again, or if other processes need them.
        """
        self.updates.flush(keep=False)
        created = [found for record in self.seen.records for found in record.created()]
        for tensor, value in created:
            self.owner.note_created(tensor, value)
        if created:
            self.has_created, self.is_read = True, False
            self._read_anew()
        if not self.owner.refuse or self.is_read:
            return {}
        updated = self._updated(self.verdict.gradients)
        if self.is_shared or reductions.is_away(updated["weights"]):
            return {site: reductions.norms(tensors) for site, tensors in updated.items()}
        self._read_update()
        return {}

    def _refuse(self) -> None:
        """Undo the step; each loss scale learns from it."""
        self.backup.undo()
        self.backup.restore_gradients()
        loss, gradients = self.verdict.loss, self.verdict.gradients
        for optimizer in self.parts.train_state.optimizers:
            if keras_optimizers.is_loss_scaled(optimizer) and optimizer.built:
                scale, counter = optimizer.dynamic_scale, optimizer.step_counter
                before = float(scale.value), int(counter.value)
                after = rules.learned_scale(
                    rules.NUMBERS, loss, gradients, *before, optimizer.initial_scale
                )
                scale.assign(after[0])
                counter.assign(after[1])
        self.verdict = self.verdict._replace(refused=True)

    def _report(self) -> Report:
        """Return the report of a bad step, with the numbers of this process. No argument of the
        step is copied.
        """
        places = reports.places(
            self.seen,
            self.parts,
            self.backup.log,
            self.statistics,
            updated=self._is_updated,
            raised=self.error is not None,
        )
        return Report(
            self.own._replace(refused=self.owner.refuse),
            tuple((site, path) for site, path, _ in places),
            reductions.counts([tensor for _, _, tensor in places]),
            as_tensors(self.args),
            left_by_previous=self.left_by_previous,
        )
