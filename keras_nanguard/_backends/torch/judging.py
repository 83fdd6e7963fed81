"""The verdict on a step on PyTorch: the numbers, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from keras_nanguard._backends.interface import Agreement
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.attempt import Attempt
from keras_nanguard._backends.torch.state import StateTensors
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._core.verdict import Report, Verdict


class Ruling(Enum):
    """What happens to a step, the most careful first."""

    REFUSE = "refuse"
    CHECK = "check"
    """It is updated with the old values kept, and the updated state decides."""
    COMMIT = "commit"


class Checked(NamedTuple):
    """The tensors of one step that are checked.

    Attributes:
        state: the train state.
        has_updated: whether an update has run.
        gradients: those that count, each with the path of its weight: those of its updates; if it
            has none, those that it has left.
        written: those of each site: `statistics`, what it has written besides its updates; of
            `weights` and `slots` all if an update has run, else those written by hand.
        constants: the `id` of the unwritten buffers that are infinite on purpose, which are not
            checked.
    """

    state: StateTensors
    has_updated: bool
    losses: Sequence[Any]
    gradients: Sequence[tuple[str, Any]]
    written: Mapping[str, Sequence[Any]]
    constants: frozenset[int] = frozenset()

    @property
    def by_site(self) -> dict[str, Sequence[Any]]:
        """The gradients, and what was written, by site."""
        return {"gradients": [gradient for _, gradient in self.gradients], **self.written}

    def without(self, constants: frozenset[int]) -> Checked:
        """Return these tensors without those statistics."""
        statistics = [t for t in self.written["statistics"] if id(t) not in constants]
        written = {**self.written, "statistics": statistics}
        return self._replace(written=written, constants=constants)


class Numbers(NamedTuple):
    """What is read of the device for one step: its losses, all loss scales before it, the norm of
    each tensor by site, and those of the previous update that were not read with it.
    """

    losses: Sequence[float]
    scales: Sequence[float]
    norms: Mapping[str, Sequence[float]]
    previous: Mapping[str, Sequence[float]]


class Judged(NamedTuple):
    """The verdict on one step, and what decided it: what its body has done until then.

    Attributes:
        ruling: what all processes do: the most careful one of theirs.
        verdict: the means of their numbers.
        own: the numbers of this process alone.
        left_by_previous: whether the last step has left bad numbers in the state.
        any_continues: whether the body of one of them may continue after its update.
        has_news: whether one of them has findings between two steps that the others do not have.
    """

    ruling: Ruling
    verdict: Verdict
    own: Verdict
    checked: Checked
    left_by_previous: bool
    any_continues: bool
    has_news: bool = False


def report(attempt: Attempt, judged: Judged, args: Sequence[Any]) -> Report:
    """Return the report of a bad step of this process. No argument is copied."""
    checked, train_state = judged.checked, judged.checked.state.train_state
    paths = {key: variable.path for key, variable in attempt.log.writers.items()}
    listed = (*train_state.trainable, *train_state.other, *train_state.slots)
    paths |= {id(variable.value): variable.path for variable in listed}
    outputs = attempt.outputs_of(attempt.step.model)
    found = [("outputs", path, tensor) for path, tensor in outputs]
    found += [("gradients", path, gradient) for path, gradient in checked.gradients]
    found += [
        (site, paths.get(id(tensor), "unlisted variable"), tensor)
        for site, tensors in checked.written.items()
        for tensor in tensors
    ]
    return Report(
        judged.own._replace(refused=attempt.step.run.refuses),
        tuple((site, path) for site, path, _ in found),
        reductions.counts([tensor for _, _, tensor in found]),
        tuple(args),
        left_by_previous=judged.left_by_previous,
    )


def judge(attempt: Attempt) -> Judged:
    """Read all numbers of a step and decide. In a healthy step the host waits for the device only
    here: with one read of it, if all numbers are finite.
    """
    checked = _checked(attempt)
    numbers = _read(attempt, checked)
    if not math.isfinite(sum(numbers.norms["statistics"])):
        checked = checked.without(_constants(checked, attempt.log))
        numbers = _read(attempt, checked)
    written = _norms_by_site(numbers.norms, checked.written)
    are_trials = attempt.has_only_line_searches and _all_finite(written)
    if are_trials and not math.isfinite(_squares(checked, numbers)):
        # The gradients are bad only at a point that a line search has tried and left.
        checked = checked._replace(gradients=())
        numbers = _read(attempt, checked)
    previous = _norms_by_site(numbers.previous, checked.state.by_site)
    left_by_previous = not _all_finite(previous)
    norms = written | previous if left_by_previous else written
    own = _own_verdict(checked, numbers, norms, attempt.raised)
    ruling = _ruling(checked, numbers, own, attempt.raised)
    may_continue = attempt.learned.continues is not False
    alone = Judged(ruling, own, own, checked, left_by_previous, may_continue)
    return _agreed(alone, attempt.step.run.agreement)


def _checked(attempt: Attempt) -> Checked:
    """Return the tensors of a step that are checked."""
    step, log, has_updated = attempt.step, attempt.log, bool(attempt.updated)
    attempt.note_created()
    state = step.read_state() if log.created else attempt.state
    losses = [loss.detach() for loss in attempt.losses or step.losses(attempt.outputs)]
    gradients = _gradients(attempt, state)
    statistics = _statistics(log, state, attempt.learned.tolerated)
    updated = state.by_site if has_updated else _written_by_hand(log, state)
    written = {"statistics": statistics, **updated}
    return Checked(state, has_updated, losses, gradients, written)


def _read(attempt: Attempt, checked: Checked) -> Numbers:
    """Read the numbers of these tensors, with one read of the device."""
    scales = [attempt.log.before(scale.value) for scale, _ in checked.state.train_state.scales]
    norms = {site: reductions.norms(tensors) for site, tensors in checked.by_site.items()}
    previous = {f"previous {site}": norms for site, norms in attempt.learned.unread.items()}
    losses = [loss.sum() if loss.ndim else loss for loss in checked.losses]
    read = reductions.read({"losses": losses, "scales": scales, **norms, **previous})
    return Numbers(
        read["losses"],
        read["scales"],
        {site: read[site] for site in norms},
        {site: read[f"previous {site}"] for site in attempt.learned.unread},
    )


def _squares(checked: Checked, numbers: Numbers) -> float:
    """Return half the sum of squares of the gradients."""
    return reductions.squares_of(numbers.norms["gradients"], checked.by_site["gradients"])


def _own_verdict(
    checked: Checked, numbers: Numbers, norms: Mapping[str, float], raised: bool
) -> Verdict:
    """Return the numbers of this process; `norms`: by site, those of the previous update if they
    are bad.
    """
    squares = _squares(checked, numbers)
    loss = reductions.sum_of(numbers.losses, checked.losses)
    return Verdict(
        False,
        loss=math.nan if raised and math.isfinite(squares) else loss,
        gradients=squares,
        statistics=norms["statistics"],
        weights=norms.get("weights", 0.0),
        slots=norms.get("slots", 0.0),
        scale=rules.common_scale(rules.NUMBERS, numbers.scales, 1.0),
    )


def _ruling(checked: Checked, numbers: Numbers, own: Verdict, raised: bool) -> Ruling:
    if not rules.may_commit(rules.NUMBERS, own.finite and not raised, numbers.scales):
        return Ruling.REFUSE
    # The update may overflow if the squares of the gradients do.
    may_overflow = not math.isfinite(sum([norm * norm for norm in numbers.norms["gradients"]]))
    return Ruling.CHECK if may_overflow and not checked.has_updated else Ruling.COMMIT


def _agreed(alone: Judged, agreement: Agreement) -> Judged:
    """Return the verdict of all processes, with that of this one alone."""
    if agreement.count == 1:
        return alone
    is_refused, is_checked = alone.ruling is Ruling.REFUSE, alone.ruling is Ruling.CHECK
    flags = [is_refused, is_checked, alone.any_continues, agreement.has_news]
    sums = host.summed([*map(float, flags), *alone.own[1:7]], "the verdict on a step")
    refuses, checks, continues, has_news = (number > 0 for number in sums[:4])
    ruling = Ruling.REFUSE if refuses else Ruling.CHECK if checks else Ruling.COMMIT
    means = (number / agreement.count for number in sums[4:])
    verdict = Verdict.of((0.0, *means, 0.0, 0.0))
    return alone._replace(
        ruling=ruling, verdict=verdict, any_continues=continues, has_news=has_news
    )


def are_finite(unread: Mapping[str, Sequence[Any]], state: StateTensors) -> bool:
    """Whether these norms of the updated state by site are finite."""
    return _all_finite(_norms_by_site(reductions.read(unread), state.by_site))


def _all_finite(norms: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, norms.values()))


def read_update(
    state: StateTensors, verdict: Verdict, agreement: Agreement
) -> tuple[Verdict, Mapping[str, Sequence[Any]]]:
    """Return the verdict with the norms of the updated state; or unchanged, and these norms by site
    if they are better read with the verdict of the next step: if the host would wait for the device
    again, or if other processes need them.
    """
    norms = {site: reductions.norms(tensors) for site, tensors in state.by_site.items()}
    if agreement.count > 1 or reductions.is_away(state.by_site["weights"]):
        return verdict, norms
    updated = _norms_by_site(reductions.read(norms), state.by_site)
    return verdict._replace(weights=updated["weights"], slots=updated["slots"]), {}


def _gradients(attempt: Attempt, state: StateTensors) -> list[tuple[str, Any]]:
    if attempt.updates:
        pairs = [pair for update in attempt.updates for pair in update.pairs]
        return [(variable.path, gradient) for gradient, variable in pairs]
    # A scaler will check those of a scaled loss.
    leaves = attempt.loss_count > 0 and not (attempt.is_scaled or attempt.has_written_weights)
    return state.gradients() if attempt.raised or leaves else []


def _statistics(log: UndoLog, state: StateTensors, tolerated: Container[int]) -> list[Any]:
    unjudged = log.gradients.kept_ids | state.not_statistics
    written = [t for t in log.written if not (id(t) in unjudged or id(t) in tolerated)]
    return list(filter(reductions.is_inexact, written))


def _written_by_hand(log: UndoLog, state: StateTensors) -> dict[str, list[Any]]:
    if state.updated.isdisjoint(log.kept):  # the healthy step of a Keras optimizer
        return {}
    written = set(map(id, log.written))
    return {site: [t for t in held if id(t) in written] for site, held in state.by_site.items()}


def _constants(checked: Checked, log: UndoLog) -> frozenset[int]:
    """Return the `id` of the unwritten buffers among the statistics that are infinite on purpose.

    Values that an earlier call has left in a layer may be NaN, too. For a running statistic this
    would hide the fault.
    """
    found, results = set(), set(map(id, checked.state.train_state.results))
    for tensor in checked.written["statistics"]:
        kept = log.kept[id(tensor)]
        if kept.is_counted or kept.differs:
            continue
        ((nan, inf, _),) = reductions.counts([tensor])
        if id(tensor) in results if nan else inf:
            found.add(id(tensor))
    return frozenset(found)


def _norms_by_site(
    read: Mapping[str, Sequence[float]], tensors: Mapping[str, Sequence[Any]]
) -> dict[str, float]:
    """Return the norm of all tensors of each site that was read, from those of each tensor."""
    return {
        site: reductions.norm_of(read[site], given)
        for site, given in tensors.items()
        if site in read
    }
