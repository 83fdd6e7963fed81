"""The hand-written loop, `NanGuardModel` and `fit` with `NanGuard` give the same numbers."""

from __future__ import annotations

import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support import zoo
from support.programs import differentiated

from keras_nanguard import NanGuard, NanGuardModel

BAD = (3, 7, 8)
EPOCHS = 2


def network(base, xla=False):
    """Return a functional model of this class, from a fixed seed, compiled with Adam."""
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    inputs = keras.Input((6,))
    x = layers.BatchNormalization()(layers.Dense(8, use_bias=False)(inputs))  # a bias there has no gradient but noise
    outputs = layers.Dense(1)(layers.Dropout(0.3, seed=1)(x))
    model = base(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(), jit_compile=xla)
    return model


def weights(model, optimizer=None):
    return [np.array(v) for v in (*model.variables, *(optimizer or model.optimizer).variables)]


@functools.cache
def data():
    return zoo.regression().with_poison(BAD)


def batches():
    for _ in range(EPOCHS):
        for b in range(data().batches):
            rows = slice(b * zoo.BATCH, (b + 1) * zoo.BATCH)
            yield ops.convert_to_tensor(data().x[rows]), ops.convert_to_tensor(data().y[rows])


def fit(model, of=None):
    zoo.fit(model, of or data(), epochs=EPOCHS)


@functools.cache
def reference(xla=False):
    """Return the weights after an unguarded fit over the data without the bad batches (XLA draws its own Dropout)."""
    model = network(keras.Model, xla)
    fit(model, of=data().without(BAD))
    return weights(model)


def check(model, steps, optimizer=None, tolerance=0.0, xla=False):
    zoo.assert_same(weights(model, optimizer), reference(xla), tolerance)
    per_epoch = data().batches
    assert steps == [e * per_epoch + b for e in range(EPOCHS) for b in BAD]


class Quiet(NanGuardModel):
    nanguard_verbose = 0


class OwnStep(Quiet):
    """A custom train step in the low-level style."""

    def train_step(self, batch):
        x, y = batch
        loss, gradients = differentiated(
            lambda: self.compute_loss(x, y, self(x, training=True)), lambda: self.trainable_variables
        )
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.parametrize("base", [Quiet, OwnStep], ids=["stock step", "own step"])
def test_model_in_fit(base):
    """`NanGuardModel` needs no callback, with the stock train step or a custom one."""
    model = network(base)
    fit(model)
    check(model, [i.step for i in model.nanguard.incidents])


def test_model_in_train_on_batch():
    """`NanGuardModel` guards `train_on_batch`."""
    model = network(Quiet)
    for x, y in batches():
        assert np.isfinite(model.train_on_batch(x, y))
    check(model, [i.step for i in model.nanguard.incidents])


def loop_step(model, optimizer):
    loss_of = keras.losses.MeanSquaredError()

    def step(x, y):
        loss, gradients = differentiated(lambda: loss_of(y, model(x, training=True)), lambda: model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


@pytest.mark.parametrize("kind", ["eager", "tf.function", "xla"])
def test_loop(kind):
    """A loop with `watch` and `step` gives the same numbers, and reports its refusals."""
    model, guard, optimizer = network(keras.Model), NanGuard(verbose=0), keras.optimizers.Adam(0.01)
    step, refused = loop_step(model, optimizer), []
    if kind != "eager":
        step = tf.function(step, jit_compile=kind == "xla")
    with guard.watch(model, optimizer):
        guarded = guard.step(step)
        for x, y in batches():
            loss = guarded(x, y)
            refused.append(guard.refused)
            assert guard.refused or np.isfinite(float(loss))
    assert [i for i, bad in enumerate(refused) if bad] == [i.step for i in guard.incidents]
    check(model, [i.step for i in guard.incidents], optimizer, 0.0 if kind == "tf.function" else 1e-5, kind == "xla")


def test_random_numbers_of_a_step_after_the_end_of_training():
    """It leaves the generators of the process as they were, also if it ends in an exception."""
    model, guard, optimizer = network(keras.Model), NanGuard("stop", verbose=0), keras.optimizers.Adam(0.01)
    step = loop_step(model, optimizer)
    x, y = ops.ones((8, 6)), ops.zeros((8, 1))
    with guard.watch(model, optimizer):
        guarded = guard.step(lambda x, y: step(x + 0.0 * np.random.rand() * random.random(), y))
        guarded(x * np.nan, y)
        before = random.getstate(), np.random.get_state()[1:3]
        guarded(x, y)
        with pytest.raises(Exception, match=r"shape|dimension|broadcast|Incompatible"):
            guarded(ops.ones((8, 5)), y)
    assert guard.stopped
    np.testing.assert_equal((random.getstate(), np.random.get_state()[1:3]), before)


def test_loop_stops(capsys):
    """Within a dozen steps, with unchanged weights; later steps have no effect."""
    model, guard, optimizer = network(keras.Model), NanGuard(), keras.optimizers.Adam(0.01)
    before, steps = model.get_weights(), 0
    with guard.watch(model, optimizer):
        guarded = guard.step(tf.function(loop_step(model, optimizer)))
        while not guard.stopped:
            guarded(ops.full((8, 6), np.nan, "float32"), ops.zeros((8, 1)))
            steps += 1
        for _ in range(3):
            assert np.isfinite(float(guarded(ops.ones((8, 6)), ops.zeros((8, 1)))))
    assert steps <= 12 and guard.session.run.counts.step == steps
    assert int(optimizer.iterations) == 0
    assert capsys.readouterr().out.count("steps since then have no effect. End the loop if guard.stopped") == 1
    for one, other in zip(before, model.get_weights()):
        if one.dtype.kind == "f":
            np.testing.assert_array_equal(one, other)
