"""A state is restored completely or not at all, for any exception during the write."""

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard.errors import StateLostError

BATCH, STEPS, BAD = 8, 50, range(40, 43)
EXHAUSTED = RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def rules(*do):
    return [{"name": "back", "site": "inputs", "after": 3, "do": list(do)}]


class Failing:
    """Replaces `write`: fails at some of the calls after it was armed."""

    def __init__(self, error, at):
        self.real, self.error, self.at, self.calls, self.armed = keras_variables.write, error, at, 0, False

    def __call__(self, variable, array):
        if self.armed:
            self.calls += 1
            if self.calls in self.at:
                raise self.error
        self.real(variable, array)


def trained(monkeypatch, error, at, *do, room=None, **arguments):
    """Train with three bad batches in a row; the writes of the rollback fail at some calls.

    With the fixture `room` no copy fits into memory from the bad batches on.
    """
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(4, name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((4,)), *dense, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4)).astype("float32")
    bad = x.copy()
    bad[BAD.start * BATCH : BAD.stop * BATCH] = np.nan
    failing, seen = Failing(error, at), zoo.After(lambda model: [w.copy() for w in model.get_weights()])
    arm = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(failing, "armed", batch >= BAD.start)
    )
    monkeypatch.setattr(keras_variables, "write", failing)
    if room:
        room(lambda: 0 if failing.armed else np.inf)
    options = {"snapshot": {"every": 20, "verify_after": 1}, **arguments}
    guard = NanGuard(rules=rules(*do), verbose=0, diagnose=False, **options)
    ended = None
    try:
        model.fit(bad, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard, seen, arm])
    except BaseException as raised:  # noqa: BLE001  the interrupt, too
        ended = raised
    return model, guard, seen.seen, ended


@pytest.mark.parametrize("first", [1, 2, 7])
@pytest.mark.parametrize("error", [EXHAUSTED, KeyboardInterrupt()], ids=["error", "interrupt"])
def test_failed_rollback_changes_nothing(monkeypatch, error, first):
    """The state is the one from before, and the incident reports that it was not restored."""
    at = {first} if isinstance(error, KeyboardInterrupt) else {first, first + 1}
    model, guard, after, ended = trained(monkeypatch, error, at, "rollback")
    last_good = after[BAD.start - 1]
    if isinstance(error, KeyboardInterrupt):
        assert isinstance(ended, KeyboardInterrupt)
        zoo.assert_same(model.get_weights(), last_good)
        return
    assert ended is None and len(after) == STEPS
    zoo.assert_same(after[BAD.stop - 1], last_good)
    outcomes = [o for i in guard.incidents for o in i.outcomes if o.action == "rollback"]
    assert [o.status for o in outcomes] == ["skipped"] and "RESOURCE_EXHAUSTED" in outcomes[0].detail
    assert guard.session.run.counts.rollbacks == guard.session.run.counts.run_again == 0


@pytest.mark.parametrize("at", [1, 2, 7])
def test_write_that_fails_once_is_repeated(monkeypatch, at):
    """A momentary lack of memory prevents neither a restore nor a replay."""
    again = {"rollback": {"replay_steps": True}}
    _, guard, _, ended = trained(monkeypatch, EXHAUSTED, {at}, again)
    outcomes = [o for i in guard.incidents for o in i.outcomes if o.action == "rollback"]
    assert ended is None and [o.status for o in outcomes] == ["done"]
    assert guard.session.run.counts.rollbacks == 1


def test_failed_rollback_runs_no_step_again(monkeypatch):
    """Steps are replayed only from a restored state."""
    again = {"rollback": {"replay_steps": True}}
    _, guard, after, ended = trained(monkeypatch, EXHAUSTED, {2, 3}, again)
    assert ended is None and guard.session.run.counts.run_again == 0
    zoo.assert_same(after[BAD.stop - 1], after[BAD.start - 1])


def test_state_that_cannot_be_put_back_ends_training(monkeypatch):
    """If neither state can be written whole, an error ends training, not a mixture of both."""
    *_, ended = trained(monkeypatch, EXHAUSTED, range(2, 1000), "rollback")
    assert isinstance(ended, StateLostError)
    assert "load a checkpoint" in str(ended)


def test_without_room_for_a_copy_a_rollback_is_completed(monkeypatch, room):
    """If the old state cannot be copied, an interrupt is raised after the rollback is complete."""
    interrupt = KeyboardInterrupt()
    model, _, after, ended = trained(monkeypatch, interrupt, {3}, "rollback", room=room)
    assert isinstance(ended, KeyboardInterrupt)
    zoo.assert_same(model.get_weights(), after[19])


def test_rollback_from_disk_is_completed(monkeypatch, room, tmp_path):
    """A snapshot that is only in files is read again after an interrupt."""
    snapshot = {"every": 20, "verify_after": 1, "storage": "disk"}
    options = {"room": room, "directory": tmp_path, "snapshot": snapshot}
    model, _, after, ended = trained(monkeypatch, KeyboardInterrupt(), {1}, "rollback", **options)
    assert isinstance(ended, KeyboardInterrupt)
    zoo.assert_same(model.get_weights(), after[19])
