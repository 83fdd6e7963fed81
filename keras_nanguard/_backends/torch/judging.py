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
from keras_nanguard._backends.torch.begun import Begun
from keras_nanguard._backends.torch.parts import Parts
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
class Observed:
    """What a body has done until it is judged.

    Attributes:
        gradients: the gradients of its updates, each with the path of its weight; if it has none,
            those that it has left.
        statistics: what it has written besides its updates, as far as that is judged.
        state: the tensors of `weights` and `slots` that are judged: all if an update has run, else
            those written by hand.
        raised: whether it has ended in an exception about a bad number.
        has_trials: whether its updates evaluate the loss themselves, more than once.
    """

    parts: Parts
    losses: Sequence[Any]
    gradients: Sequence[tuple[str, Any]]
    statistics: Sequence[Any]
    state: Mapping[str, Sequence[Any]]
    raised: bool
    has_updated: bool
    has_trials: bool

    @classmethod
    def of(cls, begun: Begun, outputs: Any, raised: bool, has_updated: bool) -> Observed:
        """Return what the body of a step has done so far."""
        log, records = begun.log, begun.intercept.records
        parts = begun.facts.read_parts() if log.created else begun.parts
        losses = begun.intercept.losses or begun.facts.losses(outputs)
        return cls(
            parts,
            [loss.detach() for loss in losses],
            _gradients(begun, parts, raised),
            _statistics(log, parts, begun.learned.tolerated),
            parts.by_site if has_updated else _written_by_hand(log, parts),
            raised,
            has_updated,
            has_trials=bool(records) and all(record.has_trials for record in records),
        )


def _gradients(begun: Begun, parts: Parts, raised: bool) -> list[tuple[str, Any]]:
    intercept = begun.intercept
    if intercept.records:
        pairs = [pair for record in intercept.records for pair in record.pairs]
        return [(variable.path, gradient) for gradient, variable in pairs]
    # A scaler will check those of a scaled loss.
    leaves = intercept.noted > 0 and not (intercept.is_scaled or begun.has_written_weights)
    return parts.gradients() if raised or leaves else []


def _statistics(log: UndoLog, parts: Parts, tolerated: Container[int]) -> list[Any]:
    gradients = {id(local(gradient)) for _, gradient in log.gradients or ()}
    unjudged = gradients | parts.judged_elsewhere
    written = [t for t in log.written if not (id(t) in unjudged or id(t) in tolerated)]
    return list(filter(reductions.is_inexact, written))


def _written_by_hand(log: UndoLog, parts: Parts) -> dict[str, list[Any]]:
    if parts.updated.isdisjoint(log.kept):  # the healthy step of a Keras optimizer
        return {}
    written = set(map(id, log.written))
    return {site: [t for t in held if id(t) in written] for site, held in parts.by_site.items()}


def _constants(statistics: Iterable[Any], log: UndoLog, parts: Parts) -> frozenset[int]:
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


@dataclass(frozen=True, eq=False)
class Judged:
    """The verdict on one step, and what decided it.

    Attributes:
        keeps_undo: whether one of all processes keeps old values, so that the next step has to.
        verdict: the numbers; means over all processes, if there are several.
        own: the numbers of this process alone.
        written: the tensors of the state that were judged, by site.
        left_by_previous: whether the previous step has left bad numbers in the state.
        constants: the `id` of buffers that turned out to be infinite on purpose.
    """

    parts: Parts
    ruling: Ruling
    keeps_undo: bool
    verdict: Verdict
    own: Verdict
    gradients: Sequence[tuple[str, Any]]
    written: Mapping[str, Sequence[Any]]
    left_by_previous: bool
    constants: frozenset[int]


def places(begun: Begun, judged: Judged) -> list[tuple[str, str, Any]]:
    """Return `(site, path, tensor)` of everything that a report of the step counts."""
    state, kept = judged.parts.train_state, begun.log.kept.items()
    paths = {key: entry.writer.path for key, entry in kept if entry.writer is not None}
    paths |= {id(v.value): v.path for v in (*state.trainable, *state.other, *state.slots)}
    found = [("outputs", path, tensor) for path, tensor in begun.intercept.outputs]
    found += [("gradients", path, gradient) for path, gradient in judged.gradients]
    return found + [
        (site, paths.get(id(tensor), "unlisted variable"), tensor)
        for site, tensors in judged.written.items()
        for tensor in tensors
    ]


def judge(
    begun: Begun, outputs: Any = None, raised: bool = False, has_updated: bool = False
) -> Judged:
    """Read all numbers of a step and decide. In a healthy step the host waits for the device only
    here. Tells the agreement whether any process has news.

    Args:
        outputs: what its body has returned, if it has ended.
        raised: whether it has ended in an exception about a bad number.
    """
    learned, agreement = begun.learned, begun.facts.run.agreement
    observed = Observed.of(begun, outputs, raised, has_updated)
    parts, gradients = observed.parts, observed.gradients
    written = {"statistics": observed.statistics, **observed.state}
    tensors = {"gradients": [gradient for _, gradient in gradients], **written}
    read, constants = _read(observed, begun.log, tensors, learned.unread), frozenset[int]()
    if not math.isfinite(sum(read["statistics"])):
        constants = _constants(observed.statistics, begun.log, parts)
        kept = [tensor for tensor in observed.statistics if id(tensor) not in constants]
        written["statistics"] = kept
        read |= reductions.read({"statistics": reductions.norms(kept)})
    norms = _norms(read, written)
    previous = _norms(read, {site: parts.by_site[site] for site in learned.unread}, "previous ")
    left_by_previous = not all(map(math.isfinite, previous.values()))
    squares = reductions.squares_of(read["gradients"], tensors["gradients"])
    is_finite = all(map(math.isfinite, norms.values()))
    if observed.has_trials and is_finite and not math.isfinite(squares):
        gradients, squares = [], 0.0  # of a point that a line search has tried and left
    own = _verdict(observed, read, squares, {**norms, **previous} if left_by_previous else norms)
    ruling, keeps_undo = _ruling(observed, read, own), learned.continues is not False
    verdict = own
    if agreement.count > 1:
        ruling, keeps_undo, verdict = _agreed(ruling, keeps_undo, own, agreement)
    decided = ruling, keeps_undo, verdict, own
    return Judged(parts, *decided, gradients, written, left_by_previous, constants)


def _read(
    observed: Observed,
    log: UndoLog,
    tensors: Mapping[str, Sequence[Any]],
    unread: Mapping[str, Sequence[Any]],
) -> dict[str, list[float]]:
    """Read the numbers of a verdict, with one read of the device: losses, scales, the norms of
    these tensors by site, and those norms that the last step has left `unread`.
    """
    scales = [scale.value for scale, _ in observed.parts.train_state.scales]
    return reductions.read(
        {
            "losses": [loss.sum() if loss.ndim else loss for loss in observed.losses],
            "scales": [log.before(scale) for scale in scales],
            **{site: reductions.norms(given) for site, given in tensors.items()},
            **{f"previous {site}": norms for site, norms in unread.items()},
        }
    )


def _norms(
    read: Mapping[str, Sequence[float]], tensors: Mapping[str, Sequence[Any]], prefix: str = ""
) -> dict[str, float]:
    """Return the norm of all these tensors of each site, from those of each tensor."""
    return {site: reductions.norm_of(read[prefix + site], given) for site, given in tensors.items()}


def are_finite(unread: Mapping[str, Sequence[Any]], parts: Parts) -> bool:
    """Whether these norms of the updated state by site are finite."""
    norms = _norms(reductions.read(unread), {site: parts.by_site[site] for site in unread})
    return all(map(math.isfinite, norms.values()))


def _verdict(
    observed: Observed,
    read: Mapping[str, Sequence[float]],
    squares: float,
    norms: Mapping[str, float],
) -> Verdict:
    """Return the verdict from the numbers that were read, and the norms of the state by site."""
    loss = reductions.sum_of(read["losses"], observed.losses)
    return Verdict(
        False,
        loss=math.nan if observed.raised and math.isfinite(squares) else loss,
        gradients=squares,
        statistics=norms["statistics"],
        weights=norms.get("weights", 0.0),
        slots=norms.get("slots", 0.0),
        scale=min(read["scales"], default=1.0),
    )


def _ruling(observed: Observed, read: Mapping[str, Sequence[float]], own: Verdict) -> Ruling:
    finite = own.finite and not observed.raised
    if not rules.may_commit(rules.NUMBERS, finite, read["scales"]):
        return Ruling.REFUSE
    # Gradients whose squares overflow are so large that the update may overflow, too.
    overflows = not math.isfinite(sum([norm * norm for norm in read["gradients"]]))
    return Ruling.CHECK if overflows and not observed.has_updated else Ruling.COMMIT


def _agreed(
    ruling: Ruling, keeps_undo: bool, own: Verdict, agreement: Agreement
) -> tuple[Ruling, bool, Verdict]:
    """Return the most careful ruling of all processes, whether one of them keeps old values, and
    the means of their verdicts.
    """
    careful = [ruling is Ruling.REFUSE, ruling is Ruling.CHECK]
    flags = [*careful, keeps_undo, agreement.has_news]
    sums = host.summed([*map(float, flags), *own[1:7]], "the verdict on a step")
    *careful, keeps_undo, news = (number > 0 for number in sums[:4])
    agreement.hear(news)
    means = (number / agreement.count for number in sums[4:])
    agreed = Ruling([*careful, True].index(True))
    return agreed, keeps_undo, Verdict.of((0.0, *means, 0.0, 0.0))


def read_update(
    parts: Parts, verdict: Verdict, agreement: Agreement
) -> tuple[Verdict, Mapping[str, Sequence[Any]]]:
    """Return the verdict with the norms of the updated state; or unchanged, and these norms by site
    if they are better read with the verdict of the next step: if the host would wait for the device
    again, or if other processes need them.
    """
    norms = {site: reductions.norms(tensors) for site, tensors in parts.by_site.items()}
    if agreement.count > 1 or reductions.is_away(parts.by_site["weights"]):
        return verdict, norms
    updated = _norms(reductions.read(norms), parts.by_site)
    return verdict._replace(weights=updated["weights"], slots=updated["slots"]), {}
