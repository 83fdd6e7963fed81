"""`evaluate`, `predict`, validation: bad results are reported with the first bad layer."""

import threading

import keras
import numpy as np
import pytest
from keras import ops
from support import zoo

from keras_nanguard import NanGuard

RUINS = {"nan": np.nan, "negative": -1.0, "inf": np.inf}
"""Moving variances with which only inference mode gives NaN (or, for Inf, constant outputs)."""


def ruin(model, value):
    layer = next(layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization))
    layer.moving_variance.assign(np.full(layer.moving_variance.shape, value, "float32"))
    return layer


@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.parametrize("how", ["nan", "negative"])
def test_first_bad_layer(call, how):
    """One incident names the layer and its statistics, and nothing, not even a rate, changes."""
    data, guard = zoo.regression(), NanGuard(verbose=0)
    model = zoo.plain()
    model.fit(*data.all, verbose=0)
    layer = ruin(model, RUINS[how])
    before = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    getattr(model, call)(*(data.all if call == "evaluate" else (data.x,)), verbose=0, callbacks=[guard])
    (incident,) = guard.incidents
    assert {"evaluate": "validation", "predict": "predictions"}[call] in incident.sites
    assert incident.diagnosis.cause == "batchnorm_statistics"
    assert incident.diagnosis.culprit.startswith(layer.path)
    assert incident.outcomes == () and incident.decision is None
    for old, variable in zip(before, (*model.variables, *model.optimizer.variables)):
        np.testing.assert_array_equal(old, np.array(variable))


def test_faults_of_inference_mode_are_found_at_the_first_validation():
    """Training is fine while a moving variance is bad: the first validation names the layer."""

    data, guard = zoo.regression(), NanGuard(verbose=0)
    model = zoo.plain()
    ruins = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: ruin(model, -1.0))
    fitting = {"epochs": 2, "verbose": 0, "validation_data": data.all, "callbacks": [ruins, guard]}
    history = model.fit(*data.all, **fitting).history
    assert np.isfinite(history["loss"]).all() and np.isnan(history["val_loss"]).all()
    assert guard.incidents[0].diagnosis.cause == "batchnorm_statistics"
    assert guard.incidents[0].epoch == 0


def test_loss_of_the_validation():
    """Finite outputs with a loss that is not: the loss is to blame."""

    def reckless(y_true, y_pred):
        return ops.mean(ops.log(y_true), axis=-1) + ops.mean(ops.square(y_pred), axis=-1)

    data, guard = zoo.regression(), NanGuard(verbose=0)
    model = zoo.plain(loss=reckless, metrics=())
    y = np.abs(data.y) + 1
    y[13] = 0
    model.evaluate(data.x, y, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis.cause in ("loss_domain", "target_out_of_range") and "reckless" in diagnosis.culprit


def test_a_metric_that_is_meant_to_be_nan(capsys):
    """0/0 without positives in the validation or `evaluate`: one line, no incident, no second read of the data."""

    def precision(y_true, y_pred):
        positive = ops.cast(y_pred > 1e6, "float32")
        return ops.sum(positive) / ops.sum(positive)

    data, guard = zoo.regression(), NanGuard()
    model = zoo.plain(metrics=[precision])
    fitting = {"epochs": 3, "verbose": 0, "validation_data": data.all}
    history = model.fit(*data.all, **fitting, callbacks=[guard]).history
    assert np.isnan(history["val_precision"]).all() and np.isfinite(history["val_loss"]).all()
    model.evaluate(*data.all, verbose=0, callbacks=[guard])
    assert guard.incidents == []
    assert capsys.readouterr().out.splitlines() == [
        "NanGuard: the metric val_precision of epoch 1 is nan, although the loss is finite.",
        "NanGuard: the metric precision of epoch 1 is nan, although the loss is finite.",
        "NanGuard: the metric precision is nan, although the loss is finite.",
    ]


def test_inputs_of_a_prediction():
    """A bad row is the fault of the input, in any batch; a generator is not read twice."""
    x, read = zoo.draw(), []
    x[19, 0] = np.nan
    guard = NanGuard(verbose=0)
    zoo.plain().predict(x, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
    diagnosis = guard.incidents[0].diagnosis
    assert (diagnosis.cause, diagnosis.samples) == ("input_nonfinite", (19 % zoo.BATCH,))

    def batches():
        for start in range(0, len(x), zoo.BATCH):
            read.append(start)
            yield (x[start : start + zoo.BATCH],)

    guard = NanGuard(verbose=0)
    zoo.plain().predict(batches(), steps=zoo.BATCHES, verbose=0, callbacks=[guard])
    assert len(guard.incidents) == 1 and read == sorted(set(read))


@pytest.mark.requires_backend("jax", reason="only there Keras keeps the state outside of the variables")
def test_no_other_thread_writes_the_state_of_a_prediction():
    """Keras calls the guard in a thread while the next batch runs, which has taken over the arrays."""
    threads, model = [], zoo.plain()
    sync = model.jax_state_sync
    object.__setattr__(model, "jax_state_sync", lambda: (threads.append(threading.current_thread()), sync()))
    for _ in range(3):
        model.predict(zoo.draw(), batch_size=zoo.BATCH, verbose=0, callbacks=[NanGuard(verbose=0)])
    assert set(threads) == {threading.main_thread()}


def test_results_of_a_model_that_was_never_trained():
    """Data that can be read only once is not read again: the state alone is diagnosed."""
    data, guard = zoo.regression(), NanGuard(verbose=0)
    model = zoo.plain()
    kernel = model.layers[-1].kernel
    kernel.assign(np.full(kernel.shape, np.nan))
    once = ((data.x[start : start + zoo.BATCH],) for start in range(0, len(data.x), zoo.BATCH))
    model.predict(once, steps=zoo.BATCHES, verbose=0, callbacks=[guard])
    diagnosis = guard.incidents[0].diagnosis
    assert (diagnosis.cause, diagnosis.culprit) == ("state_nonfinite", kernel.path)


def test_healthy_results_are_silent():
    data, guard = zoo.regression(), NanGuard(verbose=0)
    model = zoo.plain()
    model.fit(*data.all, verbose=0, validation_data=data.all, callbacks=[guard])
    model.evaluate(*data.all, verbose=0, callbacks=[guard])
    model.predict(data.x, verbose=0, callbacks=[guard])
    assert guard.incidents == []


@pytest.mark.parametrize(("bad", "epochs"), [({1, 2, 3}, 4), ({0, 1, 3, 4, 5}, 6), ({0, 2, 4}, 8)])
def test_a_rule_about_bad_validations_in_a_row(bad, epochs):
    """`after = 3` acts at the third bad validation in a row; a good one between them starts anew."""

    class Validation(keras.utils.PyDataset):
        epoch = 0

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.full((4, 3), np.nan if self.epoch in bad else 1.0), np.ones((4, 1))

    data = Validation()
    next_epoch = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: setattr(data, "epoch", data.epoch + 1))
    rule = {"name": "validation", "site": "validation", "after": 3, "do": "stop"}
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    guard = NanGuard(verbose=0, rules=[rule])
    fit = {"epochs": 8, "batch_size": 2, "verbose": 0, "validation_data": data, "callbacks": [guard, next_epoch]}
    history = model.fit(np.ones((8, 3)), np.ones((8, 1)), **fit)
    assert len(history.epoch) == epochs
