"""Exceptions inside a guarded step on PyTorch: one of torch about a bad number refuses the step, a
user's exception ends the run.
"""

from __future__ import annotations

import contextlib
import math

import keras
import numpy as np
import pytest
import torch
from support.torch_steps import X, Y, alone, network, same, state, watched

from keras_nanguard import NanGuard

NAN = torch.full((2, 2), torch.nan)


def cross_entropy():
    torch.nn.functional.binary_cross_entropy(NAN, torch.ones(2, 2))


def distribution():
    torch.distributions.Normal(NAN, 1.0, validate_args=True)


def draw():
    torch.multinomial(NAN, 1)


def clip():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = NAN.clone()
    torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def factorize():
    torch.linalg.svd(NAN)


@pytest.mark.parametrize("raising", [cross_entropy, distribution, draw, clip, factorize])
def test_an_exception_of_torch_about_a_bad_number(raising):
    """The step is refused, its loss is NaN, and the next one trains."""
    model = network()
    model.optimizer.build(model.trainable_variables)
    bad = [True]

    def body(data):
        if bad[0]:
            raising()
        return model.train_step(data)

    step, before = alone(model, body), state(model)
    step((X, Y))
    assert step.verdict.refused and math.isnan(step.verdict.loss) and same(state(model), before)
    assert step.verdict.weights == step.verdict.slots == 0.0, "nothing was updated"
    bad[0] = False
    step((X, Y))
    assert not step.verdict.refused and not same(state(model), before)


def from_another():
    try:
        distribution()
    except ValueError as error:
        raise ValueError(f"bad settings: {error}") from error


def helper(message):
    raise ValueError(message)


@pytest.mark.parametrize("how", ["raise", "helper", "from torch's", "call"])
@pytest.mark.parametrize("message", ["crop size to satisfy the constraint width % 8 == 0", "all elements of input should be between 0 and 1", "disk full"])
def test_an_exception_of_the_users(how, message):
    """Ends the fit as without a guard, with any message, and with the state from before that step.
    """

    class Raising(keras.Model):
        calls = 0

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            self.calls += 1
            if self.calls == 4:
                raises()
            return self.dense(x)

    def raises():
        if how == "call":
            helper(message)
        if how == "helper":
            list(map(helper, [message]))
        if how == "from torch's":
            from_another()
        raise ValueError(message)

    ends = []
    for callbacks in ([], [NanGuard(verbose=0)]):
        keras.utils.set_random_seed(0)
        model = Raising()
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="constraint" if how == "from torch's" else message.split("%")[0]):
            model.fit(np.ones((32, 3)), np.ones((32, 1)), batch_size=4, verbose=0, callbacks=callbacks)
        ends.append(state(model))
    assert same(*ends)


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
def test_a_step_that_ends_halfway_is_undone(error):
    """Stock Keras keeps the statistics of its forward pass; the guard restores them."""

    class Halfway(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            if int(self.optimizer.iterations) == 3:
                raise error
            return super().compute_loss(*args, **kwargs)

    ends = []
    for callbacks, batches in ([], 8), ([], 3), ([NanGuard(verbose=0)], 8):
        keras.utils.set_random_seed(0)
        model = Halfway([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = {"x": np.ones((4 * batches, 3)), "y": np.ones((4 * batches, 1)), "batch_size": 4}
        with contextlib.nullcontext() if batches == 3 else pytest.raises(type(error)):
            model.fit(**data, verbose=0, callbacks=callbacks)
        ends.append(state(model))
    assert not same(ends[0], ends[1]) and same(ends[2], ends[1])


class TwoUpdates(keras.Sequential):
    """Updates once more than Keras, so its updates run before the verdict."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.zero_grad()
        loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0], training=True))
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
        return logs


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["ctrl-c", "memory"])
@pytest.mark.parametrize("function", ["isfinite", "Tensor.isnan"], ids=["verdict", "report"])
@pytest.mark.parametrize("kind", [keras.Sequential, TwoUpdates], ids=["stock", "two updates"])
def test_a_bad_step_whose_verdict_or_report_raises_is_undone(monkeypatch, kind, function, error):
    """The verdict on a batch with NaN, or its report, ends halfway. The model is left as after the
    batches before.
    """

    def trained(batches, bad):
        keras.utils.set_random_seed(0)
        model = kind([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        x = np.random.default_rng(0).normal(size=(4 * batches, 3)).astype("float32")
        if bad is not None:
            x[4 * bad] = np.nan
        guard, raised = NanGuard("stop", verbose=0), False

        class Raising(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == bad:
                    monkeypatch.setattr(f"torch.{function}", raising)

            def on_train_batch_end(self, batch, logs=None):
                monkeypatch.undo()

        try:
            model.fit(x, x.sum(1), batch_size=4, shuffle=False, verbose=0, callbacks=[Raising(), guard])
        except type(error):
            raised = True
        finally:
            monkeypatch.undo()
        return state(model), raised

    def raising(*args, **kwargs):
        raise error

    (left, raised), (before, _) = trained(8, bad=5), trained(5, bad=None)
    assert same(left, before)
    assert raised or (function, type(error)) == ("Tensor.isnan", RuntimeError)


def frozen(net, x):
    net[0].requires_grad_(False)
    draw_of(net(x))
    net[0].requires_grad_(True)


def evaluated(net, x):
    net.eval()
    draw_of(net(x))
    net.train()


def without_gradients(net, x):
    torch.set_grad_enabled(False)
    draw_of(net(x))
    torch.set_grad_enabled(True)


def draw_of(output):
    torch.multinomial(output.detach().sigmoid().reshape(1, -1), 1)


@pytest.mark.parametrize("part", [frozen, evaluated, without_gradients])
def test_modes_that_a_step_changes_until_it_raises(part):
    """The step does not set them back, so the guard does. The next steps train everything."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer, modes = torch.optim.SGD(net.parameters(), 0.01), []

    def body(x):
        modes.append((net[0].weight.requires_grad, net[1].training, torch.is_grad_enabled()))
        part(net, x)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with torch.enable_grad():
        guard, _ = watched(net, [optimizer], body, [x, x, x, x * torch.nan, x])
    assert len(guard.incidents) == 1 and modes[-1] == (True, True, True)


def test_a_frozen_scripted_module_has_no_mode():
    fixed = torch.jit.freeze(torch.jit.script(torch.nn.Linear(3, 3).eval()))
    net = torch.nn.Sequential(fixed, torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net[1].parameters(), 0.01)

    def body(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(4, 3)
    guard, _ = watched(net, [optimizer], body, [x, x * torch.nan, x])
    assert [incident.step for incident in guard.incidents] == [1]


def test_modes_of_a_step_that_is_not_undone():
    """With a policy that changes nothing, a step that ends halfway keeps what it has set, as without the guard."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def body(x):
        net.eval()
        raise RuntimeError("done")

    guard = NanGuard("observe", verbose=0)
    with pytest.raises(RuntimeError, match="done"), guard.watch(net, optimizer):
        guard.step(body)(torch.ones(4, 3))
    assert not net.training


# clip_grad_norm_(error_if_nonfinite=True)


def loop(data, guard=None, left_out=(), loss=lambda out, y: (out - y).square().mean()):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)

    def train(x, y):
        optimizer.zero_grad()
        value = loss(net(x), y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        return value

    step = train if guard is None else guard.step(train)
    with guard.watch(net, optimizer) if guard is not None else torch.enable_grad():
        for number, (x, y) in enumerate(data):
            if number not in left_out:
                step(x, y)
    return [p.detach().clone() for p in net.parameters()] + [s["exp_avg"] for s in optimizer.state.values()]


def batches(bad=None):
    x = torch.randn(8, 6, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(2, keepdim=True)
    if bad is not None:
        x[bad, 4, 1] = torch.nan
    return list(zip(x, y))


def test_a_clip_that_raises_on_a_bad_batch():
    """Ends a stock torch loop; with the guard it is a refused step, and the run ends as without
    that batch.
    """
    data = batches(bad=3)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        loop(data)
    guard = NanGuard(verbose=0)
    left = loop(data, guard)
    assert all(map(torch.equal, left, loop(data, left_out=[3])))
    (incident,) = guard.incidents
    assert (incident.step, incident.refused) == (3, True)
    assert (incident.diagnosis.cause, incident.diagnosis.samples) == ("input_nonfinite", (4,))


def test_a_clip_that_raises_on_a_bad_gradient():
    """The incident is about the gradients, not about the loss."""
    calls = []

    def loss(out, y):
        calls.append(True)
        at_zero = out * (0.0 if len(calls) == 3 else 1.0)
        return (out - y).square().mean() + (at_zero.square().sqrt() * 0.0).sum()

    guard = NanGuard(verbose=0, diagnose=False)
    loop(batches()[:5], guard, loss=loss)
    (incident,) = guard.incidents
    assert incident.step == 2 and incident.refused
    assert {finding.site for finding in incident.findings} == {"gradients"}
    assert "0.weight" in {finding.path for finding in incident.findings}


def trained(net, optimizer, train):
    """Return the guard of a loop of this step, with one bad batch."""
    guard = NanGuard(verbose=0)
    with guard.watch(net, optimizer):
        step = guard.step(train)
        for x, y in batches(bad=3):
            step(x, y)
    return guard


@pytest.mark.parametrize("arguments", [{}, {"error_if_nonfinite": True}, {"foreach": False, "norm_type": 1.0}])
def test_a_norm_by_the_function_behind_the_clip(arguments):
    """A replay runs it with the arguments that the step gives, by name or by default."""
    clip = torch.nn.utils.clip_grad
    if not hasattr(clip, "_get_total_norm"):
        pytest.skip("torch before 2.6")

    def train(x, y):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        clip._get_total_norm([p.grad for p in net.parameters()], **arguments)
        optimizer.step()
        return loss

    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    guard = trained(net, optimizer, train)
    (incident,) = guard.incidents
    assert (incident.diagnosis.cause, incident.diagnosis.samples) == ("input_nonfinite", (4,))
    assert any("reproduces" in sentence for sentence in incident.diagnosis.evidence)


def test_a_clip_that_raises_is_caught_by_the_step():
    """If the step handles the exception itself, nothing is refused."""
    caught = []

    def train(x, y):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        try:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError:
            caught.append(True)
            return
        optimizer.step()

    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    guard = trained(net, optimizer, train)
    assert caught == [True] and guard.refused == 0
