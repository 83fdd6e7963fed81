"""The same policy makes the same decisions on every backend: one table of faults and of the
decisions of the default.

The table is written by hand, not computed: every backend runs this file and must give these lines.
"""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

SKIP, BACK, STOP = "skip: done", "rollback: done", "stop: done"

TABLE = {
    "nothing": ("recover", [], [], 1e-3),
    "one bad input": (
        "recover", [{"site": "inputs", "step": 5}], [(5, "input_nonfinite", SKIP)], 1e-3,
    ),
    "one bad target": (
        "recover", [{"site": "targets", "kind": "inf", "step": 5}], [(5, "target_nonfinite", SKIP)], 1e-3,
    ),
    "one bad loss": ("recover", [{"site": "loss", "step": 5}], [(5, "transient", SKIP)], 1e-3),
    "one bad gradient": (
        "recover", [{"site": "gradients", "kind": "-inf", "step": 4}], [(4, "transient", SKIP)], 1e-3,
    ),
    "three bad gradients": (
        "recover",
        [{"site": "gradients", "step": 6, "count": 3}],
        [(6, "transient", SKIP), (7, "transient", SKIP), (8, "transient", BACK)],
        1e-3,
    ),
    "damaged weights": (
        "recover", [{"site": "weights", "step": 7, "path": "hidden"}], [(7, "state_nonfinite", BACK)], 1e-3,
    ),
    "damaged statistics": (
        "recover", [{"site": "statistics", "kind": "inf", "step": 7}], [(7, "state_nonfinite", BACK)], 1e-3,
    ),
    "damaged slots": ("recover", [{"site": "slots", "step": 7}], [(7, "state_nonfinite", BACK)], 1e-3),
    "faults without end": (
        "recover",
        [{"site": "gradients", "step": 0, "count": 24}],
        [*((step, "transient", SKIP) for step in range(9)), (9, "transient", STOP)],
        1e-3,
    ),
    "faults without end in the middle": (
        "recover",
        [{"site": "gradients", "step": 6, "count": 18}],
        [*((step, "transient", BACK if step in (8, 11, 14) else SKIP) for step in range(6, 15)),
         (15, "transient", STOP)],
        1e-3,
    ),
    "stop at the first": ("stop", [{"site": "loss", "step": 3}], [(3, "transient", STOP)], 1e-3),
    "see and tell": ("observe", [{"site": "inputs", "step": 3}], [(3, "input_nonfinite")], 1e-3),
}  # fmt: skip
"""Policy, faults, the resulting incidents (step, cause, outcomes), and the learning rate at the
end.
"""


def decided(policy, faults):
    """Train for 24 steps and return findings, decisions, outcomes, and the rate at the end."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(1, dtype="float32", name="head"),
        ]
    )
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
    policy, faults, lines, rate = TABLE[name]
    assert decided(policy, faults) == (lines, pytest.approx(rate))
