"""Fits in several threads of one process: each runs as alone, and leaves nothing behind."""

from __future__ import annotations

import threading
from functools import partial

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard

LIMIT = 120.0
"""Seconds that a test waits for a thread."""


def together(*functions):
    """Run functions at the same time in threads; return their results or exceptions."""
    results = [None] * len(functions)
    gate = threading.Barrier(len(functions))

    def run(place, function):
        try:
            gate.wait(LIMIT)
            results[place] = function()
        except BaseException as error:  # noqa: BLE001
            results[place] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a fit hangs"
    return results


def net():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(layers.Dense(4)(inputs))))
    model.compile("adam", "mse")
    return model


def fit(model, data, *callbacks, epochs=2):
    zoo.fit(model, data, *callbacks, epochs=epochs)
    return [np.array(v) for v in (*model.get_weights(), *map(keras.ops.convert_to_numpy, model.optimizer.variables))]


@pytest.mark.daily("1")
@pytest.mark.parametrize("rounds", [1, 3])
def test_guarded_and_plain_fits_at_a_time(rounds):
    """They do not affect each other, also if one raises, and leave nothing behind."""
    data, bad = zoo.regression(), zoo.poison(zoo.regression(), 5)
    plain, guarded = fit(net(), data), fit(net(), bad, NanGuard(verbose=0))
    before = {name: vars(keras.Variable).get(name) for name in ("_direct_assign", "_initialize", "assign")}
    for _ in range(rounds):
        models = [net() for _ in range(3)]
        found = together(
            partial(fit, models[0], bad, NanGuard(verbose=0)),
            partial(fit, models[1], data),
            partial(fit, models[2], data, NanGuard(verbose=0), zoo.After(zoo.raising(RuntimeError("disk full")), 6)),
        )
        zoo.assert_same(found[0], guarded)
        zoo.assert_same(found[1], plain)
        assert isinstance(found[2], RuntimeError) and "disk full" in str(found[2])
        assert {name: vars(keras.Variable).get(name) for name in before} == before
        for model in models:
            assert not {"train_step", "make_train_function", "save"} & set(vars(model))
            assert not {"apply", "stateless_apply"} & set(vars(model.optimizer))
    again = net()
    zoo.assert_same(together(lambda: fit(again, data))[0], plain)  # a plain fit in a new thread
