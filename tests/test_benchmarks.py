"""The benchmarks read what the library has."""

import importlib
import os
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def healthy(monkeypatch):
    """The module `healthy` of the benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", keras.backend.backend())
    return importlib.import_module("healthy")


@pytest.mark.parametrize("bad", [False, True])
def test_a_healthy_program_is_counted(healthy, bad):
    """A step that the guard refused counts as acted on, although plain Keras commits it."""
    programs = importlib.import_module("healthy_programs")
    x = np.ones((24, 3), "float32")
    x[9] = np.nan if bad else 1.0

    def build():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")

        def train(callbacks):
            model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))

        return programs.Training((model,), train, lambda: model.evaluate(x[:8], x[:8, :1], verbose=0))

    row = healthy.measured(programs.Program("small", build, "lower", False))
    assert (row["acted on"], row["refused"], row["worse"]) == (bad, int(bad), False)
