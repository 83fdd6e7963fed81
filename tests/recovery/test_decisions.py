"""The same policy makes the same decisions on every backend: one table of faults and of the
decisions of the default.

The table is written by hand, not computed: every backend runs this file and must give these lines.
"""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

SKIP, BACK, STOP = "skip: done", "rollback: done", "stop: done"

TABLE = {
    "nothing": ([], []),
    "one bad input": ([{"site": "inputs", "step": 5}], [(5, "input_nonfinite", SKIP)]),
    "one bad target": (
        [{"site": "targets", "kind": "inf", "step": 5}],
        [(5, "target_nonfinite", SKIP)],
    ),
    "one bad loss": ([{"site": "loss", "step": 5}], [(5, "transient", SKIP)]),
    "one bad gradient": (
        [{"site": "gradients", "kind": "-inf", "step": 4}],
        [(4, "transient", SKIP)],
    ),
    "three bad gradients": (
        [{"site": "gradients", "step": 6, "count": 3}],
        [(6, "transient", SKIP), (7, "transient", SKIP), (8, "transient", BACK)],
    ),
    "damaged weights": (
        [{"site": "weights", "step": 7, "path": "hidden"}],
        [(7, "state_nonfinite", BACK)],
    ),
    "damaged statistics": (
        [{"site": "statistics", "kind": "inf", "step": 7}],
        [(7, "state_nonfinite", BACK)],
    ),
    "damaged slots": ([{"site": "slots", "step": 7}], [(7, "state_nonfinite", BACK)]),
    "faults without end": (
        [{"site": "gradients", "step": 0, "count": 24}],
        [*((step, "transient", SKIP) for step in range(9)), (9, "transient", STOP)],
    ),
    "faults without end in the middle": (
        [{"site": "gradients", "step": 6, "count": 18}],
        [
            *((n, "transient", BACK if n in (8, 11, 14) else SKIP) for n in range(6, 15)),
            (15, "transient", STOP),
        ],
    ),
    "stop at the first": ([{"site": "loss", "step": 3}], [(3, "transient", STOP)], "stop"),
    "see and tell": ([{"site": "inputs", "step": 3}], [(3, "input_nonfinite")], "observe"),
}
"""Faults, resulting incidents (step, cause, outcomes), and the policy if it is another one."""


def decided(faults, policy="recover"):
    """Train for 24 steps; return incidents with their outcomes, and the rate at the end."""
    keras.utils.set_random_seed(3)
    body = [layers.Dense(16, "relu", name="hidden"), layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((8,)), *body, layers.Dense(1, name="head")])
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((192, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    guard = NanGuard(policy, verbose=0)
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(inject(model, require_fired=False, **fault))
        model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[guard])
    lines = [(i.step, i.diagnosis.cause, *(f"{o.action}: {o.status}" for o in i.outcomes)) for i in guard.incidents]
    return lines, float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


@pytest.mark.parametrize("name", TABLE)
def test_same_decisions(name):
    faults, lines, *policy = TABLE[name]
    assert decided(faults, *policy) == (lines, pytest.approx(1e-3))


def test_a_later_fit_remembers_how_many_good_steps_came_since():
    """Three refused steps long ago are not among the last 200: without the second `fit`, nor with it."""
    x, y = np.ones((420, 4), "float32"), np.ones((420, 1), "float32")
    for epochs in ([2], [1, 1]):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        guard, done = NanGuard(max_refused_share=0.02, verbose=0), []
        with inject(model, site="inputs", step=5, count=3), inject(model, site="inputs", step=425):
            for number, several in enumerate(epochs):
                model.fit(x, y, batch_size=1, epochs=several + number, initial_epoch=number, verbose=0, callbacks=[guard])
        done = [outcome.action for incident in guard.incidents for outcome in incident.outcomes]
        assert done == ["skip"] * 4, epochs
