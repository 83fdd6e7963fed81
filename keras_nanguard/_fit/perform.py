"""Performs the actions of a decision: one function per action, which returns done, or skipped with
a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.incident import SITES, Incident, Outcome
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit import quarantine as _quarantine_files
from keras_nanguard._fit.recalibration import initial_statistics, learning
from keras_nanguard._fit.rollback import moment, newest, put_back, rerun_of, roll_back, times
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.whole_writes import write_all

__all__ = ["HEALING", "PERFORMERS", "perform"]

HEALING = frozenset({"rollback", "repair", "reset_batchnorm", "reset_slots"})
"""Actions that replace the state."""

_ANEW = frozenset({"repair", "reset_batchnorm", "recalibrate_batchnorm", "reset_slots"})
"""Actions after which training continues from a state that is in no snapshot."""

Answer = tuple[str, str]
"""`("done" | "skipped", detail)`."""


def perform(run: Run, incident: Incident, report: Report | None) -> tuple[Outcome, ...]:
    """Perform every action of the incident's decision, and return the outcomes.

    An action that raises is reported as skipped with the error, and the other actions still run.
    """
    outcomes = []
    assert incident.decision is not None
    for action in incident.decision.actions:
        name = action["action"]
        parameters = {key: value for key, value in action.items() if key != "action"}
        try:
            status, detail = PERFORMERS[name](run, incident, report, parameters)
        except StateLostError:
            raise
        except Exception as problem:  # noqa: BLE001  a user's function or a broken optimizer must not end the run
            status, detail = "skipped", f"{type(problem).__name__}: {problem}"
        outcomes.append(Outcome(name, status, detail))
        if name in _ANEW and status == "done":
            run.recent.restart(run.step + 1)
    return tuple(outcomes)


def _skip(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> Answer:
    return "done", "the step was skipped; the state did not change"


def _warn(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> Answer:
    return "done", p.get("message", "")


def _lower_lr(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> Answer:
    last = run.recovery.lowered_at
    if _before_update(incident) and not run.recovery.tried(run.counts.committed):
        since = "yet" if last is None else "since it was lowered"
        return "skipped", f"no step has committed {since}, so a lower rate has no effect"
    changed = []
    retrace = False
    for optimizer in run.train_state().optimizers:
        rate = run.recovery.rate(optimizer)
        factor = min(float(p["factor"]), incident.values.get("rate_factor", math.inf))
        before, after, anew = rate.lower(factor, p.get("min_lr", 0.0))
        retrace |= anew
        if after < before:
            changed.append(f"{optimizer.name}: {before:.3g} -> {after:.3g}")
    if retrace:
        run.access.rebuild()
    if not changed:
        return "skipped", f"the learning rate is already at min_lr={p.get('min_lr', 0.0):g}"
    run.recovery.diverged |= _diverged(incident)
    returns = p.get("recover_after") and not run.recovery.diverged
    run.recovery.lowered(run.counts, (p["recover_after"], p.get("ramp", 0)) if returns else None)
    return "done", "learning rate of " + ", ".join(changed)


def _diverged(incident: Incident) -> bool:
    return "divergence" in incident.causes or any(f.kind == "divergence" for f in incident.findings)


def _before_update(incident: Incident) -> bool:
    """Whether a step was refused for a finding before its update. Then another learning rate would
    not change it.
    """
    return incident.refused and any(
        SITES.index(f.site) < SITES.index("weights") for f in incident.findings
    )


def _clip(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> Answer:
    changed, reasons = [], []
    for optimizer in run.train_state().optimizers:
        inner = keras_optimizers.inner(optimizer)
        now = inner.global_clipnorm
        tight = (
            p["global_clipnorm"] if now is None or now > p["global_clipnorm"] else now * p["factor"]
        )
        tight = max(tight, p["min_clipnorm"])
        if inner.clipnorm or inner.clipvalue:
            reasons.append(
                f"{inner.name} clips by clipnorm or clipvalue, which Keras does not combine with a"
                " global norm"
            )
        elif now is not None and tight >= now:
            reasons.append(
                f"{inner.name} already clips at {now:g}, and min_clipnorm is {p['min_clipnorm']:g}"
            )
        else:
            run.recovery.change(inner, "global_clipnorm", tight)
            changed.append(f"{inner.name}: global_clipnorm {now} -> {tight:g}")
    if changed:
        run.access.rebuild()
    return (
        ("done", ", ".join([*changed, *reasons]))
        if changed
        else ("skipped", ", ".join(reasons) or "there is no optimizer")
    )


def _fix_loss_scale(
    run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]
) -> Answer:
    changed = []
    for optimizer in run.train_state().optimizers:
        if not (variables := keras_optimizers.scales_of(optimizer)):
            continue
        scale, counter = variables
        before = float(keras_variables.read(scale))
        start = p["reset_to"] if p.get("reset_to") is not None else before
        start = optimizer.initial_scale if math.isnan(start) else start
        after = min(max(start, p["floor"]), p["ceiling"])
        fresh = np.zeros_like(keras_variables.read(counter))
        write_all([(scale, np.float32(after)), (counter, fresh)])
        growth = p.get("growth_steps")
        if growth:
            run.recovery.change(optimizer, "dynamic_growth_steps", growth)
        doubling = f", doubling after {growth} good steps" if growth else ""
        changed.append(f"loss scale {before:g} -> {after:g}{doubling}")
    if not changed:
        return "skipped", "the model does not scale its loss"
    run.recovery.scale_bounds = (p["floor"], p["ceiling"])
    if p.get("growth_steps"):
        run.access.rebuild()
    return "done", ", ".join(changed)


def _repair(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> Answer:
    train_state = run.train_state()
    whole = [
        v
        for v in (*train_state.trainable, *train_state.statistics, *train_state.slots)
        if id(v) not in run.tolerated
    ]
    bad = [(v, value) for v in whole if not finiteness.is_finite(value := keras_variables.view(v))]
    if not bad:
        return "skipped", "no entry is bad"
    good = _source(run, p["source"], [v for v, _ in bad])
    missing = [v.path for v, _ in bad if good.get(id(v)) is None]
    if missing:
        return "skipped", f"{', '.join(missing)}: no value in source={p['source']!r}"
    count, repaired = 0, []
    for variable, _ in bad:
        value = keras_variables.read(variable)
        places = ~np.isfinite(finiteness.widen(value))
        value[places] = np.asarray(good[id(variable)])[places]
        repaired.append((variable, value))
        count += int(places.sum())
    write_all(repaired)
    return "done", f"{count} entries of {', '.join(v.path for v, _ in bad)} from {p['source']}"


def _source(run: Run, source: str, variables: list[Any]) -> dict[int, Any]:
    """Return the values to write into variables, by `id`; `None` for a variable without a value in
    the source.
    """
    if source == "last_good":
        snapshot = newest(run)
        return {id(v): snapshot.value(v) for v in variables} if snapshot is not None else {}
    if source == "initializer":
        return {
            **{id(v): keras_layers.initial_value(run.model, v) for v in variables},
            **_first_slots(run),
        }
    return {id(v): np.full(tuple(v.shape), 0.0 if source == "zeros" else 1.0) for v in variables}


def _first_slots(run: Run) -> dict[int, np.ndarray[Any, Any]]:
    """Return the initial value of each slot, by `id`. Averages of the weights start with the
    present weights.
    """
    first: dict[int, np.ndarray[Any, Any]] = {}
    for optimizer in run.train_state().optimizers:
        if not optimizer.built:
            continue
        fresh = keras_optimizers.fresh_like(optimizer)
        first |= {
            id(v): keras_variables.read(new) for v, new in zip(optimizer.variables, fresh.variables)
        }
        first |= {
            id(average): keras_variables.read(weight)
            for average, weight in keras_optimizers.averages_of(optimizer)
        }
    return first


def _reset_batchnorm(
    run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]
) -> Answer:
    layers = [layer for layer in keras_layers.batchnorms(run.model) if layer.built]
    if not layers:
        return "skipped", "the model has no BatchNormalization"
    values = initial_statistics(layers)
    if p["source"] == "last_good":
        snapshot = newest(run)
        values = [(v, snapshot.value(v) if snapshot is not None else None) for v, _ in values]
        if any(value is None for _, value in values):
            return "skipped", "there is no last good state"
    write_all(values)
    return "done", f"{len(values)} statistics reset"


def _recalibrate_batchnorm(
    run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]
) -> Answer:
    layers = learning(run.model)
    if not layers:
        return "skipped", "the model has no BatchNormalization that learns its statistics"
    write_all(initial_statistics(layers))
    run.recovery.estimate(run.model, p["batches"])
    return (
        "done",
        (
            f"re-estimating the statistics of {len(layers)} layers over the next {p['batches']}"
            " batches"
        ),
    )


def _reset_slots(
    run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]
) -> Answer:
    slots = [
        v for v in run.train_state().slots if finiteness.is_float(v.dtype)
    ]  # counts of steps stay
    if p["scope"] == "bad":
        slots = [v for v in slots if not finiteness.is_finite(keras_variables.view(v))]
    first = _first_slots(run) if slots else {}
    write_all([(variable, first[id(variable)]) for variable in slots])
    return ("done", f"{len(slots)} slots reset") if slots else ("skipped", "no slot is bad")


def _quarantine(
    run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]
) -> Answer:
    if run.directory is None:
        return "skipped", "the guard has no directory for batches"
    if report is None or report.batch is None:
        return "skipped", "there is no batch to save"
    return _quarantine_files.keep(
        run.directory, incident, report.batch, p["max_batches"], p["max_mb"]
    )


def _stop(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> Answer:
    run.model.stop_training = True
    run.failed = p.get("log_worst_metrics", False)
    return "done", "training stops; " + _ended(run, incident, report, p.get("restore", True))


def _raise_error(
    run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]
) -> Answer:
    return "done", "NonFiniteError is raised; " + _ended(
        run, incident, report, p.get("restore", True)
    )


def _ended(run: Run, incident: Incident, report: Report | None, restore: bool) -> str:
    """End training; return a description of the final state and learning rates."""
    run.stopped = True
    state = _restored(run, incident, report) if restore else "the state is not restored"
    return "; ".join([state, *_rates_left(run, restore)])


def _restored(run: Run, incident: Incident, report: Report | None) -> str:
    if incident.refused and not any(f.site == "state" for f in incident.findings):
        return "the model still has the last good state"
    snapshot = run.agreement.snapshot(newest(run), run.ring)
    if snapshot is None:
        return "there is no good state to restore"
    rerun = run.agreement.rerun(rerun_of(run, snapshot, incident))
    try:
        put_back(run, snapshot, incident, report, rerun)
    except StateLostError:
        raise
    except Exception as problem:  # noqa: BLE001  training ends all the same
        return f"the state {moment(snapshot)} not restored: {type(problem).__name__}: {problem}"
    if rerun is None:
        return f"the state {moment(snapshot)} restored"
    return (
        f"the state {moment(snapshot)} restored, and {times(len(rerun.batches), 'later step')}"
        " replayed"
    )


def _rates_left(run: Run, restore: bool) -> list[str]:
    """Reset every lowered learning rate, or report that it stays; return a sentence for each."""
    changed = []
    for optimizer in run.train_state().optimizers:
        rate = run.recovery.rates.get(id(optimizer))
        if rate is None or rate.factor >= 1:
            continue
        lowered = rate.value
        if restore:
            rate.give_back()
            changed.append(
                f"the learning rate of {optimizer.name} is reset to {rate.value:.3g} (from"
                f" {lowered:.3g})"
            )
        else:
            changed.append(
                f"the learning rate of {optimizer.name} stays at {lowered:.3g}, {rate.factor:.3g}"
                " times the configured rate"
            )
    if restore:
        run.recovery.returns = None
    return changed


def _call(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> Answer:
    function = run.functions.get(p["function"])
    if function is None:
        known = ", ".join(sorted(run.functions)) or "none"
        return "skipped", f"no function is registered as {p['function']!r} (registered: {known})"
    result = function(incident)
    return "done", "" if result is None else str(result)


Performer = Callable[[Run, Incident, Report | None, Mapping[str, Any]], Answer]

PERFORMERS: dict[str, Performer] = {
    "skip": _skip,
    "rollback": roll_back,
    "lower_lr": _lower_lr,
    "clip": _clip,
    "fix_loss_scale": _fix_loss_scale,
    "repair": _repair,
    "reset_batchnorm": _reset_batchnorm,
    "recalibrate_batchnorm": _recalibrate_batchnorm,
    "reset_slots": _reset_slots,
    "quarantine": _quarantine,
    "warn": _warn,
    "stop": _stop,
    "raise_error": _raise_error,
    "call": _call,
}
"""The function of each action of `keras_nanguard.actions.ACTIONS`; a test compares both tables."""
