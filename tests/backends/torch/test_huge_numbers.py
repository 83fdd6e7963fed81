"""Finite numbers on PyTorch whose sums overflow: a step is refused only if the update itself is not
finite.
"""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import torch
from support.torch_steps import X, Y, alone, network, own, same, state, twice

BIG = torch.finfo(torch.float32).max


class Holds(keras.layers.Layer):
    """Writes its own value in each step."""

    def __init__(self, value, dtype="float32"):
        super().__init__()
        self.value, self.kept_as = value, dtype

    def build(self, shape):
        kept = {"shape": (10,), "trainable": False, "autocast": False, "dtype": self.kept_as}
        self.kept = self.add_weight(initializer="zeros", **kept)
        self.built = True

    def call(self, x):
        self.kept.assign(torch.full((10,), self.value, dtype=getattr(torch, self.kept_as)))
        return x


def scaled(by):
    return lambda y, out: keras.ops.mean(keras.ops.square(out - y)) * by


@pytest.mark.parametrize("kind", ["stock", "own", "twice"])
@pytest.mark.parametrize(
    ("optimizer", "more", "loss"),
    [
        (lambda: keras.optimizers.SGD(1e-22), [], scaled(1e20)),
        (lambda: keras.optimizers.Lion(1e-4), [], scaled(1e20)),
        (lambda: keras.optimizers.Adam(1e-3, clipvalue=1.0), [], scaled(1e20)),
        (lambda: keras.optimizers.SGD(0.1), [(BIG,)], "mse"),
        (lambda: keras.optimizers.SGD(0.1), [(-1e38,)], "mse"),
        (lambda: keras.optimizers.SGD(0.1), [(1e38, "bfloat16")], "mse"),
        (lambda: keras.optimizers.SGD(0.1), [(1.7e308, "float64")], "mse"),
    ],
)
def test_huge_numbers_are_trained_on(kind, optimizer, more, loss):
    """A step that gives finite weights in stock Keras commits, bit for bit."""
    ends = []
    for guarded in (True, False):
        model = network(optimizer(), *(Holds(*values) for values in more), loss=loss)
        model.optimizer.build(model.trainable_variables)
        body = {"stock": lambda model: None, "own": own, "twice": twice}[kind](model)
        step = alone(model, body) if guarded else body or model.train_step
        for _ in range(4):
            step((X, Y))
            assert not guarded or (step.verdict.finite and not step.verdict.refused)
        ends.append(state(model))
    assert same(*ends) and all(np.isfinite(np.float64(value)).all() for value in ends[0])


@pytest.mark.parametrize("kind", ["stock", "own", "twice"])
def test_a_finite_gradient_that_overflows_the_update(kind):
    """Adam squares it into a slot that is Inf: the step is refused and does not change the state.
    """
    by = [1.0]
    model = network(keras.optimizers.Adam(1e-3), loss=lambda y, out: scaled(by[0])(y, out))
    model.optimizer.build(model.trainable_variables)
    body = {"stock": lambda model: None, "own": own, "twice": twice}[kind](model)
    step = alone(model, body)
    for _ in range(3):
        step((X, Y))
    before, by[0] = state(model), 1e20
    step((X, Y))
    assert step.verdict.refused and same(state(model), before)
    assert math.isfinite(step.verdict.gradients) and not math.isfinite(step.verdict.slots + step.verdict.weights)
    (report,) = step.take_reports()
    assert {finding.site for finding in report.findings()} <= {"weights", "slots"}
    by[0] = 1.0
    step((X, Y))
    assert not step.verdict.refused and not same(state(model), before)
