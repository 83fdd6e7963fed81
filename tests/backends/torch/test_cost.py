"""The cost of a guarded step on PyTorch besides its sums: copied tensors, and waits for a device.
"""

from __future__ import annotations

import sys

import keras
import pytest
import torch
from keras import layers
from support.torch_steps import BODIES, X, Y, alone, network


@pytest.mark.parametrize("kind", ["stock", "own"])
def test_copies_of_a_healthy_step(monkeypatch, kind):
    """Tensors that a step writes besides its update are copied once; no weight is copied."""
    model = network(None, layers.BatchNormalization(), layers.Dropout(0.2, seed=1))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    clones, clone = [], torch.Tensor.clone

    def counted(tensor, *args, **kwargs):
        if "keras_nanguard" in sys._getframe(1).f_code.co_filename:
            clones.append(tensor.data_ptr())
        return clone(tensor, *args, **kwargs)

    step, data = alone(model, BODIES[kind](model)), (X + 0.0, Y + 0.0)  # no array of a test before shares their memory
    for _ in range(4):
        step(data)
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    statistics = {v.value.data_ptr() for v in model.non_trainable_variables if "seed" not in v.path}
    written = {v.value.data_ptr() for v in (*model.non_trainable_variables, *model.metrics_variables, model.optimizer.iterations)}
    for _ in range(3):
        clones.clear()
        step(data)
        assert statistics <= set(clones) <= written and len(clones) == len(set(clones))
