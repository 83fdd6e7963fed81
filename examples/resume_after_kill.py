"""Resume after `kill -9`: the same script is started again, continues in the middle of the epoch, and ends with the same bits.

    python examples/resume_after_kill.py

The first start is a separate process that kills itself in its second epoch. The second one is this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import keras
import numpy as np
from keras import layers

from keras_nanguard import NanGuard

EPOCHS, BATCHES, KILLED_AT = 4, 50, 97

x = np.random.default_rng(0).standard_normal((32 * BATCHES, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)


class Kill(keras.callbacks.Callback):
    """Kills this process at a step."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(*callbacks):
    """Train with Dropout and Adam. Their seeds and slots must also be restored."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32, activation="relu"), layers.Dropout(0.2), layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(x, y, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def guard(directory):
    """Return the guard for the first start and every restart."""
    return NanGuard(directory=directory, resume=True, snapshot={"every": 20})


if len(sys.argv) > 1:
    train(guard(sys.argv[1]), Kill())

with tempfile.TemporaryDirectory() as directory:
    killed = subprocess.run([sys.executable, __file__, directory], check=False)
    resumed = train(guard(directory))

whole = train()
same = all(np.array_equal(a, b) for a, b in zip(resumed.get_weights(), whole.get_weights()))
print(f"first start: killed by signal {-killed.returncode} at step {KILLED_AT} of {EPOCHS * BATCHES}")
print("the same weights as a run that was never killed, bit for bit:", same)
if killed.returncode != -signal.SIGKILL or not same:
    raise SystemExit("The guard did not help here.")
