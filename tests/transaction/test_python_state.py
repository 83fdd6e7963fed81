"""Trials and diagnoses leave no trace in Python objects, variables and generators."""

import random

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard

X = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
Y = 0.7 * X.sum(axis=1, keepdims=True) + 1.4 * np.random.default_rng(1).normal(size=(256, 1)).astype("float32")
"""The loss does not halve, so divergence is tested for; what can be learned ends the trials."""


class Collecting(keras.metrics.Metric):
    """Collects predictions in a list, as a metric of another library needs them."""

    def __init__(self):
        super().__init__(name="collecting")
        self.kept = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.append(keras.ops.convert_to_numpy(y_pred))

    def result(self):
        return float(len(self.kept))

    def reset_state(self):
        self.kept = []


class Annealed(keras.losses.Loss):
    """Counts its calls in a number and in a variable, on which it depends."""

    def __init__(self):
        super().__init__(name="annealed")
        self.calls, self.variable = 0, keras.Variable(0.0, trainable=False)

    def call(self, y_true, y_pred):
        self.calls += 1
        self.variable.assign(self.variable + 1.0)
        factor = 1 + (self.calls + self.variable) / 100
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1) * factor


CALLS = zoo.Tally()
"""The number of calls of a model of `trained`, with those of a trial."""


class Called(layers.Layer):
    def call(self, inputs):
        CALLS.number += 1
        return inputs


class Counting(layers.Layer):
    """Keeps counts in a dict and a list, on which its result depends."""

    def __init__(self):
        super().__init__()
        self.seen, self.sizes = {"n": 0}, []

    def call(self, inputs):
        self.seen["n"] += 1
        self.sizes.append(1)
        return inputs * (1 + self.seen["n"] / 1000 + len(self.sizes) / 1000)


class Rate:
    """A learning rate that falls with its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return 0.01 / (1 + self.calls / 100)


def kept():
    """A metric, a loss, layers and generators that write Python objects, and fixed statistics."""
    fixed = layers.Normalization(mean=0.5, variance=2.0)
    return [Counting(), Drawn(), fixed], "sgd", Annealed(), [Collecting()]


class Centred(keras.losses.Loss):
    """Keeps an array that it writes in place, and a list in its closure, on which it depends."""

    def __init__(self):
        super().__init__(name="centred")
        self.centre, bank = np.zeros(1), []

        def banked(value):
            bank.append(value)
            return value * (1 + len(bank) / 1000)

        self.banked = banked

    def call(self, y_true, y_pred):
        self.centre += 0.01
        if keras.backend.backend() == "torch":
            TENSORS["centre"] += 0.01
        centre = float(self.centre[0]) + float(TENSORS["centre"])
        return self.banked(keras.ops.mean((y_true - y_pred) ** 2, axis=-1)) * (1 + centre)


STATE, TENSORS = {}, {}
"""What custom code of `outside` keeps in this module."""

COUNT = 0


class FromModule(layers.Layer):
    """Draws from a generator of this module, and counts in a global, a dict and its class."""

    calls = 0

    def call(self, inputs):
        global COUNT
        COUNT += 1
        FromModule.calls += 1
        STATE["n"] += 1
        drawn = STATE["drawn"].normal()
        return inputs * (1 + 0.1 * drawn + (COUNT + STATE["n"] + FromModule.calls) / 1000)


def outside():
    """A loss and a layer whose code keeps state outside of their attributes."""
    global COUNT
    COUNT = FromModule.calls = 0
    STATE.update(n=0, drawn=np.random.default_rng(0))
    TENSORS.update(centre=keras.ops.zeros(()))
    return [FromModule()], "sgd", Centred(), []


PROGRAMS = {
    "objects": kept,
    "outside": outside,
    "metric": lambda: ([], "sgd", "mse", [Collecting()]),
    "rate": lambda: ([], keras.optimizers.SGD(Rate()), "mse", []),
}


def noise(shape):
    """Noise from an operation of TensorFlow whose generator has no variable."""
    import tensorflow as tf

    return tf.random.normal(shape)


class Noise(layers.Layer):
    def call(self, inputs):
        return inputs * (1 + 0.1 * noise((1, 4)))


@pytest.mark.requires_backend("tensorflow", reason="the operation is of TensorFlow")
@pytest.mark.parametrize("nested", [False, True])
def test_an_operation_with_a_generator_of_its_own(nested):
    """Nobody can restore its generator, so a healthy run has no trials."""
    import tensorflow as tf

    ends = []
    for callbacks in ([], [NanGuard(verbose=0)]):
        keras.utils.set_random_seed(0)
        layer = Noise()
        if nested:
            layer.call = tf.function(layer.call)
        model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        ends.append(model.get_weights())
    zoo.assert_same(*ends)


def trained(*callbacks, program, **options):
    """Return losses, metrics and weights after a fit."""
    keras.utils.set_random_seed(0)
    CALLS.number = 0
    more, optimizer, loss, metrics = PROGRAMS[program]()
    model = keras.Sequential([keras.Input((4,)), Called(), layers.Dense(4), *more, layers.Dense(1)])
    model.compile(optimizer, loss, metrics=metrics, run_eagerly=True)
    history = model.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks, **options).history
    logs = [v for k, v in history.items() if not k.startswith("nanguard/") and k != "refused_steps"]
    return [*logs, *model.get_weights()]


@pytest.mark.requires_backend("tensorflow", "torch", reason="a pure step keeps no count")
@pytest.mark.daily("*" if zoo.BACKEND == "torch" else "rate")
@pytest.mark.parametrize("program", ["objects", "outside", "rate"])
def test_trials_of_a_healthy_run(program):
    """The check for divergence at the start of the second epoch runs steps again."""
    plain = trained(program=program, epochs=2)
    calls = CALLS.number
    guarded = trained(NanGuard(verbose=0), program=program, epochs=2)
    assert (CALLS.number > calls) == (program != "rate"), "a rate that counts its calls has no trials"
    zoo.assert_same(plain, guarded)


class Drawn(layers.Layer):
    """Draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)

    def call(self, inputs):
        return inputs * (1 + 0.1 * self.numpy.random() + 0.1 * self.python.random())


class Drawing(keras.utils.PyDataset):
    """Draws from the global generator at each read."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = np.random.randint(0, len(X), 8)
        return X[rows], Y[rows]


class WithNaN(Drawing):
    """Its third batch has NaN."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x * np.nan if index == 2 else x), y


class Calls(layers.Layer):
    """Counts its calls in a weight, on which its result depends."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign(self.calls + 1.0)
        return inputs * (1 + self.calls / 1000)


def test_diagnosis_of_a_validation():
    """If the loss of a validation is NaN, its data are read and the model is called again."""
    ends = []
    for callbacks in ([], [NanGuard(verbose=0)]):
        keras.utils.set_random_seed(0)
        body = [Calls(), layers.Dense(4), layers.Dropout(0.5), layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *body])
        model.compile("sgd", "mse")
        options = {"validation_data": WithNaN(), "epochs": 3, "verbose": 0}
        history = model.fit(Drawing(), callbacks=callbacks, **options).history
        ends.append([*model.get_weights(), np.random.random(), history["val_loss"]])
    assert callbacks[0].incidents
    zoo.assert_same(*ends)
