"""Consecutive steps on PyTorch: hooks on a class, tensors in attributes."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
from support import zoo

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from keras_nanguard import GuardError, NanGuard  # noqa: E402
from keras_nanguard._keras.overrides import Overrides  # noqa: E402
from keras_nanguard.testing import inject  # noqa: E402

VARIABLE = keras.src.backend.Variable


def test_the_class_is_changed_once_for_a_fit():
    """Changing a class clears Python's cache of its attributes; so the hooks stay while a fit runs,
    and are removed with it.
    """
    before, during = VARIABLE._direct_assign, set()
    seen = zoo.After(lambda model: during.add(VARIABLE._direct_assign), 3)
    again = zoo.After(lambda model: during.add(VARIABLE._direct_assign), 4)
    run = zoo.run(zoo.plain, zoo.regression(), guard=True, epochs=1, callbacks=[seen, again])
    assert len(during) == 1 and before not in during and VARIABLE._direct_assign is before
    reference = weakref.ref(run.guard.session.run.access.transaction)
    assert reference() is not None
    del run
    gc.collect()
    assert reference() is None, "nothing that stays behind holds the run"


class Penalty(keras.layers.Layer):
    """Adds a loss, and stores its last result."""

    def call(self, x):
        self.last = x * 1.0
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_results_of_the_last_call_are_not_state(kind):
    """A loss that a layer has added, or a result that it has stored, is NaN after a refused step;
    later steps are not affected.
    """
    data = zoo.regression()
    model = keras.Sequential([keras.Input(data.x.shape[1:]), keras.layers.Dense(4, "tanh"), Penalty(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    guard = NanGuard(verbose=0, diagnose=False)
    with inject(model, site="weights", kind=kind, step=0):
        model.fit(data.x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
    assert len(guard.incidents) == 1


class Keeps(keras.layers.Layer):
    """Stores tensors without a history: its last input, every input, and a running mean that
    replaces the previous one.
    """

    def build(self, shape):
        self.last, self.all, self.mean = None, [], 0.0

    def call(self, x):
        if x.device.type != "meta":
            self.last = x.detach()
            self.all.append(self.last)
            self.mean = 0.9 * self.mean + 0.1 * self.last.mean(axis=0)
        return x - self.mean


def keeping(data):
    model = keras.Sequential([keras.Input(data.x.shape[1:]), keras.layers.Dense(4, "tanh"), Keeps(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.set_weights([np.random.default_rng(1).normal(size=w.shape) for w in model.get_weights()])
    return model


@pytest.mark.parametrize("diagnose", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_tensor_in_an_attribute_is_given_back(step, diagnose):
    """A refused step restores the tensors that it has replaced, and so does a replay for the
    diagnosis.
    """
    data = zoo.regression()
    keep = np.ones(len(data.x), bool)
    keep[step * zoo.BATCH : (step + 1) * zoo.BATCH] = False
    model, without = keeping(data), keeping(data)
    guard = NanGuard(verbose=0, diagnose=diagnose)
    model.fit(np.where(keep[:, None], data.x, np.nan), data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
    without.fit(data.x[keep], data.y[keep], batch_size=zoo.BATCH, shuffle=False, verbose=0)
    assert [incident.step for incident in guard.incidents] == [step]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(model.get_weights(), without.get_weights(), strict=True))
    assert torch.equal(model.layers[1].mean, without.layers[1].mean) and torch.equal(model.layers[1].last, without.layers[1].last)


class Clears(keras.layers.Layer):
    """Computes a tensor in the first call; a batch with NaN clears or deletes it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.cached = how, None

    def call(self, x):
        if x.device.type == "meta":
            return x
        if self.cached is None:
            self.cached = x.detach().mean(axis=0)
        result = x - self.cached
        if torch.isnan(x).any():
            self.cached = None
            if self.how == "deletes":
                del self.cached
        return result


@pytest.mark.parametrize("how", ["clears", "deletes"])
def test_a_tensor_that_a_refused_step_removes_is_given_back(how):
    data, keep, ends = zoo.regression(), np.ones(len(zoo.regression().x), bool), []
    keep[3 * zoo.BATCH : 4 * zoo.BATCH] = False
    for x, y in ((np.where(keep[:, None], data.x, np.nan), data.y), (data.x[keep], data.y[keep])):
        keras.utils.set_random_seed(0)
        layer = Clears(how)
        model = keras.Sequential([keras.Input(x.shape[1:]), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        guard = NanGuard(verbose=0)
        model.fit(x, y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
        ends.append([layer.cached.numpy(), *model.get_weights()])
    zoo.assert_same(*ends)


@pytest.mark.parametrize("step", [0, 3])
def test_a_stored_bad_result_is_not_blamed_on_later_steps(step):
    """A bad step has left NaN in a list; later steps are not blamed for it."""
    data = zoo.regression()
    model = keeping(data)
    guard = NanGuard(verbose=0, diagnose=False)
    with inject(model, site="weights", kind="nan", step=step):
        model.fit(data.x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
    assert any(torch.isnan(kept).any() for kept in model.layers[1].all)
    assert len(guard.incidents) == 1 and torch.isfinite(model.layers[1].mean).all()


def test_a_fit_that_cannot_begin_leaves_no_hook():
    """A guard whose train function cannot be created detaches itself."""
    before = VARIABLE._direct_assign
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    NanGuard(verbose=0).set_model(model)
    with pytest.raises(GuardError, match="compile"):
        model.make_train_function()
    assert VARIABLE._direct_assign is before


def test_an_attachment_that_fails_leaves_no_hook(monkeypatch):
    """It can be detached, and the next fit runs as usual."""
    before, real, guard = VARIABLE._direct_assign, Overrides.set, NanGuard(verbose=0)
    data, model = zoo.regression(), keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def fail(overrides, target, name, value):
        if name == "make_train_function":
            raise MemoryError
        real(overrides, target, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(Overrides, "set", fail)
        with pytest.raises(MemoryError):
            guard.set_model(model)
    assert VARIABLE._direct_assign is before
    guard.session.run.access.detach()
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[NanGuard(verbose=0)])
    assert VARIABLE._direct_assign is before and "make_train_function" not in vars(model)


class Late(keras.metrics.Metric):
    """Creates a variable when it is first updated in the step that `due` names."""

    due, total = False, None

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.due and self.total is None:
            self.total = self.add_weight(name="total", initializer="zeros")

    def result(self):
        return keras.ops.zeros(())


@pytest.mark.parametrize("replaced", [False, True])
def test_variables_that_a_later_step_creates(replaced):
    """They are in the train state at the end of that step, also if it creates those of a new
    optimizer before its verdict and those of a metric after it.
    """
    metric, counts = Late(), []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=[metric])
    guard = NanGuard(verbose=0)

    def create(batch, logs):
        if batch == 3:
            metric.due, model.optimizer = True, keras.optimizers.SGD(momentum=0.9) if replaced else model.optimizer

    def compare(batch, logs):
        state = guard.session.run.train_state()
        assert [v.path for v in state.metrics] == [v.path for v in model.metrics_variables]
        assert {id(v) for v in model.optimizer.variables} == set(map(id, (*state.slots, *state.rates)))
        counts.append(len(state.metrics))

    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=create, on_train_batch_end=compare)
    model.fit(np.ones((24, 2)), np.ones((24, 1)), batch_size=4, verbose=0, callbacks=[guard, callback])
    assert counts[3] == counts[2] + 1


def test_a_slot_that_other_code_has_spoiled_before_an_update_judged_later(away):
    """The incident has the loss and the gradients of the step whose update is bad, not those of the
    next one, which its weights have made NaN; so the optimizer is not blamed.
    """

    class Spoils(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 9:
                slot = next(v for v in self.model.optimizer.variables if "momentum" in v.path)
                with torch.no_grad():
                    slot.value[0] = torch.nan

    data = zoo.regression(batches=16)
    model = keras.Sequential([keras.Input(data.x.shape[1:]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    guard = NanGuard(verbose=0)
    model.fit(data.x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[Spoils(), guard])
    (incident,) = guard.incidents
    assert incident.step == 10 and np.isfinite([incident.values[name] for name in ("loss", "gradient_norm")]).all()
    assert incident.diagnosis.cause == "state_nonfinite" and "rollback" in incident.changes
