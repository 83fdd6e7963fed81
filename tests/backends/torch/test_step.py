"""Features of PyTorch: hand-written loops with its own modules and optimizers, eager steps that
continue after an update, exceptions about bad numbers, and processes that train together.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo
from support.torch_steps import DeviceGenerator

from keras_nanguard import NanGuard
from keras_nanguard.errors import GuardError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

from keras_nanguard._backends.torch import reductions  # noqa: E402

BAD = (0, 3, 4, 9)


# Loops over a torch module


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def plain_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_step_that_takes_arrays_is_given_arrays_when_it_runs_again():
    """In a rollback, and in the trials of a diagnosis."""
    net, guard, data = network(), NanGuard(verbose=0), zoo.regression(batches=12)
    optimizer, taken = OPTIMIZERS["sgd"](net.parameters()), []

    def train(x, y):
        taken.append(type(x))
        return step(torch.from_numpy(x), torch.from_numpy(y))

    step = plain_step(net, optimizer)
    with guard.watch(net, optimizer):
        run = guard.step(train)
        for number in range(12):
            rows = slice(number * zoo.BATCH, (number + 1) * zoo.BATCH)
            x, y = data.x[rows].copy(), data.y[rows].reshape(-1, 1)
            if number == 5:
                x[0, 0] = np.nan
            if number == 8:
                net[0].weight.detach()[0] = np.nan
            run(x, y)
    bad_batch, bad_state = guard.incidents
    assert bad_batch.diagnosis.cause == "input_nonfinite" and "rollback" in bad_state.changes
    assert len(taken) > 20 and set(taken) == {np.ndarray}


def late_step(model, optimizer):
    """Clears its gradients, in place, after the update."""

    def step(x, y):
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step


def looking_step(model, optimizer):
    """Reads the weights after the update."""

    def step(x, y):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss, torch.stack([p.square().sum() for p in model.parameters()]).sum()

    return step


def clipped_step(model, optimizer):
    """Clips its gradients in place and lowers its rate with a torch scheduler, within the step."""
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=6)

    def step(x, y):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return loss

    return step


def tensors(poison=()):
    data = zoo.regression()
    for batch in poison:
        zoo.poison(data, batch)
    return torch.as_tensor(data.x).split(zoo.BATCH), torch.as_tensor(data.y).split(zoo.BATCH)


def loop(make_step, optimizer, *, poison=(), left_out=(), guard=None):
    """Train for one pass; return the final state."""
    model = network()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(1)
    step = make_step(model, optimizer)
    with guard.watch(model, optimizer) if guard is not None else contextlib.nullcontext():
        run = guard.step(step) if guard is not None else step
        for batch, (x, y) in enumerate(zip(*tensors(poison))):
            if batch not in left_out:
                run(x, y)
    left = dict(model.state_dict())
    for number, slots in optimizer.state_dict()["state"].items():
        left |= {f"{number}/{key}": torch.as_tensor(v) for key, v in slots.items() if isinstance(v, (int, float, torch.Tensor))}
    return left | {"generator": torch.get_rng_state()}


def unequal(one, other):
    assert set(one) == set(other)
    return [key for key in one if not torch.equal(one[key], other[key])]


LOOPS = [*((plain_step, name) for name in OPTIMIZERS), (late_step, "adamw")]


@pytest.mark.parametrize(("make_step", "optimizer"), [*LOOPS, (looking_step, "adamw")])
def test_loop_with_bad_batches(make_step, optimizer):
    """A guarded torch loop ends bit-identical to one without the bad batches, including the first
    step.
    """
    guard = NanGuard(verbose=0)
    guarded = loop(make_step, optimizer, poison=BAD, guard=guard)
    assert unequal(guarded, loop(make_step, optimizer, poison=BAD, left_out=BAD)) == []
    assert [i.step for i in guard.incidents] == list(BAD) and all(i.refused for i in guard.incidents)
    assert {(i.diagnosis.cause, i.diagnosis.samples) for i in guard.incidents} == {("input_nonfinite", (2,))}


@pytest.mark.parametrize(("make_step", "optimizer"), [(plain_step, "adamw"), (looking_step, "adamw"), (clipped_step, "sgd")])
def test_healthy_loop(make_step, optimizer):
    """A healthy torch loop is unchanged."""
    guard = NanGuard(verbose=0)
    assert unequal(loop(make_step, optimizer, guard=guard), loop(make_step, optimizer)) == []
    assert guard.incidents == []


def test_module_that_is_bad_before():
    """A module with NaN before the first step is reported, with its own name for the parameter."""
    model = network()
    with torch.no_grad():
        model[4].weight[0, 0] = float("nan")
    guard = NanGuard("observe", verbose=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard.watch(model, optimizer):
        guard.step(plain_step(model, optimizer))(*(part[0] for part in tensors()))
    assert (guard.incidents[0].findings[0].site, guard.incidents[0].findings[0].path) == ("state", "4.weight")


def test_torch_optimizer_on_a_keras_model():
    """A Keras model in a plain loop with a torch optimizer has the same guarantees."""

    def trained(guard, left_out):
        keras.utils.set_random_seed(0)
        model = zoo.plain()
        optimizer = torch.optim.Adam([v.value for v in model.trainable_variables], lr=0.01)

        def step(x, y):
            optimizer.zero_grad()
            loss = ops.mean(ops.square(model(x, training=True) - y))
            loss.backward()
            optimizer.step()
            return loss

        torch.manual_seed(1)
        with guard.watch(model, optimizer) if guard is not None else contextlib.nullcontext():
            run = guard.step(step) if guard is not None else step
            for batch, (x, y) in enumerate(zip(*tensors(BAD))):
                if batch not in left_out:
                    run(x, y)
        return [a for _, a in zoo.state_of(model)]

    guard = NanGuard(verbose=0)
    guarded, oracle = trained(guard, ()), trained(None, BAD)
    assert all(np.array_equal(a, b) for a, b in zip(guarded, oracle))
    assert [i.step for i in guard.incidents] == list(BAD)


def test_a_batch_of_conjugates():
    """NumPy cannot read a tensor that torch has conjugated, or negated, without a copy."""
    module, guard = torch.nn.Linear(6, 1), NanGuard(verbose=0)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)

    def step(x):
        module(x.abs()).square().mean().backward()
        optimizer.step()

    bad = torch.ones((4, 6), dtype=torch.complex64)
    bad[2, 1] = complex(0.0, torch.nan)
    with guard.watch(module, optimizer):
        run = guard.step(step)
        for x in (bad.real, bad.conj(), bad.conj().imag):
            run(x)
    found = [(i.step, i.diagnosis.cause, i.diagnosis.samples) for i in guard.incidents]
    assert found == [(step, "input_nonfinite", (2,)) for step in (1, 2)]


def embedded(x, table, dense):
    return dense(table(x.long()).mean(1))


def multiplied(x, _, dense):
    return torch.sparse.mm(x, dense.weight.T) + dense.bias


@pytest.mark.parametrize(
    ("predict", "convert", "bad_role"),
    [
        (embedded, lambda x: x, "target"),
        (multiplied, lambda x: x.to_sparse(), "input"),
        (multiplied, lambda x: x.to_sparse_csr(), "input"),
    ],
)
def test_sparse_tensors(predict, convert, bad_role):
    """A step with a sparse gradient, or a sparse batch, is refused and reported like any other."""

    def trained(guard, left_out):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Embedding(20, 6, sparse=True), nn.Linear(6, 1)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = (predict(x, *net) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        with guard.watch(net, optimizer) if guard is not None else contextlib.nullcontext():
            run = guard.step(step) if guard is not None else step
            for batch in range(6):
                x, y = torch.arange(24.0).reshape(4, 6).sub(6 * batch).relu() % 20, torch.ones(4, 1)
                if batch == 3:
                    (y if bad_role == "target" else x)[3, 0] = torch.nan
                if batch not in left_out:
                    run(convert(x / (1 if predict is embedded else 20)), y)
        return list(net.parameters())

    guard = NanGuard(verbose=0)
    assert all(map(torch.equal, trained(guard, ()), trained(None, (3,))))
    found = [(i.step, i.refused, i.diagnosis.cause, i.diagnosis.samples) for i in guard.incidents]
    assert found == [(3, True, f"{bad_role}_nonfinite", (3,))]


# Exceptions


def classifier(guarded=keras.Model):
    inputs = keras.Input((6,))
    x = layers.BatchNormalization()(layers.Dense(4)(inputs))
    model = guarded(inputs, layers.Dense(1, "sigmoid")(layers.Dropout(0.2)(x)))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def test_raising_loss_is_a_refused_step():
    """If torch raises for a NaN prediction before there is a loss, the step is refused like any
    other.
    """
    data = zoo.regression()
    data.y = (data.y > 0).astype("float32")
    oracle = zoo.run(classifier, data)
    poisoned = data.with_poison((3, 8))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        zoo.run(classifier, poisoned)
    guarded = zoo.run(classifier, poisoned, guard=True)
    assert zoo.differences(guarded, oracle) == []
    assert guarded.steps == [3, 8, 17, 22]
    assert guarded.guard.incidents[0].sites[0] == "inputs"


def test_validation_that_raises_is_reported():
    """If torch raises for a NaN prediction in validation, the fit continues, with NaN for the
    missing values.
    """
    data = zoo.regression()
    data.y = (data.y > 0).astype("float32")
    guard, model = NanGuard(verbose=0, diagnose=False), classifier()
    shown = (data.x * np.nan, data.y)
    history = model.fit(*data.all, validation_data=shown, epochs=1, verbose=0, callbacks=[guard]).history
    assert np.isnan(history["val_loss"][0]) and np.isfinite(history["loss"][0])
    assert guard.incidents[0].sites == ("validation",) and "test_step" not in vars(model)


# Steps that continue after the update


class OwnStep(keras.Model):
    """A custom train step that computes its logs after the update."""

    def train_step(self, data):
        x, y = data
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred)
        self.zero_grad()
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
        return self.logs(x, y, y_pred, loss)


class Reading(keras.metrics.Metric):
    """Sums up the step count of an optimizer at the time of the call."""

    def __init__(self, optimizer):
        super().__init__(name="count")
        self.optimizer, self.total = optimizer, self.add_weight(name="total", initializer="zeros")

    def update_state(self, *args, **kwargs):
        self.total.assign_add(ops.cast(self.optimizer.iterations, "float32"))

    def result(self):
        return self.total


@pytest.mark.parametrize("base", [keras.Model, "custom"])
def test_reads_after_the_update_are_unchanged(base):
    """A metric that reads the optimizer reads it after the update, in Keras' step and in a custom
    one.
    """

    class Own(OwnStep):
        def logs(self, x, y, y_pred, loss):
            return self.compute_metrics(x, y, y_pred)

    def build():
        optimizer, inputs = keras.optimizers.Adam(0.01), keras.Input((6,))
        outputs = layers.Dense(1)(layers.Dropout(0.2)(layers.BatchNormalization()(inputs)))
        model = (Own if base == "custom" else base)(inputs, outputs)
        model.compile(optimizer, "mse", metrics=[Reading(optimizer)])
        return model

    data = zoo.regression()
    oracle = zoo.run(build, data)
    assert zoo.differences(zoo.run(build, data, guard=True), oracle) == []
    assert zoo.differences(zoo.run(build, data.with_poison((2, 5)), guard=True), oracle) == []
    assert oracle.history["count"][0] == sum(range(1, 13))


def test_writes_in_place():
    """In-place writes of a step outside of Keras are restored, too: buffers of torch modules, and
    weights.
    """

    class Mixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm, self.dense = nn.BatchNorm1d(6), layers.Dense(1)
            self.calls = torch.zeros(())

        def call(self, x, training=None):
            self.calls.add_(1.0)
            return self.dense(self.norm(x))

        def train_step(self, data):
            logs = super().train_step(data)
            with torch.no_grad():
                for v in self.dense.trainable_variables:
                    v.value.mul_(0.999)
            return logs

    kept = []

    def build():
        model = Mixed()
        model.compile("adam", "mse")
        model(torch.zeros(2, 6))
        model.calls.zero_()
        kept.append(model)
        return model

    data = zoo.regression()
    oracle = zoo.run(build, data)
    guarded = zoo.run(build, data.with_poison((0, 4, 5)), guard=True)
    assert zoo.differences(guarded, oracle) == []
    one, other = kept
    assert float(one.calls) == float(other.calls) and unequal(dict(one.norm.state_dict()), dict(other.norm.state_dict())) == []
    assert guarded.steps == [0, 4, 5, 15, 19, 20]


def test_observing_changes_nothing():
    """Under `observe` a run with bad batches continues unchanged, and is reported."""
    data = zoo.regression().with_poison((3,))
    build = functools.partial(zoo.plain, dropout=False)
    guard = NanGuard("observe", verbose=0)
    guarded, oracle = zoo.run(build, data, guard=guard, epochs=1), zoo.run(build, data, epochs=1)
    assert [a.tobytes() for _, a in guarded.state] == [a.tobytes() for _, a in oracle.state]
    assert guarded.steps[0] == 3


# Processes that train together


LOST = """
import datetime, os, signal, sys, time
import torch
import keras_nanguard._fit.session
from keras_nanguard import NanGuard
from keras_nanguard.errors import GuardError
meeting, how = sys.argv[1:]
other = os.fork()
rank = 0 if other else 1
limit = datetime.timedelta(seconds=5)
torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
net = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
guard = NanGuard(verbose=0)
def train(x):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
with guard.watch(net, optimizer):
    step = guard.step(train)
    for i in range(6):
        if rank == 1 and i == 4:
            if how == "gone":
                os._exit(0)
            time.sleep(30)  # as one that makes fewer steps and does something else
            os._exit(0)
        before = net.weight.detach().clone()
        try:
            step(torch.ones(8, 6))
        except GuardError as error:
            assert i == 4 and bool((net.weight == before).all()), i
            print(error, flush=True)
            os.kill(other, signal.SIGKILL)
            os._exit(7)
"""


@pytest.mark.daily("gone")
@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_process_that_does_not_answer(tmp_path, how):
    """If another process has ended, or does not answer within the time limit of the process group,
    the step ends with an error that names it.
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    meeting = f"file://{tmp_path / 'meet'}"
    command = [sys.executable, "-c", LOST, meeting, how]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 7, done.stdout
    assert "an answer from all 2 processes" in done.stdout
    assert "s of waiting for the verdict on a step" in done.stdout


# Devices that the host has to wait for


class Once(keras.optimizers.schedules.LearningRateSchedule):
    """A rate at which weights overflow, in one step."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def __call__(self, step):
        return ops.where(ops.equal(step, self.bad), 3e38, 0.01)


@pytest.mark.parametrize("kind", ["fit", "loop"])
def test_the_last_update_that_overflows(away, kind):
    """No step follows that could judge it: the end of the epoch or of the loop does."""
    guard, net = NanGuard(verbose=0, diagnose=False), nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        (100.0 * net(x).square().mean()).backward()
        optimizer.step()

    if kind == "fit":
        data = zoo.regression(batches=12)
        data.y[-zoo.BATCH :] = 100.0
        run = zoo.run(lambda: zoo.plain(keras.optimizers.SGD(Once(11)), dropout=False), data, guard=guard, epochs=1)
        left = run.model.get_weights()
    else:
        with guard.watch(net, optimizer):
            run = guard.step(step)
            for number in range(12):
                optimizer.param_groups[0]["lr"] = 3e38 if number == 11 else 1e-3
                run(torch.randn(8, 6))
        left = [net.weight.detach().numpy(), net.bias.detach().numpy()]
    assert all(np.isfinite(weight).all() for weight in left)
    incident = guard.incidents[0]
    assert incident.step == 11 and incident.sites == ("weights",) and not incident.refused
    assert "rollback" in incident.changes


@pytest.mark.parametrize("functions", [1, 2])
def test_an_update_of_another_function_that_overflows(away, functions):
    """The next step judges the last update, whichever function of the loop has made it."""
    net, guard = nn.Linear(6, 1), NanGuard(verbose=0, diagnose=False)
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.01), torch.Generator().manual_seed(1)

    def step(x):
        optimizer.zero_grad()
        loss = 100.0 * net(x).square().mean()
        loss.backward()
        optimizer.step()

    with guard.watch(net, optimizer):
        run = [guard.step(functools.partial(step)) for _ in range(functions)]
        for number in range(12):
            optimizer.param_groups[0]["lr"] = 3e38 if number == 8 else 1e-3
            run[number % functions](torch.randn(8, 6, generator=generator))
    incident, *more = guard.incidents
    assert (incident.step, incident.refused, incident.sites) == (8, False, ("weights",)) and not more


@pytest.mark.parametrize("own_step", [False, True])
def test_one_device_read_for_each_step(away, monkeypatch, own_step):
    """A guarded step waits for the device once, for any number of values that it reads."""

    class Own(OwnStep):
        def logs(self, x, y, y_pred, loss):
            return {"loss": loss, "norm": self.trainable_variables[0].value.square().sum()}

    looks = []

    def counted(name):
        real = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            if "keras_nanguard" in sys._getframe(1).f_code.co_filename:
                looks[-1] += 1
            return real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, method)

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            looks.append(0)

    inputs = keras.Input((6,))
    model = (Own if own_step else keras.Model)(inputs, layers.Dense(1)(layers.BatchNormalization()(inputs)))
    model.compile("adam", "mse")
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        counted(name)
    data = zoo.regression(batches=9)
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[NanGuard(verbose=0), Steps()])
    assert looks[3:-1] == [1] * 5


@pytest.mark.parametrize("later", [0, 1])
def test_an_update_that_overflows(request, later):
    """It is undone in its own step, or in the next one if the host would have to wait again, and
    reported for that step.
    """
    if later:
        request.getfixturevalue("away")
    guard = NanGuard(verbose=0)
    done = zoo.run(lambda: zoo.plain(keras.optimizers.SGD(Once(5))), zoo.regression(), guard=guard, epochs=1)
    assert zoo.bad_entries(zoo.run(lambda: zoo.plain(keras.optimizers.SGD(Once(5))), zoo.regression(), epochs=1).model)
    incident, *again = guard.incidents  # the steps before are run again, so that the update of this number comes again, once
    assert (incident.step, incident.refused, incident.sites[0]) == (5, False, "weights") and len(again) <= 1
    assert incident.diagnosis.cause == "optimizer_domain" and guard.session.run.counts.refused <= later + len(again)
    assert zoo.bad_entries(done.model) == []


class Noise(layers.Layer):
    """Adds noise that it draws from the generator of a device; that at offset 8 is NaN."""

    def __init__(self, generator):
        super().__init__()
        self._draw = generator.draw

    def call(self, x):
        return x + (np.nan if self._draw() == 8 else 0.0)


def test_bad_noise_from_a_device_is_not_drawn_for_ever(monkeypatch):
    """A refused step restores the generator; the second one in a row advances it."""
    generator, guard = DeviceGenerator(1), NanGuard(verbose=0, diagnose=False)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1), Noise(generator)])
    model.compile("sgd", "mse")
    begin = zoo.Before(lambda model: generator.set_offset(0), 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    data = zoo.regression(batches=8)
    model.fit(data.x, data.y, batch_size=zoo.BATCH, verbose=0, callbacks=[guard, begin])
    assert [incident.step for incident in guard.incidents] == [2, 3]
    assert generator.offset == 4 * 7


class RateOfItsOwn(keras.Model):
    """Its optimizer reads a rate that the step halves after the update."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_initializer="ones")
        self.rate = self.add_weight(shape=(), initializer=keras.initializers.Constant(0.1), trainable=False, name="rate")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        self.rate.assign(self.rate * 0.5)
        return logs


def test_an_update_reads_its_rate_before_the_step_writes_it():
    """A healthy run equals that of stock Keras, and a refused step restores the rate."""
    data, bad = zoo.regression(batches=4), zoo.poison(zoo.regression(batches=4), 2)
    ends = []
    for given, callbacks in ((data, []), (data, [NanGuard(verbose=0)]), (bad, [NanGuard(verbose=0, diagnose=False)])):
        model = RateOfItsOwn()
        model.compile(keras.optimizers.SGD(lambda model=model: model.rate + 0.0), "mse")
        model.fit(given.x, given.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        ends.append((float(model.rate), *model.dense.get_weights()))
    for one, other in zip(ends[0], ends[1]):
        np.testing.assert_array_equal(one, other)
    assert [end[0] for end in ends] == pytest.approx([0.1 / 16, 0.1 / 16, 0.1 / 8])


def test_keras_runs_another_step(monkeypatch):
    """If Keras does not run the guarded step, the fit ends with an error: no run continues
    unguarded.
    """

    def bypassing(model, force=False):
        model.train_function = lambda data: [type(model).train_step(model, batch) for batch in data][-1]

    monkeypatch.setattr(keras.Model, "make_train_function", bypassing)
    with pytest.raises(GuardError, match="Keras to run the guarded step"):
        zoo.run(zoo.plain, zoo.regression(), guard="undiagnosed", epochs=1)


def linear_from_zero():
    """Return a linear model whose weights are 0, its optimizer and a guard."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    return model, torch.optim.SGD(model.parameters(), 0.1), NanGuard(verbose=0, diagnose=False)


def towards(target, model, optimizer, guard):
    """Return a guarded step that trains a model to return this number."""

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return guard.step(step)


def test_two_steps_in_one_loop():
    """Each call runs its own function, and a refusal is of the one that was called."""
    model, optimizer, guard = linear_from_zero()
    x = torch.ones((4, 3))
    with guard.watch(model, optimizer):
        first, second = (towards(target, model, optimizer, guard) for target in (1.0, 3.0))
        losses = [step(x).item() for step in (first, second, first)]
        first(x * float("nan"))
        assert guard.refused and not np.isnan(np.array(model.get_weights()[0])).any()
        second(x)
    np.testing.assert_allclose(losses, [1.0, (0.8 - 3.0) ** 2, (2.56 - 1.0) ** 2], rtol=1e-5)
    assert not guard.refused and [incident.step for incident in guard.incidents] == [3]


def test_batches_of_another_step_of_the_loop_are_not_replayed():
    """After a rollback no step is run again with a function that did not run it."""
    model, optimizer, guard = linear_from_zero()
    x = torch.ones((4, 3))
    with guard.watch(model, optimizer):
        first, second = (towards(target, model, optimizer, guard) for target in (1.0, 3.0))
        first(x)
        second(x)
        model.layers[0].kernel.assign(np.full((3, 1), np.nan))
        first(x)
        assert "rollback" in [outcome.action for outcome in guard.incidents[0].outcomes]
        assert all((weight == 0.0).all() for weight in model.get_weights())  # those of the snapshot


def test_a_bad_step_is_refused_even_if_it_cannot_be_described(monkeypatch):
    """What the report of a step reads may fail, for instance for lack of memory."""
    model = zoo.plain()
    x, y = np.zeros((32, 6), "float32"), np.zeros((32, 1), "float32")
    x[3] = np.nan

    def fails(tensors):
        raise MemoryError

    monkeypatch.setattr(reductions, "counts", fails)
    guard = NanGuard(verbose=0, diagnose=False)
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[guard])
    assert [incident.step for incident in guard.incidents] == [0]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
