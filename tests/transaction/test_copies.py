"""Copies of guards are unattached guards, and copies of guarded models are plain Keras models."""

from __future__ import annotations

import copy
import pickle
import threading

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel

BAD = zoo.poison(zoo.regression(), 5)
SET = {"train_step", "make_train_function", "save", "save_weights", "compute_loss"}
"""Attributes that a guard sets on a model during a fit."""


def cloudpickled(guard):
    return pickle.loads(pytest.importorskip("cloudpickle").dumps(guard))


FRESH = ("copy", "deepcopy")
"""The ways to make a copy that does not resume; a pickle does."""

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda guard: pickle.loads(pickle.dumps(guard)),
    "cloudpickle": cloudpickled,
}


@keras.saving.register_keras_serializable(package="nanguard_tests")
class Own(NanGuardModel):
    """A model that is guarded without a callback."""

    nanguard_verbose = 0


def own():
    inputs = keras.Input((6,))
    model = Own(inputs, layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    return model


def said(incident):
    return "found"


def named(directory):
    """Return a guard with every setting at a value that is not its default."""
    policy = {"version": 2, "preset": "stop", "snapshot": {"every": 7, "storage": "disk"}}
    return NanGuard(policy, directory=directory, verbose=0, functions={"said": said}, diagnose=False, resume=True)


def reported(incidents):
    """Return all incidents as text, because NaN is not equal to itself."""
    return [str(incident.to_dict()) for incident in incidents]


def compare(other, guard, work):
    """Check that a guard is a copy of another one, and works independently of it."""
    assert type(other) is type(guard) and other is not guard and reported(other.incidents) == reported(guard.incidents)
    assert other.incidents is not guard.incidents
    names = ("policy", "directory", "verbose", "functions", "diagnose", "resume")
    assert all(getattr(other, name) == getattr(guard, name) for name in names)
    assert other.summary() == guard.summary() and repr(other) == repr(guard)
    assert len(other.recording) == len(guard.recording) and other.bad_samples() == guard.bad_samples()
    assert other.session is None and other.model is None and not other.stopped
    before, seen = len(guard.incidents), len(other.incidents)
    work(other)
    assert len(other.incidents) > seen and len(guard.incidents) == before


class Test:
    @pytest.mark.daily("True-copy", "True-cloudpickle", "False-deepcopy", "False-pickle")
    @pytest.mark.parametrize("how", COPIES)
    @pytest.mark.parametrize("used", [False, True])
    def test_guard(self, how, used):
        """It has settings and incidents, and guards another fit."""
        guard = NanGuard({"version": 2, "preset": "recover", "snapshot": {"every": 7}}, verbose=0, diagnose=used, functions={"said": said})
        if used:
            zoo.run(zoo.plain, BAD, guard=guard, epochs=1)
            assert len(guard.incidents) == 1
        compare(COPIES[how](guard), guard, lambda other: zoo.run(zoo.plain, BAD, guard=other, epochs=1))

    @pytest.mark.daily("deepcopy", "pickle")
    @pytest.mark.parametrize("how", COPIES)
    def test_guard_with_a_directory(self, how, tmp_path):
        """Its pickle resumes there, but a copy starts from scratch."""
        guard = named(tmp_path)
        zoo.run(zoo.plain, BAD, guard=guard, epochs=1)
        other = COPIES[how](guard)
        assert other.directory == guard.directory and other.resume and other.policy == guard.policy
        assert other.functions == {"said": said} and not other.diagnose
        data = zoo.regression()
        again = zoo.run(zoo.plain, data, guard=other, epochs=1)
        assert again.guard.session.run.step == 12
        if how in FRESH:
            assert again.guard.session.run.counts.committed == 12
            assert zoo.plain_logs(again.history) == zoo.run(zoo.plain, data, epochs=1).history

    @pytest.mark.daily("deepcopy", "pickle")
    @pytest.mark.parametrize("how", COPIES)
    def test_during_a_fit(self, how):
        """The same for a guard in a running fit, copied by a callback; the fit is not affected."""
        copies = zoo.After(lambda model: COPIES[how](guard), 7)
        plain = zoo.run(zoo.plain, BAD, guard=NanGuard(verbose=0, diagnose=False), epochs=2)
        guard = NanGuard(verbose=0, diagnose=False)
        run = zoo.run(zoo.plain, BAD, guard=guard, epochs=2, callbacks=[copies])
        found = copies.seen
        assert zoo.differences(run, plain) == []
        assert [len(other.incidents) for other in found] == [1, 2]
        assert "8 steps, 1 skipped" in found[0].summary()
        zoo.run(zoo.plain, BAD, guard=found[0], epochs=1)
        assert len(guard.incidents) == 2 and len(found[0].incidents) == 2

    @pytest.mark.parametrize("how", FRESH)
    def test_functions_are_not_copied(self, how):
        """A function may be a method of something that cannot be copied."""
        guard = NanGuard(verbose=0, functions={"said": threading.Lock().acquire})
        assert COPIES[how](guard).functions == guard.functions


@pytest.mark.daily("plain-copy", "plain-save", "own-pickle", "own-clone_model")
@pytest.mark.parametrize("how", [*COPIES, "clone_model", "save"])
@pytest.mark.parametrize("build", [zoo.plain, own])
def test_model(build, how, tmp_path):
    """A copied, cloned or saved model has no part of the guard, and trains."""

    def saved(model):
        model.save(tmp_path / "model.keras")
        return keras.models.load_model(tmp_path / "model.keras")

    make = {**COPIES, "clone_model": keras.models.clone_model, "save": saved}[how]
    copies = zoo.After(lambda model: (make(model), [np.array(w) for w in model.get_weights()]), 7)
    model = build()
    guard = NanGuard(verbose=0, diagnose=False) if build is zoo.plain else model.nanguard
    callbacks = [*([guard] if build is zoo.plain else []), copies]
    model.fit(BAD.x, BAD.y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    for other, weights in (*copies.seen, copies.act(model)):
        assert type(other) is type(model) and not (SET | {"_nanguard_kept_step"}) & set(vars(other))
        for one, expected in zip(other.get_weights(), weights if how != "clone_model" else ()):
            np.testing.assert_array_equal(one, expected)
        if build is own:
            assert other.nanguard is not guard and other.nanguard.incidents == []
        if how == "clone_model":
            other.compile("adam", "mse")
        data = zoo.regression()
        other.fit(data.x, data.y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert len(guard.incidents) == 1


def test_policy_of_a_loaded_model(tmp_path):
    """A policy set before training is used, although loading reads the guard."""
    own().save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    before = model.nanguard
    model.nanguard_policy = "observe"
    assert model.nanguard is not before and not model.nanguard.policy.refuse
    model.fit(BAD.x, BAD.y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    used = model.nanguard
    assert len(used.incidents) >= 1 and used.session is not None
    model.nanguard_policy = "recover"
    assert model.nanguard is used, "with what it has seen"


def test_incidents_can_be_set():
    """A user may begin a new list of incidents; the guard adds to it."""
    guard = NanGuard(verbose=0, diagnose=False)
    for _ in range(2):
        guard.incidents = mine = []
        zoo.run(zoo.plain, BAD, guard=guard, epochs=1)
        assert guard.incidents is mine and [i.step for i in mine] == [5]
