"""Doing what a policy decided: one function per action, each of which ends as done or as skipped with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_nanguard import _probes, _state
from keras_nanguard._errors import NonFiniteError
from keras_nanguard._incident import Incident, Outcome
from keras_nanguard._snapshot import Snapshot

__all__ = ["PERFORMERS", "perform"]

Answer = tuple[str, str]
"""`("done" | "skipped", detail)`."""

_SEED_STEP = 7919
"""How far a rollback moves each seed on: a prime, so that no number of Dropout layers lines up with it."""


def perform(session: Any, incident: Incident, report: Any) -> tuple[tuple[Outcome, ...], NonFiniteError | None]:
    """Do every action of the incident's decision; returns the outcomes, and the error to raise when all is told.

    An action that fails is told as skipped with the error, so that one that cannot be done never hides the rest.
    """
    outcomes, error = [], None
    assert incident.decision is not None
    for action in incident.decision.actions:
        name = action["action"]
        parameters = {key: value for key, value in action.items() if key != "action"}
        try:
            status, detail = PERFORMERS[name](session, incident, report, parameters)
        except Exception as problem:  # noqa: BLE001  a user's function or a broken optimizer must not end the run
            status, detail = "skipped", f"{type(problem).__name__}: {problem}"
        outcomes.append(Outcome(name, status, detail))
        if name == "raise_error":
            error = NonFiniteError(f"NanGuard stopped training at step {incident.step}. {incident.decision.reason}")
    return tuple(outcomes), error


def _skip(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    return "done", "the step was left out; the state is as it was before it"


def _warn(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    return "done", p.get("message", "")


def _rollback(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    snapshot = session.ring.newest(p.get("depth", 1))
    if snapshot is None:
        return "skipped", "there is no verified snapshot to go back to"
    _put_back(session, snapshot)
    if p.get("reseed", True):
        for seed in _state.seeds(session.anatomy().other):
            moved = _state.read(seed)
            moved[..., -1] += np.asarray(_SEED_STEP * (session.rollbacks + 1), moved.dtype)
            _state.write(seed, moved)
    session.rollbacks += 1
    lost = max(incident.step - snapshot.step, 0)
    skip = int(p.get("skip_batches", 0))
    session.skip_batches += skip
    also = f"; the next {skip} batches are left out" if skip else ""
    return "done", f"back to the state before step {snapshot.step}, {lost} steps undone{also}"


def _put_back(session: Any, snapshot: Snapshot) -> None:
    session.ring.forget_after(snapshot.step)
    for variable in session.anatomy().restorable:
        value = snapshot.value(variable)
        if value is not None:
            _state.write(variable, value)


def _lower_lr(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    wait = session.lowered_at is not None and incident.step - session.lowered_at < p.get("cooldown", 0)
    if wait:
        return "skipped", f"lowered at step {session.lowered_at} already, and cooldown is {p['cooldown']} steps"
    told = []
    retrace = False
    for optimizer in session.anatomy().optimizers:
        before, after, anew = session.rate(optimizer).lower(p["factor"], p.get("min_lr", 0.0))
        retrace |= anew
        if after < before:
            told.append(f"{optimizer.name}: {before:.3g} -> {after:.3g}")
    if retrace:
        session.rebuild()
    if not told:
        return "skipped", f"the learning rate is at min_lr={p.get('min_lr', 0.0):g} already"
    session.lowered_at = incident.step
    session.recovery = (p["recover_after"], p.get("ramp", 0)) if p.get("recover_after") else None
    return "done", "learning rate of " + ", ".join(told)


def _clip(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    told = []
    for optimizer in session.anatomy().optimizers:
        inner = _state.inner(optimizer)
        if inner.clipnorm or inner.clipvalue:
            return "skipped", f"{inner.name} clips by clipnorm or clipvalue, which Keras does not combine with a global norm"
        now = inner.global_clipnorm
        tight = p["global_clipnorm"] if now is None or now > p["global_clipnorm"] else now * p["factor"]
        tight = max(tight, p["min_clipnorm"])
        session.undo.append((inner, "global_clipnorm", now))
        inner.global_clipnorm = tight
        told.append(f"{inner.name}: global_clipnorm {now} -> {tight:g}")
    session.rebuild()
    return "done", ", ".join(told)


def _fix_loss_scale(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    told = []
    for optimizer in session.anatomy().optimizers:
        if not _state.is_loss_scaled(optimizer):
            continue
        scale, counter = _state.scales_of(optimizer)
        before = float(_state.read(scale))
        start = p["reset_to"] if p.get("reset_to") is not None else before if math.isfinite(before) else p["ceiling"]
        after = min(max(start, p["floor"]), p["ceiling"])
        _state.write(scale, np.float32(after))
        _state.write(counter, np.zeros_like(_state.read(counter)))
        session.scale_bounds = (p["floor"], p["ceiling"])
        if p.get("growth_steps"):
            session.undo.append((optimizer, "dynamic_growth_steps", optimizer.dynamic_growth_steps))
            optimizer.dynamic_growth_steps = p["growth_steps"]
            session.rebuild()
        told.append(f"loss scale {before:g} -> {after:g}")
    return ("done", ", ".join(told)) if told else ("skipped", "the model does not scale its loss")


def _repair(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    snapshot = session.ring.newest()
    anatomy = session.anatomy()
    count = 0
    for variable in (*anatomy.trainable, *anatomy.statistics, *anatomy.slots):
        value = _state.read(variable)
        bad = ~np.isfinite(_probes.widen(value)) if _probes.is_float(variable.dtype) else np.zeros(value.shape, bool)
        if not bad.any() or id(variable) in session.tolerated:
            continue
        good = _source(session, p["source"], variable, snapshot)
        if good is None:
            return "skipped", f"{variable.path} has no value in source={p['source']!r}"
        value[bad] = np.asarray(good)[bad]
        _state.write(variable, value)
        count += int(bad.sum())
    return ("done", f"{count} entries from {p['source']}") if count else ("skipped", "no entry is bad")


def _source(session: Any, source: str, variable: Any, snapshot: Snapshot | None) -> Any:
    if source == "last_good":
        return snapshot.value(variable) if snapshot is not None else None
    if source == "initializer":
        return _first(session, variable)
    return np.full(tuple(variable.shape), 0.0 if source == "zeros" else 1.0)


def _first(session: Any, variable: Any) -> Any:
    return _state.initial_value(session.model, session.anatomy().optimizers, variable)


def _reset_batchnorm(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    snapshot = session.ring.newest()
    count = 0
    for variable in _state.batchnorm_statistics(session.model):
        value: Any = _first(session, variable)
        if p["source"] == "last_good":
            value = snapshot.value(variable) if snapshot is not None else None
        if value is None:
            return "skipped", "there is no last good state"
        _state.write(variable, np.asarray(value))
        count += 1
    return ("done", f"{count} statistics set back") if count else ("skipped", "the model has no BatchNormalization")


def _recalibrate_batchnorm(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    layers = _state.batchnorms(session.model)
    if not layers:
        return "skipped", "the model has no BatchNormalization"
    _reset_batchnorm(session, incident, report, {"source": "initial"})
    session.start_recalibration(layers, p["batches"])
    return "done", f"estimating {len(layers)} layers anew over the next {p['batches']} batches"


def _reset_slots(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    count = 0
    for variable in session.anatomy().slots:
        bad = not _probes.is_finite(_state.view(variable))
        counter = not _probes.is_float(variable.dtype)
        if bad or (p["scope"] == "all" and not counter):
            _state.write(variable, _first(session, variable))
            count += 1
    return ("done", f"{count} slots set back") if count else ("skipped", "no slot is bad")


def _quarantine(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    if session.directory is None:
        return "skipped", "NanGuard has no directory to keep batches in"
    if report is None or report.batch is None:
        return "skipped", "there is no batch to keep"
    answer: Answer = session.quarantine(incident, report, p["max_batches"], p["max_mb"])
    return answer


def _restored(session: Any, restore: bool, incident: Incident) -> str:
    if not restore:
        return "the state is left as it is"
    if incident.refused and not any(f.site == "state" for f in incident.findings):
        return "the refused step left the last good state in place"
    snapshot = session.ring.newest()
    if snapshot is None:
        return "there is no good state to restore"
    _put_back(session, snapshot)
    return f"the state before step {snapshot.step} restored"


def _stop(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    session.stopped = True
    session.model.stop_training = True
    return "done", "training stops; " + _restored(session, p.get("restore", True), incident)


def _raise_error(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    session.stopped = True
    return "done", "NonFiniteError is raised; " + _restored(session, p.get("restore", True), incident)


def _call(session: Any, incident: Incident, report: Any, p: Mapping[str, Any]) -> Answer:
    function = session.functions.get(p["function"])
    if function is None:
        known = ", ".join(sorted(session.functions)) or "none"
        return "skipped", f"no function is registered as {p['function']!r} (registered: {known})"
    result = function(incident)
    return "done", "" if result is None else str(result)


Performer = Callable[[Any, Incident, Any, Mapping[str, Any]], Answer]

PERFORMERS: dict[str, Performer] = {
    "skip": _skip,
    "rollback": _rollback,
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
"""The function for each action of `keras_nanguard.actions.ACTIONS`; a test holds the two tables together."""
