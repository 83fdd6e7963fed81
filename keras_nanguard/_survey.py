"""Reading a whole committed state on the host: what in it is not finite, or beyond all measure."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from keras_nanguard import _probes, _state
from keras_nanguard._incident import Finding

__all__ = ["survey"]

HUGE = 1e30
"""Magnitude beyond which no weight or slot of a run that learns lies, unless the policy says otherwise."""


def survey(anatomy: _state.Anatomy, policy: Any, tolerated: Container[int], *, before_step: bool) -> list[Finding]:
    """Return a finding for each variable that is not finite.

    Args:
        anatomy: the model's.
        policy: whose limits hold.
        tolerated: `id` of the variables that may be infinite.
        before_step: the state is that before a step which was refused: all is told as trouble that was there before,
            finite numbers included that are so large that sums over them are not.
    """
    groups = {"weights": anatomy.trainable, "statistics": anatomy.statistics, "slots": anatomy.slots}
    findings = []
    for own, variables in groups.items():
        for variable in variables:
            nan, inf, size = _probes.counts(_state.view(variable))
            if nan or (inf and id(variable) not in tolerated):
                told = "state" if before_step else own
                findings.append(Finding(told, "nonfinite", variable.path, nan, inf, size))
            elif before_step and not inf and (own != "statistics" or _state.is_statistic(variable)):
                limit = getattr(policy.limits_for(variable.path), own).max_abs or HUGE
                largest = _probes.largest(_state.view(variable))
                if largest > limit:
                    findings.append(Finding("state", "out_of_range", variable.path, 0, 0, size, largest))
    return findings
