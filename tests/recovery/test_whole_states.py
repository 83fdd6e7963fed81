"""A state is restored completely or not at all, for any exception during the write."""

import contextlib

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, recalibrate
from keras_nanguard._backends.shared import replay
from keras_nanguard._diagnose import explainer
from keras_nanguard._fit import batchnorm, perform
from keras_nanguard._keras import torch_tensors, variables as keras_variables
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


# Replays of a diagnosis, and other checks that restore the state


class Unwritable:
    """Makes some of the writes that restore one variable fail, counted from when it was armed."""

    def __init__(self, monkeypatch, variable, at):
        self.at, self.calls, self.armed = at, 0, False
        backend = keras.backend.backend()
        native = variable.value
        if backend == "torch":
            real = torch_tensors.write_tensor
            guarded = self.guarded(real, lambda tensor, *_: tensor is native)
            monkeypatch.setattr(torch_tensors, "write_tensor", guarded)
        else:
            target = native if backend == "tensorflow" else variable
            monkeypatch.setattr(target, "assign", self.guarded(target.assign, lambda *_: True))

    def guarded(self, real, concerns):
        def write(*args, **options):
            if self.armed and concerns(*args):
                self.calls += 1
                if self.calls in self.at:
                    raise EXHAUSTED
            return real(*args, **options)

        return write


def small():
    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization(momentum=0.997)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), norm, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def changed(variables, failing):
    for variable in variables:
        keras_variables.write(variable, keras_variables.read(variable) + 1)
    failing.armed = True


@pytest.mark.parametrize("times", [1, 2])
def test_a_failed_restore_skips_no_other_variable(monkeypatch, times):
    """A write that fails once is repeated; if it fails again, all others are restored."""
    model = small()
    before = model.get_weights()
    failing = Unwritable(monkeypatch, model.weights[0], range(1, 1 + times))
    expected = contextlib.nullcontext() if times == 1 else pytest.raises(StateLostError, match="1 of")
    with expected, replay.preserved(model.weights, model):
        changed(model.weights, failing)
    after = model.get_weights()
    zoo.assert_same(after[1:], before[1:])
    assert np.array_equal(after[0], before[0]) == (times == 1)


def troubled(model, do="skip"):
    """Train on batches, one of which is bad, and validate."""
    x = np.random.default_rng(0).normal(size=(20 * BATCH, 4)).astype("float32")
    bad = x.copy()
    bad[10 * BATCH : 11 * BATCH] = np.nan
    guard = NanGuard(rules=[{"name": "own", "site": "inputs", "do": [do]}], verbose=0)
    model.fit(bad, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard])


def test_a_diagnosis_that_cannot_restore_the_state_ends_training(monkeypatch):
    model, gather, before = small(), explainer.gather, []
    failing = Unwritable(monkeypatch, model.weights[0], range(1, 1000))

    def damaging(run, *args):
        run.access.sync_variables()
        with replay.preserved(model.weights, model):
            before.extend(map(keras_variables.read, model.weights))
            changed(model.weights, failing)
            return gather(run, *args)

    monkeypatch.setattr(explainer, "gather", damaging)
    with pytest.raises(StateLostError, match="load a checkpoint"):
        troubled(model)
    after = list(map(keras_variables.read, model.weights))
    zoo.assert_same(after[1:], before[1:])
    assert not np.array_equal(after[0], before[0])


@pytest.mark.parametrize(
    ("place", "name", "do"),
    [
        (explainer, "gather", "skip"),
        (explainer, "at_state", "rollback"),
        (perform, "reestimated", "recalibrate_batchnorm"),
    ],
)
def test_a_lost_state_is_reported_by_no_other_word(monkeypatch, place, name, do):
    def lost(*args, **options):
        raise StateLostError("load a checkpoint")

    monkeypatch.setattr(place, name, lost)
    with pytest.raises(StateLostError):
        troubled(small(), do)


def test_a_check_of_statistics_that_cannot_restore_the_state_ends_training(monkeypatch):
    def lost(*args, **options):
        raise StateLostError("load a checkpoint")

    monkeypatch.setattr(batchnorm, "learning", lost)
    model, x = small(), np.ones((64, 4), "float32")
    with pytest.raises(StateLostError):
        model.fit(x, x[:, :1], verbose=0, validation_data=(x, x[:, :1]), callbacks=[NanGuard(verbose=0)])


def test_a_restorer_that_raises_skips_no_other(monkeypatch):
    """`recalibrate` restores the statistics of the layers that it does not estimate."""
    model = small()
    norm = model.layers[1]
    before = keras_variables.read(norm.moving_variance)
    real = keras_variables.restorer

    def restorer(variable):
        def fail():
            raise EXHAUSTED

        return fail if variable is norm.moving_mean else real(variable)

    def call(data, training=False):
        keras_variables.write(norm.moving_variance, before + 1)
        return data

    monkeypatch.setattr(keras_variables, "restorer", restorer)
    monkeypatch.setattr(model.layers[0], "call", call)
    with pytest.raises(StateLostError):
        recalibrate(model, np.ones((8, 4), "float32"))
    zoo.assert_same([keras_variables.read(norm.moving_variance)], [before])


def test_a_result_whose_diagnosis_cannot_copy_the_state(monkeypatch):
    """The incident says so, and neither the validation nor the fit ends."""

    def preserved(*args):
        raise MemoryError

    model, x = small(), np.ones((64, 4), "float32")
    guard = NanGuard("observe", verbose=0)
    monkeypatch.setattr(replay, "preserved", preserved)
    model.fit(x, x[:, :1], verbose=0, validation_data=(x * np.nan, x[:, :1]), callbacks=[guard])
    assert "The diagnosis failed: MemoryError" in str(guard.incidents[0].diagnosis.evidence)
