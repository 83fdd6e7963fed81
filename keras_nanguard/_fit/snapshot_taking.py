"""Takes a snapshot if a copy of the state fits into memory; otherwise prints a line once."""

from __future__ import annotations

from contextlib import nullcontext

from keras_nanguard._core import memory
from keras_nanguard._core.levels import WINDOW, level_of
from keras_nanguard._fit import recorded
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import variables as keras_variables

__all__ = ["take_first", "take_snapshot"]


def take_first(run: Run) -> str:
    """Copy the state before the first step.

    Returns:
        The path of the first variable that is not finite, `""` if all are.
    """
    bad = run.ring.take(run.train_state().kept, 0, 0, verified=True, tolerated=run.tolerated)
    _warn(run)
    return bad


def take_snapshot(run: Run) -> str:
    """Copy the present state; return the same as `take_first`."""
    with run.state.access.variables_readable() if run.ring.only_reads else nullcontext():
        train_state = run.train_state()
        run.history.start(run.ring.snapshots, train_state.trainable)
        level, at = level_of(run.history.last(WINDOW)), (run.step, run.counts.committed)
        bad = run.ring.take(train_state.kept, *at, tolerated=run.tolerated, level=level)
        taken = next((s for s in run.ring.snapshots if s.step == run.step), None)
        if taken is not None:
            taken.metrics = {id(v): keras_variables.read(v) for v in train_state.metrics}
    if taken is not None and not bad:
        recorded.snapshot_taken(run)
    _warn(run)
    return bad


def _warn(run: Run) -> None:
    """Warn once if there is no snapshot of the start, and once if there is no later one."""
    what = "no snapshot" if run.step else "no snapshot of the state before the first step"
    if run.ring.missing and what not in run.short_of_memory:
        run.short_of_memory.add(what)
        size, free = memory.readable(run.ring.missing), memory.readable(memory.room())
        run.say(f"NanGuard: {what}: a copy takes {size}, and {free} of memory are free.")
