"""A divergence is replayed from a snapshot on the recorded batches, with one change at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import BundleError, GuardError, NanGuard, replay


def diverging(directory, rate=0.5, **compile_):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", **compile_)
    x = 3 * np.random.default_rng(0).standard_normal((256, 8)).astype("float32")
    guard = NanGuard(verbose=0, directory=directory)
    model.fit(x, x.sum(1, keepdims=True), batch_size=8, verbose=0, callbacks=[guard])
    return model, next(incident for incident in guard.incidents if incident.bundle)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    _, incident = diverging(tmp_path_factory.mktemp("run"))
    assert incident.diagnosis.cause == "divergence"
    return incident.bundle


def step_of(bundle):
    return json.loads((Path(bundle) / "incident.json").read_text())["step"]


def test_the_bundle_holds_the_way_to_the_bad_step(bundle):
    step, about = step_of(bundle), json.loads((Path(bundle) / "bundle.json").read_text())
    assert about["before"]["exact"] and about["before"]["steps"] == list(range(step))
    start, state = (np.load(Path(bundle) / f"{name}.npz") for name in ("start", "state"))
    assert set(start.files) == set(state.files)
    assert any(not np.array_equal(start[name], state[name]) for name in state.files)


def test_the_unchanged_run_fails_at_the_same_step_and_cures_are_named(bundle):
    reported = dict(replay(bundle, counterfactuals=True).counterfactuals)
    step = step_of(bundle)
    assert reported["unchanged"].startswith(f"the {step + 1} steps from the state before the first step: ")
    assert reported["unchanged"].endswith(f"the loss is not finite at step {step + 1} of {step + 1}")
    assert "gradients clipped" in reported["cured by"]
    assert "finite" in reported["with gradients clipped to a global norm of 1"]


def test_a_rate_too_high_is_cured_by_a_tenth_of_it(tmp_path):
    _, incident = diverging(tmp_path, rate=0.03)
    reported = dict(replay(incident.bundle, counterfactuals=True).counterfactuals)
    assert "with a tenth of the learning rate" in reported["cured by"]


def test_nothing_of_it_stays_in_the_model(bundle):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    replay(bundle, model, counterfactuals=True)
    state = list(np.load(Path(bundle) / "state.npz").values())
    for variable in model.trainable_variables:
        value = keras.ops.convert_to_numpy(variable.value)
        assert any(np.array_equal(value, one) for one in state), variable.path
    assert float(model.optimizer.learning_rate) == pytest.approx(0.5)
    assert model.optimizer.global_clipnorm is None


@pytest.mark.requires_backend("torch", reason="TensorFlow and JAX compile their steps")
def test_a_mode_that_the_backend_does_not_have_is_rejected(bundle):
    with pytest.raises(GuardError, match="eager"):
        replay(bundle, mode="graph")


@pytest.mark.parametrize("name", ["before.npz", "start.npz"])
def test_a_damaged_way_is_refused(bundle, tmp_path, name):
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (copy / name).write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(BundleError):
        replay(copy)


def test_a_bundle_without_it_still_reads(bundle, tmp_path):
    """As if the batches did not fit, or no divergence was found."""
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    for name in ("before.npz", "start.npz"):
        (copy / name).unlink()
    about = json.loads((copy / "bundle.json").read_text())
    about["before"] = None
    (copy / "bundle.json").write_text(json.dumps(about))
    reported = dict(replay(copy, counterfactuals=True).counterfactuals)
    assert "10 steps on the batch" in reported["unchanged"]
