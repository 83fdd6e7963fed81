"""Custom parts of a model that use names of Keras for something else of their own."""

import keras
import pytest
from keras import layers, ops
from support import zoo

from keras_nanguard import NanGuard


class Named(keras.metrics.Metric):
    """Has an attribute `metrics` with the names of its results."""

    def __init__(self, metrics):
        super().__init__(name="named")
        self.metrics, self.total = metrics, self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(ops.mean(y_pred))

    def result(self):
        return {"a": self.total.value}


class WithMethod(Named):
    def __init__(self):
        super().__init__(["a"])
        del self.metrics

    def metrics(self):
        return []


@pytest.mark.shared
@pytest.mark.parametrize("metric", [lambda: Named(["a"]), lambda: Named({"a": 1}), WithMethod])
@pytest.mark.parametrize("batch", [0, 3])
def test_an_attribute_of_a_metric_called_metrics(metric, batch):
    """A bad step is skipped and diagnosed as without it."""
    data, guard = zoo.poison(zoo.regression(), batch), NanGuard(verbose=0)
    model = keras.Sequential([keras.Input(data.x.shape[1:]), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[metric()])
    model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
    assert [incident.diagnosis.cause for incident in guard.incidents] == ["input_nonfinite"]


class WithPredictions(keras.Model):
    """Its `compute_loss` returns the predictions as well, for its own `train_step`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y):
        predicted = self(x, training=True)
        return ops.mean(ops.square(y - predicted)), predicted

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        if zoo.BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss, _ = self.compute_loss(x, y)
            gradients = tape.gradient(loss, weights)
        else:
            self.zero_grad()
            loss, _ = self.compute_loss(x, y)
            loss.backward()
            gradients = [v.value.grad for v in weights]
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX a step calls stateless functions")
def test_a_compute_loss_that_returns_more_than_the_loss():
    """A healthy run ends as in plain Keras; a bad step is refused by the loss in its logs."""
    ends = []
    for callbacks, bad in (((), ()), ((NanGuard(verbose=0),), ()), ((NanGuard(verbose=0),), (2,))):
        keras.utils.set_random_seed(0)
        data = zoo.poison(zoo.regression(), *bad) if bad else zoo.regression()
        model = WithPredictions()
        model.build((None, *data.x.shape[1:]))
        model.compile("sgd")
        model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[*callbacks])
        ends.append(model.get_weights())
        assert [i.step for c in callbacks for i in c.incidents] == list(bad)
    zoo.assert_same(*ends[:2])
