"""Objects of a guarded step are released when it ends, not only by Python's garbage collector."""

from __future__ import annotations

import gc
import weakref

import keras
import pytest
from support import zoo

from keras_nanguard import NanGuard

if zoo.BACKEND == "jax":
    pytest.skip("a compiled step on JAX holds no gradients that Python could keep", allow_module_level=True)


class Watched(keras.optimizers.SGD):
    """Records the gradients that it receives, without keeping them."""

    def apply(self, grads, trainable_variables=None):
        self.seen += map(weakref.ref, grads)
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("custom", [False, True])
def test_gradients(custom):
    """No gradient outlives the next step: those of a large model take gigabytes."""
    alive = []

    class Own(keras.Model):
        def train_step(self, *args):
            return super().train_step(*args)

    class Count(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch > 1:
                alive.append(sum(reference() is not None for reference in optimizer.seen))

    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(8)(inputs))
    model, optimizer = (Own if custom else keras.Model)(inputs, outputs), Watched(0.01)
    optimizer.seen = []
    model.compile(optimizer, "mse", run_eagerly=True)
    data = zoo.regression()
    gc.collect()
    gc.disable()
    try:
        model.fit(data.x, data.y, batch_size=8, verbose=0, callbacks=[Count(), NanGuard(verbose=0)])
    finally:
        gc.enable()
    assert len(optimizer.seen) >= 12 and max(alive) <= 4
