"""The cost of a guarded step on PyTorch besides its sums: copied tensors, and waits for a device.
"""

from __future__ import annotations

import sys

import keras
import pytest
import torch
from keras import layers
from support.torch_steps import BODIES, X, Y, alone, network

from keras_nanguard._backends.torch import replay
from keras_nanguard._backends.torch.undo_log import storage


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


def test_a_replay_reads_each_input_of_a_fused_update_once(monkeypatch):
    """Its lists of tensors do not match its outputs, so each output depends on all of them."""
    read, parent = [], replay.Origins._parent
    monkeypatch.setattr(replay.Origins, "_parent", lambda origins, tensor: read.append(tensor) or parent(origins, tensor))
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer = torch.optim.Adam(weights, fused=True)
    optimizer.step()
    with replay.Origins([("x", bad := torch.full((3,), torch.nan))]) as origins:
        weights[0].grad = bad * 1.0
        read.clear()
        optimizer.step()
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    inputs = {storage(t) for t in (*weights, *slots, *(w.grad for w in weights))}
    assert {storage(t) for t in read} >= inputs - {storage(slot["step"]) for slot in optimizer.state.values()}
    assert len(read) < 2 * len(inputs)
    assert origins.of(weights[0]).op == "x" and origins.of(weights[1]) is None
