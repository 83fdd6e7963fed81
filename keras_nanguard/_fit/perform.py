"""Performs the actions of a decision: one function per action. The result is an `Effect`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.incident import SITES, Incident, Outcome
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit.bad_data import quarantine
from keras_nanguard._fit.batchnorm import initial_statistics, learning
from keras_nanguard._fit.recent_batches import Rerun
from keras_nanguard._fit.recovery import Lowering
from keras_nanguard._fit.rollback import Restored, Rollback, newest
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.variables import write_all
from keras_nanguard._report.console import times


class Order(NamedTuple):
    """One action to perform.

    Attributes:
        run: the run.
        incident: the incident, with its decision.
        report: the stored report of the step, if any.
        p: the parameters of the action.
        rollback: restores snapshots.
        rates: the learning rate of each optimizer before the first action, by `id`; empty unless
            an action lowers it.
    """

    run: Run
    incident: Incident
    report: Report | None
    p: Mapping[str, Any]
    rollback: Rollback
    rates: Mapping[int, float]


class Answer(NamedTuple):
    """The result of one action.

    Attributes:
        status: `"done"` or `"skipped"`.
        detail: what was done, or why it was not.
        restored: the snapshot that it has restored, if any.
    """

    status: Literal["done", "skipped"]
    detail: str = ""
    restored: Restored | None = None


def done(detail: str = "", restored: Restored | None = None) -> Answer:
    """Return that an action was done."""
    return Answer("done", detail, restored)


def skipped(reason: str) -> Answer:
    """Return that an action was not done, and why."""
    return Answer("skipped", reason)


class Performer(NamedTuple):
    """How an action is performed.

    Attributes:
        perform: performs it; returns `done(...)` or `skipped(...)`.
        writes: which weights, statistics and slots it writes: `"nothing"`; a whole `"snapshot"`;
            `"parts"`; or `"estimates"`, statistics that are re-estimated from the next batches. An
            action that ends training writes `"nothing"`, because no step follows.
    """

    perform: Callable[[Order], Answer]
    writes: Literal["nothing", "snapshot", "parts", "estimates"]

    @property
    def voids_started(self) -> bool:
        """Whether steps that have started from the earlier state do not count."""
        return self.writes in ("snapshot", "parts")

    @property
    def leaves_snapshots(self) -> bool:
        """Whether training continues from a state that no snapshot leads to by a replay."""
        return self.writes in ("parts", "estimates")


class Effect(NamedTuple):
    """The effect of the actions of a decision, besides the written values.

    Attributes:
        outcomes: the result of each action.
        rerun: the steps to replay from the last restored snapshot, or `None`.
        state_replaced: whether the state was replaced: steps that started from the earlier one do
            not count.
        stopped: whether training ends.
        failed: whether the epoch is to log the worst metrics.
    """

    outcomes: tuple[Outcome, ...]
    rerun: Rerun | None
    state_replaced: bool
    stopped: bool
    failed: bool


def perform(run: Run, incident: Incident, report: Report | None, replays: int = 0) -> Effect:
    """Perform every action of the incident's decision, and return the effect.

    An action that raises is reported as skipped with the error, and the other actions still run.

    Args:
        run: the run.
        incident: the incident, with its decision.
        report: the stored report of the step, if any.
        replays: number of rollbacks since the first of the running replays began.
    """
    assert incident.decision is not None
    rollback = Rollback(run, incident, report, replays)
    outcomes, rerun, state_replaced, failed = [], None, False, False
    lowers = any(action["action"] == "lower_lr" for action in incident.decision.actions)
    rates = _rates(run) if lowers else {}
    for action in incident.decision.actions:
        name = action["action"]
        performer, p = PERFORMERS[name], {k: v for k, v in action.items() if k != "action"}
        failed |= p.get("log_worst_metrics", False)
        try:
            answer = performer.perform(Order(run, incident, report, p, rollback, rates))
        except StateLostError:
            raise
        except Exception as error:  # noqa: BLE001  a user's function or a broken optimizer
            answer = skipped(f"{type(error).__name__}: {error}")
        outcomes.append(Outcome(name, answer.status, answer.detail))
        rerun = rerun if answer.restored is None else answer.restored.rerun
        state_replaced |= answer.status == "done" and performer.voids_started
        if answer.status == "done" and performer.leaves_snapshots:
            run.recent.restart(run.step + 1)
    return Effect(tuple(outcomes), rerun, state_replaced, incident.decision.terminal, failed)


def _rates(run: Run) -> dict[int, float]:
    """Return the current learning rates by `id` of their optimizers, without those of a user's
    schedule that raises.
    """
    rates = {}
    for optimizer in run.train_state().optimizers:
        with suppress(Exception):
            rates[id(optimizer)] = keras_optimizers.learning_rate(optimizer)
    return rates


# The actions


def _roll_back(order: Order) -> Answer:
    run, p, rollback = order.run, order.p, order.rollback
    wanted = rollback.before_onset() if p.get("before_onset") else newest(run, p.get("depth", 1))
    snapshot = run.agreement.snapshot(wanted, run.ring)
    if snapshot is None:
        return skipped("there is no verified snapshot to restore")
    rerun = rollback.rerun(snapshot) if p.get("replay_steps") else None
    restored = rollback.restore(snapshot, rerun, rerun is None and p.get("reseed", True))
    skip = int(p.get("skip_batches", 0))
    run.counts.skip_batches += skip
    run.counts.rollbacks += 1
    back = f"restored the state {snapshot.moment}"
    also = f"; the next {skip} batches are skipped" if skip else ""
    if rerun is not None:
        again = f"{times(len(rerun.batches), 'later step')} replayed"
        return done(f"{back}{also}; {again}", restored)
    count = restored.undone
    lost = f"{times(count, 'committed step')} undone" if count else "no step had committed since"
    return done(f"{back}; {lost}{also}", restored)


def _lower_lr(order: Order) -> Answer:
    run, incident, p = order.run, order.incident, order.p
    before_update = any(SITES.index(f.site) < SITES.index("weights") for f in incident.findings)
    tried = run.recovery.tried(run.counts.committed)
    if incident.refused and before_update and not tried:
        since = "yet" if run.recovery.lowering.at is None else "since it was lowered"
        return skipped(f"no step has committed {since}, so a lower rate has no effect")
    changed = []
    retrace = False
    for optimizer in run.train_state().optimizers:
        rate = run.recovery.rate(optimizer)
        factor = min(float(p["factor"]), incident.values.get("rate_factor", math.inf))
        failed = order.rates.get(id(optimizer), 0.0)
        before, after, again = rate.lower(factor, p.get("min_lr", 0.0), failed)
        retrace |= again
        if after < before:
            changed.append(f"{optimizer.name}: {before:.3g} -> {after:.3g}")
    if retrace:
        run.access.rebuild()
    if not changed:
        return skipped(f"the learning rate is already at min_lr={p.get('min_lr', 0.0):g}")
    diverged = any(f.kind == "divergence" for f in incident.findings)
    diverged |= run.recovery.lowering.diverged or "divergence" in incident.causes
    returns = (p["recover_after"], p.get("ramp", 0)) if p.get("recover_after") else None
    at = (run.step, run.counts.committed)
    run.recovery.lowering = Lowering(diverged, at, None if diverged else returns)
    return done("learning rate of " + ", ".join(changed))


def _clip(order: Order) -> Answer:
    run, p = order.run, order.p
    changed, reasons = [], []
    first, least = p["global_clipnorm"], p["min_clipnorm"]
    for optimizer in run.train_state().optimizers:
        inner = keras_optimizers.inner(optimizer)
        now = inner.global_clipnorm
        tight = max(first if now is None or now > first else now * p["factor"], least)
        if inner.clipnorm or inner.clipvalue:
            own = "clips by clipnorm or clipvalue, which Keras does not combine with a global norm"
            reasons.append(f"{inner.name} {own}")
        elif now is not None and tight >= now:
            reasons.append(f"{inner.name} already clips at {now:g}, and min_clipnorm is {least:g}")
        else:
            run.recovery.change(inner, "global_clipnorm", tight)
            changed.append(f"{inner.name}: global_clipnorm {now} -> {tight:g}")
    if not changed:
        return skipped(", ".join(reasons) or "there is no optimizer")
    run.access.rebuild()
    return done(", ".join([*changed, *reasons]))


def _fix_loss_scale(order: Order) -> Answer:
    run, p = order.run, order.p
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
        return skipped("the model does not scale its loss")
    run.recovery.scale_bounds = (p["floor"], p["ceiling"])
    if p.get("growth_steps"):
        run.access.rebuild()
    return done(", ".join(changed))


def _repair(order: Order) -> Answer:
    run, source, state = order.run, order.p["source"], order.run.train_state()
    whole = (*state.trainable, *state.statistics, *state.slots)
    bad = [v for v in whole if id(v) not in run.tolerated and not _is_finite(v)]
    if not bad:
        return skipped("no entry is bad")
    good = _source(run, source, bad)
    missing = [v.path for v in bad if good.get(id(v)) is None]
    if missing:
        return skipped(f"{', '.join(missing)}: no value in source={source!r}")
    count, repaired = 0, []
    for variable in bad:
        value = keras_variables.read(variable)
        places = ~np.isfinite(finiteness.widen(value))
        value[places] = np.asarray(good[id(variable)])[places]
        repaired.append((variable, value))
        count += int(places.sum())
    write_all(repaired)
    return done(f"{count} entries of {', '.join(v.path for v in bad)} from {source}")


def _is_finite(variable: Any) -> bool:
    return finiteness.is_finite(keras_variables.view(variable))


def _source(run: Run, source: str, variables: list[Any]) -> dict[int, Any]:
    """Return the values to write into variables, by `id`; `None` for a variable without a value in
    the source.
    """
    if source == "last_good":
        snapshot = newest(run)
        return {id(v): snapshot.value(v) for v in variables} if snapshot is not None else {}
    if source == "initializer":
        first = {id(v): keras_layers.initial_value(run.model, v) for v in variables}
        return first | _first_slots(run)
    return {id(v): np.full(tuple(v.shape), 0.0 if source == "zeros" else 1.0) for v in variables}


def _first_slots(run: Run) -> dict[int, np.ndarray[Any, Any]]:
    """Return the initial value of each slot, by `id`. Averages of the weights start with the
    current weights.
    """
    first: dict[int, np.ndarray[Any, Any]] = {}
    for optimizer in run.train_state().optimizers:
        if not optimizer.built:
            continue
        fresh = keras_optimizers.fresh_like(optimizer)
        pairs = [*zip(optimizer.variables, fresh.variables)]
        pairs += keras_optimizers.averages_of(optimizer)
        first |= {id(variable): keras_variables.read(value) for variable, value in pairs}
    return first


def _reset_batchnorm(order: Order) -> Answer:
    run, layers = order.run, keras_layers.batchnorms(order.run.model)
    if not layers:
        return skipped("the model has no BatchNormalization")
    values = initial_statistics(layers)
    if order.p["source"] == "last_good":
        snapshot = newest(run)
        values = [(v, snapshot.value(v) if snapshot is not None else None) for v, _ in values]
        if any(value is None for _, value in values):
            return skipped("there is no last good state")
    write_all(values)
    return done(f"{len(values)} statistics reset")


def _recalibrate_batchnorm(order: Order) -> Answer:
    run, batches = order.run, order.p["batches"]
    layers = learning(run.model)
    if not layers:
        return skipped("the model has no BatchNormalization that learns its statistics")
    write_all(initial_statistics(layers))
    run.recovery.estimate(run.model, batches)
    what = f"the statistics of {len(layers)} layers"
    return done(f"re-estimating {what} over the next {batches} batches")


def _reset_slots(order: Order) -> Answer:
    run = order.run
    slots = [v for v in run.train_state().slots if finiteness.is_float(v.dtype)]  # no step counts
    if order.p["scope"] == "bad":
        slots = [v for v in slots if not _is_finite(v)]
    first = _first_slots(run) if slots else {}
    write_all([(variable, first[id(variable)]) for variable in slots])
    return done(f"{len(slots)} slots reset") if slots else skipped("no slot is bad")


def _stop(order: Order) -> Answer:
    order.run.model.stop_training = True
    return _ended(order, "training stops")


def _raise(order: Order) -> Answer:
    return _ended(order, "NonFiniteError is raised")


def _ended(order: Order, how: str) -> Answer:
    """End training; return a description of the final state and learning rates."""
    restore = order.p.get("restore", True)
    state, restored = _last_good(order) if restore else ("the state is not restored", None)
    return done("; ".join([how, state, *_rates_left(order.run, restore)]), restored)


def _last_good(order: Order) -> tuple[str, Restored | None]:
    """Restore the last good state at the end of training; return it in words."""
    run, incident, rollback = order.run, order.incident, order.rollback
    if incident.refused and not any(f.site == "state" for f in incident.findings):
        return "the model still has the last good state", None
    snapshot = run.agreement.snapshot(newest(run), run.ring)
    if snapshot is None:
        return "there is no good state to restore", None
    state, rerun = f"the state {snapshot.moment}", rollback.rerun(snapshot, ends=True)
    try:
        restored = rollback.restore(snapshot, rerun)
    except StateLostError:
        raise
    except Exception as problem:  # noqa: BLE001  training ends all the same
        return f"{state} not restored: {type(problem).__name__}: {problem}", None
    if rerun is None:
        return f"{state} restored", restored
    return f"{state} restored, and {times(len(rerun.batches), 'later step')} replayed", restored


def _rates_left(run: Run, restore: bool) -> list[str]:
    """Reset every lowered learning rate, or report that it stays; return a sentence for each."""
    changed = []
    for optimizer in run.train_state().optimizers:
        rate = run.recovery.rates.get(id(optimizer))
        if rate is None or rate.factor >= 1:
            continue
        lowered, which = rate.value, f"the learning rate of {optimizer.name}"
        if restore:
            rate.restore(1.0)
            changed.append(f"{which} is reset to {rate.value:.3g} (from {lowered:.3g})")
        else:
            share = f"{rate.factor:.3g} times the configured rate"
            changed.append(f"{which} stays at {lowered:.3g}, {share}")
    if restore:
        run.recovery.lowering = run.recovery.lowering._replace(returns=None)
    return changed


def _call(order: Order) -> Answer:
    name, functions = order.p["function"], order.run.functions
    if name not in functions:
        known = ", ".join(sorted(functions)) or "none"
        return skipped(f"no function is registered as {name!r} (registered: {known})")
    result = functions[name](order.incident)
    return done("" if result is None else str(result))


def _quarantine(order: Order) -> Answer:
    run, report, p = order.run, order.report, order.p
    if run.directory is None:
        return skipped("NanGuard has no directory")
    if report is None or report.batch is None:
        return skipped("there is no batch to save")
    limits = (p["max_batches"], p["max_mb"])
    path, why = quarantine(run.directory, report.batch, order.incident, *limits)
    return done(f"the batch is in {path}") if path is not None else skipped(why)


PERFORMERS: dict[str, Performer] = {
    "skip": Performer(
        lambda order: done("the step was skipped; the state did not change"), "nothing"
    ),
    "rollback": Performer(_roll_back, "snapshot"),
    "lower_lr": Performer(_lower_lr, "nothing"),
    "clip": Performer(_clip, "nothing"),
    "fix_loss_scale": Performer(_fix_loss_scale, "nothing"),
    "repair": Performer(_repair, "parts"),
    "reset_batchnorm": Performer(_reset_batchnorm, "parts"),
    "recalibrate_batchnorm": Performer(_recalibrate_batchnorm, "estimates"),
    "reset_slots": Performer(_reset_slots, "parts"),
    "quarantine": Performer(_quarantine, "nothing"),
    "warn": Performer(lambda order: done(order.p.get("message", "")), "nothing"),
    "stop": Performer(_stop, "nothing"),
    "raise_error": Performer(_raise, "nothing"),
    "call": Performer(_call, "nothing"),
}
"""Each action of `keras_nanguard.actions.ACTIONS`; a test compares both tables."""
