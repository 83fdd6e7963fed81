"""Twelve kinds of programs: plain and guarded are the same while all is well, and of one bad batch nothing is left."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from support import kinds, zoo

from keras_nanguard import NanGuard

FAST = ("VAE", "CTC", "graph network", "time series")
TABLE = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in kinds.KINDS]


def run(kind, guard=None, bad=False):
    keras.utils.set_random_seed(0)
    model, data = kind.build(), kind.data()
    if bad:
        array = keras.tree.flatten(data[kind.bad])[0]
        array[5 * zoo.BATCH + 2].reshape(-1)[0] = np.nan
    keras.utils.set_random_seed(1)
    callbacks = [guard] if guard else []
    history = model.fit(**data, batch_size=zoo.BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    return history, zoo.state_of(model)


@pytest.mark.parametrize("name", TABLE)
def test_plain_is_guarded_and_a_bad_batch_is_refused(name):
    """Same history, same state, no incident; of a bad batch a refused step in each epoch, and a finite state."""
    kind = kinds.KINDS[name]
    if zoo.BACKEND not in kind.on:
        pytest.skip(f"its train step is written for {', '.join(kind.on)}")
    with zoo.as_written():
        plain, state = run(kind)
        guard = NanGuard(verbose=0, diagnose=False)
        history, guarded = run(kind, guard)
    assert guard.incidents == [] and zoo.plain_logs(history) == plain
    assert [path for (path, one), (_, other) in zip(state, guarded, strict=True) if not np.array_equal(one, other)] == []
    guard = NanGuard(verbose=0, diagnose=False)
    history, state = run(kind, guard, bad=True)
    assert history["refused_steps"] == [1, 1] and [incident.batch for incident in guard.incidents] == [5, 5]
    assert all(np.isfinite(value).all() for _, value in state)


@pytest.mark.requires_backend("tensorflow", reason="the loop is written with a GradientTape")
def test_actor_critic_with_a_tape():
    """The twelfth: a loop with no `fit`. Guarded by `guard.step` it ends with the same weights, and refuses a bad reward."""
    import tensorflow as tf

    def train(guard, bad=None):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="relu")(inputs)
        model = keras.Model(inputs, [keras.layers.Dense(2)(hidden), keras.layers.Dense(1)(hidden)])
        optimizer = keras.optimizers.Adam(1e-2)
        rng = np.random.default_rng(0)

        def step(states, actions, returns):
            with tf.GradientTape() as tape:
                logits, values = model(states, training=True)
                advantage = returns - values[:, 0]
                chosen = tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(actions, 2), -1)
                loss = tf.reduce_mean(-chosen * tf.stop_gradient(advantage) + tf.square(advantage))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        step = tf.function(step, reduce_retracing=True)
        run = step if guard is None else guard.step(step)
        context = guard.watch(model, optimizer) if guard is not None else tf.name_scope("plain")
        with context:
            for episode in range(12):
                states, returns = rng.standard_normal((8, 4)).astype("float32"), rng.standard_normal(8).astype("float32")
                returns[0] = np.nan if episode == bad else returns[0]
                run(tf.constant(states), tf.constant(rng.integers(0, 2, 8)), tf.constant(returns))
        return model.get_weights()

    with zoo.as_written():
        plain, guard = train(None), NanGuard(verbose=0, diagnose=False)
        guarded = train(guard)
    assert guard.incidents == [] and all(np.array_equal(one, other) for one, other in zip(plain, guarded, strict=True))
    guard = NanGuard(verbose=0, diagnose=False)
    assert all(np.isfinite(weight).all() for weight in train(guard, bad=5)) and [incident.step for incident in guard.incidents] == [5]
