"""Fault injection: faults occur at the requested place and step, and leave nothing behind."""

from __future__ import annotations

import functools
import re

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import GuardError, NanGuard
from keras_nanguard.testing import KINDS, SITES, corrupt, inject

STEP, STEPS = 2, 4
MODES = {
    "eager": ({"run_eagerly": True}, STEP),
    "graph": ({}, STEP),
    "xla": ({"jit_compile": True}, STEP),
    "steps2": ({"steps_per_execution": 2}, STEP // 2),
}
"""Arguments of `compile`, and the execution with the fault."""


def build(site="inputs", **mode):
    """Return a stock model that has this site."""
    keras.utils.set_random_seed(0)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if site == "loss_scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model = zoo.plain(optimizer, dropout=False, metrics=(), **mode)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model, steps=STEPS):
    """Train a model and return its state after each execution."""
    course, data = zoo.After(lambda model: [array for _, array in zoo.state_of(model)]), zoo.regression(batches=steps)
    zoo.fit(model, data, course)
    return course.seen


@functools.cache
def without_fault(scaled, mode):
    """Return the state of a model after each execution, and the names of its attributes.

    Args:
        scaled: whether it has a loss scale.
        mode: a key of `MODES`.
    """
    model = build("loss_scale" if scaled else "inputs", **MODES[mode][0])
    with zoo.as_written():
        return train(model), set(vars(model))


def first_difference(one, other):
    """Return the first execution after which two courses differ."""
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if not all(np.array_equal(p, q, equal_nan=p.dtype.kind == "f") for p, q in zip(a, b, strict=True)):
            return i
    return None


DAILY = {
    "torch": ["*"],
    "tensorflow": ["weights-nan", "loss-nan", "gradients-nan"],
    "jax": ["weights-nan"],
}


# test_sites.py has other kinds; eager steps on JAX take longest, and compiled ones are tested below
@pytest.mark.daily(*DAILY[zoo.BACKEND])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("site", SITES)
def test_hits_the_exact_step(site, kind):
    """A stock model trains as without the fault up to its step, and differs from then on."""
    faulty = build(site, run_eagerly=True)
    clean, attributes = without_fault(site == "loss_scale", "eager")
    with inject(faulty, site=site, kind=kind, step=STEP) as fault:
        course = train(faulty)
    assert first_difference(course, clean) == STEP
    assert fault.fired == (STEP,) and fault.steps_run == STEPS
    assert faulty.train_function is None
    assert set(vars(faulty)) == attributes


@pytest.mark.daily("graph-weights", "graph-loss", "xla-*", "steps2-*")
@pytest.mark.parametrize(
    ("mode", "site"), [*(("graph", site) for site in SITES), ("xla", "gradients"), ("steps2", "inputs")]
)
def test_hits_the_exact_step_compiled(mode, site):
    """Afterwards the model trains like one that never had a fault."""
    settings, expected = MODES[mode]
    (oracle, _), faulty = without_fault(site == "loss_scale", mode), build(site, **settings)
    start = [v for _, v in zoo.state_of(faulty)]
    with zoo.as_written():
        with inject(faulty, site=site, step=STEP):
            assert first_difference(train(faulty), oracle) == expected
        held = [*faulty.variables, *faulty.metrics_variables, *faulty.optimizer.variables]
        values = dict(zip((path for path, _ in zoo.state_of(faulty)), start, strict=True))
        for variable in held:
            variable.assign(values[variable.path])
        assert first_difference(train(faulty), oracle) is None


@pytest.mark.shared
def test_chooses_its_place():
    """`path`, `entries`, `count` and several steps select exactly what they name."""
    model = build(run_eagerly=True)
    paths = [v.path for v in model.trainable_variables]
    with inject(model, site="gradients", step=STEPS - 1, path=paths[-1]):
        course = train(model)
    assert zoo.bad_entries(model)[0] == paths[-1]
    assert all(zoo.finite(array) for array in course[-2])
    model = build(run_eagerly=True)
    with inject(model, site="targets", kind="spike", step=(0, 5), count=2, rows=None, magnitude=1.5) as fault:
        train(model, steps=8)
    assert fault.fired == (0, 1, 5, 6)


@pytest.mark.daily("False-eager", "True-compiled")
@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {}], ids=["eager", "compiled"])
@pytest.mark.parametrize("guarded", [False, True])
def test_rows_that_a_batch_does_not_have(mode, guarded):
    """A fault in rows that the batch of a step does not have was not injected in that step."""
    data = zoo.regression(batches=2)
    x, y = (part[: zoo.BATCH + 5] for part in data.all)  # the second batch has five rows

    def fit(**arguments):
        with inject(model := build(**mode), step=(0, 1), **arguments) as fault:
            callbacks = [NanGuard(verbose=0, diagnose=False)] if guarded else []
            model.fit(x, y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return fault.fired, [i.step for callback in callbacks for i in callback.incidents]

    assert fit(site="targets", rows=5) == ((0,), [0] * guarded)
    assert fit(site="inputs", rows=(4, 100)) == ((0, 1), [0, 1] * guarded)
    with pytest.raises(GuardError, match=r"(?s)no batch of them has row 100"):
        fit(site="inputs", rows=100)


@pytest.mark.shared
def test_counts_over_fits_and_after_errors():
    """Steps count over all fits of one context; a failed fit also leaves no fault behind."""
    model = build(run_eagerly=True)
    with inject(model, site="inputs", step=STEPS + 1) as fault:
        train(model)
        assert zoo.bad_entries(model) == [] and fault.fired == ()
        train(model)
    assert fault.fired == (STEPS + 1,)
    with pytest.raises(ZeroDivisionError), inject(model, site="loss", step=9):
        1 / 0  # noqa: B018
    assert "compute_loss" not in vars(model) and "_make_function" not in vars(model)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ({"site": "nowhere"}, "site='nowhere'"),
        ({"kind": "bad"}, "kind='bad'"),
        ({"step": -1}, "step=-1"),
        ({"step": ()}, r"step=\(\)"),
        ({"step": 1.5}, "step=1.5"),
        ({"step": True}, "step=True"),
        ({"count": 0}, "count=0"),
        ({"entries": 0}, "entries=0"),
        ({"rows": -2}, "rows=-2"),
        ({"step": np.array(3)}, r"step=array\(3\)"),
        ({"path": None}, "path=None"),
        ({"magnitude": "big"}, "magnitude='big'"),
        ({"model": "model"}, "model='model'"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "model=<Sequential"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_arguments(arguments, reported):
    """The error has the expected and the received value and the remedy."""
    arguments = {"model": build(), "site": "inputs", **arguments}
    with pytest.raises(GuardError, match=rf"(?s)Expected.*Received.*{reported}"):
        inject(arguments.pop("model"), **arguments)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ({"site": "weights", "path": "nothing/*"}, "weights that match path='nothing/"),
        ({"site": "inputs", "path": "7"}, "inputs that match path='7'"),
        ({"site": "gradients", "path": "nothing"}, "variables that match path='nothing'"),
        ({"site": "loss_scale"}, "loss_scale that match"),
        ({"site": "loss", "step": 99}, "4 train steps ran"),
    ],
)
def test_faults_without_a_place(arguments, reported):
    """A fault that was never injected is an error: such a test would prove nothing."""
    model = build(run_eagerly=True)
    with pytest.raises(GuardError, match=f"(?s)Expected.*{re.escape(reported)}"), inject(model, **arguments):
        train(model)
    assert "_make_function" not in vars(model)


@pytest.mark.parametrize("site", ["loss", "gradients"])
def test_a_fault_is_not_part_of_a_replay(site):
    """A diagnosis replays the bad step without the fault, so the replay is finite."""
    model, guard = build(site), NanGuard(verbose=0)
    data = zoo.regression(batches=STEPS)
    with inject(model, site=site, step=STEP):
        zoo.fit(model, data, guard)
    assert [(i.step, i.diagnosis.cause) for i in guard.incidents] == [(STEP, "transient")]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_corrupt(kind, dtype):
    """`corrupt` changes the first entries of a variable of any float dtype, and no others."""
    variable = keras.Variable(np.full((2, 3), 0.5), dtype=dtype)
    corrupt(variable, kind, entries=2, magnitude=4.0)
    held = keras.ops.convert_to_numpy(variable.value)  # JAX holds float32 for a variable of float64, by default
    flat = held.astype("float64").reshape(-1)
    largest = {"float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38, "float64": 1.79e308}[str(held.dtype)]
    wanted = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "overflow": largest, "spike": 2.0, "zero": 0.0}[kind]
    np.testing.assert_allclose(flat[:2], wanted, rtol=0.01)
    np.testing.assert_array_equal(flat[2:], 0.5)


def test_corrupt_a_variable_that_is_stored_by_columns():
    """As the recurrent kernel of a layer is on PyTorch."""
    layer = keras.layers.SimpleRNN(3)
    layer.build((None, 4, 2))
    corrupt(layer.cell.recurrent_kernel, entries=4)
    found = np.isnan(keras.ops.convert_to_numpy(layer.cell.recurrent_kernel))
    assert found.ravel().tolist() == [True] * 4 + [False] * 5


@pytest.mark.shared
@pytest.mark.parametrize("bad", [3, keras.Variable(1, dtype="int32", trainable=False)], ids=["number", "integer"])
def test_corrupt_refuses(bad):
    """A variable that cannot hold the fault is reported."""
    with pytest.raises(GuardError, match=r"(?s)Expected a keras.Variable of a float dtype.*Received"):
        corrupt(bad)
    with pytest.raises(GuardError, match=r"(?s)Expected kind.*Received: kind='x'"):
        corrupt(bad, "x")
    with pytest.raises(GuardError, match=r"(?s)Expected magnitude.*Received: magnitude=None"):
        corrupt(keras.Variable([1.0, 2.0]), "spike", magnitude=None)
    for entries in (0, -1, 1.5):
        with pytest.raises(GuardError, match=rf"(?s)Expected entries.*Received: entries={entries}"):
            corrupt(keras.Variable([1.0, 2.0]), entries=entries)
