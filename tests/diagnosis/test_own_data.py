"""A step of a loop that reads its batch from an iterator."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard

pytestmark = pytest.mark.requires_backend("tensorflow", "torch", reason="a step on JAX is given its batch")


def test_no_batch_is_lost_to_a_replay(tmp_path):
    """Each call of the step takes the next batch, no replay does; so the cause is unknown."""
    batches = np.random.default_rng(0).normal(size=(20, 8, 4)).astype("float32")
    batches[7] = np.nan
    feed, taken = iter(batches), []
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step():
        batch = keras.ops.convert_to_tensor(next(feed))
        taken.append(batch)
        if zoo.BACKEND == "torch":
            loss = keras.ops.mean(keras.ops.square(model(batch)))
            model.zero_grad()
            loss.backward()
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
            return loss
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    guard = NanGuard(verbose=0, directory=str(tmp_path))
    with guard.watch(model, optimizer):
        guarded = guard.step(step)
        for _ in range(len(batches)):
            guarded()
    assert len(taken) == len(batches) and next(feed, None) is None
    (incident,) = guard.incidents
    assert incident.step == 7 and incident.diagnosis.cause == "unknown"
    assert any("reads from an iterator" in text for text in incident.diagnosis.evidence)
    assert all(np.isfinite(w).all() for w in model.get_weights())
