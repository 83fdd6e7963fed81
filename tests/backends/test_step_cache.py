"""A traced step is reused in later fits, like Keras' train function, if it still fits."""

from __future__ import annotations

import gc

import keras
import pytest
from keras import ops
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

pytestmark = pytest.mark.requires_backend("tensorflow", "jax", reason="a guarded step on torch is not compiled")

MODES = [mode for mode in ("graph", "xla", "steps4") if mode in zoo.MODES]


class Traced:
    """A loss that counts its traces."""

    def __init__(self):
        self.count = 0

    def __call__(self, y_true, y_pred):
        self.count += 1
        return ops.mean(ops.square(y_true - y_pred), -1)


def network(optimizer="adam", **compiled):
    """Return a small model with a random seed in its state."""
    body = [keras.layers.Dense(2), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *body])
    model.compile(optimizer, **{"loss": "mse", **compiled})
    return model


def fitted(times, mode="graph"):
    """Return a model after this many fits, each with a new guard; the loss; the guards."""
    loss, data, guards = Traced(), zoo.regression(), []
    model = network(loss=loss, **zoo.MODES[mode])
    for _ in range(times):
        guards.append(NanGuard(verbose=0))
        zoo.fit(model, data, guards[-1])
    return model, loss, guards


@pytest.mark.daily("graph", "steps4")
@pytest.mark.parametrize("mode", MODES)
def test_traced_once(mode):
    """Later fits trace nothing that the first one has not traced."""
    model, loss, _ = fitted(1, mode)
    before = loss.count
    for _ in range(3):
        zoo.fit(model, zoo.regression(), NanGuard(verbose=0))
    assert loss.count == before > 0


@pytest.mark.daily("graph")
@pytest.mark.parametrize("mode", MODES)
def test_the_same_numbers(mode):
    """As without the bad batches; each guard reports its own incidents, also of a reused step."""
    bad = (3, 6, 9, 12)  # whole executions of four are left: the lowest Keras makes too many steps of a rest
    data = zoo.regression(batches=16)
    for batch in bad:
        zoo.poison(data, batch)
    runs = []
    for guarded in (True, False):
        keras.utils.set_random_seed(0)
        model = zoo.plain(**zoo.MODES[mode])
        guards = [NanGuard(verbose=0, diagnose=again) for again in (False, True)] if guarded else [None] * 2
        for guard in guards:
            zoo.fit(model, data if guarded else data.without(bad), guard)
        runs.append((model, guards))
    (guarded, guards), (oracle, _) = runs
    exact = mode == "graph" and keras.backend.backend() == "tensorflow"
    ends = [[*model.variables, *model.optimizer.variables] for model in (guarded, oracle)]
    zoo.assert_same(*ends, 0.0 if exact else 1e-5)
    assert [[i.step for i in guard.incidents] for guard in guards] == [list(bad)] * 2
    assert all(incident.diagnosis.samples == (2,) for incident in guards[1].incidents)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.compile("adam", model.loss),
        lambda model: setattr(model.optimizer, "learning_rate", keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.9)),
    ],
    ids=["compiled anew", "another rate"],
)
def test_traced_again(change):
    """Nothing that is built into a trace may have changed."""
    model, loss, _ = fitted(1)
    before = loss.count
    change(model)
    zoo.fit(model, zoo.regression(), NanGuard(verbose=0))
    assert loss.count > before


@pytest.mark.requires_backend("tensorflow", "torch", reason="Keras on JAX trains no other weights without `compile`, it raises")
@pytest.mark.daily("frozen")
@pytest.mark.parametrize("first", ["frozen", "trained"])
def test_trainable_is_changed_without_compile(first):
    """Stock Keras keeps its train function until `compile`, and so does a guarded fit."""
    weights = []
    for guarded in ((False, False), (True, True), (False, True)):
        keras.utils.set_random_seed(0)
        model = network()
        model.layers[0].trainable = first == "trained"
        model.compile("adam", "mse")
        zoo.fit(model, zoo.regression(), NanGuard(verbose=0) if guarded[0] else None)
        model.layers[0].trainable = first == "frozen"
        zoo.fit(model, zoo.regression(), NanGuard(verbose=0) if guarded[1] else None)
        weights.append(model.get_weights())
    plain, *others = weights
    for other in others:
        zoo.assert_same(plain, other)


@pytest.mark.requires_backend("tensorflow", "torch", reason="Keras on JAX makes a train function for each fit")
def test_the_trace_of_keras_is_restored():
    """A plain fit after a guarded one traces nothing that an earlier plain one has traced."""
    model, loss, _ = fitted(0)
    zoo.fit(model, zoo.regression())
    zoo.fit(model, zoo.regression(), NanGuard(verbose=0))
    before = loss.count
    zoo.fit(model, zoo.regression())
    assert loss.count == before


def test_another_policy():
    """A step that refuses is not reused for a policy that only observes."""
    model, loss, _ = fitted(1)
    before = loss.count
    guard = NanGuard("observe", verbose=0, diagnose=False)
    data = zoo.poison(zoo.regression(), 2)
    zoo.fit(model, data, guard)
    assert loss.count > before and not guard.incidents[0].refused
    assert zoo.bad_entries(model)


def test_a_step_that_was_changed_for_its_fit():
    """A rate that the policy lowers under a schedule is only in the trace of that fit."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([10_000], [0.05, 0.05])
    weights = []
    for guarded in (True, False):
        keras.utils.set_random_seed(0)
        model = network(keras.optimizers.SGD(rate))
        start = model.get_weights()
        rule = {"name": "act", "do": {"lower_lr": {"factor": 0.25}}}
        first = NanGuard(rules=[rule], verbose=0, diagnose=False)
        zoo.fit(model, zoo.poison(zoo.regression(), 2), first)
        assert [o.action for o in first.incidents[0].outcomes if o.status == "done"] == ["lower_lr"]
        model.set_weights(start)
        zoo.fit(model, zoo.regression(), NanGuard(verbose=0) if guarded else None)
        weights.append(model.get_weights())
    zoo.assert_same(*weights, 1e-5)


def test_clipping_is_built_in():
    """A step that clips is not used by a guard that does not, and the other way round."""
    x = keras.ops.convert_to_numpy(ops.ones((8, 1)))
    bad = x.copy()
    bad[3] = float("nan")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: ops.mean(p))
    clip = {"clip": {"global_clipnorm": 0.5}}
    clipping = NanGuard({"rules": [{"name": "clip", "do": [clip]}]}, verbose=0)

    def moved(guard, data=x):
        before = model.get_weights()[0]
        model.fit(data, data, batch_size=1, shuffle=False, verbose=0, callbacks=[guard])
        return float((before - model.get_weights()[0]).item())

    moved(clipping, bad)
    changes = [moved(clipping), moved(NanGuard(verbose=0)), moved(clipping)]
    assert changes == pytest.approx([4.0, 8.0, 4.0])


def test_an_injected_fault_ends_with_its_context():
    """A fault of `inject` is in no later step, and is also injected into an existing step."""
    model, _, _ = fitted(1)
    guard = NanGuard(verbose=0, diagnose=False)
    with inject(model, site="gradients", step=3):
        zoo.fit(model, zoo.regression(), guard)
    assert [incident.step for incident in guard.incidents] == [3]
    after = NanGuard(verbose=0)
    zoo.fit(model, zoo.regression(), after)
    assert after.incidents == []


@pytest.mark.parametrize("first", ["new", "trained without a guard"])
def test_nothing_of_the_run_is_kept(first):
    """Between two fits the model keeps its step, but no session and no snapshots."""

    def sessions():
        return sum(type(o).__name__ == "Session" for o in gc.get_objects())

    gc.collect()
    before = sessions()
    model = network()
    for guard in ([None] if first != "new" else []) + [NanGuard(verbose=0), NanGuard(verbose=0)]:
        zoo.fit(model, zoo.regression(), guard)
    del guard
    gc.collect()
    assert model.built and sessions() == before
