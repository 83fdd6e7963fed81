"""Finite faults are reported by checks that no healthy run can trigger."""

import keras
import numpy as np
from keras import layers

from keras_nanguard import NanGuard


def test_frozen_and_pretrained_statistics_may_be_constant():
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()], name="base")
    base.layers[-1].moving_mean.assign([0.1] * 4)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((800, 4)).astype("float32")
    guard = NanGuard(verbose=0)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard])
    assert guard.incidents == []


class Own(layers.BatchNormalization):
    """Has neither `gamma` nor statistics of its own, and does not move those that it has."""

    def call(self, inputs, training=None, mask=None):
        return inputs

    @property
    def gamma(self):
        raise AttributeError("gamma")

    @gamma.setter
    def gamma(self, value):
        pass


def test_a_layer_that_a_check_cannot_read_does_not_end_training(capsys):
    """The check is omitted, which is said once, and all others run."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Own(name="own"), layers.Dense(1, name="last")])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((400, 4)).astype("float32")
    limits = [{"site": "weights", "layer": ["*last/kernel"], "max_abs": 0.01}]
    rules = [{"name": "own", "kind": "out_of_range", "do": ["skip"]}]
    guard = NanGuard(verbose=1, statistics={"stuck_after": 5}, limits=limits, rules=rules)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard])
    assert guard.session.run.step == 50
    assert capsys.readouterr().out.count("NanGuard: cannot check for finite faults: AttributeError: ") == 1
    assert {f.path.rpartition("last")[1:] for i in guard.incidents for f in i.findings} == {("last", "/kernel")}


def test_warnings_about_a_policy_that_fail_do_not_end_training(capsys, monkeypatch):
    def fail(*args):
        raise AttributeError("gamma")

    monkeypatch.setattr("keras_nanguard.guard.warnings_about", fail)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[NanGuard()])
    assert capsys.readouterr().out == "NanGuard: cannot look for rules without effect: AttributeError: gamma.\n"
