"""The benchmarks read what the library has."""

import importlib
import os
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

UNUSUAL = (
    *("betavae_kl_annealing", "freeze_unfreeze_bn_batch4", "hard_first_then_easy_curriculum", "multi_output_one_dominates_1e6"),
    *("pure_noise_targets_nadam", "returns_r2_1pct_lion_ordered", "sgd_warm_restarts_large_peak", "triplet_batchhard_margin"),
)
"""Healthy programs of the benchmarks with unusual losses, which train for seconds."""


@pytest.fixture
def healthy(monkeypatch):
    """The module `healthy` of the benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", keras.backend.backend())
    return importlib.import_module("healthy")


@pytest.mark.daily("multi*", "pure*")
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_program_is_left_alone(healthy, name):
    """The guard refuses no step, does nothing else, prints nothing, and the result is no worse."""
    programs = importlib.import_module("healthy_programs").PROGRAMS
    row = healthy.measured(next(program for program in programs if program.name == name))
    assert (row["acted on"], row["refused"], row["worse"], row["lines"]) == (False, 0, False, []), row


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
