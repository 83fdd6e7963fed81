"""Which updates can wait for the verdict, as the graph of the step shows; whichever way it goes, a bad step leaves nothing behind."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support.tensorflow_steps import (
    Away,
    Bursting,
    Retrace,
    X,
    Y,
    alone,
    batches,
    execution,
    network,
    run,
    same,
    spoiled,
    state,
)

STEPS, BAD = range(5), (0, 2)
SPOILT = X.copy()
SPOILT[[*BAD], 2, 1] = np.nan


def rate(model):
    return model.optimizer._learning_rate


def reads_a_weight(model, batch):
    logs = model.train_step(batch)
    return {**logs, "norm": tf.norm(model.layers[0].kernel.value)}


def reads_another_variable(model, batch):
    logs = model.train_step(batch)
    return {**logs, "other": model.other.value + 1.0}


def writes_another_variable(model, batch):
    logs = model.train_step(batch)
    model.other.assign(0.9 * model.other.value + tf.reduce_mean(batch[0]))
    return logs


def reads_the_rate(model, batch):
    logs = model.train_step(batch)
    return {**logs, "rate": rate(model).value + 1.0}


def writes_the_rate(model, batch):
    logs = model.train_step(batch)
    rate(model).assign(rate(model).value * 0.9)
    return logs


def writes_the_rate_before(model, batch):
    rate(model).assign(rate(model).value * 0.9 + tf.reduce_mean(batch[0]) * 1e-3)
    return model.train_step(batch)


def writes_a_weight_before(model, batch):
    kernel = model.layers[0].kernel
    kernel.assign(kernel.value * 0.9 + tf.reduce_mean(batch[0]))
    return model.train_step(batch)


def writes_a_slot_before(model, batch):
    model.optimizer.momentums[0].assign(model.optimizer.momentums[0].value + tf.reduce_mean(batch[0]))
    return model.train_step(batch)


def gradients_of(model, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])


def updates_in_a_conditional(model, batch):
    loss, gradients = gradients_of(model, batch)

    def update():
        model.optimizer.apply(gradients, model.trainable_variables)
        return 1

    tf.cond(tf.size(batch[0]) > 0, update, lambda: 0)
    return {"loss": loss}


def updates_and_scales_in_a_conditional(model, batch):
    return updates_in_a_conditional(model, batch)


def writes_what_nobody_lists(model, batch):
    model.hidden().assign_add(tf.reduce_mean(batch[0], 0))
    x, y = batch
    return model.train_step((x + 0.1 * model.hidden(), y))


def updates_what_nobody_lists_twice(model, batch):
    loss, gradients = gradients_of(model, batch)
    model.optimizer.apply(gradients, model.trainable_variables)
    hidden = model.hidden()
    for power in (2, 3):
        with tf.GradientTape() as tape:
            own = tf.reduce_mean((hidden - batch[0]) ** power)
        model.second.apply([tape.gradient(own, hidden)], [hidden])
    return {"loss": loss + own}


def writes_and_updates_what_nobody_lists(model, batch):
    logs, hidden = model.train_step(batch), model.hidden()
    hidden.assign_add(tf.reduce_mean(batch[0], 0))
    with tf.GradientTape() as tape:
        own = tf.reduce_mean((hidden - batch[0]) ** 2)
    model.second.apply([tape.gradient(own, hidden)], [hidden])
    return logs


WAITS = {
    reads_a_weight: False,
    reads_another_variable: True,
    writes_another_variable: True,
    reads_the_rate: True,
    writes_the_rate: False,
    writes_the_rate_before: True,
    writes_a_weight_before: False,
    writes_a_slot_before: False,
    updates_in_a_conditional: False,
    updates_and_scales_in_a_conditional: False,
    writes_what_nobody_lists: True,
    updates_what_nobody_lists_twice: False,
    writes_and_updates_what_nobody_lists: False,
}
"""Steps, and whether their updates can wait."""

CASES = [(body, way) for body in WAITS for way in ("deferred",)]
CASES += [(body, "eager") for body in WAITS if "nobody" in body.__name__]


@pytest.mark.parametrize(("body", "way"), [pytest.param(*case, id=f"{case[0].__name__}, {case[1]}") for case in CASES])
def test_who_waits(body, way):
    """The state is that of the step by itself without the bad batches, and no old weight is kept where the updates can wait."""

    def made():
        scaled = "scales" in body.__name__
        model = network(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=4.0) if scaled else None)
        model.other = model.add_weight(shape=(), initializer="zeros", trainable=False, name="other")
        hidden = tf.Variable(tf.zeros((3,)), trainable="updates_what" in body.__name__)
        if way == "eager" and "writes" in body.__name__:
            model.layers[0].hidden = hidden  # nothing but an attribute shows it there
        model.hidden, model.second = lambda: hidden, keras.optimizers.SGD(0.1, momentum=0.9)
        return model

    plain, model = made(), made()
    execute = execution(lambda batch: body(plain, batch), way)
    for batch in batches(X, [step for step in STEPS if step not in BAD]):
        execute(batch)
    transaction = alone(model, way, lambda batch: body(model, batch))
    verdicts = run(transaction, batches(SPOILT, STEPS), 1, way)[1]
    assert [v.refused for v in verdicts] == [step in BAD for step in STEPS]
    states = [[*state(one), *(np.array(v) for v in (one.hidden(), *one.second.variables))] for one in (model, plain)]
    same(*states)
    assert transaction.keeps_undo == (way != "eager" and not WAITS[body])
    assert len(transaction.untracked) == (way != "eager" and body is writes_what_nobody_lists)
    noted = [id(variable) for variable, _ in transaction.created]
    assert len(noted) == len({*noted}) and (id(model.hidden()) in noted) == ("updates_what" in body.__name__)


@pytest.mark.parametrize("way", ["deferred", "eager"])
def test_what_the_first_step_makes(way):
    """A bad first step of a model that it builds leaves it as if it had not run, and its variables are noted once."""

    def unbuilt():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Dense(2), layers.BatchNormalization(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    plain, model = unbuilt(), unbuilt()
    execute = execution(plain.train_step, way)
    for batch in batches(X, [step for step in STEPS if step not in BAD]):
        execute(batch)
    transaction = alone(model, way)
    verdicts = run(transaction, batches(SPOILT, STEPS), 1, way)[1]
    assert [v.refused for v in verdicts] == [step in BAD for step in STEPS]
    same(state(model), state(plain))
    made = {id(v.value) for v in (*model.variables, *model.optimizer.variables) if v is not model.optimizer._learning_rate}
    noted = [id(variable) for variable, _ in transaction.created]
    assert len(noted) == len({*noted}) and made - {*noted} <= {id(v.value) for v in model.optimizer.variables}
    assert transaction.keeps_undo is False


@pytest.mark.parametrize("way", ["deferred", "eager"])
def test_two_loss_scales(way):
    """Each of two optimizers that the first step builds halves its scale where all gradients are bad, as stock Keras does."""

    def made():
        scaled = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=scale) for scale in (64.0, 16.0)]
        model = network(scaled[0], loss=spoiled("gradients"), built=False)
        model.second = scaled[1]
        return model

    def step(model, batch):
        loss, gradients = gradients_of(model, batch)
        gradients = [g + tf.where(tf.reduce_max(batch[1]) > 50, np.float32("inf"), 0.0) for g in gradients]
        model.optimizer.apply(gradients[:1], model.trainable_variables[:1])
        model.second.apply(gradients[1:], model.trainable_variables[1:])
        return {"loss": loss}

    plain, model = made(), made()
    execute, transaction = execution(lambda batch: step(plain, batch), way), alone(model, way, lambda batch: step(model, batch))
    y = Y.copy()
    y[[*BAD], 1] = 100.0
    for batch in [(tf.constant(a), tf.constant(b)) for a, b in zip(X, y)]:
        execute(batch)
        run(transaction, [batch], 1, way)
        scales = [[float(o.dynamic_scale) for o in (one.optimizer, one.second)] for one in (plain, model)]
        assert scales[0] == scales[1]
    assert scales[0] == [16.0, 4.0]


@pytest.mark.parametrize("where", ["weights", "slots"])
def test_what_the_first_update_makes(where):
    """In eager execution the first step reads what it has made, and is refused where that is bad."""
    model = network(Bursting(where, update=0), Away(name="away"), built=False)
    before = [np.array(v) for v in model.variables]
    (verdict,) = run(alone(model, "eager"), batches(X, [0]), 1, "eager")[1]
    assert verdict.refused and np.isfinite(verdict.loss + verdict.gradients + verdict.statistics)
    same([np.array(v) for v in model.variables], before)
    assert all(np.isfinite(np.array(v)).all() for v in model.optimizer.variables)


@pytest.mark.parametrize("way", ["deferred"])
def test_a_step_that_makes_nothing(way):
    """It is traced once, and gives back what nobody lists in its very first run."""
    model, hidden = network(), tf.Variable(tf.zeros((3,)), trainable=False)

    def body(batch):
        hidden.assign_add(tf.reduce_mean(batch[0], 0))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch[0], training=True) - batch[1]))
        model.optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        return loss

    transaction = alone(model, way, body, logs=False)
    before = [np.array(v) for v in (hidden, *model.variables, *model.optimizer.variables)]
    execute = execution(transaction, way)
    for _ in range(2):
        try:
            _, verdict = transaction.read(execute(batches(SPOILT, [0])[0]))
            break
        except Retrace as found:
            transaction.learn(found)
            execute = execution(transaction, way)
    assert verdict.refused and len(transaction.untracked) == 1
    same([np.array(v) for v in (hidden, *model.variables, *model.optimizer.variables)], before)
