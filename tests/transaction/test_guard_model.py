"""`NanGuardModel` counts as `NanGuard` does: per fit, per epoch, in History; and stands aside for a callback."""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel

BAD = (3, 7)


class Quiet(NanGuardModel):
    nanguard_verbose = 0


def network(**compile_with):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    model = Quiet(inputs, layers.Dense(1)(layers.BatchNormalization()(layers.Dense(8)(inputs))))
    model.compile("adam", "mse", **compile_with)
    return model


def fit(model, *callbacks, epochs=2, **kwargs):
    data = zoo.regression().with_poison(BAD)
    return model.fit(
        *data.all, batch_size=zoo.BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **kwargs
    ).history


@pytest.mark.parametrize("steps", [1, 2])
def test_epochs_and_fits_count_anew(steps):
    """Steps count from the start of each fit, batches from the start of each epoch, and History says how many."""
    zoo.supported({"steps_per_execution": steps})
    model = network(steps_per_execution=steps)
    per_epoch = zoo.BATCHES + len(BAD)
    for number in range(2):
        history = fit(model)
        told = model.nanguard.incidents[number * 4 :]
        assert [(i.step, i.epoch, i.batch) for i in told] == [(e * per_epoch + b, e, b) for e in range(2) for b in BAD]
        assert history["refused_steps"] == [2, 2]
    assert ", 4 refused" in model.nanguard.summary()


def test_no_callback_is_needed_for_the_logs_to_be_honest():
    """An epoch without a good step is not the best one, here as there."""
    model, data = network(), zoo.regression(batches=2)
    data.x[...] = np.nan
    seen = keras.callbacks.EarlyStopping("loss", patience=9)
    history = model.fit(*data.all, batch_size=zoo.BATCH, epochs=2, verbose=0, callbacks=[seen]).history
    assert min(history["loss"]) > 1e30 and seen.best > 1e30


def test_a_callback_takes_over_for_its_fit():
    """With a `NanGuard` in the list that one guards, once; before and after the model guards itself."""
    model, guard = network(), NanGuard(verbose=0)
    fit(model, epochs=1)
    fit(model, guard, epochs=1)
    fit(model, epochs=1)
    assert len(guard.incidents) == 2 and len(model.nanguard.incidents) == 4
    assert zoo.bad_entries(model) == []


def test_table_at_the_end(capsys):
    """Each fit in which something happened ends with the table of that fit, as with a callback."""
    model = network()
    model.nanguard_verbose = 1
    model.train_on_batch(np.full((8, 6), np.nan, "float32"), np.ones((8, 1), "float32"))
    capsys.readouterr()
    fit(model, epochs=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "All of it" in line]
    assert lines == [f"NanGuard: 2 of {zoo.BATCHES + 2} steps were refused, 2 incidents. All of it: guard.report('run.html')"]
    model.fit(*zoo.regression().all, batch_size=zoo.BATCH, verbose=0)
    assert "All of it" not in capsys.readouterr().out


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
    """Both kinds can be made of classes that inherit from `NanGuardModel`, in any order; stock Keras cannot with a class between."""

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
