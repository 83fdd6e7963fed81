"""What a step on PyTorch has done until it is judged, and the numbers that the host reads of it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras.tensors import local


@dataclass(frozen=True, eq=False)
class Measurements:
    """What a body has done until it is judged, and the numbers of it: the host has read them with
    one read of the device if all of them are finite.

    Attributes:
        raised: whether it has ended in an exception about a bad number.
        has_trials: whether its updates evaluate the loss themselves, more than once.
        losses: its losses, and the sum of each of them in `loss_sums`.
        scales: the loss scales before the step.
        gradients: the gradients of its updates, each with the path of its weight; if it has none,
            those that it has left. The norm of each of them is in `gradient_norms`.
        written: the judged tensors of each site: `statistics`, what it has written besides its
            updates; of `weights` and `slots` all if an update has run, else those written by hand.
        norms: the norm of all of these together, by site.
        previous: the norms that the last step has left `unread`, by site.
        constants: the `id` of the unwritten buffers that are infinite on purpose, which are not
            judged.
    """

    parts: StateTensors
    raised: bool
    has_updated: bool
    has_trials: bool
    losses: Sequence[Any]
    loss_sums: Sequence[float]
    scales: Sequence[float]
    gradients: Sequence[tuple[str, Any]]
    gradient_norms: Sequence[float]
    written: Mapping[str, Sequence[Any]]
    norms: Mapping[str, float]
    previous: Mapping[str, float]
    constants: frozenset[int]

    @classmethod
    def of(
        cls, context: StepContext, outputs: Any, raised: bool, has_updated: bool
    ) -> Measurements:
        """Measure what the body of a step has done so far."""
        log, records, unread = context.log, context.intercept.records, context.learned.unread
        parts = context.definition.read_parts() if log.created else context.parts
        losses = context.intercept.losses or context.definition.losses(outputs)
        losses = [loss.detach() for loss in losses]
        gradients = _gradients(context, parts, raised)
        statistics = _statistics(log, parts, context.learned.tolerated)
        state = parts.by_site if has_updated else _written_by_hand(log, parts)
        written = {"statistics": statistics, **state}
        tensors = {"gradients": [gradient for _, gradient in gradients], **written}
        read = reductions.read(
            {
                "losses": [loss.sum() if loss.ndim else loss for loss in losses],
                "scales": [log.before(scale.value) for scale, _ in parts.train_state.scales],
                **{site: reductions.norms(given) for site, given in tensors.items()},
                **{f"previous {site}": norms for site, norms in unread.items()},
            }
        )
        constants = frozenset[int]()
        if not math.isfinite(sum(read["statistics"])):
            constants = _constants(statistics, log, parts)
            kept = [tensor for tensor in statistics if id(tensor) not in constants]
            written["statistics"] = kept
            read |= reductions.read({"statistics": reductions.norms(kept)})
        left = {site: parts.by_site[site] for site in unread}
        return cls(
            parts,
            raised,
            has_updated,
            has_trials=bool(records) and all(record.has_trials for record in records),
            losses=losses,
            loss_sums=read["losses"],
            scales=read["scales"],
            gradients=gradients,
            gradient_norms=read["gradients"],
            written=written,
            norms=norms_by_site(read, written),
            previous=norms_by_site(read, left, "previous "),
            constants=constants,
        )

    @property
    def has_bad_previous(self) -> bool:
        """Whether the last step has left bad numbers in the state."""
        return not all(map(math.isfinite, self.previous.values()))

    @property
    def is_state_finite(self) -> bool:
        """Whether all judged tensors of the state are finite."""
        return all(map(math.isfinite, self.norms.values()))

    @property
    def may_overflow(self) -> bool:
        """Whether gradients are so large that the update may overflow, because their squares do."""
        return not math.isfinite(sum([norm * norm for norm in self.gradient_norms]))

    def verdict(self, squares: float) -> Verdict:
        """Return the verdict of this process; `squares` is half the sum of those of gradients."""
        loss = reductions.sum_of(self.loss_sums, self.losses)
        common = partial(rules.common_scale, rules.NUMBERS)
        norms = {**self.norms, **(self.previous if self.has_bad_previous else {})}
        return Verdict(
            False,
            loss=math.nan if self.raised and math.isfinite(squares) else loss,
            gradients=squares,
            statistics=norms["statistics"],
            weights=norms.get("weights", 0.0),
            slots=norms.get("slots", 0.0),
            scale=reduce(common, self.scales) if self.scales else 1.0,
        )


def _gradients(context: StepContext, parts: StateTensors, raised: bool) -> list[tuple[str, Any]]:
    intercept = context.intercept
    if intercept.records:
        pairs = [pair for record in intercept.records for pair in record.pairs]
        return [(variable.path, gradient) for gradient, variable in pairs]
    # A scaler will check those of a scaled loss.
    leaves = intercept.noted > 0 and not (intercept.is_scaled or context.has_written_weights)
    return parts.gradients() if raised or leaves else []


def _statistics(log: UndoLog, parts: StateTensors, tolerated: Container[int]) -> list[Any]:
    gradients = {id(local(gradient)) for _, gradient in log.gradients.kept or ()}
    unjudged = gradients | parts.judged_elsewhere
    written = [t for t in log.written if not (id(t) in unjudged or id(t) in tolerated)]
    return list(filter(reductions.is_inexact, written))


def _written_by_hand(log: UndoLog, parts: StateTensors) -> dict[str, list[Any]]:
    if parts.updated.isdisjoint(log.kept):  # the healthy step of a Keras optimizer
        return {}
    written = set(map(id, log.written))
    return {site: [t for t in held if id(t) in written] for site, held in parts.by_site.items()}


def _constants(statistics: Iterable[Any], log: UndoLog, parts: StateTensors) -> frozenset[int]:
    """Return the `id` of the unwritten buffers among these that are infinite on purpose.

    Values that an earlier call has left in a layer may be NaN, too. For a running statistic this
    would hide the fault.
    """
    found, results = set(), set(map(id, parts.train_state.results))
    for key, kept in ((id(tensor), log.kept[id(tensor)]) for tensor in statistics):
        if kept.is_counted or kept.differs:
            continue
        ((nan, inf, _),) = reductions.counts([kept.tensor])
        if key in results if nan else inf:
            found.add(key)
    return frozenset(found)


def norms_by_site(
    read: Mapping[str, Sequence[float]], tensors: Mapping[str, Sequence[Any]], prefix: str = ""
) -> dict[str, float]:
    """Return the norm of all these tensors of each site, from those of each tensor."""
    return {site: reductions.norm_of(read[prefix + site], given) for site, given in tensors.items()}
