"""The verdict on one step on PyTorch: the tensors of the train state by role, the numbers of the
step, and the decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import keras
import torch

from keras_nanguard._backends.interface import Agreement
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.modules import TorchOptimizer, local
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import attributes as keras_attributes, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

NO_VERDICT = Verdict(False, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
"""The verdict before there are any numbers."""


class Decision(IntEnum):
    """A decision about a step, the most careful first."""

    REFUSE = 0
    CHECK = 1
    """It is updated with the old values kept, and the updated state decides."""
    COMMIT = 2


@dataclass(slots=True)
class Carried:
    """What the steps of one body have shown, and later ones need.

    Attributes:
        steps: their number.
        stale: whether the train state has to be read again before the next one.
        unread: norms of the updated `weights` and `slots`, if they are still on a device. They are
            read with the verdict of the next step.
        untracked: tensors that the body writes in place outside of Keras, by `id`; they are kept
            before each step.
        tolerated: the `id` of tensors that may be infinite or NaN.
        keeps_undo: whether an update had to run before the verdict.
        adds_to_gradients: whether the body adds to the gradients of an earlier step, which are then
            kept before each step.
    """

    steps: int = 0
    stale: bool = True
    unread: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    untracked: dict[int, Any] = field(default_factory=dict)
    tolerated: set[int] = field(default_factory=set)
    keeps_undo: bool = False
    adds_to_gradients: bool = False


class Parts:
    """A train state, and the tensors in it by role.

    Attributes:
        weights, slots: what updates write.
        weights_and_slots: both in one list.
        updated: the `id` of each of them.
        other: statistics, frozen weights, seeds and states of recurrent layers.
        small_state: `other`, and the tensors of metrics.
        all: all of these tensors.
        holders: what has a gradient.
        unlisted: tensors that may be written although Keras lists them nowhere, buffers of torch
            modules included.
        results: the `id` of tensors that earlier calls have left in layers.
        judged_elsewhere: the `id` of tensors that are not statistics.
        loose: the optimizers of torch in attributes of the model or its layers that are not among
            the optimizers of the train state.
    """

    def __init__(self, train_state: TrainState):
        self.train_state = train_state
        self.weights, self.slots = _of(train_state.trainable), _of(train_state.slots)
        self.weights_and_slots = [*self.weights, *self.slots]
        self.other, metrics = _of(train_state.other), _of(train_state.metrics)
        self.small_state = [*self.other, *metrics]
        self.all = [*self.small_state, *self.weights_and_slots]
        self.holders = [getattr(v, "of", v.value) for v in train_state.trainable]
        self.results = {id(tensor) for tensor in train_state.results}
        settings = (*(s for pair in train_state.scales for s in pair), *train_state.rates)
        self.updated = {id(tensor) for tensor in self.weights_and_slots}
        self.judged_elsewhere = self.updated | {id(t) for t in (*metrics, *_of(settings))}
        listed = self.updated | {id(t) for t in self.other}
        natives = [keras_variables.native(v) for v in train_state.unlisted]
        self.unlisted = [t for t in natives if isinstance(t, torch.Tensor) and id(t) not in listed]
        self.unlisted += [v.value for v in train_state.other if _is_buffer(v)]
        attributes = keras_attributes.attributes_of(train_state.layers)
        self._of_tensors = [entry for entry in attributes if isinstance(entry[2], torch.Tensor)]
        known = [getattr(optimizer, "of", None) for optimizer in train_state.optimizers]
        found = [held for _, _, held in attributes if isinstance(held, torch.optim.Optimizer)]
        self.loose = [TorchOptimizer(held, {}) for held in found if held not in known]

    @property
    def by_site(self) -> dict[str, list[Any]]:
        """What updates write, by site: `weights`, `slots`."""
        return {"weights": self.weights, "slots": self.slots}

    def gradients(self) -> list[tuple[str, Any]]:
        """Return the current gradients, each with the path of its weight."""
        pairs = zip(self.train_state.trainable, self.holders)
        return [(v.path, local(t.grad)) for v, t in pairs if t.grad is not None]

    def attributes(self, every: bool) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the attributes of layers that are tensors, or all attributes (each may become
        one), with current values.
        """
        if every:
            return keras_attributes.attributes_of(self.train_state.layers)
        return [(held, name, held.get(name)) for held, name, _ in self._of_tensors]


def _of(variables: Iterable[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def _is_buffer(variable: Any) -> bool:
    """Whether this is a buffer of a torch module, which torch itself writes."""
    of_keras = isinstance(variable, keras.Variable)
    return not (of_keras or isinstance(variable.value, torch.nn.Parameter))


class Judgement:
    """The verdict on one step, and the decision that follows from it.

    Args:
        carried: what earlier steps have shown.
        parts: the train state before the step.
        agreement: the agreement of processes that train together.
        find_losses: returns the losses among the outputs of a body that calls no `compute_loss`.
        seen: the calls of optimizers and loss.
        log: the undo log of the step.

    Attributes:
        decision: `None` before it was made.
        verdict: the numbers so far; means over all processes, if there are several.
        own: the numbers of this process alone, at the time of the decision.
        statistics: what the step has written besides its updates, as far as it is judged.
        unrecorded: the weights and slots that it has written without an optimizer, by site.
        raised: whether the body has ended in an exception about a bad number.
        updated: whether updates had run before the decision.
        left_by_previous: whether the previous step has left bad numbers in the state.
        is_shared: whether several processes decide together.
    """

    def __init__(
        self,
        carried: Carried,
        parts: Parts,
        agreement: Agreement,
        find_losses: Callable[[Any], list[Any]],
        seen: Intercept,
        log: UndoLog,
    ):
        self.carried, self.agreement, self.find_losses = carried, agreement, find_losses
        self.seen, self.log = seen, log
        self.decision: Decision | None = None
        self.verdict = self.own = NO_VERDICT
        self.statistics: list[Any] = []
        self.unrecorded: dict[str, list[Any]] = {}
        self.left_by_previous = self.raised = self.updated = False
        self.is_shared = agreement.count > 1

    def judge(self, parts: Parts, outputs: Any, *, raised: bool, updated: bool) -> None:
        """Read all numbers and decide. The only place where the host waits for the device.

        Args:
            parts: the train state.
            outputs: what the body has returned, `None` so far.
            raised, updated: see the attributes.
        """
        seen, unread = self.seen, self.carried.unread
        self.raised, self.updated = raised, updated
        losses = [loss.detach() for loss in seen.losses or self.find_losses(outputs)]
        gradients = [gradient for record in seen.records for gradient in record.gradients]
        if raised and not seen.records:  # what was left before the first update
            gradients = [gradient for _, gradient in parts.gradients()]
        self.statistics = self._written_statistics(parts)
        self.unrecorded = state = self._unrecorded(parts)
        if updated and seen.records:
            state = parts.by_site
        scales = [scale.value for scale, _ in parts.train_state.scales]
        read = reductions.read(
            {
                "losses": [loss.sum() if loss.ndim else loss for loss in losses],
                "gradients": reductions.norms(gradients),
                "statistics": reductions.norms(self.statistics),
                "scales": [self.log.before(scale) for scale in scales],
                **{site: reductions.norms(tensors) for site, tensors in state.items()},
                **{f"previous {site}": norms for site, norms in unread.items()},
            }
        )
        if not math.isfinite(sum(read["statistics"])):
            self._tolerate_constants(parts)
            read |= reductions.read({"statistics": reductions.norms(self.statistics)})
        loss = reductions.sum_of(read["losses"], losses)
        squares = reductions.squares_of(read["gradients"], gradients)
        norms = {site: reductions.norm_of(read[site], tensors) for site, tensors in state.items()}
        both = parts.weights_and_slots
        previous = {s: reductions.norm_of(read[f"previous {s}"], both) for s in unread}
        if not all(map(math.isfinite, previous.values())):
            self.left_by_previous, norms = True, previous
        self.verdict = self.own = Verdict(
            False,
            loss=math.nan if raised and math.isfinite(squares) else loss,
            gradients=squares,
            statistics=reductions.norm_of(read["statistics"], self.statistics),
            weights=norms.get("weights", 0.0),
            slots=norms.get("slots", 0.0),
            scale=min(read["scales"], default=1.0),
        )
        finite = self.verdict.finite and not raised
        # Gradients whose squares overflow are so large that the update may overflow, too.
        overflows = not math.isfinite(sum([norm * norm for norm in read["gradients"]]))
        if not rules.may_commit(rules.NUMBERS, finite, read["scales"]):
            self._decide(Decision.REFUSE)
        else:
            self._decide(Decision.CHECK if overflows and not updated else Decision.COMMIT)

    def read_update(self, parts: Parts) -> Mapping[str, Sequence[Any]]:
        """Read the norms of the updated state, or return them by site if they are better read with
        the verdict of the next step: if the host would wait for the device again, or if other
        processes need them.
        """
        state = parts.by_site
        norms = {site: reductions.norms(tensors) for site, tensors in state.items()}
        if self.is_shared or reductions.is_away(parts.weights):
            return norms
        read = reductions.read(norms)
        weights, slots = (reductions.norm_of(read[site], t) for site, t in state.items())
        self.verdict = self.verdict._replace(weights=weights, slots=slots)
        return {}

    def places(self, parts: Parts) -> list[tuple[str, str, Any]]:
        """Return `(site, path, tensor)` of everything that a report of the step counts."""
        seen, state = self.seen, parts.train_state
        paths = {key: variable.path for key, variable in self.log.writers.items()}
        paths |= {id(v.value): v.path for v in (*state.trainable, *state.other)}
        found = [("outputs", name, t) for name, t in seen.outputs]
        found += [("gradients", v.path, g) for record in seen.records for g, v in record.pairs]
        if self.raised and not seen.records:
            found += [("gradients", path, gradient) for path, gradient in parts.gradients()]
        found += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in self.statistics]
        written = {id(tensor) for tensors in self.unrecorded.values() for tensor in tensors}
        for site, variables in (("weights", state.trainable), ("slots", state.slots)):
            shown = [v for v in variables if self.updated or id(v.value) in written]
            found += [(site, v.path, v.value) for v in shown]
        return found

    def _unrecorded(self, parts: Parts) -> dict[str, list[Any]]:
        """Return the `weights` and `slots` that the step has written, and none of its updates
        writes.
        """
        if parts.updated.isdisjoint(self.log.old):  # the healthy step of a Keras optimizer
            return {}
        recorded = {id(tensor) for record in self.seen.records for tensor in record.state()}
        written = {id(tensor) for tensor in self.log.written} - recorded
        return {
            site: [t for t in held if id(t) in written] for site, held in parts.by_site.items()
        }

    def _decide(self, decision: Decision) -> None:
        """Decide as all processes do: the most careful one counts. The numbers of the verdict
        become the means over all of them. One message.
        """
        if self.is_shared:
            agreement, verdict = self.agreement, self.verdict
            careful = [decision is Decision.REFUSE, decision is Decision.CHECK]
            flags = [*careful, agreement.has_news]
            numbers = [*map(float, flags), *verdict[1:7]]
            sums = host.summed(numbers, "the verdict on a step")
            *careful, agreement.news = (number > 0 for number in sums[:3])
            means = (number / agreement.count for number in sums[3:])
            self.verdict = Verdict.of((0.0, *means, 0.0, 0.0))
            decision = Decision([*careful, True].index(True))
        self.decision = decision

    def _written_statistics(self, parts: Parts) -> list[Any]:
        apart = parts.judged_elsewhere | self.carried.tolerated
        written = self.log.written
        return [t for t in written if id(t) not in apart and reductions.can_be_bad(t)]

    def _tolerate_constants(self, parts: Parts) -> None:
        """Exclude unwritten buffers that are infinite on purpose.

        Values that an earlier call has left in a layer may be NaN, too. For a running statistic
        this would hide the fault.
        """
        log = self.log
        for tensor in self.statistics:
            if id(tensor) in log.uncounted and not torch.isfinite(tensor).all():
                before, nan = log.before(tensor), id(tensor) in parts.results
                if torch.allclose(tensor, before, rtol=0.0, atol=0.0, equal_nan=nan):
                    self.carried.tolerated.add(id(tensor))
        self.statistics = self._written_statistics(parts)
