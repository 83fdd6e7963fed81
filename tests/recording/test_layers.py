"""How layers went: what a look says is what the weights say, and looks take no more time than they may."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._fit import layer_looks
from keras_nanguard._recording import layer_table
from keras_nanguard._recording.layer_table import LayerTable, by_path
from keras_nanguard._recording.recording import Recording

QUIET = {"verbose": 0, "diagnose": False}


@pytest.fixture
def often(monkeypatch):
    """Look at the layers whenever there is a chance to."""
    monkeypatch.setattr(layer_looks, "SHARE", 1e9)
    monkeypatch.setattr(layer_looks, "MIN_STEPS", 1)


class Weights(keras.callbacks.Callback):
    """Keeps all variables after each execution."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_train_batch_end(self, batch, logs=None):
        self.seen[batch] = {v.path: np.array(keras.ops.convert_to_numpy(v)).astype("float64") for v in self.model.variables}


@pytest.mark.parametrize("mode", ["graph", "eager", "steps4"])
def test_looks_say_what_the_weights_say(mode, often):
    """Norms, changes and ranges are those of the weights that a callback sees."""
    zoo.supported(zoo.MODES[mode])
    if zoo.BACKEND == "jax" and mode == "steps4":
        pytest.skip("each step of an execution is guarded by itself on JAX, and callbacks see only the last")
    weights, guard = Weights(), NanGuard(**QUIET)
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.05), **zoo.MODES[mode]), zoo.regression(), guard=guard, epochs=1, callbacks=[weights])
    layers, width = guard.recording.layers, zoo.MODES[mode].get("steps_per_execution", 1)
    paths = {path.rpartition("/")[2] for path in layers}
    assert paths == {"kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance"}
    for path, found in layers.items():
        steps = found["step"].tolist()
        assert steps and steps == sorted(set(steps)) and (np.array(steps) % width == width - 1).all()
        for place, step in enumerate(steps):
            now = weights.seen[step][path]
            if "low" in found:
                np.testing.assert_allclose([found["low"][place], found["high"][place]], [now.min(), now.max()], rtol=1e-6)
                continue
            norm, moved = np.linalg.norm(now), np.linalg.norm(now - weights.seen[step - width][path]) / width
            np.testing.assert_allclose(found["weight_norm"][place], norm, rtol=1e-5)
            np.testing.assert_allclose(found["update_ratio"][place], moved / norm, rtol=1e-3)
            assert np.isnan(found["gradient_norm"][place])


def test_nothing_where_a_step_was_refused(often):
    """Where the step after a copy was refused or undone, there is no look of it."""
    guard = NanGuard(**QUIET)
    data = zoo.regression()
    for batch in range(1, 12, 2):
        zoo.poison(data, batch)
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.05)), data, guard=guard, epochs=1)
    refused = set(np.flatnonzero(guard.recording.steps["status"]).tolist())
    steps = {step for found in guard.recording.layers.values() for step in found["step"].tolist()}
    assert refused and not steps & refused


def test_in_the_file(tmp_path, often):
    """The file has the same looks, and a run that goes on in it has those before."""
    for run in (1, 2):
        guard = NanGuard(directory=tmp_path, **QUIET)
        zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=1)
        found, memory = Recording.read(tmp_path).layers, guard.recording.layers
        assert list(found) == list(memory) and len(found) >= 6 * run - 6
        for path in found:
            for name in found[path]:
                np.testing.assert_array_equal(found[path][name], memory[path][name])
    assert max(found[path]["step"].max() for path in found) >= 12


def test_share_of_the_time(monkeypatch):
    """All looks together take no more than their share of the time of training."""
    spent, real = [0.0], layer_looks.LayerLooks.look

    def timed(self, run):
        start = time.monotonic()
        real(self, run)
        spent[0] += time.monotonic() - start
        time.sleep(0.001)

    monkeypatch.setattr(layer_looks.LayerLooks, "look", timed)
    monkeypatch.setattr(layer_looks, "MIN_STEPS", 1)
    monkeypatch.setattr(layer_looks, "SHARE", 0.01)
    start = time.monotonic()
    guard = NanGuard(**QUIET)
    zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=8)
    looks = max(len(found["step"]) for found in guard.recording.layers.values())
    assert looks >= 1 and spent[0] <= 0.01 * (time.monotonic() - start) + 2 * spent[0] / looks


def test_table_is_thinned(monkeypatch):
    """Beyond its size moments go, evenly from all but the last of the run, and the file is written anew."""
    monkeypatch.setattr(layer_table, "MAX_BYTES", 12 * 8 * 100)
    table = LayerTable()
    variables = tuple((f"v{n}", "trainable") for n in range(8))
    seen = []
    for step in range(1000):
        table.add(step, variables, np.full((8, 3), float(step)))
        if step % 37 == 0:
            fresh, anew = table.unwritten(), table.thinned
            seen, table.thinned = [*([] if anew else seen), *fresh], False
    fresh, anew = table.unwritten(), table.thinned
    seen = [*([] if anew else seen), *fresh]
    assert seen == table.rows()
    steps = by_path(table.rows())["v3"]["step"]
    assert 40 <= len(steps) <= 100 and steps[0] == 0 and np.diff(steps).max() <= 80
    assert steps[-20:].tolist() == list(range(980, 1000)), "the last ones are all there"
