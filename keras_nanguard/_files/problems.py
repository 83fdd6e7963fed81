"""The problems of one variable, from its statistics. Pure functions; imports no backend."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.variable_names import SPREADS, is_second_moment

if TYPE_CHECKING:
    from keras_nanguard._files.formats.contents import Identity, ModelArray

SEVERITIES = ("error", "warning", "note")
"""Worst first. `error`: the model computes NaN or Inf from it. `warning`: it may. `note`, of a
hazard only: for information."""

STATISTICS_LIMIT = 1e6
"""Magnitude above which moving statistics are out of range.

A variance of 1e6 means activations of about 1000; a layer that sees them in float16 overflows
within two multiplications (1000 * 1000 > 65504).
"""

PROBLEMS: Mapping[str, tuple[str, str]] = {
    "nan": ("error", "{count} NaN"),
    "inf": ("error", "{count} Inf"),
    "negative_variance": ("error", "negative variances or second moments, down to {value:.6g}"),
    "loss_scale": ("error", "a loss scale of {value:.6g}, at which nothing can be learned"),
    "out_of_range": ("warning", "{count} beyond {limit:.6g} in magnitude, up to {value:.6g}"),
    "beyond_limit": (
        "warning",
        "{count} beyond the limit {limit:.6g} in magnitude, up to {value:.6g}",
    ),
    "float16_overflow": (
        "warning",
        "{count} beyond 65504, up to {value:.6g}, in a layer that computes in float16",
    ),
    "zero_variance": ("warning", "every variance is 0: the layer divides by sqrt(epsilon) alone"),
    "unread": ("warning", "not read: {reason}"),
}
"""Every problem that a scan can report: its severity, and its sentence."""


@dataclass(frozen=True, slots=True)
class ArrayStats:
    """The statistics of one array of floats.

    Attributes:
        size: number of values (a complex value counts as two).
        zeros: number of exact zeros, of either sign.
        beyond_float16: number of finite values above 65504 in magnitude.
        beyond_limit: number of finite values above the given limit in magnitude; 0 if no limit was
            given.
        mean: mean of the finite values (summed pairwise in at least float32), or `None` if there is
            none.
    """

    size: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    beyond_float16: int = 0
    beyond_limit: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None

    @property
    def inf(self) -> int:
        """Number of infinities of either sign."""
        return self.posinf + self.neginf

    @property
    def nonfinite(self) -> int:
        """Number of values that are NaN or infinite."""
        return self.nan + self.inf

    @property
    def all_zero(self) -> bool:
        """Whether there is at least one value and every value is zero."""
        return self.size > 0 and self.zeros == self.size


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one variable.

    Attributes:
        code: a key of `PROBLEMS`.
        severity: one of `SEVERITIES`.
        count: number of affected values.
    """

    code: str
    severity: str
    detail: str
    count: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Magnitudes above which a finite value is bad.

    Attributes:
        limit: magnitude that no value may exceed, or `None`.
        statistics_limit: magnitude that no moving statistic may exceed.

    Raises:
        GuardError: if one is not a positive number.
    """

    limit: float | None = None
    statistics_limit: float = STATISTICS_LIMIT

    def __post_init__(self) -> None:
        for name in ("limit", "statistics_limit"):
            value = getattr(self, name)
            number, unlimited = isinstance(value, numbers.Real), value is None and name == "limit"
            if not (unlimited or (number and value > 0)):
                what, remedy = f"{name} to be a number above 0", "Leave it out for the default."
                raise GuardError(expected(what, f"{name}={value!r}", remedy))
            if value is not None:  # a number of NumPy cannot be sent to the worker
                try:
                    bound = float(value)
                except OverflowError:  # a whole number above any float
                    bound = math.inf
                object.__setattr__(self, name, bound)

    def of(self, who: Identity) -> float:
        """Return the limit of one variable, infinite if there is none. The statistics of a
        Normalization describe the data, which may have any scale."""
        moving = who.role == "statistics" and who.layer_class != "Normalization"
        general = math.inf if self.limit is None else self.limit
        return min(self.statistics_limit, general) if moving else general


def not_negative(who: Identity) -> bool:
    """Return whether a variable cannot be negative: the variance of a layer's statistics, or the
    second moment of an optimizer of Keras. A weight can, whatever its name."""
    if who.role == "slot":
        return is_second_moment(who.name, who.layer_class)
    return who.role == "statistics" and any(word in who.name for word in SPREADS)


def is_loss_scale(who: Identity) -> bool:
    """Return whether a variable is the loss scale of an optimizer, which is above 0."""
    return who.role == "slot" and who.name.endswith("dynamic_scale")


def problem(code: str, count: int = 0, **values: Any) -> Problem:
    """Return a problem with its severity and sentence filled in."""
    severity, sentence = PROBLEMS[code]
    return Problem(code, severity, sentence.format(count=count, **values), count)


def find_problems(array: ModelArray, found: ArrayStats, limits: Limits) -> tuple[Problem, ...]:
    """Return the problems of an array, worst first, from its statistics, taken with its limit."""
    problems = _problems(array.who, found, limits)
    return tuple(sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity)))


def _problems(who: Identity, found: ArrayStats, limits: Limits) -> Iterator[Problem]:
    if who.layer_class == "Metric":  # a result, which the next evaluation resets
        return
    for code, count in (("nan", found.nan), ("inf", found.inf)):
        if count:
            yield problem(code, count)
    if found.min is not None and found.max is not None:
        low, largest = found.min, max(-found.min, found.max)
        if not_negative(who) and low < 0:
            yield problem("negative_variance", value=low)
        elif is_loss_scale(who) and low <= 0:
            yield problem("loss_scale", 1, value=low)
        elif not_negative(who) and who.role == "statistics" and found.all_zero:
            yield problem("zero_variance", found.size)
        if found.beyond_limit and who.role != "other":
            bound = limits.of(who)
            code = "beyond_limit" if bound == limits.limit else "out_of_range"
            yield problem(code, found.beyond_limit, limit=bound, value=largest)
        if found.beyond_float16 and who.role == "weight" and who.in_float16:
            yield problem("float16_overflow", found.beyond_float16, value=largest)
