"""After an action that compiles the step anew a run goes on: nothing waits, and the batches of earlier steps are those of these steps."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard, replay

BACKEND = keras.backend.backend()
SECONDS = 300
BATCH, BATCHES = 4, 64
BAD = (8, 9, 15, 55)
"""Refused steps: the next one, six and forty steps after an action."""

MODES = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "four steps in one": {"jit_compile": False, "steps_per_execution": 4},
    "four steps in one, xla": {"jit_compile": True, "steps_per_execution": 4},
    "four steps in one, eager": {"run_eagerly": True, "steps_per_execution": 4},
}
if BACKEND == "torch":
    MODES = {"eager": {"jit_compile": False}}
if BACKEND == "jax":  # where a step is compiled by XLA or not at all
    MODES = {name: mode for name, mode in MODES.items() if "run_eagerly" in mode or mode["jit_compile"]}


def plain():
    return keras.optimizers.SGD(0.01)


def scheduled():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.9))


def scaled():
    return keras.optimizers.LossScaleOptimizer(plain(), 64.0)


ACTIONS = {
    "clip": (plain, {"clip": {"global_clipnorm": 1.0, "factor": 0.5, "min_clipnorm": 1e-3}}),
    "lower_lr": (scheduled, {"lower_lr": {"factor": 0.5}}),
    "fix_loss_scale": (scaled, {"fix_loss_scale": {"floor": 1.0, "growth_steps": 50}}),
}


def within(seconds, call):
    """Return what `call()` returns; fail, and leave it waiting in its thread, where it takes longer."""
    found = []

    def work():
        try:
            found.append((call(), None))
        except BaseException as error:  # noqa: BLE001  it is raised below
            found.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"nothing came back within {seconds} seconds"
    result, error = found[0]
    if error is not None:
        raise error
    return result


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH * BATCHES, 4)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    for step in BAD:
        y[step * BATCH + 2] = 3e38
    return x, y


def fitted(action, mode, directory):
    """Return the guard of a fit in which that action is taken at each refused step, and the data."""
    make, do = ACTIONS[action]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(1)])
    model.compile(make(), "mse", **MODES[mode])
    policy = {
        "rules": [{"name": "act", "kind": "nonfinite", "do": do}],
        "loss_scale": {"streak": 0},
        "rollback": {"further_back": False},
        "action_budget": 99,
    }
    guard = NanGuard(policy, directory=directory, diagnose=directory is not None, verbose=0)
    x, y = data()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard])
    return model, guard, x, y


def table():
    """Return every mode with every action, with and without a directory; one of both is left to the slow tests, turn and turn about."""
    for n, mode in enumerate(MODES):
        for m, action in enumerate(ACTIONS):
            for with_directory in (True, False):
                marks = [pytest.mark.slow] if with_directory == bool((n + m) % 2) else []
                name = f"{mode}-{action}-{'directory' if with_directory else 'no directory'}"
                yield pytest.param(mode, action, with_directory, marks=marks, id=name)


@pytest.mark.daily("graph-*", "eager-*", "xla-clip-*", "four steps in one, xla-fix_loss_scale-*")
@pytest.mark.parametrize(("mode", "action", "with_directory"), table())
def test_a_second_incident(mode, action, with_directory, tmp_path):
    """A refused step soon or long after it is found, its bundle holds the batches of the steps before, and replays as it was."""
    directory = tmp_path / "run" if with_directory else None
    model, guard, x, y = within(SECONDS, lambda: fitted(action, mode, directory))
    assert [incident.step for incident in guard.incidents] == list(BAD)
    status = ["done"] * len(BAD)
    if action == "lower_lr":  # no step has shown yet that the rate as it is does not do
        status[1] = "skipped"
    assert [[(o.action, o.status) for o in incident.outcomes] for incident in guard.incidents] == [[(action, s)] for s in status]
    if with_directory:
        assert {(i.diagnosis.cause, i.diagnosis.samples) for i in guard.incidents} == {("input_scale", (2,))}
        within(SECONDS, lambda: [check(incident.bundle, incident, model, x, y) for incident in guard.incidents])


def check(path, incident, model, x, y):
    """A bundle says of steps before the incident what these were given, and comes to the same when it is replayed."""
    steps = json.loads((Path(path) / "bundle.json").read_text())["before"]["steps"]
    if getattr(model, "steps_per_execution", 1) > 1 and keras.backend.backend() == "tensorflow":
        assert steps == [], "with several steps in one execution no batch is remembered there"
    else:
        known = [step for step in range(steps[0], incident.step) if step not in BAD]
        assert steps == known and steps[-1] >= incident.step - 2
    kept = list(np.load(Path(path) / "before.npz").values()) if steps else []
    for step in steps:
        rows = slice(step * BATCH, (step + 1) * BATCH)
        for array in (x[rows], y[rows]):
            assert any(np.array_equal(array, one, equal_nan=True) for one in kept)
    again = replay(path, model)
    assert (again.diagnosis.cause, again.diagnosis.samples) == (incident.diagnosis.cause, incident.diagnosis.samples)
