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
    TrainState,
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

from keras_nanguard import NanGuard
from keras_nanguard._backends.torch.execution import StepRun
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import KerasUpdate
from keras_nanguard._backends.torch.watch import Watch


def test_a_healthy_step():
    """Nothing is refused; without a loss scale the scale is 1, and the norm is that of the
    gradients.
    """
    model = network()
    kernel, bias = (np.array(ops.convert_to_numpy(v)) for v in model.trainable_variables)
    error = X.numpy() @ kernel + bias - Y.numpy()
    norm = math.hypot(*(X.numpy().T @ error).ravel(), error.sum())
    step, norms = alone(model), []
    for _ in range(4):
        step((X, Y))
        assert not step.verdict.refused and step.verdict.finite and step.verdict.scale == 1.0
        norms.append(step.verdict.gradient_norm)
    assert norms[0] == pytest.approx(norm, rel=1e-5)


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
    assert (step.learned.keeps_undo or not refuse) and not step.learned.untracked, "what updates write is not kept before each step"


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


class Best(keras.metrics.Metric):
    """Is infinite until there is a better value."""

    def __init__(self):
        super().__init__(name="best")
        self.best = self.add_weight(shape=(), initializer=keras.initializers.Constant(np.inf), name="best")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.best.assign(self.best + ops.mean(y_pred))

    def result(self):
        return self.best


def test_a_metric_that_is_infinite():
    """The variables of a metric are not part of training."""
    model = network()
    model.compile("sgd", "mse", metrics=[Best()])
    step = alone(model)
    for _ in range(3):
        step((X, Y))
        assert not step.verdict.refused and step.verdict.statistics == 0.0


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


def test_a_loss_scale_is_updated_next_to_an_optimizer_without_one():
    model = network(loss=root)
    model.second = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    model.second.build(model.trainable_variables)

    target, step = zeros(model), alone(model, lambda data: {"loss": updated(model, data, model.second)})
    step((X, target))
    assert step.verdict.refused and float(model.second.dynamic_scale) == 32.0


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


@pytest.mark.parametrize("every", [None, 1, 3])
def test_a_step_that_adds_to_the_gradients_it_finds(every):
    """A refused step leaves the gradients unchanged: none before the first step, and those of the
    good steps later.

    The loop clears them after as many steps as it accumulates over, or never.
    """

    def trained(batches, guarded):
        keras.utils.set_random_seed(0)
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        good = []

        def body(x):
            loss = ((net(x) - Y) ** 2).mean()
            loss.backward()
            if every is None or len(good) % every == every - 1:
                optimizer.step()
                if every is not None:
                    optimizer.zero_grad()
            return loss

        def count(batch):
            good.extend([batch] if batch is not bad else [])

        if not guarded:
            for batch in batches:
                body(batch)
                count(batch)
        else:
            guard = NanGuard(verbose=0, diagnose=False)
            with guard.watch(net, optimizer):
                step = guard.step(body)
                for batch in batches:
                    step(batch)
                    count(batch)
        return [np.array(t.detach()) for p in net.parameters() for t in (p, p.grad) if t is not None]

    bad = X * torch.nan  # the last of them after the steps in which all is kept
    for given in ([bad, X, 2 * X], [X, bad, 2 * X, X], [X, X, X, bad, X, 3 * X, bad, bad, X]):
        assert same(trained(given, True), trained([batch for batch in given if batch is not bad], False))


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
    assert set(step.learned.untracked) == ({id(kernel)} if good else set()) and step.learned.keeps_undo is not bool(good)
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


@pytest.mark.parametrize("bad", [False, True])
def test_a_variable_that_a_step_creates_is_reported_once(bad):
    """With its first value; the train state is read again for the verdict of that step, and before
    the next one.
    """
    model, noted, read, wanted, made = network(), [], [], [], []

    def body(data):
        logs = model.train_step(data)
        made.extend(keras.Variable(wanted.pop()) for _ in list(wanted))
        return logs

    step = alone(model, body, note_created=lambda tensor, value: noted.append((tensor, float(value))))
    step.run.read_train_state = lambda: read.append(True) or TrainState.of(model)
    model.optimizer.build(model.trainable_variables)
    for _ in range(3):
        step((X, Y))
    wanted.append(2.0)
    step((X * torch.nan if bad else X, Y))
    (variable,), before = made, len(read)
    assert [(tensor is variable.value, value) for tensor, value in noted] == [(True, 2.0)]
    step((X, Y))
    step((X, Y))
    assert len(read) == before + 1 and not step.verdict.refused


@pytest.mark.parametrize("body", [lambda model: None, twice], ids=["stock", "twice"])
def test_nothing_of_a_step_waits_for_the_garbage_collector(body):
    """The old values and the gradients of a step would otherwise take memory until it runs."""
    model = network()
    step = alone(model, body(model))
    gc.collect()
    gc.disable()
    try:
        for x in (X, X * math.nan, X):
            step((x, Y))
        left = [held for held in gc.get_objects() if type(held) in (StepRun, UndoLog, Watch, KerasUpdate)]
    finally:
        gc.enable()
    assert left == []


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


def test_a_step_that_was_created_again_judges_the_last_update_on_a_device(away):
    model = network()
    step, again = alone(model), alone(model)
    for rate in (0.1, 0.1, 0.1, 3e38):
        model.optimizer.learning_rate = rate
        step((X, Y))
    again.inherit(step)
    assert again.has_left_bad() and not again.has_left_bad() and not alone(model).has_left_bad()


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
