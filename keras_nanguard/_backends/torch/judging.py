"""The verdict on one step on PyTorch: the checked tensors, its numbers, and the decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.parts import Parts
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._core.verdict import Verdict

NO_VERDICT = Verdict(False, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
"""The verdict before there are any numbers."""

REFUSE, CHECK, COMMIT = range(3)
"""Decisions about a step, the most careful first. `CHECK`: it is updated with the old values kept,
and the updated state decides.
"""


class Judgement:
    """The verdict on one step, and the decision that follows from it.

    Args:
        transaction: the `Transaction`.
        seen: the calls of optimizers and loss.
        log: the undo log of the step.

    Attributes:
        decision: one of `REFUSE`, `CHECK` and `COMMIT`, `None` before it was made.
        verdict: the numbers so far; means over all processes, if there are several.
        own: the numbers of this process alone, at the time of the decision.
        statistics: what the step has written besides its updates, as far as it is judged.
        constants: the `id` of tensors that are infinite on purpose.
        update_is_read: whether the verdict has the norms of the updated weights and slots.
        left_by_previous: whether the previous step has left bad numbers in the state.
        is_shared: whether several processes decide together.
    """

    def __init__(self, transaction: Any, seen: Intercept, log: UndoLog):
        self.transaction, self.seen, self.log = transaction, seen, log
        self.decision: int | None = None
        self.verdict = self.own = NO_VERDICT
        self.statistics: list[Any] = []
        self.constants: set[int] = set()
        self.update_is_read = self.left_by_previous = False
        agreement = transaction.agreement
        self.is_shared = agreement is not None and agreement.count > 1
        self._rewritten = transaction.parts.slots_written_since(transaction.slot_versions)

    @property
    def parts(self) -> Parts:
        """The train state."""
        return self.transaction.parts  # type: ignore[no-any-return]

    def judge(self, outputs: Any, raised: bool, updated: bool) -> None:
        """Read all numbers and decide. The only place where the host waits for the device.

        Args:
            outputs: what the body has returned, `None` so far.
            raised: whether it has ended in an exception about a bad number.
            updated: whether updates have run already.
        """
        transaction, seen = self.transaction, self.seen
        losses = [loss.detach() for loss in seen.losses or transaction.losses(outputs)]
        gradients = [gradient for record in seen.records for gradient in record.gradients]
        if raised and not seen.records:  # what was left before the first update
            gradients = [gradient for _, gradient in self.parts.gradients()]
        self.statistics = self._written_statistics()
        state = self._updated(math.inf) if updated else {}
        scales = [scale.value for scale, _ in self.parts.train_state.scales]
        read = reductions.read(
            {
                "losses": [loss.sum() if loss.ndim else loss for loss in losses],
                "gradients": reductions.norms(gradients),
                "statistics": reductions.norms(self.statistics),
                "scales": [self.log.before(scale) for scale in scales],
                **{site: reductions.norms(tensors) for site, tensors in state.items()},
                **{f"previous {site}": norms for site, norms in transaction.unread.items()},
            }
        )
        if not math.isfinite(sum(read["statistics"])):
            self._tolerate_constants()
            read |= reductions.read({"statistics": reductions.norms(self.statistics)})
        loss = reductions.sum_of(read["losses"], losses)
        squares = reductions.squares_of(read["gradients"], gradients)
        norms = {site: reductions.norm_of(read[site], tensors) for site, tensors in state.items()}
        self.verdict = Verdict(
            False,
            loss=math.nan if raised and math.isfinite(squares) else loss,
            gradients=squares,
            statistics=reductions.norm_of(read["statistics"], self.statistics),
            weights=norms.get("weights", 0.0),
            slots=norms.get("slots", 0.0),
            scale=min(read["scales"], default=1.0),
        )
        self.update_is_read = updated
        if transaction.unread:
            self._judge_previous({site: read[f"previous {site}"] for site in transaction.unread})
        self.own = self.verdict
        finite = self.verdict.finite and not raised
        if not rules.may_commit(rules.NUMBERS, finite, read["scales"]):
            self._decide(REFUSE)
        else:  # gradients whose squares overflow are so large that the update may overflow, too
            overflows = not math.isfinite(sum([norm * norm for norm in read["gradients"]]))
            self._decide(CHECK if overflows else COMMIT)

    def judge_update(self) -> None:
        """Decide by the updated state, after `CHECK`."""
        self._read_update(self._updated(self.verdict.gradients))
        finite = math.isfinite(self.verdict.weights + self.verdict.slots)
        self._decide(COMMIT if finite else REFUSE)

    def read_update(self) -> Mapping[str, Sequence[Any]]:
        """Read the norms of the updated state, or return them by site if they are better read with
        the verdict of the next step: if the host would wait for the device again, or if other
        processes need them.
        """
        state = self._updated(self.verdict.gradients)
        if self.is_shared or reductions.is_away(state["weights"]):
            return {site: reductions.norms(tensors) for site, tensors in state.items()}
        self._read_update(state)
        return {}

    def places(self, updated: bool, raised: bool) -> list[tuple[str, str, Any]]:
        """Return `(site, path, tensor)` of everything that a report of the step counts.

        Args:
            updated: whether updates have run.
            raised: whether the body has ended in an exception about a bad number.
        """
        seen, state = self.seen, self.parts.train_state
        paths = {key: variable.path for key, variable in self.log.writers.items()}
        paths |= {id(v.value): v.path for v in (*state.trainable, *state.other)}
        found = [("outputs", name, t) for name, t in seen.outputs]
        found += [("gradients", v.path, g) for record in seen.records for g, v in record.pairs]
        if raised and not seen.records:
            found += [("gradients", path, gradient) for path, gradient in self.parts.gradients()]
        found += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in self.statistics]
        if updated:
            for site, variables in (("weights", state.trainable), ("slots", state.slots)):
                bad = (v for v in variables if reductions.can_be_bad(v.value))
                found += [(site, v.path, v.value) for v in bad]
        return found

    def _decide(self, decision: int) -> None:
        """Decide as all processes do: the most careful one counts. The numbers of the verdict
        become the means over all of them. One message.
        """
        if self.is_shared:
            agreement, verdict = self.transaction.agreement, self.verdict
            flags = [decision == REFUSE, decision == CHECK, agreement.has_news]
            numbers = [*map(float, flags), *verdict[1:7]]
            sums = host.summed(numbers, "the verdict on a step")
            refuse, check, agreement.news = (number > 0 for number in sums[:3])
            self.verdict = Verdict(False, *(number / agreement.count for number in sums[3:]))
            decision = REFUSE if refuse else CHECK if check else COMMIT
        self.decision = decision

    def _judge_previous(self, unread: Mapping[str, Sequence[float]]) -> None:
        """Judge the state that the previous step has left, by norms that are read only now."""
        state = self.parts.weights_and_slots
        found = {site: reductions.norm_of(norms, state) for site, norms in unread.items()}
        if not all(map(math.isfinite, found.values())):
            self.left_by_previous = True
            weights, slots = found["weights"], found["slots"]
            self.verdict = self.verdict._replace(weights=weights, slots=slots)

    def _written_statistics(self) -> list[Any]:
        apart = self.parts.judged_elsewhere | self.transaction.tolerated
        written = self.log.written
        return [t for t in written if id(t) not in apart and reductions.can_be_bad(t)]

    def _tolerate_constants(self) -> None:
        """Exclude unwritten buffers that are infinite on purpose.

        Values that an earlier call has left in a layer may be NaN, too. For a running statistic
        this would hide the fault.
        """
        log = self.log
        for tensor in self.statistics:
            if id(tensor) in log.uncounted and not torch.isfinite(tensor).all():
                before, nan = log.before(tensor), id(tensor) in self.parts.results
                if torch.allclose(tensor, before, rtol=0.0, atol=0.0, equal_nan=nan):
                    self.constants.add(id(tensor))
        self.statistics = [t for t in self.statistics if id(t) not in self.constants]

    def _read_update(self, state: Mapping[str, Sequence[Any]]) -> None:
        read = reductions.read({site: reductions.norms(t) for site, t in state.items()})
        weights, slots = (reductions.norm_of(read[site], t) for site, t in state.items())
        self.verdict = self.verdict._replace(weights=weights, slots=slots)
        self.update_is_read = True

    def _updated(self, gradients: float) -> dict[str, list[Any]]:
        """Return the updated `weights` and `slots` to read, given half the sum of squares of the
        gradients.
        """
        weights = self.transaction.verdict.weights  # their norm, after the previous step
        bound = gradients + 0.5 * weights * weights
        due = rules.full_read_is_due(rules.NUMBERS, self.transaction.steps, bound)
        return self.parts.updated(self.seen.records, due, self._rewritten)
