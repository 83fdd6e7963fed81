"""What the actions of one decision have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        restart: the change that helps a run that is proven to have diverged, `None` for another
            incident.
        written_outside: whether other code has written the bad state after the last step.
        rates_before: the learning rate of each optimizer before the first action, by `id`; empty
            unless an action lowers it.
        has_restored: whether an earlier action of the decision has restored a snapshot.
    """

    run: Run
    incident: Incident
    report: Report | None
    replays: int
    restart: LowerRateRestart | None = None
    written_outside: bool = False
    rates_before: Mapping[int, float] = field(default_factory=dict)
    has_restored: bool = False
