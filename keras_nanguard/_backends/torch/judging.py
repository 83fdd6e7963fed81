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
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.parts import Learned, Parts
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras.tensors import local


class Ruling(IntEnum):
    """What happens to a step, the most careful first."""

    REFUSE = 0
    CHECK = 1
    """It is updated with the old values kept, and the updated state decides."""
    COMMIT = 2


@dataclass(frozen=True)
class Observed:
    """What a body has done until it is judged.

    Attributes:
        log: what it has written.
        raised: whether it has ended in an exception about a bad number.
        leaves_gradients: whether it has computed gradients, and leaves them for a later step.
    """

    intercept: Intercept
    log: UndoLog
    losses: Sequence[Any]
    raised: bool
    updated: bool
    leaves_gradients: bool

    def gradients(self, parts: Parts) -> list[tuple[str, Any]]:
        """Return the gradients of its updates, each with the path of its weight; if it has none,
        those that it has left.
        """
        records = self.intercept.records
        if not records:
            # A scaler will check those of a scaled loss.
            judges_left = self.leaves_gradients and not self.intercept.is_scaled
            return parts.gradients() if self.raised or judges_left else []
        return [(v.path, gradient) for record in records for gradient, v in record.pairs]

    @property
    def has_trials(self) -> bool:
        """Whether its updates evaluate the loss themselves, more than once."""
        records = self.intercept.records
        return bool(records) and all(record.has_trials for record in records)

    def statistics(self, parts: Parts, tolerated: Container[int]) -> list[Any]:
        """Return what it has written besides its updates, as far as that is judged."""
        gradients = {id(local(gradient)) for _, gradient in self.log.gradients or ()}
        return [
            tensor
            for tensor in self.log.written
            if id(tensor) not in parts.judged_elsewhere
            and id(tensor) not in tolerated
            and id(tensor) not in gradients
            and reductions.is_inexact(tensor)
        ]

    def state(self, parts: Parts) -> dict[str, list[Any]]:
        """Return `weights` and `slots`: all if an update has run, else those written by hand."""
        if self.updated:
            return parts.by_site
        if parts.updated.isdisjoint(self.log.kept):  # the healthy step of a Keras optimizer
            return {}
        written = set(map(id, self.log.written))
        return {site: [t for t in held if id(t) in written] for site, held in parts.by_site.items()}

    def constants(self, statistics: Iterable[Any], parts: Parts) -> frozenset[int]:
        """Return the `id` of the unwritten buffers among these that are infinite on purpose.

        Values that an earlier call has left in a layer may be NaN, too. For a running statistic
        this would hide the fault.
        """
        found, results = set(), set(map(id, parts.train_state.results))
        for key, kept in ((id(tensor), self.log.kept[id(tensor)]) for tensor in statistics):
            if kept.is_counted or kept.differs:
                continue
            ((nan, inf, _),) = reductions.counts([kept.tensor])
            if key in results if nan else inf:
                found.add(key)
        return frozenset(found)


@dataclass(frozen=True)
class Judged:
    """The verdict on one step, and what decided it.

    Attributes:
        keeps_undo: whether one of all processes keeps old values, so that the next step has to.
        verdict: the numbers; means over all processes, if there are several.
        own: the numbers of this process alone.
        gradients: the gradients, each with the path of its weight.
        written: the tensors of the state that were judged, by site.
        left_by_previous: whether the previous step has left bad numbers in the state.
        constants: the `id` of buffers that turned out to be infinite on purpose.
    """

    observed: Observed
    ruling: Ruling
    keeps_undo: bool
    verdict: Verdict
    own: Verdict
    gradients: Sequence[tuple[str, Any]]
    written: Mapping[str, Sequence[Any]]
    left_by_previous: bool
    constants: frozenset[int]

    def places(self, parts: Parts) -> list[tuple[str, str, Any]]:
        """Return `(site, path, tensor)` of everything that a report of the step counts."""
        state, kept = parts.train_state, self.observed.log.kept.items()
        paths = {key: entry.writer.path for key, entry in kept if entry.writer is not None}
        paths |= {id(v.value): v.path for v in (*state.trainable, *state.other, *state.slots)}
        found = [("outputs", path, tensor) for path, tensor in self.observed.intercept.outputs]
        found += [("gradients", path, gradient) for path, gradient in self.gradients]
        return found + [
            (site, paths.get(id(tensor), "unlisted variable"), tensor)
            for site, tensors in self.written.items()
            for tensor in tensors
        ]


def judge(observed: Observed, parts: Parts, learned: Learned, agreement: Agreement) -> Judged:
    """Read all numbers of a step and decide. In a healthy step the host waits for the device only
    here. Tells the agreement whether any process has news.
    """
    gradients = observed.gradients(parts)
    written = {"statistics": observed.statistics(parts, learned.tolerated), **observed.state(parts)}
    tensors = {"gradients": [gradient for _, gradient in gradients], **written}
    read, constants = _read(observed, parts, tensors, learned.unread), frozenset[int]()
    if not math.isfinite(sum(read["statistics"])):
        constants = observed.constants(written["statistics"], parts)
        kept = [tensor for tensor in written["statistics"] if id(tensor) not in constants]
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
    return Judged(observed, *decided, gradients, written, left_by_previous, constants)


def _read(
    observed: Observed,
    parts: Parts,
    tensors: Mapping[str, Sequence[Any]],
    unread: Mapping[str, Sequence[Any]],
) -> dict[str, list[float]]:
    """Read the numbers of a verdict, with one read of the device: losses, scales, the norms of
    these tensors by site, and those norms that the last step has left `unread`.
    """
    scales = [scale.value for scale, _ in parts.train_state.scales]
    return reductions.read(
        {
            "losses": [loss.sum() if loss.ndim else loss for loss in observed.losses],
            "scales": [observed.log.before(scale) for scale in scales],
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
    return Ruling.CHECK if overflows and not observed.updated else Ruling.COMMIT


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
