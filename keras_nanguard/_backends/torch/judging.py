"""The verdict on one step on PyTorch: the tensors of the train state by role, the numbers of the
step, and the decision.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import keras
import torch

from keras_nanguard._backends.interface import Agreement, Learned
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.modules import local, loose_optimizers
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


@dataclass(frozen=True)
class Facts(Learned):
    """What the steps of one body have shown. Keys are the `id` of tensors; untracked ones are kept
    before each step.

    Attributes:
        steps: their number.
        stale: whether the train state has to be read again before the next one.
        unread: norms of the updated `weights` and `slots`, if they are still on a device. They are
            read with the verdict of the next step.
        adds_to_gradients: whether the body adds to the gradients of an earlier step, which are then
            kept before each step.
    """

    steps: int = 0
    stale: bool = True
    unread: Mapping[str, Sequence[Any]] = field(default_factory=dict)
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
        self.loose = loose_optimizers(train_state.layers, train_state.optimizers)

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


@dataclass(frozen=True)
class Ran:
    """What a body has done until it is judged.

    Attributes:
        seen: the calls of optimizers and loss.
        log: what it has written.
        losses: its losses.
        raised: whether it has ended in an exception about a bad number.
        updated: whether updates have run before the decision.
    """

    seen: Intercept
    log: UndoLog
    losses: Sequence[Any]
    raised: bool
    updated: bool

    def statistics(self, parts: Parts, tolerated: Container[int]) -> list[Any]:
        """Return what it has written besides its updates, as far as that is judged."""
        return [
            tensor
            for tensor in self.log.written
            if id(tensor) not in parts.judged_elsewhere
            and id(tensor) not in tolerated
            and reductions.can_be_bad(tensor)
        ]

    def unrecorded(self, parts: Parts) -> dict[str, list[Any]]:
        """Return the `weights` and `slots` that it has written, and none of its updates writes."""
        if parts.updated.isdisjoint(self.log.old):  # the healthy step of a Keras optimizer
            return {}
        recorded = {id(tensor) for record in self.seen.records for tensor in record.state()}
        written = {id(tensor) for tensor in self.log.written} - recorded
        return {
            site: [t for t in held if id(t) in written] for site, held in parts.by_site.items()
        }

    def constants(self, statistics: Iterable[Any], parts: Parts) -> frozenset[int]:
        """Return the `id` of the unwritten buffers among these that are infinite on purpose.

        Values that an earlier call has left in a layer may be NaN, too. For a running statistic
        this would hide the fault.
        """
        found = set()
        for tensor in statistics:
            if id(tensor) in self.log.uncounted and not torch.isfinite(tensor).all():
                before, nan = self.log.before(tensor), id(tensor) in parts.results
                if torch.allclose(tensor, before, rtol=0.0, atol=0.0, equal_nan=nan):
                    found.add(id(tensor))
        return frozenset(found)


@dataclass(frozen=True)
class Judged:
    """The verdict on one step, and what decided it.

    Attributes:
        ran: what was judged.
        decision: the decision.
        verdict: the numbers; means over all processes, if there are several.
        own: the numbers of this process alone.
        statistics: what the step has written besides its updates, as far as it is judged.
        unrecorded: the weights and slots that it has written without an optimizer, by site.
        left_by_previous: whether the previous step has left bad numbers in the state.
        constants: the `id` of buffers that turned out to be infinite on purpose.
    """

    ran: Ran
    decision: Decision
    verdict: Verdict
    own: Verdict
    statistics: Sequence[Any]
    unrecorded: Mapping[str, Sequence[Any]]
    left_by_previous: bool
    constants: frozenset[int]

    def places(self, parts: Parts) -> list[tuple[str, str, Any]]:
        """Return `(site, path, tensor)` of everything that a report of the step counts."""
        ran, state = self.ran, parts.train_state
        records = ran.seen.records
        paths = {key: variable.path for key, variable in ran.log.writers.items()}
        paths |= {id(v.value): v.path for v in (*state.trainable, *state.other)}
        found = [("outputs", name, t) for name, t in ran.seen.outputs]
        found += [("gradients", v.path, g) for record in records for g, v in record.pairs]
        if ran.raised and not records:
            found += [("gradients", path, gradient) for path, gradient in parts.gradients()]
        found += [("statistics", paths.get(id(t), "unlisted variable"), t) for t in self.statistics]
        written = {id(tensor) for tensors in self.unrecorded.values() for tensor in tensors}
        for site, variables in (("weights", state.trainable), ("slots", state.slots)):
            shown = [v for v in variables if ran.updated or id(v.value) in written]
            found += [(site, v.path, v.value) for v in shown]
        return found


def judge(ran: Ran, parts: Parts, learned: Facts, agreement: Agreement) -> Judged:
    """Read all numbers of a step and decide. The only place where the host waits for the device.

    Args:
        ran: what its body has done.
        parts: the train state.
        learned: what earlier steps have shown.
        agreement: the agreement of processes that train together.
    """
    records, constants = ran.seen.records, frozenset[int]()
    gradients = [gradient for record in records for gradient in record.gradients]
    if ran.raised and not records:  # what was left before the first update
        gradients = [gradient for _, gradient in parts.gradients()]
    statistics, unrecorded = ran.statistics(parts, learned.tolerated), ran.unrecorded(parts)
    state = parts.by_site if ran.updated and records else unrecorded
    scales = [scale.value for scale, _ in parts.train_state.scales]
    read = reductions.read(
        {
            "losses": [loss.sum() if loss.ndim else loss for loss in ran.losses],
            "gradients": reductions.norms(gradients),
            "statistics": reductions.norms(statistics),
            "scales": [ran.log.before(scale) for scale in scales],
            **{site: reductions.norms(tensors) for site, tensors in state.items()},
            **{f"previous {site}": norms for site, norms in learned.unread.items()},
        }
    )
    if not math.isfinite(sum(read["statistics"])):
        constants = ran.constants(statistics, parts)
        statistics = [tensor for tensor in statistics if id(tensor) not in constants]
        read |= reductions.read({"statistics": reductions.norms(statistics)})
    both = parts.weights_and_slots
    previous = {s: reductions.norm_of(read[f"previous {s}"], both) for s in learned.unread}
    left_by_previous = not all(map(math.isfinite, previous.values()))
    norms = {site: reductions.norm_of(read[site], tensors) for site, tensors in state.items()}
    own = _verdict(ran, read, gradients, statistics, previous if left_by_previous else norms)
    decision, verdict = _agreed(_decision(ran, read, own), own, agreement)
    return Judged(
        ran, decision, verdict, own, statistics, unrecorded, left_by_previous, constants
    )


def _verdict(
    ran: Ran,
    read: Mapping[str, Sequence[float]],
    gradients: Sequence[Any],
    statistics: Sequence[Any],
    norms: Mapping[str, float],
) -> Verdict:
    """Return the verdict from the numbers that were read, and the norms of weights and slots."""
    loss = reductions.sum_of(read["losses"], ran.losses)
    squares = reductions.squares_of(read["gradients"], gradients)
    return Verdict(
        False,
        loss=math.nan if ran.raised and math.isfinite(squares) else loss,
        gradients=squares,
        statistics=reductions.norm_of(read["statistics"], statistics),
        weights=norms.get("weights", 0.0),
        slots=norms.get("slots", 0.0),
        scale=min(read["scales"], default=1.0),
    )


def _decision(ran: Ran, read: Mapping[str, Sequence[float]], own: Verdict) -> Decision:
    """Return the decision of this process."""
    finite = own.finite and not ran.raised
    if not rules.may_commit(rules.NUMBERS, finite, read["scales"]):
        return Decision.REFUSE
    # Gradients whose squares overflow are so large that the update may overflow, too.
    overflows = not math.isfinite(sum([norm * norm for norm in read["gradients"]]))
    return Decision.CHECK if overflows and not ran.updated else Decision.COMMIT


def _agreed(
    decision: Decision, own: Verdict, agreement: Agreement
) -> tuple[Decision, Verdict]:
    """Return the decision of all processes, which is that of the most careful one, and the means of
    their verdicts. One message.
    """
    if agreement.count == 1:
        return decision, own
    careful = [decision is Decision.REFUSE, decision is Decision.CHECK]
    flags = [*careful, agreement.has_news]
    sums = host.summed([*map(float, flags), *own[1:7]], "the verdict on a step")
    *careful, agreement.news = (number > 0 for number in sums[:3])
    means = (number / agreement.count for number in sums[3:])
    return Decision([*careful, True].index(True)), Verdict.of((0.0, *means, 0.0, 0.0))


def read_update(
    parts: Parts, verdict: Verdict, is_shared: bool
) -> tuple[Verdict, Mapping[str, Sequence[Any]]]:
    """Return the verdict with the norms of the updated state; or unchanged, and these norms by site
    if they are better read with the verdict of the next step: if the host would wait for the device
    again, or if other processes need them.
    """
    norms = {site: reductions.norms(tensors) for site, tensors in parts.by_site.items()}
    if is_shared or reductions.is_away(parts.weights):
        return verdict, norms
    read = reductions.read(norms)
    weights, slots = (reductions.norm_of(read[site], t) for site, t in parts.by_site.items())
    return verdict._replace(weights=weights, slots=slots), {}
