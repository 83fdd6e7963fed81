"""Single steps on TensorFlow, with the transaction around them and without a fit."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_nanguard._backends.interface import Executed, Learned
from keras_nanguard._backends.tensorflow.replica import Retrace
from keras_nanguard._backends.tensorflow.step import Transaction
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras.train_state import TrainState

SIZE, STEPS, BAD = 4, 8, (1, 2, 6)
X = np.random.default_rng(0).standard_normal((STEPS, SIZE, 3)).astype("float32")
Y = X[:, :, :1] - 0.5
WITH_BAD = X.copy()
WITH_BAD[[*BAD], 2, 1] = np.nan
KEPT = [step for step in range(STEPS) if step not in BAD]


def network(optimizer=None, *more, loss="mse", built=True):
    """Return a model; if it is built, no step creates variables of its optimizer or metrics."""
    keras.utils.set_random_seed(0)
    first = [keras.Input((3,)), layers.Dense(2, use_bias=False), layers.BatchNormalization(), *more]
    model = keras.Sequential([*first, layers.Dense(1, dtype="float32")])
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["mae"])
    if built:  # TensorFlow traces a step twice if it creates variables
        model.optimizer.build(model.trainable_variables)
        model.compute_metrics(None, tf.zeros((1, 1)), tf.zeros((1, 1)))
        model.reset_metrics()
    return model


def facts(model, created):
    """Return the facts of a run, as a transaction uses them; the variables it creates are added."""
    return SimpleNamespace(
        model=model,
        read_train_state=lambda: TrainState.of(model),
        note_created=lambda variable, value: created.append((variable, value)),
        tolerate_created=list,
    )


def alone(model, way="deferred", body=None, several=1, logs=True, **more):
    """Return the transaction around the step of a model, for this many steps per execution."""
    created = []
    known = {"of_trainer": logs, "counted": several > 1, "refuse": True}
    known.update({"host_has_batches": several == 1, "jit": "compiled" in way, **more})
    transaction = Transaction(body or model.train_step, facts(model, created), **known)
    transaction.created = created
    transaction.learned = Learned(updates_first=way == "kept")
    return transaction


def batches(x, steps=range(STEPS)):
    return [(tf.constant(x[step]), tf.constant(Y[step])) for step in steps]


def execution(step, way=""):
    """Return a function that runs a step on each batch, and returns the result of the last one."""

    def execute(*batches):
        return [step(batch) for batch in batches][-1]

    return execute if way == "eager" else tf.function(execute, autograph=False)


def read(result):
    """Return the outputs and the verdict of one call."""
    outputs, row = result
    return outputs, Verdict.of(row.numpy().tolist())


def run(transaction, given, several=1, way=""):
    """Return the logs of each execution, the verdict of each step, and the reports of all."""
    execute = vars(transaction).setdefault("traced", execution(transaction, way))
    logs, verdicts, reports = [], [], []
    for start in range(0, len(given), several):
        now = given[start : start + several]
        try:
            result = execute(*now)
        except Retrace as found:
            transaction.learned = found.learned
            execute = vars(transaction)["traced"] = execution(transaction, way)
            result = execute(*now)
        told, verdict = read(result)
        logs.append({key: float(value) for key, value in told.items()})
        results = transaction.results(Executed(told, verdict, (now[0],)))
        verdicts += [verdict for verdict, _ in results]
        assert str(verdicts[-1]) == str(verdict)
        reports += [report for _, report in results if report is not None]
    return logs, verdicts, reports


def state(model):
    return [np.array(v) for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)]


def trained(model, given, way=""):
    """Train a model by Keras' own step, and return the logs of each step."""
    execute = execution(model.train_step, way)
    return [{key: float(value) for key, value in execute(batch).items()} for batch in given]


class Bursting(keras.optimizers.SGD):
    """Makes a weight or a slot infinite in one update; no step computes a bad value from it."""

    def __init__(self, where, update=2):
        super().__init__(0.05, momentum=0.9)
        self.where, self.update = where, update

    def build(self, variables):
        super().build(variables)
        self.spare = self.add_variable((2,), name="spare")

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        if "away/bias" in getattr(variable, "path", variable.name):
            bad = tf.where(self.iterations.value == self.update, np.float32("inf"), 0.0)
            (variable if self.where == "weights" else self.spare.value).assign_add(tf.fill((2,), bad))


class Away(layers.Layer):
    """Adds the values of its weights, or nothing if they are infinite."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(2,), initializer="zeros", name="bias")

    def call(self, x):
        return x + tf.exp(-tf.abs(self.bias))


def spoiled(what):
    """Return a loss that is bad, or whose gradient alone is bad, if a target is large."""

    def loss(y, found):
        large = y > 50
        bad = {"loss": tf.where(large, np.float32("nan"), 0.0), "gradients": 0.1 * tf.sqrt(tf.where(large, 0.0 * found, 1.0 + 0.0 * found))}
        return tf.reduce_mean(tf.square(tf.where(large, 0.0, y) - found) + bad.get(what, 0.0), -1)

    return loss
