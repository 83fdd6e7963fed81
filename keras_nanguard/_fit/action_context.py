"""What the actions of one decision have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from keras_nanguard._core.incident import Incident
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit.run import Run


class LowerRateRestart(NamedTuple):
    """From where, and with which share of the learning rate, a diverged run trains better: the step
    of the snapshot, and the factor of the rate.
    """

    step: int
    rate_factor: float


@dataclass(frozen=True, slots=True)
class ActionContext:
    """What the actions of one decision have in common.

    Attributes:
        replays: number of rollbacks since the first of the running replays began; 0 outside.
        rates_before: the learning rate of each optimizer before the first action, by `id`; empty
            unless an action lowers it.
        restart: the change that helps a run that is proven to have diverged, `None` for another
            incident.
        written_outside: whether other code has written the bad state after the last step.
        has_restored: whether an earlier action of the decision has restored a snapshot.
    """

    run: Run
    incident: Incident
    report: Report | None
    replays: int
    rates_before: Mapping[int, float]
    restart: LowerRateRestart | None
    written_outside: bool
    has_restored: bool = False
