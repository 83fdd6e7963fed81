"""Finds the variables of a train state that are not finite, or larger than a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, isfinite
from typing import Any

from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Finding
from keras_nanguard._core.literals import Site
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy

HUGE = 1e30
"""Magnitude above which a value counts as overflowed, unless the policy has another limit."""


def checked(train_state: TrainState) -> Iterator[tuple[Site, Any]]:
    """Yield each checked variable of the state after its site."""
    groups: dict[Site, Any] = {
        "weights": train_state.trainable,
        "statistics": train_state.statistics,
        "slots": train_state.slots,
    }
    for own, variables in groups.items():
        for variable in variables:
            yield own, variable


def beyond(limit: float, site: Site, variable: Any) -> Iterator[Finding]:
    """Yield a finding of `site` if the magnitude of a finite variable is above a limit."""
    value = keras_variables.view(variable)
    largest = finiteness.largest(value)
    if largest > limit:
        yield Finding(site, "out_of_range", variable.path, 0, 0, int(value.size), largest)


def bad_scales(train_state: TrainState) -> Iterator[Finding]:
    """Yield a finding for each loss scale that is NaN or infinite."""
    for scale, _ in train_state.scales:
        value = float(keras_variables.read(scale))
        if not isfinite(value):
            yield Finding("loss_scale", "collapse", str(scale.path), value=value)


class StateCheck:
    """Finds the bad variables of a train state, without those that are not finite on purpose.

    Attributes:
        tolerated: the `id` of each variable that may have Inf, because it had at first; those that
            may have NaN as well are among them.
        nan_markers: the `id` of each variable that may have NaN.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self.tolerated, self.nan_markers = frozenset[int](), frozenset[int]()

    def follow(self, earlier: StateCheck) -> None:
        """Tolerate what was tolerated in an earlier fit of the same model."""
        self.tolerated, self.nan_markers = earlier.tolerated, earlier.nan_markers

    def tolerate(
        self, train_state: TrainState, model: Any, first: Mapping[int, Any] | None = None
    ) -> list[Any]:
        """Tolerate Inf or NaN in variables that have them on purpose, besides those that are
        tolerated already; return all of them.

        Args:
            first: the first values of the new variables, by `id`; `None` if all variables have
                their first values.
        """

        def value_of(variable: Any) -> Any:
            return keras_variables.view(variable) if first is None else first[id(variable)]

        constants = train_state.constants
        new = constants if first is None else [v for v in constants if id(v) in first]
        bad = [v for v in new if not finiteness.is_finite(value_of(v))]
        nan = {id(v) for v in bad if finiteness.counts(value_of(v))[0]}
        self.nan_markers |= nan & keras_layers.states_of_own_layers(model) if nan else set()
        self.tolerated |= self.nan_markers | {id(v) for v in bad} - nan
        return [v for v in constants if id(v) in self.tolerated]

    def accepts(self, variable: Any, value: Any) -> bool:
        """Return whether a value of a variable is finite, except for what it may have."""
        if finiteness.is_finite(value):
            return True
        nan, infs, _ = finiteness.counts(value)
        return not self._has_bad(variable, nan, infs)

    def _has_bad(self, variable: Any, nan: int, infs: int) -> bool:
        """Whether these numbers of NaN and Inf are not what the variable may have."""
        bad_nan = nan and id(variable) not in self.nan_markers
        return bool(bad_nan or (infs and id(variable) not in self.tolerated))

    def scan(self, train_state: TrainState, before: bool = False) -> list[Finding]:
        """Return a finding for each variable with NaN or Inf.

        Args:
            before: whether to report all findings as present before a step, at the site `"state"`,
                and to include finite values so large that sums over them overflow. If not, each
                finding is reported under its own site.
        """
        findings = []
        # A step may leave any square of finite gradients there.
        squares = {id(v) for v in keras_optimizers.second_moments(train_state.optimizers)}
        for own, variable in checked(train_state):
            nan, infs, size = finiteness.counts(keras_variables.view(variable))
            place: Site = "state" if before else own
            if self._has_bad(variable, nan, infs):
                findings.append(Finding(place, "nonfinite", variable.path, nan, infs, size))
            elif before and not (nan or infs):
                own_limit = self._policy.max_abs(variable.path, own) if self._policy.limits else 0.0
                limit = own_limit or (inf if id(variable) in squares else HUGE)
                if own != "statistics" or keras_variables.is_statistic(variable):
                    findings += beyond(limit, place, variable)
        return findings
