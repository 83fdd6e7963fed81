"""Layers over time: the measurements agree with the weights, and take only their share of the time.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, Recording

QUIET = {"verbose": 0, "diagnose": False}


@pytest.fixture
def often(set_limit):
    """Measure the layers as often as possible."""
    set_limit("share of the time for looks", 1e9)
    set_limit("steps between two looks", 1)


def test_a_fit_that_dies_leaves_no_copies():
    """A guard whose fit ended with an exception in the first step has no copies of the weights."""
    guard, data = NanGuard(**QUIET), zoo.regression()
    with pytest.raises(RuntimeError, match="enough"):
        zoo.plain(keras.optimizers.Adam(0.01)).fit(*data.all, verbose=0, callbacks=[guard, zoo.After(zoo.raising(RuntimeError("enough")))])
    assert guard.session.tasks.layer_looks._weights == {}


OVERWRITTEN = {"use_ema": True, "ema_overwrite_frequency": 1}
"""Each step replaces the weights by their averages."""

OPTIMIZERS = [
    pytest.param(lambda: keras.optimizers.SGD(0.05), id="SGD"),
    pytest.param(lambda: keras.optimizers.SGD(0.05, momentum=0.9), id="momentum"),
    pytest.param(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01), id="nesterov"),
    pytest.param(lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), id="schedule"),
    pytest.param(lambda: keras.optimizers.SGD(0.05, use_ema=True), id="averages"),
    pytest.param(lambda: keras.optimizers.SGD(0.05, momentum=0.9, **OVERWRITTEN), id="momentum, overwritten"),
    pytest.param(lambda: keras.optimizers.Adam(0.01), id="Adam"),
    pytest.param(lambda: keras.optimizers.AdamW(0.01), id="AdamW"),
    pytest.param(lambda: keras.optimizers.Nadam(0.01), id="Nadam"),
    pytest.param(lambda: keras.optimizers.Adamax(0.01), id="Adamax"),
    pytest.param(lambda: keras.optimizers.Lion(0.001), id="Lion"),
    pytest.param(lambda: keras.optimizers.Lamb(0.01), id="Lamb"),
    pytest.param(lambda: keras.optimizers.RMSprop(0.001), id="RMSprop"),
    pytest.param(lambda: keras.optimizers.Adagrad(0.01), id="Adagrad"),
    pytest.param(lambda: keras.optimizers.Adadelta(0.1), id="Adadelta"),
    pytest.param(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0), id="loss scale"),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_of_all_layers_are_those_of_the_step(optimizer, often):
    """The combined norm of all variables, computed from the slots, equals the norm that the step
    itself has measured.
    """
    guard = NanGuard(**QUIET)
    zoo.run(lambda: zoo.plain(optimizer()), zoo.regression(), guard=guard, epochs=1)
    recording = guard.recording
    measured = dict(zip(recording.steps["step"].tolist(), recording.steps["gradient_norm"].tolist()))
    trained = [found for found in recording.layers.values() if "gradient_norm" in found]
    steps = trained[0]["step"].tolist()
    assert len(steps) >= 2
    for place, step in enumerate(steps):
        reported = np.sqrt(np.nansum([found["gradient_norm"][place] ** 2 for found in trained]))  # a bias before BatchNorm has next to none
        np.testing.assert_allclose(reported, measured[step], rtol=2e-3)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.Adafactor(0.01), id="keeps none"),
        pytest.param(lambda: type("Mine", (keras.optimizers.SGD,), {})(0.05), id="a custom class"),
        pytest.param(lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), id="accumulated"),
        pytest.param(lambda: keras.optimizers.SGD(0.05, **OVERWRITTEN), id="overwritten"),
    ],
)
def test_gradients_that_cannot_be_computed(optimizer, often):
    guard = NanGuard(**QUIET)
    zoo.run(lambda: zoo.plain(optimizer()), zoo.regression(), guard=guard, epochs=1)
    trained = [found for found in guard.recording.layers.values() if "gradient_norm" in found]
    assert trained and all(np.isnan(found["gradient_norm"]).all() and np.isfinite(found["weight_norm"]).all() for found in trained)


@pytest.mark.parametrize("mode", ["graph", "eager", "steps4"])
def test_measurements_agree_with_the_weights(mode, often):
    """Norms, changes and ranges agree with the weights that a callback reads."""
    zoo.supported(zoo.MODES[mode])
    if zoo.BACKEND == "jax" and mode == "steps4":
        pytest.skip("each step of an execution is guarded separately on JAX, and callbacks see only the last")
    weights = zoo.After(lambda model: {v.path: np.array(v.numpy()).astype("float64") for v in model.variables})
    guard = NanGuard(**QUIET)
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.05), **zoo.MODES[mode]), zoo.regression(), guard=guard, epochs=1, callbacks=[weights])
    layers, width = guard.recording.layers, zoo.MODES[mode].get("steps_per_execution", 1)
    paths = {path.rpartition("/")[2] for path in layers}
    assert paths == {"kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance"}
    for path, found in layers.items():
        steps = found["step"].tolist()
        assert steps and steps == sorted(set(steps)) and (np.array(steps) % width == width - 1).all()
        for place, step in enumerate(steps):
            last = step // width  # among the executions
            now = weights.seen[last][path]
            if "low" in found:
                np.testing.assert_allclose([found["low"][place], found["high"][place]], [now.min(), now.max()], rtol=1e-6)
                continue
            norm, moved = np.linalg.norm(now), np.linalg.norm(now - weights.seen[last - 1][path]) / width
            np.testing.assert_allclose(found["weight_norm"][place], norm, rtol=1e-5)
            np.testing.assert_allclose(found["update_ratio"][place], moved / norm, rtol=1e-3)
            assert width == 1 or np.isnan(found["gradient_norm"][place]), "several steps tell no single gradient"


def test_no_measurement_of_a_refused_step(often):
    """If the step after a copy was refused or undone, there is no measurement of it."""
    guard = NanGuard(**QUIET)
    data = zoo.regression()
    for batch in range(1, 12, 2):
        zoo.poison(data, batch)
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.05)), data, guard=guard, epochs=1)
    refused = set(np.flatnonzero(guard.recording.steps["status"]).tolist())
    steps = {step for found in guard.recording.layers.values() for step in found["step"].tolist()}
    assert refused and not steps & refused


def test_in_the_file(tmp_path, often):
    """The file has the same measurements, and a run that continues in it keeps the earlier ones."""
    for run in (1, 2):
        guard = NanGuard(directory=tmp_path, **QUIET)
        zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=1)
        found, memory = Recording.read(tmp_path).layers, guard.recording.layers
        assert list(found) == list(memory) and len(found) >= 6 * run - 6
        for path in found:
            for name in found[path]:
                np.testing.assert_array_equal(found[path][name], memory[path][name])
    assert max(found[path]["step"].max() for path in found) >= 12


def test_measurements_are_few():
    """They take a small share of the time, so most steps have none."""
    guard = NanGuard(**QUIET)
    zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=12)
    looks = {step for found in guard.recording.layers.values() for step in found["step"].tolist()}
    assert 1 <= len(looks) <= 12 * 12 / 4
