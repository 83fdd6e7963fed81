"""Rollbacks that are repeated do not undo a long run, in memory or on disk."""

import json

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard.testing import corrupt, inject

SNAPSHOT = {"every": 10, "verify_after": 2}
LOST = {"escalation": ["skip", "skip", [{"rollback": {"replay_steps": False}}]]}


def iterations(model):
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def corrupts(batch, epoch=0):
    """Return a callback that writes NaN into a kernel after this batch."""
    return zoo.After(lambda model: corrupt(model.layers[0].kernel), batch, epoch)


def rollbacks(guard):
    return [o.detail for i in guard.incidents for o in i.outcomes if o.action == "rollback"]


@pytest.mark.parametrize("storage", ["memory", "disk"])
class TestRow:
    """One fault in many steps in a row, late in a run."""

    @staticmethod
    def run(count, storage, tmp_path):
        """Return the model, its guard, and its state after 50 steps, with a fault from step 53 on."""
        guard = NanGuard(snapshot={**SNAPSHOT, "storage": storage}, directory=tmp_path, verbose=0, diagnose=False)
        kept, model = [], zoo.plain(dropout=False)
        keeps = zoo.After(lambda model: kept.append(zoo.state_of(model)), 49)
        with inject(model, site="gradients", kind="nan", step=53, count=count):
            zoo.fit(model, zoo.regression(batches=70), guard, keeps)
        return model, guard, kept[0]

    @pytest.mark.parametrize("count", [6, 9])
    def test_the_progress_stays(self, count, storage, tmp_path):
        """The second rollback goes one snapshot further back, and the third one not to the start."""
        model, guard, _ = self.run(count, storage, tmp_path)
        later = ["restored the state after 40 steps; no step had committed since"] if count == 9 else []
        assert rollbacks(guard) == [
            "restored the state after 50 steps; 3 committed steps undone",
            "restored the state after 40 steps; 10 committed steps undone",
            *later,
        ]
        assert iterations(model) == 40 + 70 - 53 - count

    def test_the_end_restores_the_state_before_it(self, storage, tmp_path):
        """Not the older one of the last rollback, from which no step was good."""
        model, guard, before = self.run(12, storage, tmp_path)
        assert guard.stopped and "the state after 50 steps restored" in guard.incidents[-1].outcomes[-1].detail
        known = {path: value for path, value in before if not path.startswith(("loss/", "mean_absolute"))}
        for path, value in zoo.state_of(model):
            if path in known:
                np.testing.assert_array_equal(value, known[path], err_msg=path)


def test_faults_far_apart_lose_few_steps_each():
    """Each restores a recent snapshot, although the undone steps cannot run again."""
    guard = NanGuard(LOST, snapshot=SNAPSHOT, verbose=0, diagnose=False)
    faults = (52, 75, 98)
    run = zoo.run(zoo.plain, zoo.regression(batches=110), guard=guard, epochs=1, callbacks=[*map(corrupts, faults)])
    assert len(rollbacks(guard)) == 3 and not any("replayed" in detail for detail in rollbacks(guard))
    assert iterations(run.model) >= 110 - 3 * (2 * SNAPSHOT["every"] + 5)


def test_a_run_that_is_killed_after_a_rollback_continues_after_it(tmp_path):
    """With the restored state, the lowered rate, and the next batch: it ends as an uninterrupted one."""
    data, build = zoo.overflowing(23, 24, 25, count=32), lambda: zoo.plain(dropout=False)

    def guarded(name):
        return NanGuard(directory=tmp_path / name, resume=True, snapshot=SNAPSHOT, verbose=0, diagnose=False)

    whole = zoo.run(build, data, guard=guarded("whole"), epochs=1)
    killed = zoo.After(zoo.raising(KeyboardInterrupt), 25)
    with pytest.raises(KeyboardInterrupt):
        zoo.run(build, data, guard=guarded("killed"), epochs=1, callbacks=[killed])
    resumed = zoo.run(build, data, guard=guarded("killed"), epochs=1)
    assert len(rollbacks(whole.guard)) == 1 and rollbacks(resumed.guard) == []
    assert iterations(resumed.model) == iterations(whole.model) == 20 + 32 - 26
    for (path, one), (_, other) in zip(resumed.state, whole.state, strict=True):
        if not path.startswith(("loss/", "mean_absolute")):
            np.testing.assert_array_equal(one, other, err_msg=path)


def snapshots(directory):
    """Return the records of the snapshots in a folder, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("snapshots/*/snapshot.json"))]


class TestPosition:
    """A snapshot has the epoch and the batch of its step, also in a replay."""

    def test_of_an_earlier_epoch(self, tmp_path, capsys):
        guard = NanGuard(directory=tmp_path, resume=True, snapshot={**SNAPSHOT, "keep": 20}, diagnose=False)
        callbacks = [corrupts(11), corrupts(3, epoch=1)]
        zoo.run(zoo.plain, zoo.regression(batches=15), guard=guard, epochs=3, callbacks=callbacks)
        assert [detail.rpartition("; ")[0] for detail in rollbacks(guard)] == [
            "restored the state after 10 steps",
            "restored the state before the first step",
        ]
        found = snapshots(tmp_path)
        assert all(one["step"] == 15 * one["epoch"] + one["batch"] for one in found)
        assert [one["step"] for one in found] == [0, 10, 20, 30, 40] and "cannot write" not in capsys.readouterr().out

    @pytest.mark.shared
    def test_of_many_short_epochs(self, tmp_path):
        """As many as the steps that a replay may have: here one step in each."""
        snapshot = {"every": 20, "verify_after": 2, "keep": 20}
        guard = NanGuard(directory=tmp_path, resume=True, snapshot=snapshot, verbose=0, diagnose=False)
        build = lambda: zoo.plain(keras.optimizers.SGD(0.0), dropout=False, metrics=())  # noqa: E731
        callbacks = [corrupts(0, epoch=30), corrupts(0, epoch=290)]
        zoo.run(build, zoo.regression(batches=1), guard=guard, epochs=300, callbacks=callbacks)
        assert ["before the first step" in detail for detail in rollbacks(guard)] == [False, True]
        found = {one["step"]: one["epoch"] + one["batch"] for one in snapshots(tmp_path)}
        assert found.keys() >= {20, 40, 280} and all(step == epoch for step, epoch in found.items())

    def test_among_skipped_batches(self, tmp_path):
        """Those after the first rollback are no part of the steps before it, which the second one replays."""
        policy = {"snapshot": {**SNAPSHOT, "keep": 20}, "rollback": {"skip_batches": 7}}
        guard = NanGuard(policy, directory=tmp_path, resume=True, verbose=0, diagnose=False)
        callbacks = [corrupts(11), corrupts(14)]
        zoo.run(zoo.plain, zoo.regression(batches=60), guard=guard, epochs=1, callbacks=callbacks)
        assert [detail.rpartition("; ")[2] for detail in rollbacks(guard)] == ["3 later steps replayed", "14 later steps replayed"]
        found = [(one["step"], one["batch"]) for one in snapshots(tmp_path)]
        assert found == [(0, 0), (10, 10), (20, 34), (30, 44), (40, 54)], "7 batches after step 12, and 7 after step 13"


def test_a_refused_step_that_was_good_in_a_replay_is_no_longer_refused():
    """Three of 200 end the run. Of the two before the second rollback the first one has replayed both."""
    guard = NanGuard(max_refused_share=0.015, verbose=0, diagnose=False)
    model = zoo.plain(dropout=False)
    with inject(model, site="loss", step=5):
        zoo.fit(model, zoo.regression(batches=20), guard, corrupts(9), corrupts(14))
    assert len(rollbacks(guard)) == 2 and all("replayed" in detail for detail in rollbacks(guard))
    assert not guard.stopped
