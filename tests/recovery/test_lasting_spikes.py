"""A few finite batches that throw a run back: it goes on as if they had not been there."""

from __future__ import annotations

from itertools import pairwise

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from sklearn.datasets import load_digits
from support import zoo

from keras_nanguard import NanGuard

DIGITS = load_digits()
X, Y = (DIGITS.data / 16).astype("float32"), DIGITS.target
BATCH, BAD, EPOCHS = 32, 40, 5
"""57 steps an epoch, the 41st of each is bad: nothing is shuffled."""
ROWS = slice(BAD * BATCH, (BAD + 1) * BATCH)
SOUND = np.ones(len(X), bool)
SOUND[ROWS] = False


def classifier(optimizer):
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(64, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, "softmax")])
    model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def regression(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, "relu"), layers.Dense(1)])
    model.compile(optimizer(), "mse")
    return model


def unscaled(by=100.0):
    x = X.copy()
    x[ROWS] *= by
    return classifier, x, Y


def mistyped():
    y = (Y / 10).astype("float32")
    y[ROWS] *= 1e5
    return regression, X, y


def fit(build, optimizer, x, y, guard=None, epochs=EPOCHS):
    model = build(optimizer)
    guards = [guard] if guard is not None else []
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=guards)
    return model


def figure(model, x, y):
    result = model.evaluate(x[SOUND], y[SOUND], batch_size=256, verbose=0, return_dict=True)
    return result.get("accuracy", -result["loss"])


@pytest.mark.parametrize(
    ("data", "optimizer", "margin"),
    [
        pytest.param(unscaled, lambda: optimizers.SGD(0.02, momentum=0.9), 0.02, id="unscaled images, momentum"),
        pytest.param(lambda: unscaled(1e3), lambda: optimizers.Adam(1e-3), 0.02, id="unscaled images, Adam"),
        pytest.param(mistyped, lambda: optimizers.SGD(0.05), 0.02, id="a target with three zeros too many, SGD, overflows"),
        pytest.param(mistyped, lambda: optimizers.Adam(1e-3), 0.02, id="a target with three zeros too many, Adam"),
    ],
)
def test_brought_home(data, optimizer, margin):
    """Stock Keras is thrown back; the guarded run ends as well as one without these batches."""
    build, x, y = data()
    clean = figure(fit(build, optimizer, x[SOUND], y[SOUND]), x, y)
    stock = figure(fit(build, optimizer, x, y), x, y)
    assert not stock > clean - margin, "otherwise there is nothing to heal"
    guard = NanGuard(verbose=0)
    assert figure(fit(build, optimizer, x, y, guard), x, y) > clean - margin
    found = [i for i in guard.incidents if i.findings[0].kind == "lasting_spike"]
    first = found[0]
    assert len(found) == 1 and abs(first.values["onset"] - BAD) <= 2
    done = {o.action: o.detail for o in first.outcomes if o.status == "done"}
    assert "left out" in done["rollback"] and "clipped" in done["clip"]
    assert first.diagnosis.cause == "spike" and any("Tried again without" in text for text in first.diagnosis.evidence)
    assert guard.session.refused >= 1, "a step that was left out counts as refused"


def test_one_that_does_no_harm():
    """At a rate at which it does not matter: silent, and the bits of the plain run."""
    build, x, y = unscaled(12.0)
    guard = NanGuard(verbose=0)
    tame = lambda: optimizers.SGD(1e-3)  # noqa: E731
    guarded, plain = fit(build, tame, x, y, guard), fit(build, tame, x, y)
    assert guard.incidents == []
    for one, other in zip(guarded.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(one, other, rtol=0, atol=0 if zoo.BACKEND == "tensorflow" else 1e-6)


@pytest.mark.requires_backend("tensorflow", reason="how a run like this goes depends on the backend; where a step is counted does not")
def test_a_step_that_is_run_again_keeps_its_place():
    """An incident of a step that runs again in a later epoch names the epoch and the batch that it is of."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1280, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    y[860] = 1e4
    keras.utils.set_random_seed(0)
    stack = [keras.Input((8,)), layers.Dense(32, activation="tanh"), layers.BatchNormalization(), layers.Dense(1)]
    model = keras.Sequential(stack)
    model.compile(optimizers.SGD(0.05, momentum=0.9), "mse")
    guard = NanGuard(verbose=0)
    model.fit(x, y, epochs=4, shuffle=False, verbose=0, callbacks=[guard])
    places = [(i.step, i.epoch, i.batch) for i in guard.incidents]
    assert any(step < before for (before, *_), (step, *_) in pairwise(places)), "no incident in a step that is run again"
    assert all((epoch, batch) == divmod(step, 40) for step, epoch, batch in places)
