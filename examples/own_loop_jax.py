"""Your own loop on JAX: a stateless step under jax.jit, no Keras trainer, one Inf in the data.

    python examples/own_loop_jax.py
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np

from keras_nanguard import NanGuard

rng = np.random.default_rng(0)
x = rng.standard_normal((640, 8)).astype("float32")
y = x[:, :1] ** 2
x[200, 3] = np.inf
batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, len(x), 32)] * 5


def build():
    """Return a model, its optimizer, their train step, and its initial state."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    optimizer, loss_of = keras.optimizers.Adam(1e-2), keras.losses.MeanSquaredError()
    optimizer.build(model.trainable_variables)

    def loss_and_state(trainable, non_trainable, inputs, targets):
        outputs, non_trainable = model.stateless_call(trainable, non_trainable, inputs, training=True)
        return loss_of(targets, outputs), non_trainable

    @jax.jit
    def train_step(state, inputs, targets):
        trainable, non_trainable, slots = state
        (loss, non_trainable), gradients = jax.value_and_grad(loss_and_state, has_aux=True)(trainable, non_trainable, inputs, targets)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return loss, (trainable, non_trainable, slots)

    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    return model, optimizer, train_step, tuple([v.value for v in group] for group in variables)


def error(model, state):
    """Return the mean squared error of a state on the clean rows."""
    kept = np.isfinite(x).all(axis=1)
    outputs, _ = model.stateless_call(state[0], state[1], x[kept])
    return float(np.mean((np.asarray(outputs) - y[kept]) ** 2))


stock, optimizer, train_step, ruined = build()
for inputs, targets in batches:
    _, ruined = train_step(ruined, inputs, targets)

guarded, optimizer, train_step, state = build()
guard = NanGuard()
with guard.watch(guarded, optimizer):
    step = guard.step(train_step)
    for inputs, targets in batches:
        _, state = step(state, inputs, targets)
        if guard.stopped:
            break

print(f"steps skipped: {sum(i.refused for i in guard.incidents)} of {len(batches)}")
print(f"mean squared error: {error(stock, ruined):.2f} without a guard, {error(guarded, state):.2f} with it")
if np.isfinite(error(stock, ruined)) or not error(guarded, state) < 1.0:
    raise SystemExit("The guard did not help here.")
