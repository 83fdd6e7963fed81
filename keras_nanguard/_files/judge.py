"""The problems of one variable, from its statistics. Pure functions; imports no backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_nanguard._files.arrays import Statistics

__all__ = ["PROBLEMS", "SEVERITIES", "STATISTICS_LIMIT", "Problem", "judge", "problem"]

SEVERITIES = ("error", "warning", "note")
"""Worst first. `error`: the model computes NaN or Inf from it. `warning`: it may. `note`: for information only."""

STATISTICS_LIMIT = 1e6
"""Magnitude above which moving statistics are out of range: the default of `checks.statistics.max_abs` in a policy.

A variance of 1e6 means activations of about 1000; a layer that sees them in float16 overflows within two
multiplications (1000 * 1000 > 65504).
"""

PROBLEMS: Mapping[str, tuple[str, str]] = {
    "nan": ("error", "{count} NaN"),
    "inf": ("error", "{count} Inf"),
    "negative_variance": ("error", "negative values of a square, down to {value:.6g}"),
    "loss_scale": ("error", "a loss scale of {value:.6g}, at which nothing can be learned"),
    "out_of_range": ("warning", "{count} beyond {limit:.6g} in magnitude, up to {value:.6g}"),
    "beyond_limit": ("warning", "{count} beyond the limit {limit:.6g} in magnitude, up to {value:.6g}"),
    "float16_overflow": ("warning", "{count} beyond 65504, up to {value:.6g}, in a layer that computes in float16"),
    "zero_variance": ("warning", "every variance is 0: the layer divides by sqrt(epsilon) alone"),
    "unread": ("warning", "not read: {reason}"),
    "metric": ("note", "{count} NaN or Inf: the result of the last evaluation, which the next one resets"),
    "beyond_float16": ("note", "{count} beyond 65504, the largest float16, up to {value:.6g}"),
    "all_zero": ("note", "all {count} values are 0"),
    "constant": ("note", "all {count} values are {value:.6g}"),
    "denormal": ("note", "{count} denormal, which float arithmetic may flush to 0"),
}
"""Every problem that a scan can report: its severity, and its sentence."""

_VARIANCES = ("moving_variance", "variance", "moving_stddev", "renorm_stddev")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one variable.

    Attributes:
        code: a key of `PROBLEMS`.
        severity: one of `SEVERITIES`.
        detail: the problem in words.
        count: number of values concerned.
    """

    code: str
    severity: str
    detail: str
    count: int = 0


def judge(
    name: str,
    role: str,
    layer_class: str,
    found: Statistics,
    *,
    rank: int,
    float16: bool = False,
    limit: float | None = None,
    statistics_limit: float = STATISTICS_LIMIT,
) -> tuple[Problem, ...]:
    """Return the problems of one variable, worst first.

    Args:
        name: name of the variable within its layer (`"moving_variance"`).
        role: one of `keras_nanguard._files.names.ROLES`.
        layer_class: class of the layer, or `""`.
        found: its statistics, taken with `limit` (for statistics: with the lower of `limit` and `statistics_limit`).
        rank: number of its axes; a kernel of zeros is reported, a bias of zeros is its initial value.
        float16: whether its layer computes in float16.
        limit: magnitude that no value may exceed, or `None`.
        statistics_limit: magnitude that no moving statistic may exceed.

    Returns:
        The problems.
    """
    if layer_class == "Metric":  # a result, not part of the model
        return (problem("metric", found.nan + found.inf),) if found.nan + found.inf else ()
    problems = [*_nonfinite(found), *_impossible(name, role, found)]
    problems += _large(role, layer_class, found, float16, limit, statistics_limit)
    problems += _odd(name, role, found, rank)
    return tuple(sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity)))


def problem(code: str, count: int = 0, **values: Any) -> Problem:
    """Return a problem with its severity and sentence filled in."""
    severity, sentence = PROBLEMS[code]
    return Problem(code, severity, sentence.format(count=count, **values), count)


def _nonfinite(found: Statistics) -> list[Problem]:
    counted = (("nan", found.nan), ("inf", found.inf))
    return [problem(code, count) for code, count in counted if count]


def _impossible(name: str, role: str, found: Statistics) -> list[Problem]:
    if found.min is None or found.max is None:
        return []
    squares = name in _VARIANCES or (role == "slot" and name.endswith("velocity"))
    if squares and found.min < 0:
        return [problem("negative_variance", value=found.min)]
    if name.endswith("dynamic_scale") and found.min <= 0:
        return [problem("loss_scale", 1, value=found.min)]
    if name in _VARIANCES and found.all_zero:
        return [problem("zero_variance", found.size)]
    return []


def _large(role: str, layer_class: str, found: Statistics, float16: bool, limit: float | None, statistics_limit: float) -> list[Problem]:
    if role == "other" or found.min is None or found.max is None:
        return []
    largest, problems = max(-found.min, found.max), []
    moving = role == "statistics" and layer_class != "Normalization"  # Normalization describes the data, at any scale
    bound = statistics_limit if moving else math.inf
    if found.beyond_limit and largest > min(bound, limit if limit is not None else math.inf):
        code = "out_of_range" if limit is None or bound <= limit else "beyond_limit"
        lower = bound if code == "out_of_range" else limit
        problems.append(problem(code, found.beyond_limit, limit=lower, value=largest))
    if found.beyond_float16 and role == "weight":
        code = "float16_overflow" if float16 else "beyond_float16"
        problems.append(problem(code, found.beyond_float16, value=largest))
    return problems


def _odd(name: str, role: str, found: Statistics, rank: int) -> list[Problem]:
    problems = []
    if role == "weight" and rank > 1 and found.all_zero:
        problems.append(problem("all_zero", found.size))
    elif role == "weight" and rank > 1 and found.constant:
        problems.append(problem("constant", found.size, value=found.min))
    if role in ("weight", "statistics") and found.denormals:
        problems.append(problem("denormal", found.denormals))
    return problems
