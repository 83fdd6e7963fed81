"""Taking a snapshot where there is room for it: as many copies in memory as fit, then on disk, then none, each said once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from keras_nanguard._core import memory
from keras_nanguard._core.levels import WINDOW, level_of
from keras_nanguard._fit import recorded
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots_on_disk import DiskRing
from keras_nanguard._keras import variables as keras_variables

__all__ = ["take_first", "take_snapshot"]


def take_first(run: Run) -> str:
    """Keep the state before the first step; returns the path of the first variable that is not finite, `""` where all are."""

    def take() -> str:
        return run.ring.take(run.train_state().kept, 0, 0, verified=True, tolerated=run.tolerated)

    return _taken(run, take)


def take_snapshot(run: Run) -> str:
    """Take a snapshot of the state of this moment; returns the same."""

    def take() -> str:
        with run.state.access.variables_readable() if run.ring.only_reads else nullcontext():
            train_state = run.train_state()
            run.history.start(run.ring.snapshots, train_state.trainable)
            level, at = level_of(run.history.last(WINDOW)), (run.step, run.counts.committed)
            bad = run.ring.take(train_state.kept, *at, tolerated=run.tolerated, level=level)
            taken = next((snapshot for snapshot in run.ring.snapshots if snapshot.step == run.step), None)
            if taken is not None:
                taken.metrics = {id(variable): keras_variables.read(variable) for variable in train_state.metrics}
        if taken is not None and not bad:
            recorded.snapshot_taken(run)
        return bad

    return _taken(run, take)


def _taken(run: Run, take: Callable[[], str]) -> str:
    """Take a snapshot; on disk from here on where memory has no room for one, and there is a directory."""
    keep, bad = run.ring.keep, take()
    if not bad and run.ring.lacks and run.directory is not None and not isinstance(run.ring, DiskRing):
        before, run.ring = run.ring, DiskRing(run.policy.snapshot.keep, run.ring.good_after, run.directory, run.recovery, run.say)
        run.ring.snapshots, run.ring.agree_on_room = before.snapshots, before.agree_on_room
        run.say(f"{_short(before.lacks)}: snapshots are written to {run.ring.folder} from here on.")
        keep, bad = run.ring.keep, take()
    _say(run, keep)
    return bad


def _say(run: Run, keep: int) -> None:
    """Say what there was no room for, each once."""
    ring, said, step = run.ring, run.short_of_memory, run.step
    if ring.keep < keep:
        snapshots = "one snapshot is kept" if ring.keep == 1 else f"{ring.keep} snapshots are kept"
        run.say(f"{_short(sum(array.nbytes for array in ring.snapshots[-1].arrays.values()))}: {snapshots} instead of {keep}.")
    if ring.lacks and not step and "start" not in said:
        run.say(f"{_short(ring.lacks)}: the state before the first step is not kept, and no rollback goes back to it.")
    if ring.lacks and step and "snapshots" not in said:
        held = "no newer snapshot is kept" if ring.snapshots else "training goes on without snapshots, so that no rollback is possible"
        run.say(f"{_short(ring.lacks)}: {held}. Bad steps are refused all the same.")
    if ring.lacks:
        said.add("snapshots" if step else "start")


def _short(size: float) -> str:
    room = f"{memory.readable(max(memory.room(), 0.0))} of memory can be taken"
    return f"NanGuard: {room}, and a copy of the state takes {memory.readable(size)}"
