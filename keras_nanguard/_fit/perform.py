"""Performs the actions of a decision: one function per action, which returns what was done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends.shared.replay import rate_if_known
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import GuardError, StateLostError
from keras_nanguard._core.incident import RATE_LEFT, Incident, Outcome, restored_state
from keras_nanguard._core.literals import SITES
from keras_nanguard._core.plain_values import times
from keras_nanguard._fit import rollback
from keras_nanguard._fit.batchnorm import initial_statistics, learning, reestimated, runs_alone
from keras_nanguard._fit.rates import Rate
from keras_nanguard._fit.rollback import ActionContext, Restored
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.all_or_none import write_all
from keras_nanguard._policy import actions


class NotDoneError(Exception):
    """An action was not done, and why."""


class Done(NamedTuple):
    """The result of an action that was done.

    Attributes:
        text: what was done, in words. The printed line has that of a lowered rate, and of the end
            of training the `restored_state`.
        restored: what was restored, if anything.
    """

    text: str
    restored: Restored | None = None


def perform(
    context: ActionContext, chosen: Sequence[actions.Action]
) -> tuple[tuple[Outcome, ...], Restored | None]:
    """Perform the actions that were chosen for an incident.

    An action that raises is reported as skipped with the error, and the other actions still run.

    Returns:
        The outcomes, and what an action has restored, if any has.
    """
    run = context.run
    if any(isinstance(action, actions.LowerLr) for action in chosen):
        read, optimizers = keras_optimizers.learning_rate, run.train_state().optimizers
        rates = {id(o): rate_if_known(read, o) for o in optimizers}
        known = {key: rate for key, rate in rates.items() if rate is not None}
        context = replace(context, rates_before=known)
    run.ring.promote(run.counts.good)
    outcomes: list[Outcome] = []
    for action in chosen:
        outcome, restored = _attempt(context, action)
        outcomes.append(outcome)
        if restored is not None:
            context = replace(context, restored=restored)
    return tuple(outcomes), context.restored


def _attempt(context: ActionContext, action: actions.Action) -> tuple[Outcome, Restored | None]:
    """Perform one action; return its outcome, and what it has restored, if anything."""
    name = action.name
    try:
        done = PERFORMERS[name](context, action)
    except StateLostError:
        raise
    except NotDoneError as error:
        return Outcome(name, "skipped", str(error)), None
    except Exception as error:  # noqa: BLE001  of a user's function, a broken optimizer
        return Outcome(name, "skipped", f"{type(error).__name__}: {error}"), None
    if name in WRITES_PARTS:
        context.run.recent.restart()
    return Outcome(name, "done", done.text), done.restored


# The actions


def _roll_back(context: ActionContext, p: actions.Rollback) -> Done:
    run = context.run
    if context.restored is not None:
        raise NotDoneError("an earlier action has restored a state")
    replays = p.replay_steps and rollback.can_rerun(context)
    wanted = rollback.chosen(context, replays, further=p.further_back)
    snapshot = run.agreement.snapshot(wanted, run.ring)
    if snapshot is None:
        raise NotDoneError("there is no verified snapshot to restore")
    rerun = rollback.plan_replay(context, snapshot) if p.replay_steps else None
    undone = rollback.restore(context, snapshot, rerun, reseed=rerun is None)
    skip = p.skip_batches if run.access.skips_batches else 0
    run.counts.roll_back(skip)
    back = f"restored the state {snapshot.time}"
    also = f"; the next {skip} batches are skipped" if skip else ""
    if skip < p.skip_batches:
        also = "; no batch is skipped, because a loop of your own chooses them"
    if rerun is not None:
        again = f"{times(rerun.replayed, 'later step')} replayed"
        return Done(f"{back}{also}; {again}", Restored(snapshot, rerun))
    lost = f"{times(undone, 'committed step')} undone" if undone else "no step had committed since"
    return Done(f"{back}; {lost}{also}", Restored(snapshot, None))


def _lower_lr(context: ActionContext, p: actions.LowerLr) -> Done:
    run, incident, least = context.run, context.incident, p.min_lr
    if _lowered_in_vain(run, incident):
        since = "yet" if run.recovery.lowering.at is None else "since it was lowered"
        raise NotDoneError(f"no step has committed {since}, so a lower rate has no effect")
    factor = min(p.factor, incident.values.get("rate_factor", p.factor))
    changed, rebuild = [], False
    with run.recovery.all_or_nothing():
        for optimizer in run.train_state().optimizers:
            failed = context.rates_before.get(id(optimizer), 0.0)
            before, after, retrace = run.recovery.rate(optimizer).lower(factor, least, failed)
            rebuild |= retrace
            if after < before:
                changed.append((optimizer.name, f"{before:.3g} -> {after:.3g}"))
        if rebuild:
            run.rebuild()
    if not changed:
        raise NotDoneError(f"the learning rate is already at min_lr={least:g}")
    run.recovery.lowered(run.counts.committed, incident.diverged, p.recover_after)
    if len(changed) == 1:
        return Done(f"learning rate {changed[0][1]}")
    return Done(f"learning rate of {', '.join(f'{name}: {rates}' for name, rates in changed)}")


def _lowered_in_vain(run: Run, incident: Incident) -> bool:
    """Whether a lower rate cannot have an effect: a step was refused before its update, and none
    has committed since the rate was last lowered.
    """
    before_update = any(SITES.index(f.site) < SITES.index("weights") for f in incident.findings)
    tried = run.counts.committed > max(run.recovery.lowering.at or 0, 0)
    return incident.refused and before_update and not tried


def _clip(context: ActionContext, p: actions.Clip) -> Done:
    run, changed, reasons = context.run, [], []
    first, least = p.global_clipnorm, p.min_clipnorm
    own = "clips by clipnorm or clipvalue, which Keras does not combine with a global norm"
    with run.recovery.all_or_nothing():
        for inner in map(keras_optimizers.inner, run.train_state().optimizers):
            now = inner.global_clipnorm
            tight = max(first if now is None or now > first else now * p.factor, least)
            if inner.clipnorm or inner.clipvalue:
                reasons.append(f"{inner.name} {own}")
            elif now is not None and tight >= now:
                at = f"already clips at {now:g}, and min_clipnorm is {least:g}"
                reasons.append(f"{inner.name} {at}")
            else:
                run.recovery.change(inner, "global_clipnorm", tight)
                changed.append(f"{inner.name}: global_clipnorm {now} -> {tight:g}")
        if changed:
            run.rebuild()
    if not changed:
        raise NotDoneError(", ".join(reasons) or "there is no optimizer")
    return Done(", ".join([*changed, *reasons]))


def _fix_loss_scale(context: ActionContext, p: actions.FixLossScale) -> Done:
    run, growth, bounds = context.run, p.growth_steps, context.run.policy.loss_scale
    changed = []
    scaling = [o for o in run.train_state().optimizers if keras_optimizers.scales_of(o)]
    if not scaling:
        raise NotDoneError("the model does not scale its loss")
    if growth:  # first, because compiling may fail
        with run.recovery.all_or_nothing():
            for optimizer in scaling:
                run.recovery.change(optimizer, "dynamic_growth_steps", growth)
            run.rebuild()
    for optimizer in scaling:
        scale, counter = keras_optimizers.scales_of(optimizer)
        before = float(keras_variables.read(scale))
        start = p.reset_to if p.reset_to is not None else before
        start = optimizer.initial_scale if math.isnan(start) else start
        after = min(max(start, bounds.floor), bounds.ceiling)
        fresh = np.zeros_like(keras_variables.read(counter))
        write_all([(scale, np.float32(after)), (counter, fresh)])
        doubling = f", doubling after {growth} good steps" if growth else ""
        changed.append(f"loss scale {before:g} -> {after:g}{doubling}")
    run.recovery.bound_scale(bounds.floor, bounds.ceiling)
    return Done(", ".join(changed))


def _repair(context: ActionContext, p: actions.Repair) -> Done:
    run, source, state = context.run, p.source, context.run.train_state()
    whole = (*state.trainable, *state.statistics, *state.slots)
    accepts = run.state_check.accepts
    bad = [v for v in whole if not accepts(v, keras_variables.view(v))]
    if not bad:
        raise NotDoneError("no entry is bad")
    good = _source(context, source, bad)
    missing = ", ".join(v.path for v in bad if good.get(id(v)) is None)
    known = [v for v in bad if good.get(id(v)) is not None]
    if not known:
        raise NotDoneError(f"{missing}: no value in source={source!r}")
    count, repaired = 0, []
    for variable in known:
        value = keras_variables.read(variable)
        wide = finiteness.widen(value)
        places = np.isnan(wide) if id(variable) in run.tolerated else ~np.isfinite(wide)
        value[places] = np.asarray(good[id(variable)])[places]
        repaired.append((variable, value))
        count += int(places.sum())
    write_all(repaired)
    left = f"; no value for {missing}" if missing else ""
    return Done(f"{count} entries of {', '.join(v.path for v in known)} from {source}{left}")


def _source(context: ActionContext, source: str, variables: list[Any]) -> dict[int, Any]:
    """Return values for variables by `id`, `None` for a variable without one in the source."""
    if source == "last_good":
        snapshot = context.run.ring.newest()
        return {id(v): snapshot.value(v) for v in variables} if snapshot is not None else {}
    if source == "initializer":
        first = {id(v): keras_layers.initial_value(context.run.model, v) for v in variables}
        return first | _first_slots(context.run)
    return {id(v): np.full(tuple(v.shape), 0.0 if source == "zeros" else 1.0) for v in variables}


def _first_slots(run: Run) -> dict[int, np.ndarray[Any, Any]]:
    """Return the first value of each slot by `id`; averages start with the current weights."""
    first: dict[int, np.ndarray[Any, Any]] = {}
    for optimizer in run.train_state().optimizers:
        own = keras_optimizers.first_values(optimizer) if optimizer.built else {}
        first |= {slot: keras_variables.read(value) for slot, value in own.items()}
    return first


def _reset_batchnorm(context: ActionContext, p: actions.ResetBatchnorm) -> Done:
    values = initial_statistics(keras_layers.batchnorms(context.run.model))
    if not values:
        raise NotDoneError("the model has no BatchNormalization")
    if p.source == "last_good":
        good = _source(context, "last_good", [v for v, _ in values])
        values = [(v, good.get(id(v))) for v, _ in values]
        if any(value is None for _, value in values):
            raise NotDoneError("there is no last good state")
    write_all(values)
    return Done(f"{times(len(values), 'statistic')} reset")


def _recalibrate_batchnorm(context: ActionContext, p: actions.RecalibrateBatchnorm) -> Done:
    run, layers = context.run, learning(context.run.model)
    if not layers:
        raise NotDoneError("the model has no BatchNormalization that learns its statistics")
    if not runs_alone(run.model):
        raise NotDoneError("a batch is spread over several devices or processes")
    batches = run.recent.last(p.batches)
    if not batches:
        raise NotDoneError("no batch is in memory")
    try:
        estimates = reestimated(run, layers, batches)
    except StateLostError:
        raise
    except Exception as error:
        why = f"the model cannot run on the arguments of a step: {type(error).__name__}: {error}"
        raise NotDoneError(str(error) if isinstance(error, GuardError) else why) from error
    write_all(estimates)
    source = times(len(batches), "good step")
    return Done(f"{times(len(estimates), 'statistic')} re-estimated from the last {source}")


def _reset_slots(context: ActionContext, p: actions.ResetSlots) -> Done:
    run = context.run
    slots = [v for v in run.train_state().slots if finiteness.is_float(v.dtype)]  # no step counts
    if p.scope == "bad":
        slots = [v for v in slots if not keras_variables.is_finite(v)]
    if not slots:
        raise NotDoneError("no slot is bad" if p.scope == "bad" else "there is no slot")
    first = _first_slots(run)
    if any(id(variable) not in first for variable in slots):
        raise NotDoneError("a new optimizer of this configuration has other slots")
    write_all([(variable, first[id(variable)]) for variable in slots])
    return Done(f"{times(len(slots), 'slot')} reset")


def _ended(context: ActionContext, p: actions.Ending, how: str) -> Done:
    """End training, with the last good state if the action restores it."""
    restores = p.restore
    done = _restore_last_good(context) if restores else Done("no state is restored")
    sentences = (how, done.text, *_rates_left(context.run, restores))
    return done._replace(text="; ".join(sentences))


def _restore_last_good(context: ActionContext) -> Done:
    """Restore the last good state at the end, unless the model has it."""
    run, diverged = context.run, context.incident.diverged
    if context.restored is not None:
        return Done("the model keeps the state that was restored")
    wanted = rollback.last_good(context)
    if wanted == "present":
        return Done("the model still has the last good state")
    snapshot = run.agreement.snapshot(wanted, run.ring)
    if snapshot is None:
        return Done("there is no good state to restore")
    rerun = None if diverged else rollback.plan_replay(context, snapshot)
    try:
        rollback.restore(context, snapshot, rerun)
    except StateLostError:
        raise
    except Exception as problem:  # noqa: BLE001  training ends all the same
        why = f"not restored: {type(problem).__name__}: {problem}"
        return Done(restored_state(str(snapshot.time), why))
    again = "" if rerun is None else f", and {times(rerun.replayed, 'later step')} replayed"
    done = restored_state(str(snapshot.time), f"restored{again}")
    return Done(done, Restored(snapshot, rerun))


def _rates_left(run: Run, restore: bool) -> list[str]:
    """Reset every lowered learning rate, or report that it stays; return a sentence for each."""
    changed = []
    for optimizer in run.train_state().optimizers:
        rate = run.recovery.rates.get(id(optimizer))
        if rate is None or rate.factor >= 1:
            continue
        lowered, which = _shown(rate), f"{RATE_LEFT}{optimizer.name}"
        if restore:
            rate.restore(1.0)
            changed.append(f"{which} is reset to {_shown(rate)} (from {lowered})")
        else:
            share = f"{rate.factor:.3g} times the configured rate"
            changed.append(f"{which} stays at {lowered}, {share}")
    if restore:
        run.recovery.keep_rates()
    return changed


def _shown(rate: Rate) -> str:
    """Return a learning rate as text."""
    value = rate_if_known(keras_optimizers.learning_rate, rate.optimizer)
    return "an unknown value" if value is None else f"{value:.3g}"


def _call(context: ActionContext, p: actions.Call) -> Done:
    name, functions = p.function, context.run.functions
    if name not in functions:
        names = ", ".join(sorted(functions)) or "none"
        raise NotDoneError(f"no function is registered as {name!r} (registered: {names})")
    result = functions[name](context.incident)
    return Done("" if result is None else str(result))


PERFORMERS: dict[str, Callable[[ActionContext, Any], Done]] = {
    "skip": lambda context, p: Done("the step was skipped; the state did not change"),
    "rollback": _roll_back,
    "lower_lr": _lower_lr,
    "clip": _clip,
    "fix_loss_scale": _fix_loss_scale,
    "repair": _repair,
    "reset_batchnorm": _reset_batchnorm,
    "recalibrate_batchnorm": _recalibrate_batchnorm,
    "reset_slots": _reset_slots,
    "warn": lambda context, p: Done(p.message),
    "stop": partial(_ended, how="training stops"),
    "raise_error": partial(_ended, how="NonFiniteError is raised"),
    "call": _call,
}
"""Performs each action of `keras_nanguard.actions.ACTIONS`; a test compares both tables. Each
function returns what was done, or raises `NotDoneError`.
"""

WRITES_PARTS = frozenset({"repair", "reset_batchnorm", "recalibrate_batchnorm", "reset_slots"})
"""The actions that write some weights, statistics or slots: not a whole snapshot."""
