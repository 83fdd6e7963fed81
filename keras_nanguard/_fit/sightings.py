"""Findings that the host makes: bad values in a batch and in the state. Also the measurements of an
incident.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from keras_nanguard._backends.shared import batches
from keras_nanguard._core import finiteness
from keras_nanguard._core.data_names import argument_path, input_names, named
from keras_nanguard._core.incident import Finding
from keras_nanguard._core.literals import Site
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy

__all__ = ["HUGE", "bad_state", "beyond_limits", "in_batch", "values"]


HUGE = 1e30
"""Magnitude above which a value counts as overflowed, unless the policy has another limit."""


def bad_state(
    train_state: TrainState,
    site: str,
    tolerated: Container[int],
    marks: Container[int],
    policy: Policy,
) -> list[Finding]:
    """Read the whole state and return a finding for each variable with NaN or Inf.

    Args:
        train_state: the state.
        site: `"state"` reports all findings as present before the step, and includes finite values
            so large that sums over them overflow. Any other value reports each finding under its
            own site.
        tolerated: `id` of variables that may be infinite.
        marks: `id` of variables that may be NaN.
        policy: the policy, for its limits.
    """
    findings = []
    for own, variable in _of_state(train_state):
        nan, inf, size = finiteness.counts(keras_variables.view(variable))
        if (nan and id(variable) not in marks) or (inf and id(variable) not in tolerated):
            place: Site = "state" if site == "state" else own
            findings.append(Finding(place, "nonfinite", variable.path, nan, inf, size))
            continue
        limited = own != "statistics" or keras_variables.is_statistic(variable)
        if site == "state" and limited and not (nan or inf):
            findings += _beyond(policy.max_abs(variable.path, own) or HUGE, "state", variable)
    return findings


def beyond_limits(train_state: TrainState, policy: Policy) -> Iterator[Finding]:
    """Yield a finding for each finite variable of the state beyond its limit in the policy."""
    for site, variable in _of_state(train_state):
        limit = policy.max_abs(variable.path, site)
        if limit is not None and finiteness.is_finite(keras_variables.view(variable)):
            yield from _beyond(limit, site, variable)


def _of_state(train_state: TrainState) -> Iterator[tuple[Site, Any]]:
    """Yield each checked variable of the state after its site."""
    groups: dict[Site, Any] = {
        "weights": train_state.trainable,
        "statistics": train_state.statistics,
        "slots": train_state.slots,
    }
    for own, variables in groups.items():
        for variable in variables:
            yield own, variable


def _beyond(limit: float, site: Site, variable: Any) -> Iterator[Finding]:
    """Yield a finding of `site` if the magnitude of a finite variable is above a limit."""
    value = keras_variables.view(variable)
    largest = finiteness.largest(value)
    if largest > limit:
        yield Finding(site, "out_of_range", variable.path, 0, 0, int(value.size), largest)


def values(verdict: Verdict, optimizers: Iterable[Any], committed: bool) -> dict[str, float]:
    """Return the measurements of one step for its incident.

    `committed` is whether the optimizers have counted the step.
    """
    measured = {"loss": verdict.loss, "gradient_norm": verdict.gradient_norm}
    for optimizer in list(optimizers)[:1]:
        rate = keras_optimizers.rate_before if committed else keras_optimizers.learning_rate
        measured["learning_rate"] = rate(optimizer)
    if any(keras_optimizers.is_loss_scaled(o) for o in optimizers):
        measured["loss_scale"] = verdict.scale
    return measured


def in_batch(report: Report | None, model: Any = None) -> list[Finding]:
    """Return findings for the inputs and targets of a refused step, by the user's names: `x`,
    `x/age`, `y`.
    """
    if report is None or report.batch is None:
        return []
    findings, names = [], input_names(model)
    for part in batches.parts(report.batch):
        nan, inf, size = finiteness.counts(keras_variables.dense(part.value))
        if nan or inf:
            site: Site = "inputs" if part.role == "inputs" else "targets"
            place = named(argument_path(part.path), names)
            findings.append(Finding(site, "nonfinite", place, nan, inf, size))
    return findings
