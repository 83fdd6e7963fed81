"""The transaction of PyTorch without a fit: single steps, and the effects of each."""

from __future__ import annotations

import gc
import math

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from support.torch_steps import (
    X,
    Y,
    alone,
    in_loop,
    network,
    same,
    state,
    twice,
    updated,
)

from keras_nanguard.testing import inject


@pytest.mark.parametrize("refuse", [True, False])
def test_an_update_that_overflows_before_the_verdict(refuse):
    """It is detected in its own step, and undone if bad steps are refused."""
    model = network()
    model.optimizer.build(model.trainable_variables)
    step = alone(model, twice(model), refuse=refuse)
    for _ in range(3):
        step((X, Y))
    assert step.verdict.finite and not step.verdict.refused
    before = state(model)
    model.optimizer.learning_rate = 3e38
    before[[v is model.optimizer.learning_rate for v in (*model.variables, *model.optimizer.variables)].index(True)][...] = 3e38
    step((X, 1e3 * Y))
    assert not math.isfinite(step.verdict.weights) and math.isfinite(step.verdict.gradients)
    assert step.verdict.refused is refuse and same(state(model), before) is refuse
    assert (step.learned.updates_first or not refuse) and not step.learned.untracked, "what updates write is not kept before each step"


class Masked(layers.Layer):
    """Has tensors that Keras does not know: a mask that is infinite on purpose, and one that it
    writes.
    """

    def __init__(self):
        super().__init__()
        self.mask = torch.tensor([0.0, 0.0, -torch.inf])
        self.last = torch.zeros(3)

    def call(self, x):
        if x.shape[0]:
            self.last.copy_(x.detach()[0])
        return torch.softmax(x + self.mask, -1)


def test_a_tensor_that_is_infinite_on_purpose():
    """Nothing writes it, so it is a constant; a written tensor next to it that becomes NaN is
    refused and restored.
    """
    layer = Masked()
    model = network(None, layer)
    step = alone(model)
    for number in range(5):
        step((X, Y))
        assert not step.verdict.refused and math.isfinite(step.verdict.statistics), number
    bad = X.clone()
    bad[0, 2] = torch.nan  # hidden by the mask
    step((bad, Y))
    assert step.verdict.refused and not math.isfinite(step.verdict.statistics)
    assert torch.equal(layer.last, X[0]) and layer.mask[2] == -torch.inf
    step((X, Y))
    assert not step.verdict.refused


def root(y, prediction):
    """Finite, with a gradient that is not, if the prediction is 0."""
    return ops.mean(ops.sqrt(ops.abs(prediction - y)))


def zeros(model):
    model.layers[-1].kernel.assign(np.zeros((3, 1), "float32"))
    return torch.zeros_like(Y)


@pytest.mark.parametrize("built", [True, False])
def test_a_loss_scale_is_updated_from_the_first_step_on(built):
    """Also if the optimizer was not built, because its first update was refused; the weights are
    unchanged.
    """
    model = network(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0), loss=root)
    if built:
        model.optimizer.build(model.trainable_variables)
        model.optimizer.step_counter.assign(7)
    target, step = zeros(model), alone(model)
    for scale in (32.0, 16.0):
        step((X, target))
        assert step.verdict.refused and step.verdict.only_gradients
        assert model.optimizer.built and float(model.optimizer.dynamic_scale) == scale and int(model.optimizer.step_counter) == 0
    assert int(model.optimizer.iterations) == 0 and not np.any(ops.convert_to_numpy(model.layers[-1].kernel))


@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (0, 2), (1, 2), ()])
def test_an_overflow_lowers_the_scale_of_its_own_optimizer(bad):
    """Of three optimizers: two with a scale, and one without."""
    model = network(None, layers.Dense(2), layers.Dense(2))
    optimizers = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0) for _ in range(2)]
    optimizers.append(keras.optimizers.SGD(0.1))

    def body(data):
        loss = model.compute_loss(x=data[0], y=data[1], y_pred=model(data[0], training=True))
        loss.backward()
        for number, (optimizer, layer) in enumerate(zip(optimizers, model.layers, strict=True)):
            with torch.no_grad():
                gradients = [v.value.grad + (math.inf if number in bad else 0.0) for v in layer.trainable_variables]
                optimizer.apply(gradients, layer.trainable_variables)
        return {"loss": loss}

    step = in_loop(body, model, optimizers)
    step((X, Y))
    assert step.verdict.refused == bool(bad)
    scales = [float(optimizer.dynamic_scale) for optimizer in optimizers[:2]]
    assert scales == [32.0 if number in bad else 64.0 for number in range(2)]


@pytest.mark.parametrize("good", [0, 2, 3])
def test_a_weight_that_is_written_in_place_is_given_back(good):
    """Once known, it is stored before each step; variables that only the updates write are not."""
    model = network()
    model.optimizer.build(model.trainable_variables)
    kernel = model.layers[-1].kernel.value

    def body(data):
        with torch.no_grad():
            kernel.mul_(0.5)
        return {"loss": updated(model, data)}

    step = alone(model, body)
    for _ in range(good):
        step((X, Y))
    assert set(step.learned.untracked) == ({id(kernel)} if good else set()) and step.learned.updates_first is not bool(good)
    before = state(model)
    logs = step((X * torch.nan, Y))
    assert step.verdict.refused and same(state(model), before) and set(logs) == {"loss"}
    step((X, Y))
    assert not step.verdict.refused and not same(state(model), before)


class Counts(layers.Layer):
    """Counts its calls in a weight, in place, outside of Keras."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        if not x.is_meta:
            with torch.no_grad():
                self.calls.value.add_(1.0)
        return x


@pytest.mark.parametrize("bad", [(0, 1), (1, 3), (2,), (3, 4)])
def test_a_state_that_is_written_in_place_is_given_back(bad):
    """Also within Keras' own step, from the first step on."""
    layer = Counts()
    model = network(None, layer)
    layer.calls.assign(0.0)
    step = alone(model)
    for number in range(5):
        step((X * torch.nan if number in bad else X, Y))
        assert step.verdict.refused is (number in bad)
    assert float(layer.calls.value) == 5 - len(bad) and set(step.learned.untracked) <= {id(layer.calls.value)}


@pytest.mark.parametrize("steps", [0, 3])
def test_an_exception_that_is_kept_keeps_no_copy_of_the_step(steps):
    """A notebook keeps the last exception, and with it the frames of the guard."""
    model = network()
    model.optimizer.build(model.trainable_variables)
    raised, kernel = [], model.layers[-1].kernel

    def body(data):
        if len(raised) == steps:
            kernel.assign(kernel + 1.0)
            raise RuntimeError("out of memory")
        raised.append(None)
        return {"loss": updated(model, data)}

    def copies():
        gc.collect()
        shape = tuple(kernel.shape)
        return sum(type(held) is torch.Tensor and held.shape == shape for held in gc.get_objects())

    step = alone(model, body)
    for _ in range(steps):
        step((X, Y))
    before = copies()
    with pytest.raises(RuntimeError, match="out of memory") as kept:
        step((X, Y))
    assert kept.tb is not None and copies() <= before


@pytest.mark.parametrize("good", [0, 2, 3])
def test_a_weight_that_becomes_nan_by_hand_before_its_update(good):
    """The gradients are finite, but the update would keep the NaN: the step is refused."""
    model = network()
    model.optimizer.build(model.trainable_variables)
    kernel, factors = model.layers[-1].kernel.value, [0.5] * good + [math.nan, 0.5]

    def body(data):
        model.zero_grad()
        loss = model.compute_loss(x=data[0], y=data[1], y_pred=model(data[0], training=True))
        loss.backward()
        with torch.no_grad():
            kernel.mul_(factors.pop(0))
            model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        return {"loss": loss}

    step = alone(model, body)
    for _ in range(good):
        step((X, Y))
        assert not step.verdict.refused
    before = state(model)
    step((X, Y))
    assert step.verdict.refused and same(state(model), before)
    (report,) = step.take_reports()
    assert [finding.path for finding in report.findings()] == [model.layers[-1].kernel.path]
    step((X, Y))
    assert not step.verdict.refused and not same(state(model), before)


@pytest.mark.parametrize("replaced", [False, True])
def test_the_next_step_judges_the_last_update_on_a_device(away, replaced):
    """Unless an action has replaced the state since."""
    model = network()
    step = alone(model)
    for _ in range(4):
        step((X, Y))
    before = [(v, ops.convert_to_numpy(v).copy()) for v in (*model.variables, *model.optimizer.variables)]
    model.optimizer.learning_rate = 3e38
    step((X, Y))
    assert step.verdict.finite, "its update is not read yet"
    for variable, value in before if replaced else ():
        variable.assign(value)
    step((X, Y))
    assert step.verdict.refused != replaced and math.isfinite(step.verdict.slots) == replaced
    assert [report.left_by_previous for report in step.take_reports()] == [True] * (not replaced)


@pytest.mark.parametrize("site", ["inputs", "targets"])
def test_a_fault_in_a_batch_of_a_data_loader(site):
    """Which is a list."""
    data = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    model, seen = network(), []
    real = model.compute_loss
    model.compute_loss = lambda x=None, y=None, *args, **kwargs: seen.append((x, y)) or real(x, y, *args, **kwargs)
    with inject(model, site=site, kind="nan", step=0):
        model.fit(torch.utils.data.DataLoader(data, batch_size=len(X)), verbose=0)
    trained = next(batch for batch in seen if not batch[0].is_meta)  # Keras also traces the model
    bad = [bool(torch.isnan(value).any()) for value in trained]
    assert bad == [site == "inputs", site == "targets"]
