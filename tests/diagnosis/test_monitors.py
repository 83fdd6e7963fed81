"""Trouble that stays finite is reported, by tests that no healthy run can meet."""

from __future__ import annotations

import contextlib
import types

import keras
import numpy as np
import pytest
from hypothesis import given, strategies as st
from keras import layers
from support.calls import calls_of

from keras_nanguard import NanGuard
from keras_nanguard._core import finiteness
from keras_nanguard._core.history import START_STEPS, History, sizes
from keras_nanguard._fit import monitors
from keras_nanguard.testing import inject


def regression(rate: float, steps: int = 130, **checks):
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(50, activation="relu", name="one"), layers.Dense(30, activation="relu", name="two")]
    model = keras.Sequential([keras.Input((1,)), *hidden, layers.Dense(1, name="out")])
    model.compile(keras.optimizers.SGD(rate), "mse")
    x = np.linspace(0, 5, 50, dtype="float32")[:, None]
    guard = NanGuard(verbose=0, checks=checks)
    model.fit(x, 5 * x**2, batch_size=32, epochs=steps // 2, verbose=0, callbacks=[guard])
    return guard


def test_a_network_that_died_after_a_jump_is_reported():
    """Where nothing is done about a divergence, that the network has died is reported all the same."""
    (incident,) = [i for i in regression(0.1, divergence=False, trend=False).incidents if not i.refused]
    assert {(f.site, f.kind) for f in incident.findings} == {("gradients", "stuck")}
    assert (incident.refused, incident.diagnosis.cause) == (False, "divergence")
    assert "no longer change" in " ".join(incident.diagnosis.evidence)


def test_a_network_that_died_after_a_jump_is_brought_home():
    guard = regression(0.1)
    assert {i.diagnosis.cause for i in guard.incidents} == {"divergence"}
    assert any(f.kind == "stuck" for i in guard.incidents for f in i.findings)
    assert np.isfinite(guard.session.history.last(1)[0][1])
    if keras.backend.backend() == "tensorflow":  # others begin with other weights
        assert guard.session.history.last(1)[0][1] < 500.0, "it had settled at 1500"


def test_the_same_network_with_a_sound_rate_is_quiet():
    assert regression(0.001).incidents == []


def test_frozen_and_pretrained_statistics_may_stand_still():
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()], name="base")
    base.layers[-1].moving_mean.assign([0.1] * 4)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((800, 4)).astype("float32")
    guard = NanGuard(verbose=0)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard])
    assert guard.incidents == []


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@given(st.lists(st.tuples(st.integers(0, 9999), st.sampled_from([1, -1])), min_size=1, max_size=3, unique_by=lambda c: c[0]))
def test_a_fingerprint_changes_with_the_last_bit(dtype, changes):
    array = np.random.default_rng(0).normal(size=(100, 100)).astype(dtype)
    before = finiteness.fingerprint(array)
    assert before.nbytes < array.nbytes / 8 and np.array_equal(finiteness.fingerprint(array.copy()), before)
    words = array.ravel().view(f"u{array.dtype.itemsize}")
    for place, step in changes:
        words[place] += np.asarray(step).astype(words.dtype)
    assert not np.array_equal(finiteness.fingerprint(array), before)


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-25, 1e-8, 1.0, 1e8, 1e25, 1e37])
def test_sizes(scale):
    """They are those of the closed form, at magnitudes whose squares overflow float32."""
    array = (np.random.default_rng(0).normal(size=(40, 50)) * scale).astype("float32")
    wide = array.astype("float64")
    assert sizes(array) == pytest.approx((np.linalg.norm(wide), np.abs(wide).max()), rel=1e-5)


def test_sizes_of_what_is_not_finite():
    assert sizes(np.array([1.0, np.inf])) == (np.inf, np.inf)
    assert sizes(np.array([1.0, np.nan]))[0] == np.inf
    assert sizes(np.array([3, 4])) == (0.0, 0.0) == sizes(np.zeros(0))
    assert sizes(np.array([3j, 4.0])) == (5.0, 4.0)


def test_remembering_a_step_appends_and_does_nothing_else():
    """All arithmetic waits until an incident needs it; the first few steps are kept a second time."""
    history = History()
    calls = [calls_of(history.push, step, 1.0, 2.0, 1.0) for step in range(500)]
    assert calls == [["push", "append", "append"]] * START_STEPS + [["push", "append"]] * (500 - START_STEPS)


def test_history_gives_back_the_last_steps_in_order():
    history = History()
    for step in range(300):
        history.push(step, float(step + 1), 2.0, 2.0)
    kept = history.before(250)
    assert [e.step for e in kept] == list(range(172, 250))
    assert [e.step for e in history.first(3)] == [0, 1, 2]
    assert kept[0].norm == 1.0
    assert history.jump(300)[0] == 300.0


@pytest.mark.parametrize("dies", [True, False])
def test_a_network_that_dies_in_a_moderate_rise_of_the_loss_is_reported(dies):
    """Below a twentyfold rise two looks have to agree, and the kernels have to have moved before."""
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(16, "relu", name="hidden_1"), layers.Dense(16, "relu", name="hidden_2")
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((1600, 4)).astype("float32")
    y = x.sum(1, keepdims=True) + np.random.default_rng(1).standard_normal((1600, 1)).astype("float32")

    guard = NanGuard("observe", verbose=0)
    with inject(model, site="weights", kind="zero", step=45, entries=None, path="hidden*") if dies else contextlib.nullcontext():
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
    if not dies:
        assert guard.incidents == []
        return
    assert guard.session.history.jump(guard.session.step)[0] >= 3.0
    (incident,) = [i for i in guard.incidents if i.sites == ("gradients",)]
    assert {(f.site, f.kind) for f in incident.findings} == {("gradients", "stuck")}
    assert {f.path for f in incident.findings} >= {layer.kernel.path for layer in hidden}
    assert incident.diagnosis.cause == "divergence"
    assert incident.step > 60, "one look is not enough"


def test_a_network_that_has_never_moved_has_not_died():
    """Behind vanishing gradients updates round to nothing, and a lower rate would help nobody; losses of one row scatter."""
    keras.utils.set_random_seed(0)
    small = keras.initializers.RandomNormal(stddev=1e-3)
    model = keras.Sequential([keras.Input((8,)), *(layers.Dense(8, kernel_initializer=small) for _ in range(6)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    x = np.random.default_rng(0).standard_normal((200, 8)).astype("float32")
    kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
    before = [keras.ops.convert_to_numpy(v).copy() for v in kernels]
    guard = NanGuard(verbose=0)
    model.fit(x, x[:, :1], batch_size=1, shuffle=False, verbose=0, callbacks=[guard])
    assert sum(np.array_equal(then, keras.ops.convert_to_numpy(v)) for then, v in zip(before, kernels)) > len(kernels) / 2
    assert guard.session.history.jump(guard.session.step)[0] >= 20.0
    assert guard.incidents == []


@pytest.mark.parametrize("moved, expected", [(0, False), (2, False), (3, True), (4, True), (None, None)])
def test_whether_kernels_have_moved(moved, expected):
    """Most of them have to have: where updates are about as small as the last bits, a few move now and then."""
    kernels = [keras.Variable([[1.0, 2.0]]) for _ in range(4)]
    then = None if moved is None else {id(v): keras.ops.convert_to_numpy(v).copy() for v in kernels}
    for kernel in kernels[: moved or 0]:
        kernel.assign_add([[0.0, 1e-6]])
    snapshot = None if then is None else types.SimpleNamespace(value=lambda v: then[id(v)])
    assert monitors._have_moved(kernels, snapshot) is expected
