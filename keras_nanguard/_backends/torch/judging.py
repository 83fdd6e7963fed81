"""The verdict on a step on PyTorch: the numbers, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from keras_nanguard._backends.interface import Agreement
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.measurements import Measurements, norms_by_site
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._core.verdict import Verdict


class Ruling(IntEnum):
    """What happens to a step, the most careful first."""

    REFUSE = 0
    CHECK = 1
    """It is updated with the old values kept, and the updated state decides."""
    COMMIT = 2


@dataclass(frozen=True, eq=False)
class Judged:
    """The verdict on one step, and what decided it.

    Attributes:
        any_continues: whether the body of one of all processes may continue after its update.
        verdict: the numbers; means over all processes, if there are several.
        news: whether any process has findings between two steps that the others do not have.
        own: the numbers of this process alone.
        gradients: those that count for it, each with the path of its weight.
    """

    ruling: Ruling
    any_continues: bool
    verdict: Verdict
    news: bool
    own: Verdict
    gradients: Sequence[tuple[str, Any]]
    measured: Measurements


def places(context: StepContext, judged: Judged) -> list[tuple[str, str, Any]]:
    """Return `(site, path, tensor)` of everything that a report of the step counts."""
    state, kept = judged.measured.parts.train_state, context.log.kept.items()
    paths = {key: entry.writer.path for key, entry in kept if entry.writer is not None}
    paths |= {id(v.value): v.path for v in (*state.trainable, *state.other, *state.slots)}
    found = [("outputs", path, tensor) for path, tensor in context.intercept.outputs]
    found += [("gradients", path, gradient) for path, gradient in judged.gradients]
    return found + [
        (site, paths.get(id(tensor), "unlisted variable"), tensor)
        for site, tensors in judged.measured.written.items()
        for tensor in tensors
    ]


def judge(
    context: StepContext, outputs: Any = None, raised: bool = False, has_updated: bool = False
) -> Judged:
    """Read all numbers of a step and decide. In a healthy step the host waits for the device only
    here.

    Args:
        outputs: what its body has returned, if it has ended.
        raised: whether it has ended in an exception about a bad number.
    """
    agreement, continues = context.definition.run.agreement, context.learned.continues is not False
    measured = Measurements.of(context, outputs, raised, has_updated)
    gradients = measured.gradients
    tensors = [gradient for _, gradient in gradients]
    squares = reductions.squares_of(measured.gradient_norms, tensors)
    if measured.has_trials and measured.is_state_finite and not math.isfinite(squares):
        gradients, squares = [], 0.0  # of a point that a line search has tried and left
    own = measured.verdict(squares)
    decided = _ruling(measured, own), continues, own, False
    if agreement.count > 1:
        decided = _agreed(*decided[:3], agreement)
    return Judged(*decided, own, gradients, measured)


def _ruling(measured: Measurements, own: Verdict) -> Ruling:
    finite = own.finite and not measured.raised
    if not rules.may_commit(rules.NUMBERS, finite, measured.scales):
        return Ruling.REFUSE
    is_late = measured.has_updated or not measured.may_overflow
    return Ruling.COMMIT if is_late else Ruling.CHECK


def are_finite(unread: Mapping[str, Sequence[Any]], parts: StateTensors) -> bool:
    """Whether these norms of the updated state by site are finite."""
    norms = norms_by_site(reductions.read(unread), {site: parts.by_site[site] for site in unread})
    return all(map(math.isfinite, norms.values()))


def _agreed(
    ruling: Ruling, continues: bool, own: Verdict, agreement: Agreement
) -> tuple[Ruling, bool, Verdict, bool]:
    """Return the most careful ruling of all processes, whether the body of one of them may
    continue, the means of their verdicts, and whether one of them has news.
    """
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
    updated = norms_by_site(reductions.read(norms), parts.by_site)
    return verdict._replace(weights=updated["weights"], slots=updated["slots"]), {}
