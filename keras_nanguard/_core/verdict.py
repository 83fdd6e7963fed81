"""The results of one step for the host: a row of numbers for every step, a report of a refused one,
and a row for each layer of one that is replayed.

Pure Python and NumPy; the backends fill these in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from keras_nanguard._core.incident import Finding
from keras_nanguard._core.literals import Kind, Site

PERIOD = 1 << 23
"""The inner step number is reported modulo this number, so that float32 represents it exactly in
runs of any length."""


def gradient_norm(half_squares: float, scale: float) -> float:
    """Return the global norm of the unscaled gradients, NaN if it is not defined.

    Args:
        half_squares: half the sum of squares of the scaled gradients.
        scale: the loss scale, 1 if there is none.
    """
    return math.sqrt(2.0 * half_squares) / scale if half_squares >= 0.0 and scale else math.nan


class Verdict(NamedTuple):
    """The numbers of one step; a sum that is not finite has at least one such term.

    The compiled step returns it as one row of numbers in this order; the host uses it as a record.

    Attributes:
        gradients: half the sum of squares of all gradients, which are scaled by the loss scale, if
            any.
        statistics: the sum over the statistics that the forward pass wrote; on PyTorch their norm.
        weights, slots: the same sums over weights and slots after the update, 0 if not read.
        scale: the loss scale, 1 if there is none.
        step: its number modulo `PERIOD`, if one execution runs several steps: they count themselves
            on the accelerator, also those that raise.
        halted: whether it was refused because an earlier step of the same execution left a bad
            state behind, or because the host first had to handle the previous step.
    """

    refused: bool
    loss: float
    gradients: float
    statistics: float
    weights: float
    slots: float
    scale: float
    step: int = 0
    halted: bool = False

    @classmethod
    def of(cls, row: Sequence[float]) -> Verdict:
        """Return the verdict of a row of numbers of a step."""
        refused, loss, gradients, statistics, weights, slots, scale, step, halted = row
        sums = (loss, gradients, statistics, weights, slots, scale)
        return cls(refused > 0, *sums, int(step), halted > 0)

    @property
    def gradient_norm(self) -> float:
        """Global norm of the unscaled gradients."""
        return gradient_norm(self.gradients, self.scale)

    @property
    def recorded(self) -> tuple[float, float, float]:
        """Its numbers that are recorded: loss, gradients and scale."""
        return self.loss, self.gradients, self.scale

    @property
    def finite(self) -> bool:
        """Whether every number that the step checked is finite."""
        total = self.loss + self.gradients + self.statistics + self.weights + self.slots
        return math.isfinite(total) and self.scale_is_valid

    @property
    def scale_is_valid(self) -> bool:
        """Whether the loss scale is usable: finite and positive."""
        return math.isfinite(self.scale) and self.scale > 0

    @property
    def only_gradients(self) -> bool:
        """Whether only the gradients are bad, as in an ordinary float16 overflow."""
        others = math.isfinite(self.loss) and math.isfinite(self.statistics)
        bad = self.refused and not math.isfinite(self.gradients)
        return bad and others and self.scale_is_valid


FIELDS = Verdict._fields
"""The order of the numbers in the row that a step returns."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a refused step: counts for each variable, gradient and array that it checked,
    and the batch.

    Attributes:
        rows: `(site, path)` of each counted array. Empty, or without gradients, if there was no
            memory to count them.
        counts: int array of shape `(len(rows), 3)`: NaN, Inf and all entries of each.
        batch: the arguments of the step, with their nesting, or `None` if they were not stored.
        replicas: the replicas with findings, if there are several.
        left_by_previous: whether the bad values are in the state, and the previous step left them
            there.
    """

    verdict: Verdict
    rows: tuple[tuple[str, str], ...]
    counts: Any
    batch: Any = None
    replicas: tuple[int, ...] = ()
    left_by_previous: bool = False

    def findings(self) -> list[Finding]:
        """Return one finding per bad row; a sum that overflowed although every entry is finite is
        an explosion."""
        found = [
            Finding(cast(Site, site), "nonfinite", path, int(nan), int(inf), int(size))
            for (site, path), (nan, inf, size) in zip(self.rows, self.counts)
            if nan or inf
        ]
        seen = {finding.site for finding in found}
        v = self.verdict
        if not math.isfinite(v.loss):
            counts = (int(math.isnan(v.loss)), int(math.isinf(v.loss)), 1)
            found.append(Finding("loss", "nonfinite", "", *counts, v.loss))
        if "slots" in seen:  # the sum over the weights may be over the slots as well
            seen.add("weights")
        sums: tuple[Site, ...] = ("gradients", "statistics", "weights", "slots")
        for site in sums:
            number: float = getattr(v, site)
            if not math.isfinite(number) and site not in seen:
                found.append(Finding(site, self._kind_of(site, number), "", 0, 0, None, number))
        if not v.scale_is_valid:
            found.append(Finding("loss_scale", "collapse", "", value=v.scale))
        return found

    def _kind_of(self, site: Site, number: float) -> Kind:
        """Return why a sum is not finite although no counted array of its site is bad.

        Either its arrays were counted, and it has overflowed. Or they were not, which happens to
        gradients alone, or to all sites: then Inf is an overflow, as no sum of finite squares is
        NaN, and NaN is in one of the arrays.
        """
        sites = {row[0] for row in self.rows}
        was_counted = site in sites if site == "gradients" else bool(sites)
        return "explosion" if was_counted or math.isinf(number) else "nonfinite"


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One call of one layer in the table of a replay."""

    path: str
    layer_class: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    zeros: int
    nan: int
    plus_inf: int
    minus_inf: int
    size: int
    share_of_range: float
    inputs_finite: bool = True

    @property
    def finite(self) -> bool:
        """Whether no entry is NaN or Inf."""
        return not (self.nan or self.plus_inf or self.minus_inf)
