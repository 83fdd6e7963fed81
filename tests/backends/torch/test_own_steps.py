"""Single unusual steps on PyTorch: they accumulate gradients, create slots, set rates, raise, or
are compiled.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from support.torch_steps import (
    BODIES,
    X,
    Y,
    adapted,
    alone,
    in_loop,
    network,
    same,
    state,
)

from keras_nanguard import NanGuard

BAD = X * torch.nan


def plain(model, kind):
    """The body of such a step, without a transaction."""
    return BODIES[kind](model) or (lambda data: model.train_step(data))


def scaled(**more):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0, **more)


# Gradients


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_gradients_that_are_estimated_in_inference_mode(loss):
    """A step may find the gradients that the last one has estimated so; torch counts no writes of
    them. A refused step leaves them.
    """
    parameter = torch.nn.Parameter(torch.ones(3))
    net = torch.nn.ParameterList([parameter])
    optimizer, guard = torch.optim.SGD([parameter], 0.5), NanGuard(verbose=0)
    with guard.watch(net, optimizer):

        @guard.step
        def train(loss):
            if parameter.grad is None:
                with torch.inference_mode():
                    parameter.grad = torch.ones(3)
            optimizer.step()
            return loss

        for number in (1.0, loss, 1.0):
            found = parameter.grad
            train(torch.tensor(number))
            assert number == 1.0 or parameter.grad is found
    refused = sum(incident.refused for incident in guard.incidents)
    assert refused == (loss != 1.0)
    np.testing.assert_array_equal(parameter.detach(), [refused * 0.5 - 0.5] * 3)


@pytest.mark.parametrize("batches", [(X, BAD, 2 * X, 3 * X), (X, X, X, X, BAD, X, X), (BAD, X, X, X)])
def test_a_train_step_that_adds_up_gradients_over_several_calls(batches):
    """A refused step does not change the gradients that earlier good steps have accumulated."""

    def trained(batches, guarded):
        model, good = network(), []
        model.optimizer.build(model.trainable_variables)

        def body(data):
            loss = model.compute_loss(x=data[0], y=data[1], y_pred=model(data[0], training=True))
            loss.backward()
            if len(good) % 3 == 2:
                with torch.no_grad():
                    model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
                model.zero_grad()
            return {"loss": loss}

        step = alone(model, body) if guarded else body
        for batch in batches:
            step((batch, Y))
            good += [batch] if batch is not BAD else []
        return state(model)

    assert same(trained(batches, True), trained([batch for batch in batches if batch is not BAD], False))


@pytest.mark.parametrize("bad", range(6))
def test_an_overflow_in_a_sum_of_gradients_of_a_scaled_loss(bad):
    """The loop begins its next sum, as in plain Keras."""

    def trained(guarded):
        model, done = network(scaled()), []

        def body(x, y):
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
            overflow = math.inf if len(done) == bad else 0.0
            (model.optimizer.scale_loss(loss) + overflow * model.layers[-1].kernel.value.sum()).backward()
            done.append(x)
            if len(done) % 3 == 0:
                with torch.no_grad():
                    model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
                model.zero_grad()
            return loss

        guard = NanGuard(verbose=0)
        with guard.watch(model, model.optimizer):
            step = guard.step(body) if guarded else body
            for factor in range(1, 10):
                step(factor * X, Y)
        assert guard.incidents == []
        return state(model)

    assert same(trained(True), trained(False))


@pytest.mark.parametrize("optimizer", [scaled, lambda: keras.optimizers.SGD(0.1)])
def test_an_overflow_of_one_optimizer_and_a_sum_of_gradients_of_another_one(optimizer):
    """The other one, of the second layer, adds up gradients over three steps. Its sum is that of
    the good steps, with the scale that it had.
    """

    def trained(batches):
        model, other, good = network(scaled(), layers.Dense(2)), optimizer(), []
        first, second = ([layer.kernel, layer.bias] for layer in model.layers)
        model.optimizer.build(first)
        other.build(second)

        def update(optimizer, variables):
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)
            for variable in variables:
                variable.value.grad = None

        def body(x, overflow):
            loss = 0.01 * model.compute_loss(x=x, y=Y, y_pred=model(x, training=True))
            wrong = overflow * first[0].value.sum()
            torch.autograd.backward(model.optimizer.scale_loss(loss) + wrong, inputs=[v.value for v in first], retain_graph=True)
            torch.autograd.backward(other.scale_loss(loss), inputs=[v.value for v in second])
            good.extend([] if overflow else [x])
            update(model.optimizer, first)
            if len(good) % 3 == 0 and not overflow:
                update(other, second)
            return loss

        with (guard := NanGuard(verbose=0)).watch(model, model.optimizer, other):
            step = guard.step(body)
            for batch, overflow in batches:
                step(batch, overflow)
        assert float(model.optimizer.dynamic_scale) == 64.0 / 2 ** (len(batches) - len(good))
        return [np.array(ops.convert_to_numpy(v)) for v in model.variables]

    good = [(factor * X / 10, 0.0) for factor in range(1, 8)]
    bad = (X, math.inf)
    assert same(trained([*good[:4], bad, *good[4:5], bad, *good[5:]]), trained(good))


# What a step creates


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, scaled])
def test_an_optimizer_that_a_bad_first_step_builds(kind, optimizer):
    """Its slots have their initial values, also if the update could not be deferred."""
    model, other, noted = network(optimizer()), network(optimizer()), {}
    step = alone(model, BODIES[kind](model), note_created=lambda tensor, value: noted.__setitem__(id(tensor), value))
    step((BAD, Y))
    assert step.verdict.refused and step.verdict.scale == (64.0 if optimizer is scaled else 1.0)
    assert model.optimizer.built and not [v.path for v in model.optimizer.variables if not np.isfinite(ops.convert_to_numpy(v)).all()]
    slots = [v for v in model.optimizer.variables if id(v.value) in noted]
    assert len(slots) == (2 if optimizer is scaled else 4)
    assert all(np.array_equal(noted[id(v.value)], ops.convert_to_numpy(v)) for v in slots)
    body = plain(other, kind)
    for _ in range(3):
        step((X, Y))
        assert not step.verdict.refused
        body((X, Y))
    assert same(state(model), state(other))


def loop(make):
    """Return the transaction of a loop with two parameters, the second of which is used after three
    steps, and its notes.
    """
    net = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))])
    of, noted = make(net.parameters()), {}
    module, optimizers = adapted(net, [of])

    def body(late):
        of.zero_grad()
        loss = net[0].square().sum() + (net[1].square().sum() if late else 0.0)
        loss.backward()
        of.step()
        return loss

    step = in_loop(body, module, optimizers, note_created=lambda tensor, value: noted.__setitem__(id(tensor), value))
    return step, of, noted


def test_slots_that_an_optimizer_of_torch_creates():
    """Each is noted with its first value in the step that creates it, and is part of the train
    state from then on.
    """
    step, of, noted = loop(lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    for late in (False, False, False, True):
        step(late)
        assert step.learned.stale is (late or step.learned.steps == 1)
        assert set(noted) == {id(t) for slots in of.state.values() for t in slots.values()}
    assert len(noted) == 6 and not any(map(np.any, noted.values()))
    step(True)
    assert not step.learned.stale and {id(t) for t in step.state.weights_and_slots} >= set(noted)


# Scales and rates


@pytest.mark.parametrize("kind", BODIES)
def test_a_scale_that_grows_to_infinity_is_judged_by_the_next_step(kind):
    """It was finite when the loss was scaled; the next step is refused, and the scale is reset."""
    model = network(scaled())
    model.optimizer.build(model.trainable_variables)
    model.layers[-1].kernel.assign(np.zeros((3, 1), "float32"))
    target, step = torch.zeros_like(Y), alone(model, BODIES[kind](model))
    step((X, target))
    model.optimizer.dynamic_scale.assign(2.0**127)
    model.optimizer.step_counter.assign(model.optimizer.dynamic_growth_steps - 1)
    step((X, target))
    assert not step.verdict.refused and step.verdict.scale == 2.0**127
    assert step.verdict.statistics == 0.0 and math.isinf(float(model.optimizer.dynamic_scale))
    step((X, target))
    assert step.verdict.refused and math.isinf(step.verdict.scale) and float(model.optimizer.dynamic_scale) == 64.0


# Updates without a Keras optimizer of the model


def assigned(model):
    """Gradient descent by `assign`."""

    def update(gradients):
        for variable, gradient in zip(model.trainable_variables, gradients):
            variable.assign(variable.value - 0.1 * gradient)

    return update


def of_torch(model):
    """An optimizer of torch in an attribute of the model."""
    model.of = torch.optim.Adam([v.value for v in model.trainable_variables], lr=0.1)
    return lambda gradients: model.of.step()


def in_place(model):
    """Gradient descent by an operation of torch."""
    return lambda gradients: [v.value.sub_(0.1 * g) for v, g in zip(model.trainable_variables, gradients)]


def by_hand(make, batches, guarded):
    """Train, where a batch is `BAD` with a NaN gradient of a finite loss; return the final state,
    whether each step was refused, and the transaction.
    """
    model = network()
    update, ran = make(model), []

    def body(data):
        model.zero_grad()
        x = X if data[0] is BAD else data[0]
        loss = model.compute_loss(x=x, y=data[1], y_pred=model(x, training=True))
        (loss + 0 * torch.sqrt(0 * model.layers[-1].kernel.value.sum()) if data[0] is BAD else loss).backward()
        with torch.no_grad():
            update([v.value.grad for v in model.trainable_variables])
        return {"loss": loss}

    step = alone(model, body) if guarded else body
    for batch in batches:
        step((batch, Y))
        ran += [step.verdict.refused] if guarded else []
    slots = [t.numpy().copy() for held in model.of.state.values() for t in held.values()] if make is of_torch else []
    return [*state(model), *slots], ran, step


@pytest.mark.parametrize("make", [assigned, of_torch])
@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_an_update_without_an_optimizer_of_the_model(make, at):
    """The weights that it writes are judged with the step."""
    good = [X, 2 * X, X, 3 * X, X]
    batches = [*good[:at], BAD, *good[at:]]
    assert not all(np.isfinite(a).all() for a in by_hand(make, batches[: at + 1], False)[0])
    ended, refused, step = by_hand(make, batches, True)
    assert refused == [batch is BAD for batch in batches] and same(ended, by_hand(make, good, False)[0])
    (report,) = step.take_reports()
    assert math.isfinite(report.verdict.loss) and [row for row, (nan, _, _) in zip(report.rows, report.counts) if nan] == [("weights", step.run.model.layers[-1].kernel.path)]


@pytest.mark.parametrize("make", [assigned, of_torch, in_place])
def test_an_update_by_hand_that_first_comes_late(make):
    """What a step writes in place for the first time cannot be restored, but it is seen; an
    optimizer of torch shows what it will write.
    """
    model = network()
    update, calls = make(model), []

    def body(data):
        calls.append(data)
        model.zero_grad()
        loss = model.compute_loss(x=X, y=Y, y_pred=model(X, training=True))
        loss.backward()
        with torch.no_grad():
            if len(calls) == 4:
                update([v.value.grad.mul_(torch.nan) for v in model.trainable_variables])
        return {"loss": loss}

    step = alone(model, body)
    for _ in range(4):
        step((X, Y))
    assert step.verdict.refused is (make is not in_place) and not math.isfinite(step.verdict.weights)


def test_a_complex_scalar_that_a_step_differentiates():
    """It is no loss; its gradients are judged."""
    net = torch.nn.Linear(3, 1, dtype=torch.complex64)
    of = torch.optim.SGD(net.parameters(), lr=0.01)
    module, optimizers = adapted(net, [of])

    def body(x):
        of.zero_grad()
        total = net(x.to(torch.complex64)).sum()
        total.backward(torch.ones_like(total))
        of.step()

    step, refused = in_loop(body, module, optimizers), []
    for x in (X, BAD, X, X, BAD):
        step(x)
        refused.append(step.verdict.refused)
    assert refused == [False, True, False, False, True]


# Exceptions


class Raising(keras.metrics.Metric):
    """Raises after the update if `when` returns true: an error of torch, or its own one with this
    message.
    """

    def __init__(self, when, message):
        super().__init__(name="raising")
        self.when, self.message = when, message

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.when(y_pred):
            if self.message == NUMERIC:
                torch.nn.functional.binary_cross_entropy(torch.full((1,), torch.nan), torch.ones(1))
            raise RuntimeError(self.message)

    def result(self):
        return 0.0


NUMERIC = "all elements of input should be between 0 and 1"


def with_metric(when, message):
    model = network(keras.optimizers.Adam(0.1), layers.BatchNormalization())
    model.compile(model.optimizer, "mse", metrics=[Raising(when, message)])
    return model


def test_a_metric_that_raises_on_a_bad_prediction():
    """The step was refused before, and its exception is dropped."""
    model = with_metric(lambda prediction: bool(torch.isnan(prediction).any()), NUMERIC)
    model.optimizer.build(model.trainable_variables)
    step, before = alone(model), state(model)
    step((BAD, Y))
    assert step.verdict.refused and math.isnan(step.verdict.loss) and same(state(model)[:-1], before[:-1])
    step((X, Y))
    assert not step.verdict.refused


@pytest.mark.parametrize("message", [NUMERIC, "disk full"])
def test_an_exception_after_the_update(message):
    """Reaches the user; the update and everything that belongs to it stay, as without a guard."""
    ends = []
    for guard in (True, False):
        calls = []
        model = with_metric(lambda prediction, calls=calls: calls.append(True) or len(calls) == 4, message)
        step = alone(model) if guard else model.train_step
        for _ in range(3):
            step((X, Y))
        with pytest.raises(RuntimeError, match=message):
            step((X, Y))
        ends.append(state(model))
    assert same(*ends)


@pytest.mark.parametrize("refuse", [True, False])
def test_an_exception_before_the_update(refuse):
    """Restores the state from before the step, or, if nothing is refused, leaves it as without a
    guard.
    """
    model, other = (network(keras.optimizers.Adam(0.1), layers.BatchNormalization()) for _ in range(2))

    def body(of, data):
        of(data[0], training=True)
        raise RuntimeError("disk full")

    step, before = alone(model, lambda data: body(model, data), refuse=refuse), state(model)
    for call in (step, lambda data: body(other, data)):
        with pytest.raises(RuntimeError, match="disk full"):
            call((X, Y))
    assert same(state(model), before if refuse else state(other)) and not same(before, state(other))


# Tensors that Keras does not list


def test_frozen_parameters_of_torch_are_not_statistics():
    """Torch writes its buffers without counting it, but never writes a parameter that is not
    trained.
    """
    net = torch.nn.Linear(3, 1)
    net.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    net.register_buffer("seen", torch.full((3,), 2.0))
    of = torch.optim.SGD(net.parameters(), lr=0.01)
    module, optimizers = adapted(net, [of])

    def body(x):
        of.zero_grad()
        loss = (net(x) - Y).square().mean()
        loss.backward()
        of.step()
        return loss

    step = in_loop(body, module, optimizers)
    for _ in range(3):
        step(X)
        assert step.verdict.statistics == pytest.approx(math.sqrt(12.0))


# Optimizers that are not in an attribute of the model


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, scaled])
def test_a_fit_with_an_optimizer_within_another_object(optimizer):
    """The replays of a diagnosis leave its slots alone, too."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.holder = layers.Dense(1), SimpleNamespace(optimizer=optimizer())
            self.dense.build((None, 3))

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            self.zero_grad()
            loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0], training=True))
            self.holder.optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                self.holder.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            return {"loss": loss}

    def trained(x, guard=None):
        keras.utils.set_random_seed(0)
        model = Model()
        model.compile("sgd", "mse")
        model.fit(x, np.ones((len(x), 1)), batch_size=2, shuffle=False, verbose=0, callbacks=[guard] if guard else [])
        return [ops.convert_to_numpy(v) for v in (*model.variables, *model.holder.optimizer.variables)]

    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    bad, guard = np.insert(x, [0, 6, 6], np.nan, axis=0), NanGuard(verbose=0)
    bad = np.insert(bad, 0, np.nan, axis=0)
    assert same(trained(bad, guard), trained(x))
    assert [(i.step, i.diagnosis.cause) for i in guard.incidents] == [(0, "input_nonfinite"), (4, "input_nonfinite")]


class ReplacesBuffer(torch.nn.Module):
    """A running mean in a buffer, which is another tensor after each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Grows(torch.nn.Module):
    """Keeps a row of each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 3))

    def forward(self, x):
        if self.training and not x.is_meta:
            self.rows = torch.cat([self.rows, x[:1].detach()])
        return x


def holds(make):
    """Return a class of modules that hold a tensor in a buffer."""

    class Holds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("held", make())

        def forward(self, x):
            return x

    return Holds


def made_without_gradients():
    with torch.inference_mode():
        return torch.ones(3)


SPECIAL = {
    "sparse": holds(lambda: torch.eye(3).to_sparse()),
    "float8": holds(lambda: torch.ones(3).to(torch.float8_e4m3fn)),
    "quantized": holds(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
    "inference": holds(made_without_gradients),
    "grows": Grows,
    "scripted": lambda: torch.jit.script(torch.nn.BatchNorm1d(3)),
    "written": lambda: torch.nn.BatchNorm1d(3),
    "replaced": lambda: ReplacesBuffer(),
    "with running statistics": lambda: torch.nn.Sequential(SPECIAL["float8"](), SPECIAL["sparse"](), torch.nn.BatchNorm1d(3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPECIAL)
def test_special_buffers_of_a_module_within_a_layer(name):
    """A bad batch leaves no trace, and a rollback restores the first state."""
    x = np.random.default_rng(0).standard_normal((20, 3)).astype("float32")
    spoiled = x.copy()
    spoiled[12:16] = np.nan
    rule = {"name": "back", "site": "loss", "after": 1, "do": "rollback"}
    without = with_module_of_torch(SPECIAL[name](), np.delete(x, range(12, 16), 0), [])
    skipped = with_module_of_torch(SPECIAL[name](), spoiled, [NanGuard(verbose=0)])
    undone = with_module_of_torch(SPECIAL[name](), spoiled, [guard := NanGuard(verbose=0, rules=[rule])])
    last = with_module_of_torch(SPECIAL[name](), x[16:], [])
    (incident,) = guard.incidents
    assert incident.step == 3
    assert incident.outcomes[0].detail == "restored the state before the first step; 3 committed steps undone"
    assert all(map(np.array_equal, skipped, without)) and all(map(np.array_equal, undone, last))


def with_batchnorm_of_torch(x, callbacks, epochs=1):
    return with_module_of_torch(torch.nn.BatchNorm1d(3), x, callbacks, epochs)


def with_module_of_torch(module, x, callbacks, epochs=1):
    """Train a model of Keras with a module of torch; return buffers of the module, and weights."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.TorchModuleWrapper(module, output_shape=(None, 3))
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    y = np.ones((len(x), 1), "float32")
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    buffers = [buffer.cpu() for buffer in module.buffers() if not buffer.is_quantized]
    return [*(buffer.to_dense().float().numpy() for buffer in buffers), *model.get_weights()]


def test_resuming_restores_buffers_of_a_module_within_a_layer(tmp_path):
    x = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
    whole = with_batchnorm_of_torch(x, [], epochs=2)
    settings = {"directory": tmp_path, "snapshot": {"storage": "disk", "every": 5}, "verbose": 0}
    with_batchnorm_of_torch(x, [NanGuard(**settings)])
    resumed = with_batchnorm_of_torch(x, [NanGuard(**settings, resume=True)], epochs=2)
    assert all(map(np.array_equal, resumed, whole))


@pytest.mark.parametrize("name", ["written", "replaced"])
def test_a_buffer_of_a_module_within_a_layer_in_a_bad_first_step(name):
    """It is restored, although torch does not know the layers of a `Sequential`."""
    x = np.random.default_rng(0).standard_normal((20, 3)).astype("float32")
    spoiled = x.copy()
    spoiled[:4] = np.nan
    found = with_module_of_torch(SPECIAL[name](), spoiled, [guard := NanGuard(verbose=0)])
    assert [i.step for i in guard.incidents] == [0]
    assert all(map(np.array_equal, found, with_module_of_torch(SPECIAL[name](), x[4:], [])))
