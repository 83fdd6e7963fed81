"""The verdict on a step on PyTorch: the numbers, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from keras_nanguard._backends.interface import Agreement
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras.tensors import local


class Ruling(IntEnum):
    """What happens to a step, the most careful first."""

    REFUSE = 0
    CHECK = 1
    """It is updated with the old values kept, and the updated state decides."""
    COMMIT = 2


@dataclass(frozen=True, eq=False)
class Judged:
    """The verdict on one step, and what decided it: what its body has done until then.

    Attributes:
        any_continues: whether the body of one of all processes may continue after its update.
        verdict: the numbers; means over all processes, if there are several.
        news: whether any process has findings between two steps that the others do not have.
        own: the numbers of this process alone.
        parts: the train state.
        has_updated: whether an update has run.
        gradients: the gradients that count, each with the path of its weight: those of its updates;
            if it has none, those that it has left.
        written: the judged tensors of each site: `statistics`, what it has written besides its
            updates; of `weights` and `slots` all if an update has run, else those written by hand.
        constants: the `id` of the unwritten buffers that are infinite on purpose, which are not
            judged.
        left_by_previous: whether the last step has left bad numbers in the state.
    """

    ruling: Ruling
    any_continues: bool
    verdict: Verdict
    news: bool
    own: Verdict
    parts: StateTensors
    has_updated: bool
    gradients: Sequence[tuple[str, Any]]
    written: Mapping[str, Sequence[Any]]
    constants: frozenset[int]
    left_by_previous: bool


def places(context: StepContext, judged: Judged) -> list[tuple[str, str, Any]]:
    """Return `(site, path, tensor)` of everything that a report of the step counts."""
    state, kept = judged.parts.train_state, context.log.kept.items()
    paths = {key: entry.writer.path for key, entry in kept if entry.writer is not None}
    paths |= {id(v.value): v.path for v in (*state.trainable, *state.other, *state.slots)}
    found = [("outputs", path, tensor) for path, tensor in context.intercept.outputs]
    found += [("gradients", path, gradient) for path, gradient in judged.gradients]
    return found + [
        (site, paths.get(id(tensor), "unlisted variable"), tensor)
        for site, tensors in judged.written.items()
        for tensor in tensors
    ]


def judge(
    context: StepContext, outputs: Any = None, raised: bool = False, has_updated: bool = False
) -> Judged:
    """Read all numbers of a step and decide. In a healthy step the host waits for the device only
    here: with one read of it, if all numbers are finite.

    Args:
        outputs: what its body has returned, if it has ended.
        raised: whether it has ended in an exception about a bad number.
        has_updated: whether one of its updates has run.
    """
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
        written["statistics"] = [t for t in statistics if id(t) not in constants]
        read |= reductions.read({"statistics": reductions.norms(written["statistics"])})
    norms = _norms_by_site(read, written)
    left = _norms_by_site(read, {site: parts.by_site[site] for site in unread}, "previous ")
    left_by_previous = not _all_finite(left)
    squares = reductions.squares_of(read["gradients"], tensors["gradients"])
    has_trials = bool(records) and all(record.has_trials for record in records)
    if has_trials and _all_finite(norms) and not math.isfinite(squares):
        gradients, squares = [], 0.0  # of a point that a line search has tried and left
    loss = reductions.sum_of(read["losses"], losses)
    loss = math.nan if raised and math.isfinite(squares) else loss
    own = _verdict(loss, squares, {**norms, **(left if left_by_previous else {})}, read["scales"])
    # The update may overflow if the squares of the gradients do.
    may_overflow = not math.isfinite(sum([norm * norm for norm in read["gradients"]]))
    needs_check = may_overflow and not has_updated
    ruling = _ruling(own, read["scales"], raised, needs_check)
    return Judged(
        *_agreed(ruling, context, own),
        own=own,
        parts=parts,
        has_updated=has_updated,
        gradients=gradients,
        written=written,
        constants=constants,
        left_by_previous=left_by_previous,
    )


def _verdict(
    loss: float, squares: float, norms: Mapping[str, float], scales: Sequence[float]
) -> Verdict:
    """Return the verdict of this process, from norms by site and all loss scales before the step;
    `squares` is half the sum of those of gradients.
    """
    return Verdict(
        False,
        loss=loss,
        gradients=squares,
        statistics=norms["statistics"],
        weights=norms.get("weights", 0.0),
        slots=norms.get("slots", 0.0),
        scale=rules.common_scale(rules.NUMBERS, scales, 1.0),
    )


def _ruling(own: Verdict, scales: Sequence[float], raised: bool, needs_check: bool) -> Ruling:
    if not rules.may_commit(rules.NUMBERS, own.finite and not raised, scales):
        return Ruling.REFUSE
    return Ruling.CHECK if needs_check else Ruling.COMMIT


def are_finite(unread: Mapping[str, Sequence[Any]], parts: StateTensors) -> bool:
    """Whether these norms of the updated state by site are finite."""
    tensors = {site: parts.by_site[site] for site in unread}
    return _all_finite(_norms_by_site(reductions.read(unread), tensors))


def _all_finite(norms: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, norms.values()))


def _agreed(
    ruling: Ruling, context: StepContext, own: Verdict
) -> tuple[Ruling, bool, Verdict, bool]:
    """Return the most careful ruling of all processes, whether the body of one of them may
    continue, the means of their verdicts, and whether one of them has news.
    """
    agreement = context.definition.run.agreement
    continues = context.learned.continues.is_possible
    if agreement.count == 1:
        return ruling, continues, own, False
    careful = [ruling is Ruling.REFUSE, ruling is Ruling.CHECK]
    flags = [*careful, continues, agreement.has_news]
    sums = host.summed([*map(float, flags), *own[1:7]], "the verdict on a step")
    *careful, continues, news = (number > 0 for number in sums[:4])
    means = (number / agreement.count for number in sums[4:])
    agreed = Ruling([*careful, True].index(True))
    return agreed, continues, Verdict.of((0.0, *means, 0.0, 0.0)), news


def read_update(
    parts: StateTensors, verdict: Verdict, agreement: Agreement
) -> tuple[Verdict, Mapping[str, Sequence[Any]]]:
    """Return the verdict with the norms of the updated state; or unchanged, and these norms by site
    if they are better read with the verdict of the next step: if the host would wait for the device
    again, or if other processes need them.
    """
    norms = {site: reductions.norms(tensors) for site, tensors in parts.by_site.items()}
    if agreement.count > 1 or reductions.is_away(parts.by_site["weights"]):
        return verdict, norms
    updated = _norms_by_site(reductions.read(norms), parts.by_site)
    return verdict._replace(weights=updated["weights"], slots=updated["slots"]), {}


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


def _norms_by_site(
    read: Mapping[str, Sequence[float]], tensors: Mapping[str, Sequence[Any]], prefix: str = ""
) -> dict[str, float]:
    """Return the norm of all these tensors of each site, from those of each tensor."""
    return {site: reductions.norm_of(read[prefix + site], given) for site, given in tensors.items()}
