"""Iterations at which a schedule gives no usable learning rate, and how a run gets past them.

A schedule can have a pole: `rsqrt(step - warmup)` is infinite at the end of the warmup. No weights
are finite after a step at such a rate. So the step is skipped and the iteration counter moves past
it, as otherwise the next step has the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from keras_nanguard._core.incident import Incident, Outcome
from keras_nanguard._diagnose.causes import MAX_RATE
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.whole_writes import write_all

__all__ = ["found", "pass_over", "passed"]

MAX_PASSED = 10
"""Iterations in a row that are passed over. A schedule that gives no rate for longer ends the run
by the bounds of the policy.
"""

_UPDATED = frozenset({"state", "weights", "slots"})


def found(run: Run, incident: Incident) -> dict[int, tuple[int, float]]:
    """Return the iteration and the rate of a bad step by `id` of each optimizer with an unusable
    one.

    If the state was bad before the step, it is about the step that left it so. A rate that is
    finite counts only if the diagnosis blames it.
    """
    if not incident.refused and _UPDATED.isdisjoint(incident.sites):
        return {}
    culprit = incident.diagnosis.culprit if incident.diagnosis is not None else ""
    highest = MAX_RATE if culprit.endswith("/learning_rate") else math.inf
    ago = 1 if not incident.refused or "state" in incident.sites else 0
    poles = {}
    for optimizer in run.train_state().optimizers:
        iteration = _next(optimizer, ago)
        rate = 0.0 if iteration is None else _rate(optimizer, iteration)
        if iteration is not None and not (math.isfinite(rate) and abs(rate) <= highest):
            poles[id(optimizer)] = iteration, rate
            run.poles.setdefault(id(optimizer), set()).add(iteration)
    return poles


def passed(
    run: Run, poles: Mapping[int, tuple[int, float]], outcomes: tuple[Outcome, ...]
) -> tuple[Outcome, ...]:
    """Pass over the poles of an incident; return its outcomes, of which one tells so.

    Steps that are still to be replayed reach them again: `pass_over` handles that.
    """
    if not poles or run.stopped or run.rerun is not None or not run.policy.refuse:
        return outcomes
    last = {key: iteration for key, (iteration, _) in poles.items()}
    pass_over(run, last)  # if the replay has not
    after = [(o, _next(o)) for o in run.train_state().optimizers if id(o) in poles]
    past = [(o, n) for o, n in after if n is not None and n > last[id(o)]]
    words = ", ".join(f"{optimizer.name} continues at iteration {n}" for optimizer, n in past)
    main = next((o for o in outcomes if o.action in ("rollback", "skip")), None)
    if not words or main is None:
        return outcomes
    return tuple(replace(o, detail=f"{o.detail}; {words}") if o is main else o for o in outcomes)


def pass_over(run: Run, beyond: Mapping[int, int] | None = None) -> None:
    """Move the iteration counters of optimizers past the poles that are known.

    Args:
        run: the run.
        beyond: the iteration that a counter has to be past, by `id` of the optimizer.
    """
    for optimizer in run.train_state().optimizers if run.poles else ():
        known = run.poles.get(id(optimizer), set())
        first = _next(optimizer) if known else None
        if first is None:
            continue
        # Accumulated gradients are applied at each of these.
        every = keras_optimizers.accumulation_steps(optimizer)
        last = (beyond or {}).get(id(optimizer), -1)
        iteration = first + every * max(math.ceil((last + 1 - first) / every), 0)
        poles = 0
        while poles <= MAX_PASSED and _is_pole(optimizer, iteration, known):
            poles, iteration = poles + 1, iteration + every
        if iteration > first and poles <= MAX_PASSED:
            counter = keras_optimizers.iterations(optimizer)
            write_all([(counter, np.asarray(iteration, str(counter.dtype)))])


def _is_pole(optimizer: Any, iteration: int, known: set[int]) -> bool:
    return iteration in known or not math.isfinite(_rate(optimizer, iteration))


def _next(optimizer: Any, ago: int = 0) -> int | None:
    return keras_optimizers.scheduled_iteration(optimizer, ago)


def _rate(optimizer: Any, iteration: int) -> float:
    """Return the rate of a schedule; 0.0 if it cannot be evaluated outside of a step."""
    try:
        return keras_optimizers.scheduled_rate(optimizer, iteration)
    except Exception:  # noqa: BLE001  a schedule of the user's may raise anything
        return 0.0
