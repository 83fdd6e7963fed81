"""`NanGuardModel` counts like `NanGuard`, and gives way to a callback."""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard.testing import inject

BAD = (3, 7)
HUGEST = 3.4028234663852886e38


class Quiet(NanGuardModel):
    nanguard_verbose = 0


def network(**compile_with):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    model = Quiet(inputs, layers.Dense(1)(layers.BatchNormalization()(layers.Dense(8)(inputs))))
    model.compile("adam", "mse", **compile_with)
    model.nanguard.diagnose = False
    return model


def fit(model, *callbacks, epochs=2, **kwargs):
    return zoo.fit(model, zoo.regression().with_poison(BAD), *callbacks, epochs=epochs, **kwargs)


@pytest.mark.parametrize("steps", [1, 2], ids=["one", "two steps in one"])
def test_counts_restart_with_epochs_and_fits(steps):
    """Steps count from the start of a fit, batches from that of an epoch."""
    zoo.supported({"steps_per_execution": steps})
    model = network(steps_per_execution=steps)
    per_epoch = zoo.BATCHES + len(BAD)
    for number in range(2):
        history = fit(model)
        reported = model.nanguard.incidents[number * 4 :]
        assert [(i.step, i.epoch, i.batch) for i in reported] == [(e * per_epoch + b, e, b) for e in range(2) for b in BAD]
        assert history["refused_steps"] == [2, 2]
    assert "steps, 8 skipped, 8 incidents" in model.nanguard.summary()


def test_no_callback_is_needed_for_the_logs_to_be_honest():
    """An epoch without a good step is never the best one, as with a callback."""
    model, data = network(), zoo.regression(batches=2)
    data.x[...] = np.nan
    seen = keras.callbacks.EarlyStopping("loss", patience=9)
    history = model.fit(*data.all, batch_size=zoo.BATCH, epochs=2, verbose=0, callbacks=[seen]).history
    assert min(history["loss"]) > 1e30 and seen.best is None


def test_a_callback_takes_over_for_its_fit():
    """Only a `NanGuard` of the list guards; before and after, the model itself."""
    model, guard = network(), NanGuard(verbose=0)
    fit(model, epochs=1)
    fit(model, guard, epochs=1)
    fit(model, epochs=1)
    assert len(guard.incidents) == 2 and len(model.nanguard.incidents) == 4
    assert zoo.bad_entries(model) == []


def test_table_at_the_end(capsys):
    """Each fit with incidents ends with the table of that fit, as with a callback."""
    model = network()
    model.nanguard_verbose = 1
    model.train_on_batch(np.full((8, 6), np.nan, "float32"), np.ones((8, 1), "float32"))
    capsys.readouterr()
    fit(model, epochs=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Details: " in line and "incidents" in line]
    steps = zoo.BATCHES + 2
    details = 'Details: guard.report("run.html")'
    assert lines == [f"NanGuard: skipped 2 of {steps} steps, 2 incidents. {details}"]
    model.fit(*zoo.regression().all, batch_size=zoo.BATCH, verbose=0)
    assert "Details: " not in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["recover", "stop"])
def test_logs_of_train_on_batch(policy):
    """Those of a refused call are those of the last one that was not, or worse than any measurement."""
    model = network(metrics=["mae"])
    model.nanguard_policy = policy
    model.nanguard.diagnose = False
    x, y = zoo.regression().all
    x, y = x[:8], y[:8]
    if policy == "recover":
        assert model.train_on_batch(x * np.nan, y) == [HUGEST, HUGEST]
        assert model.train_on_batch(x * np.nan, y, return_dict=True) == {"loss": HUGEST, "mae": HUGEST}
    model.train_on_batch(x, y)
    good = model.train_on_batch(x, y, return_dict=True)
    assert 0.0 < good["loss"] < HUGEST
    for given in (x * np.nan, x * np.nan, x if policy == "stop" else x * np.nan):
        assert model.train_on_batch(given, y, return_dict=True) == good
        assert model.train_on_batch(given, y) == [good["loss"], good["mae"]]
    assert policy == "stop" or model.train_on_batch(x, y, return_dict=True)["loss"] != good["loss"]


@pytest.mark.parametrize("by", ["model", "list"])
def test_steps_after_the_end_of_training(by, capsys):
    """A loop is told once that its steps have no effect; `fit` ends."""
    guard = NanGuard("stop", diagnose=False)
    inputs = keras.Input((6,))
    model = (NanGuardModel if by == "model" else keras.Model)(inputs, layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    x, y = np.ones((8, 6), "float32"), np.ones((8, 1), "float32")
    model.nanguard_policy = "stop"
    if by == "list":
        calls = keras.callbacks.CallbackList([guard], model=model, epochs=1, steps=30)
        calls.on_train_begin()
        calls.on_epoch_begin(0)
    for step in range(30):
        model.train_on_batch(x * np.nan if step == 4 else x, y)
        if step == 4:
            weights = model.get_weights()
    if by == "list":
        calls.on_train_end()
    zoo.assert_same(model.get_weights(), weights)
    lines = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    name = "model.nanguard" if by == "model" else "guard"
    remedy = f"End the loop if {name}.stopped is true."
    assert lines == [f"NanGuard: training has ended, so steps since then have no effect. {remedy}"]
    model.fit(np.tile(x * np.nan, (4, 1)), np.tile(y, (4, 1)), batch_size=8, verbose=0, callbacks=[guard])
    assert "no effect" not in capsys.readouterr().out


def test_results_and_files_are_plain_keras(tmp_path):
    """`evaluate`, `predict` and saving are those of `keras.Model`."""
    model, data = network(), zoo.regression()
    fit(model, epochs=1)
    before = model.predict(data.x, verbose=0)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras", custom_objects={"Quiet": Quiet})
    np.testing.assert_array_equal(again.predict(data.x, verbose=0), before)
    assert np.isfinite(model.evaluate(*data.all, verbose=0))


def test_models_of_tensors_and_models_with_a_call_of_their_own(tmp_path):
    """Stock Keras cannot create both kinds from a class in between."""

    def kinds(common):
        class Made(common):
            pass

        class Called(common):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.dense = layers.Dense(1)

            def call(self, x):
                return self.dense(x)

        x = keras.Input((6,))
        return Called(), Made(x, layers.Dense(1)(x)), common(inputs=x, outputs=layers.Dense(1)(x)), Called()

    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        kinds(type("Common", (keras.Model,), {}))
    data = zoo.regression(batches=2)
    for model in kinds(NanGuardModel):
        model.nanguard_verbose = 0
        model.compile("adam", "mse")
        model.fit(zoo.poison(data, 1).x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0)
        assert isinstance(model, NanGuardModel) and [i.step for i in model.nanguard.incidents] == [1]
        model.save(tmp_path / "m.keras")
        again = keras.models.load_model(tmp_path / "m.keras", custom_objects={type(model).__name__: type(model)})
        assert isinstance(again, type(model))
        np.testing.assert_array_equal(again.predict(data.x, verbose=0), model.predict(data.x, verbose=0))
    whole = kinds(NanGuardModel)[2]
    for copied in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert type(copied) is type(whole)
        np.testing.assert_array_equal(copied.predict(data.x, verbose=0), whole.predict(data.x, verbose=0))


class WithUnits(NanGuardModel):
    """A model with a `call` and constructor arguments."""

    def __init__(self, units=1, **kwargs):
        super().__init__(**kwargs)
        self.units, self.dense = units, layers.Dense(units)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@pytest.mark.parametrize("common", [keras.Model, NanGuardModel], ids=["stock", "guarded"])
@pytest.mark.parametrize("first", ["called", "of tensors"])
def test_a_registered_class_is_loaded_and_cloned(tmp_path, common, first):
    """Saving reads every attribute of a model; the name in Keras' registry stays that of the class."""

    @keras.saving.register_keras_serializable("test_guard_model")
    class Registered(common):
        nanguard_verbose = 0

        def __init__(self, *args, units=2, **kwargs):
            super().__init__(*args, **kwargs)
            self.units, self.dense = units, layers.Dense(units)

        def call(self, x):
            return self.dense(x)

        def get_config(self):
            return {**super().get_config(), "units": self.units}

    @keras.saving.register_keras_serializable("test_guard_model")
    class Plain(common):
        nanguard_verbose = 0

    x, inputs = np.ones((8, 6), "float32"), keras.Input((6,))
    built = {
        "called": lambda: Registered(units=1),
        "of tensors": lambda: Plain(inputs, layers.Dense(1)(inputs)),
    }
    for name in (first, *(built.keys() - {first})):
        model, cls = built[name](), Registered if name == "called" else Plain
        model.compile("adam", "mse")
        model.fit(x, x[:, :1], verbose=0)
        model.save(tmp_path / "m.keras")
        assert keras.saving.get_registered_object(f"test_guard_model>{cls.__name__}") is cls
        assert keras.saving.get_registered_name(type(model)) == f"test_guard_model>{cls.__name__}"
        copies = [keras.models.load_model(tmp_path / "m.keras") for _ in range(2)]
        copies += [keras.models.load_model(tmp_path / "m.keras", custom_objects={cls.__name__: cls}), copy.deepcopy(model)]
        for copied in copies:
            assert type(copied) is type(model) and isinstance(copied, cls)
            np.testing.assert_array_equal(copied.predict(x, verbose=0), model.predict(x, verbose=0))
        clone = keras.models.clone_model(model)
        assert type(clone) is type(model) and clone.predict(x, verbose=0).shape == (8, 1)


def of_tensors(guard):
    inputs = keras.Input((6,))
    return NanGuardModel(inputs, layers.Dense(1)(inputs), guard=guard)


@pytest.mark.parametrize("build", [of_tensors, lambda guard: WithUnits(guard=guard)])
def test_a_given_guard(build, tmp_path):
    """`NanGuardModel(..., guard=guard)` uses this guard, which is not saved with the model."""
    guard = NanGuard(verbose=0, diagnose=False, snapshot={"every": 7})
    model = build(guard)
    model.compile("adam", "mse")
    fit(model, epochs=1)
    assert model.nanguard is guard and len(guard.incidents) == 2
    model.save(tmp_path / "model.keras")
    custom = {"WithUnits": WithUnits}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=custom)
    assert loaded.nanguard is not guard and loaded.nanguard.policy.snapshot.every == 100 and "guard" not in model.get_config()
    assert keras.models.clone_model(model).nanguard is not guard if build is of_tensors else True


def test_a_given_guard_resumes(tmp_path):
    """With `resume=True` a second run resumes from the snapshots of the first."""

    def run(epochs):
        keras.utils.set_random_seed(0)
        model = of_tensors(NanGuard(directory=tmp_path, resume=True, verbose=0, snapshot={"every": 4, "verify_after": 1}))
        model.compile("adam", "mse")
        data = zoo.regression()
        history = model.fit(*data.all, batch_size=zoo.BATCH, epochs=epochs, shuffle=False, verbose=0)
        return model, history.epoch

    assert run(2)[1] == [0, 1]
    model, epochs = run(4)
    assert epochs[-1] == 3 and epochs[0] >= 1
    assert model.nanguard.session.start.resuming is None


def test_steps_without_a_fit_begin_like_a_run(tmp_path, capsys):
    """They resume, earlier incidents keep their bundles, and a rule without effect is named."""
    x, y = np.ones((8, 6), "float32"), np.ones((8, 1), "float32")

    def run(steps, bad=()):
        keras.utils.set_random_seed(0)
        rule = {"name": "embedding", "layer": "embed*", "do": "stop"}
        guard = NanGuard(directory=tmp_path, resume=True, rules=[rule], snapshot={"every": 4, "verify_after": 1})
        model, weights = of_tensors(guard), []
        model.compile("adam", "mse")
        for step in range(steps):
            model.train_on_batch(x * np.nan if step in bad else x, y)
            weights.append(model.get_weights())
        return guard, weights

    guard, whole = run(7, bad=(0, 2))
    assert len(guard.incidents) == 2 and all(incident.bundle for incident in guard.incidents)
    assert "Rule 'embedding' never acts" in capsys.readouterr().out
    guard.session.end()
    _, again = run(3)
    assert f"NanGuard: resuming from {tmp_path}" in capsys.readouterr().out
    zoo.assert_same(again[2], whole[6])


def test_a_guard_argument_that_is_not_a_guard():
    """Any other object gives an error with the right call."""
    with pytest.raises(ValueError, match=r"Expected guard to be a NanGuard. Received: guard='stop'. Write guard=NanGuard"):
        of_tensors("stop")


@pytest.mark.parametrize("fit", ["of Keras", "of a tracker", "with a list"])
def test_callbacks_of_a_fit(monkeypatch, fit):
    """The guard joins them: by place, through a tracker that has replaced `fit`, or in a `CallbackList`."""
    real, seen = keras.Model.fit, []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    model, (x, y) = network(), zoo.regression().with_poison(BAD).all
    if fit == "of a tracker":
        monkeypatch.setattr(keras.Model, "fit", lambda self, *args, **kwargs: real(self, *args, **kwargs))
        history = model.fit(x, y, zoo.BATCH, verbose=0, shuffle=False, callbacks=[note])
    elif fit == "with a list":
        calls = keras.callbacks.CallbackList([note], add_history=True, model=model, epochs=1, steps=None, verbose=0)
        history = model.fit(x, y, zoo.BATCH, verbose=0, shuffle=False, callbacks=calls)
        assert model.nanguard.params["epochs"] == 1
    else:
        history = model.fit(x, y, zoo.BATCH, 1, 0, [note], shuffle=False)
    assert history.history["refused_steps"] == [2] and seen == [0]


def test_a_rollback_replays_what_that_of_a_callback_does():
    """The same bits and the same outcomes, after a state that became bad within the fit."""
    data, ends, found = zoo.regression(), [], []
    for of_model in (False, True):
        guard = NanGuard(verbose=0)
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        tensors = inputs, layers.Dense(1)(layers.BatchNormalization()(layers.Dense(8)(inputs)))
        model = NanGuardModel(*tensors, guard=guard) if of_model else keras.Model(*tensors)
        model.compile("adam", "mse")
        with zoo.as_written(), inject(model, site="weights", step=5):
            zoo.fit(model, data, None if of_model else guard)
        ends.append([array for _, array in zoo.state_of(model)])
        found.append([(i.step, i.diagnosis.cause, [(o.action, o.status, o.detail) for o in i.outcomes]) for i in guard.incidents])
    assert found[0] == found[1] and "replayed" in found[0][0][2][0][2]
    assert all(map(np.array_equal, *ends))
