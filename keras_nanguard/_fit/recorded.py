"""Records everything of a run besides its steps: start, learning rates, rollbacks, snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keras_nanguard._backends import current, processes
from keras_nanguard._core.incident import Outcome
from keras_nanguard._fit.recent_batches import Rerun
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._policy.actions import ACTIONS
from keras_nanguard._policy.state import BUDGET_WINDOW
from keras_nanguard._recording import database

__all__ = ["acted", "begun", "budgets", "note_rate", "returned", "rolled_back", "say_problem"]


def begun(run: Run, resumed: int | None = None) -> None:
    """Begin the recording of a fit, which resumes from the snapshot of step `resumed`, if any."""
    optimizers = run.train_state().optimizers
    path = None
    if run.directory is not None and processes.index() == 0:
        path = Path(run.directory) / database.NAME
    meta = {
        "model": str(getattr(run.model, "name", type(run.model).__name__)),
        "backend": current.name(),
        "versions": current.versions(),
        "policy": run.policy.to_toml(),
        "budgets": budgets(run),
    }
    scaled = any(keras_optimizers.is_loss_scaled(optimizer) for optimizer in optimizers)
    run.recorder.begin(meta, scaled=scaled, path=path, resumed=resumed, epoch=run.counts.epoch)
    run.recorder.factor = run.recovery.rate_factor
    say_problem(run)


def say_problem(run: Run) -> None:
    """Print once that the recording is no longer written to its file, and why."""
    problem = run.recorder.problem()
    if problem:
        run.say(f"NanGuard: {problem}")


def note_rate(run: Run, ahead: bool = False) -> None:
    """Record the learning rate of the first optimizer, for the last step or for the next one
    (`ahead`).

    The variables have the present state, or read as it.
    """
    for optimizer in run.train_state().optimizers[:1]:
        try:
            rate = keras_optimizers.learning_rate(optimizer)
        except Exception:  # noqa: BLE001  a schedule of the user's may raise outside of a step
            return
        plain = keras_optimizers.rate_variable(optimizer) is not None
        before = run.recorder.rate(rate, ahead or not plain)
        if not ahead and run.recorder.factor != run.recovery.rate_factor:
            _factor_changed(run)
        elif before is not None and plain and not ahead:
            data = {"before": before, "after": rate, "by": "callback"}
            text = f"{optimizer.name}: {before:.3g} -> {rate:.3g}"
            run.recorder.event("learning_rate", run.step, run.counts.epoch, text, data)


def rolled_back(run: Run, snapshot: Snapshot, undone: int, rerun: Rerun | None) -> None:
    """Record that a snapshot was restored."""
    again = None
    if rerun is not None:
        steps = enumerate(rerun.batches, snapshot.step)
        again = frozenset(step for step, args in steps if args is not None)
    run.recorder.undo(snapshot.step, again)
    data = {"to": snapshot.step, "undone": undone, "run_again": len(again or ())}
    moment = f"after {snapshot.step} steps" if snapshot.step else "before the first step"
    then = f"; {len(again)} steps replayed" if again else ""
    text = f"Restored the state {moment}{then}."
    run.recorder.event("rollback", run.step, run.counts.epoch, text, data)


def budgets(run: Run) -> list[dict[str, Any]]:
    """Return how often each change was made, and how often the policy allows it within a window of
    steps.
    """
    state, times = run.recovery.policy_state, run.policy.action_budget
    used = {name: state.times(name) for name in state.action_steps if name in ACTIONS}
    return [
        {"rule": name, "do": [name], "used": n, "times": times, "per_steps": BUDGET_WINDOW}
        for name, n in used.items()
    ]


def acted(run: Run, outcomes: tuple[Outcome, ...]) -> None:
    """Record a learning rate that the actions of an incident have changed."""
    run.recorder.note(budgets=budgets(run))
    lowered = [o.detail for o in outcomes if o.action == "lower_lr" and o.status == "done"]
    if run.recovery.rate_factor != run.recorder.factor or lowered:
        _factor_changed(run, "; ".join(lowered))
        note_rate(run, ahead=True)


def returned(run: Run) -> None:
    """Record that a lowered rate has returned, and at intervals its way there."""
    changed = run.recovery.rate_factor != run.recorder.factor
    if changed and (run.recovery.returns is None or run.recorder.wants_rate):
        _factor_changed(run)
        note_rate(run, ahead=True)


def _factor_changed(run: Run, text: str = "") -> None:
    """Record the present factor of the guard on learning rates."""
    before, after = run.recorder.factor, run.recovery.rate_factor
    run.recorder.factor = after
    text = text or f"The learning rate is {after:.3g} times the configured rate."
    data = {"factor_before": before, "factor": after, "by": "guard"}
    run.recorder.event("learning_rate", run.step, run.counts.epoch, text, data)
