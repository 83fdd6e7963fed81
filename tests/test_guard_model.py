"""`NanGuardModel` counts as `NanGuard` does: per fit, per epoch, in History; and stands aside for a callback."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import zoo
from keras import layers

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
    assert ", 4 left out" in model.nanguard.summary()


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


def test_results_and_files_are_plain_keras(tmp_path):
    """`evaluate`, `predict` and saving are those of `keras.Model`."""
    model, data = network(), zoo.regression()
    fit(model, epochs=1)
    before = model.predict(data.x, verbose=0)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras", custom_objects={"Quiet": Quiet})
    np.testing.assert_array_equal(again.predict(data.x, verbose=0), before)
    assert np.isfinite(model.evaluate(*data.all, verbose=0))
