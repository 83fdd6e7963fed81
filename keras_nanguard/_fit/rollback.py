"""Restores a snapshot, replays the steps since then, and passes over iterations without a usable
learning rate.

If the batch of a step is remembered, the step can run again from a snapshot with the same compiled
function, batch and seeds. It gives the same numbers unless something was changed in between, such
as the learning rate. So a rollback loses no steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._core.incident import Incident, Outcome
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._diagnose.causes import MAX_RATE
from keras_nanguard._fit.recovery import initial_statistics
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Rerun, Snapshot
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.optimizers import scheduled_iteration
from keras_nanguard._keras.whole_writes import write_all

MOST_RERUNS = 32
"""Maximum number of rollbacks within replays of each other."""

_SEED_STEP = 7919
"""Amount by which a rollback advances each seed: a prime, so that no number of Dropout layers
aligns with it.
"""

Answer = tuple[str, str]
"""`("done", detail)` or `("skipped", reason)`."""


class Order(NamedTuple):
    """One action to perform.

    Attributes:
        run: the run.
        incident: the incident, with its decision.
        report: the stored report of the step, if any.
        p: the parameters of the action.
    """

    run: Run
    incident: Incident
    report: Report | None
    p: Mapping[str, Any]


# The actions


def roll_back(order: Order) -> Answer:
    """Perform the action `rollback`."""
    run, p = order.run, order.p
    wanted = _from_before_onset(order) if p.get("before_onset") else newest(run, p.get("depth", 1))
    snapshot = run.agreement.snapshot(wanted, run.ring)
    if snapshot is None:
        return "skipped", "there is no verified snapshot to restore"
    rerun = run.agreement.rerun(_rerun_of(order, snapshot)) if p.get("replay_steps") else None
    undone = _put_back(order, snapshot, rerun, rerun is None and p.get("reseed", True))
    skip = int(p.get("skip_batches", 0))
    run.counts.skip_batches += skip
    run.counts.rollbacks += 1
    back = f"restored the state {_moment(snapshot)}"
    also = f"; the next {skip} batches are skipped" if skip else ""
    if rerun is not None:
        return "done", f"{back}{also}; {_times(len(rerun.batches), 'later step')} replayed"
    lost = f"{_times(undone, 'committed step')} undone" if undone else "no step had committed since"
    return "done", f"{back}; {lost}{also}"


def restore_for_good(order: Order) -> str:
    """Restore the last good state at the end of training; return a description of the state."""
    run, incident = order.run, order.incident
    if incident.refused and not any(f.site == "state" for f in incident.findings):
        return "the model still has the last good state"
    snapshot = run.agreement.snapshot(newest(run), run.ring)
    if snapshot is None:
        return "there is no good state to restore"
    rerun = run.agreement.rerun(_rerun_of(order, snapshot))
    state = f"the state {_moment(snapshot)}"
    try:
        _put_back(order, snapshot, rerun)
    except StateLostError:
        raise
    except Exception as problem:  # noqa: BLE001  training ends all the same
        return f"{state} not restored: {type(problem).__name__}: {problem}"
    if rerun is None:
        return f"{state} restored"
    return f"{state} restored, and {_times(len(rerun.batches), 'later step')} replayed"


def _moment(snapshot: Snapshot) -> str:
    """Return the time of a snapshot in words."""
    return f"after {_times(snapshot.step, 'step')}" if snapshot.step else "before the first step"


def _times(count: int, word: str) -> str:
    """Return a count with its word: `1 step`, `2 steps`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


# Which snapshot


def newest(run: Run, depth: int = 1) -> Snapshot | None:
    """Return the `depth`-th newest verified snapshot."""
    run.ring.promote(run.counts.good)
    return run.ring.newest(depth)


def _from_before_onset(order: Order) -> Snapshot | None:
    """Return the newest snapshot from before the onset, or an older one if the last restored one
    brought no progress.

    If this is the state before the first step and the steps since then cannot be replayed, the
    snapshot with the lowest loss is used instead, provided that it has made most of the progress.
    So a long run does not start over.
    """
    run, incident = order.run, order.incident
    run.ring.promote(run.counts.good)
    onset, restored = int(incident.values.get("onset", incident.step)), run.counts.restored
    if restored is not None and "rate_factor" not in incident.values:
        onset = onset if _improved_since(run, restored) else min(onset, max(restored - 1, 0))
    snapshot = run.ring.before(onset)
    if snapshot is not None and not snapshot.step and _known_since(run, snapshot, incident) is None:
        kept = run.ring.with_least_loss()
        first = min((m.loss for m in run.history.first(run.step)), default=math.inf)
        level = kept.level if kept is not None else None
        progress = level is not None and level.value + level.spread < first
        if kept is not None and progress and run.ring.at_hand(kept):
            return kept
    return snapshot if snapshot is not None and run.ring.at_hand(snapshot) else run.ring.newest()


def _improved_since(run: Run, restored: int) -> bool:
    """Whether the loss after the last rollback was lower than ever before."""
    before = [loss for step, loss in run.history.series if step < restored]
    before += [m.loss for m in run.history.first(run.step)]
    since = [loss for step, loss in run.history.series if step >= restored]
    found = level_of([(0, loss) for loss in sorted(since)[:WINDOW]])
    return found is not None and found.value < min(before, default=math.inf)


def _known_since(run: Run, snapshot: Snapshot, incident: Incident) -> Rerun | None:
    """Return the steps since a snapshot, to be replayed; `None` if not all of their batches are
    available.
    """
    if not run.access.can_run_again:
        return None
    return run.recent.rerun(snapshot, incident.step, run.transaction.batch)


def _rerun_of(order: Order, snapshot: Snapshot) -> Rerun | None:
    """Return the same for the steps that are to be replayed; `None` if replaying them has led to
    this incident.
    """
    run, incident = order.run, order.incident
    if run.reruns and (run.stopped or run.reruns >= MOST_RERUNS):
        return None
    ends = incident.decision is not None and incident.decision.terminal
    bad = any(f.kind in ("nonfinite", "out_of_range") for f in incident.findings)
    if run.access.can_run_again and not incident.refused and (ends or bad):
        run.recent.blame(incident.step)  # this step was bad, and not the state that it came to
    return _known_since(run, snapshot, incident)


# Restoring it


def _put_back(order: Order, snapshot: Snapshot, rerun: Rerun | None, reseed: bool = False) -> int:
    """Write a snapshot into the model; return the number of committed steps that this undoes.

    Nothing else changes before the whole snapshot is written, and nothing at all if that fails.

    Args:
        order: the action, with the reason for it.
        snapshot: the state to restore.
        rerun: the steps to replay afterwards. If given, loss scales and the generator are restored
            as well.
        reseed: whether the random generators advance, by another amount after each rollback.

    Raises:
        StateLostError: if neither the snapshot nor the previous state could be written completely.
        Exception: if the snapshot could not be written; the model has the previous state.
    """
    run, incident, train_state = order.run, order.incident, order.run.train_state()
    variables = train_state.restorable if rerun is None else train_state.kept
    estimate = run.recovery.recalibration
    changed = initial_statistics(estimate.layers) if estimate is not None else []
    if reseed:
        changed += moved_seeds(train_state.other, run.counts.rollbacks + 1, snapshot)
    run.ring.write(snapshot, variables, changed, undo=processes.count() == 1)
    if rerun is not None and snapshot.generator is not None:
        current.host().set_generator_state(snapshot.generator)
    elif rerun is None and reseed:
        current.host().advance_generator()
    committed_bad = not incident.refused and order.report is not None
    spoilt = committed_bad and any(f.kind == "nonfinite" for f in incident.findings)
    undone = run.counts.good - snapshot.good + spoilt
    run.ring.forget_after(snapshot.step)
    if rerun is None:
        run.counts.good = snapshot.good
        run.recent.restart(run.step + 1, snapshot)
    else:
        run.rerun = rerun
        run.recent.return_to(snapshot.step)
    _record(run, snapshot, undone, rerun)
    run.history.undo(snapshot.step)
    run.counts.restored = snapshot.step
    if estimate is not None:
        estimate.restart()
    return undone


def _record(run: Run, snapshot: Snapshot, undone: int, rerun: Rerun | None) -> None:
    """Record that a snapshot was restored."""
    batches = enumerate(rerun.batches, snapshot.step) if rerun is not None else ()
    again = frozenset(step for step, args in batches if args is not None)
    run.recording.recorder.undo(snapshot.step, again)
    data = {"to": snapshot.step, "undone": undone, "run_again": len(again)}
    then = f"; {len(again)} steps replayed" if again else ""
    text = f"Restored the state {_moment(snapshot)}{then}."
    run.recording.event("rollback", text, data)


def draw_anew(run: Run) -> None:
    """Advance every random generator of the model, so that the next step draws other numbers."""
    write_all(moved_seeds(run.train_state().other))
    current.host().advance_generator()


def moved_seeds(
    variables: Sequence[Any], times: int = 1, snapshot: Snapshot | None = None
) -> list[tuple[Any, Any]]:
    """Return the advanced seeds among variables, each with its new value."""
    moved = []
    for seed in keras_variables.seeds(variables):
        known = snapshot.value(seed) if snapshot is not None else None
        value = keras_variables.read(seed) if known is None else np.array(known)
        value[..., -1] += np.asarray(_SEED_STEP * times, value.dtype)
        moved.append((seed, value))
    return moved


# Replaying the steps since then


def run_again(run: Run, after: Callable[[Verdict], object]) -> None:
    """Replay the undone steps, with all handling after each step. This may lead to another
    rollback.

    Afterwards the counters are the same as before.

    Args:
        run: the run, with the steps to replay.
        after: handles the verdict of a step.
    """
    step, stopped = run.counts.step, run.stopped
    metrics: list[tuple[Any, Any]] = []
    batches: deque[Any] = deque()
    try:
        while batches or run.rerun is not None:
            if run.rerun is not None:
                plan, run.rerun = run.rerun, None
                run.reruns += 1
                metrics = _metrics_from(run, plan)
                at, good, every = plan.snapshot.step, plan.snapshot.good, run.policy.snapshot.every
                run.counts.return_to(at, good, plan.refused)
                run.recovery.return_to(at, run.counts.committed)
                for task in ("checks", "proof"):  # they are due again
                    run.due.plan(task, at + 1)
                run.due.plan("snapshot", at + every if every else math.inf)
                batches.extendleft(reversed(plan.batches))
                continue
            args = batches.popleft()
            if run.counts.step == run.counts.epoch_start and not metrics:
                _begin_metrics(run)
            pass_over(run)
            if args is None:
                run.recent.push(run.counts.step, None, refused=True)
                run.counts.step += 1
            else:
                after(run.access.run_again(args))
                if run.stopped and not stopped and run.rerun is None:
                    break  # in the state that the policy has restored
    finally:
        run.reruns, run.counts.step = 0, step
    run.access.sync_variables()
    for variable, value in metrics:
        keras_variables.write(variable, value)


def _metrics_from(run: Run, plan: Rerun) -> list[tuple[Any, Any]]:
    """Restore the metrics of a snapshot. If they are unknown, return the values to write back
    afterwards.
    """
    metrics, known = run.train_state().metrics, plan.snapshot.metrics
    if plan.snapshot.step <= run.counts.epoch_start and hasattr(run.model, "reset_metrics"):
        _begin_metrics(run)
        return []
    if not all(id(variable) in known for variable in metrics):
        return [(variable, keras_variables.read(variable)) for variable in metrics]
    for variable in metrics:
        keras_variables.write(variable, known[id(variable)])
    return []


def _begin_metrics(run: Run) -> None:
    """Reset the metrics, as at the start of an epoch. A torch module has none."""
    if hasattr(run.model, "reset_metrics"):
        run.access.sync_variables()
        run.model.reset_metrics()


# Iterations without a usable learning rate: a schedule can have a pole, as `rsqrt(step - warmup)`
# at the end of the warmup. No weights are finite after a step at such a rate. So the step is
# skipped and the iteration counter moves past it, as otherwise the next step has the same rate.


MAX_PASSED = 10
"""Iterations in a row that are passed over. A schedule that gives no rate for longer ends the run
by the bounds of the policy.
"""

_UPDATED = frozenset({"state", "weights", "slots"})


def find_poles(run: Run, incident: Incident) -> dict[int, tuple[int, float]]:
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
        iteration = scheduled_iteration(optimizer, ago)
        rate = 0.0 if iteration is None else _rate(optimizer, iteration)
        if iteration is not None and not (math.isfinite(rate) and abs(rate) <= highest):
            poles[id(optimizer)] = iteration, rate
            run.poles.setdefault(id(optimizer), set()).add(iteration)
    return poles


def pass_poles(
    run: Run, poles: Mapping[int, tuple[int, float]], outcomes: tuple[Outcome, ...]
) -> tuple[Outcome, ...]:
    """Pass over the poles of an incident; return its outcomes, of which one tells so.

    Steps that are still to be replayed reach them again: `pass_over` handles that.
    """
    if not poles or run.stopped or run.rerun is not None or not run.policy.refuse:
        return outcomes
    last = {key: iteration for key, (iteration, _) in poles.items()}
    pass_over(run, last)  # if the replay has not
    after = [(o, scheduled_iteration(o)) for o in run.train_state().optimizers if id(o) in poles]
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
        first = scheduled_iteration(optimizer) if known else None
        if first is None:
            continue
        # Accumulated gradients are applied at each of these.
        every = keras_optimizers.accumulation_steps(optimizer)
        last = (beyond or {}).get(id(optimizer), -1)
        iteration = first + every * max(math.ceil((last + 1 - first) / every), 0)
        poles = 0
        while poles <= MAX_PASSED and (
            iteration in known or not math.isfinite(_rate(optimizer, iteration))
        ):
            poles, iteration = poles + 1, iteration + every
        if iteration > first and poles <= MAX_PASSED:
            counter = keras_optimizers.iterations(optimizer)
            write_all([(counter, np.asarray(iteration, str(counter.dtype)))])


def _rate(optimizer: Any, iteration: int) -> float:
    """Return the rate of a schedule; 0.0 if it cannot be evaluated outside of a step."""
    try:
        return keras_optimizers.scheduled_rate(optimizer, iteration)
    except Exception:  # noqa: BLE001  a schedule of the user's may raise anything
        return 0.0
