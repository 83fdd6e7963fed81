"""Layers over time: measurements agree with the weights, and take only their share of time."""

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, Recording

QUIET = {"verbose": 0, "diagnose": False}


@pytest.fixture
def often(set_limit):
    set_limit("share of the time for looks", 1e9)
    set_limit("steps between two looks", 1)


def test_a_fit_that_dies_leaves_no_copies():
    """A guard whose fit ended with an exception in the first step has no copies of the weights."""
    guard, data = NanGuard(**QUIET), zoo.regression()
    with pytest.raises(RuntimeError, match="enough"):
        zoo.plain(keras.optimizers.Adam(0.01)).fit(*data.all, verbose=0, callbacks=[guard, zoo.After(zoo.raising(RuntimeError("enough")))])
    assert guard.session.tasks.layer_looks._weights == {}


@pytest.mark.parametrize("mode", ["graph", "eager", "steps4"])
def test_measurements_agree_with_the_weights(mode, often):
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
