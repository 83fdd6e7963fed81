"""If the arithmetic of an optimizer is proven, all of its steps give finite numbers."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_nanguard import Incident, NanGuard
from keras_nanguard._core.history import History
from keras_nanguard._diagnose.evidence import Evidence
from keras_nanguard._diagnose.gathering import (
    MODERATE,
    PROVEN,
    is_by_other_code,
    optimizer_facts,
)


def parts(optimizer, weight, slot=None):
    """Return a weight, its float slots with a value, and the state of the two and their optimizer."""
    variable = keras.Variable(np.asarray(weight, "float32"))
    optimizer.build([variable])
    slots = [v for v in optimizer.variables[2:] if "float" in str(v.dtype)]
    for held in slots:
        if slot is not None:
            held.assign(np.full(held.shape, slot, "float32"))
    return variable, slots, SimpleNamespace(optimizers=[optimizer], trainable=[variable], slots=slots)


def stays_finite(state, norm):
    """Whether no update can have made bad values of this state, with this norm of the gradient."""
    incident = Incident(3, 0, 3, (), values={"gradient_norm": norm})
    facts = tuple(map(optimizer_facts, state.optimizers))
    return is_by_other_code(Evidence(incident, optimizers=facts), History(), state)


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, MODERATE])
def test_moderate_numbers_stay_finite(name, size):
    """The oracle is Keras: weights, slots and gradients at the bounds, under each optimizer."""
    optimizer = getattr(keras.optimizers, name)(1e3)
    variable, slots, state = parts(optimizer, [size, -size, 0.0], size)
    assert stays_finite(state, MODERATE)
    for gradient in ([MODERATE / 2, -MODERATE / 2, 0.0], [0.0, 0.0, 0.0], [1e-38, 1.0, size / 2]):
        optimizer.apply([keras.ops.convert_to_tensor(np.asarray(gradient, "float32"))], [variable])
        for held in (variable, *slots):
            assert np.isfinite(keras.ops.convert_to_numpy(held)).all()
        variable.assign(np.asarray([size, -size, 0.0], "float32"))
        for held in slots:
            held.assign(np.full(held.shape, size, "float32"))


def test_bad_entries_are_ignored():
    _, _, state = parts(keras.optimizers.Adam(), [1.0, np.nan, np.inf, 3e38])
    assert stays_finite(state, 1.0)


@pytest.mark.parametrize(
    ("optimizer", "weight", "norm"),
    [
        (lambda: keras.optimizers.Adam(epsilon=0.0), [1.0], 1.0),
        (lambda: keras.optimizers.Adam(float("inf")), [1.0], 1.0),
        (lambda: keras.optimizers.Adam(beta_1=1.0), [1.0], 1.0),
        (lambda: keras.optimizers.Ftrl(), [1.0], 1.0),
        (lambda: type("Mine", (keras.optimizers.SGD,), {"__module__": "mine"})(), [1.0], 1.0),
        (lambda: keras.optimizers.SGD(), [1e16], 1.0),
        (lambda: keras.optimizers.SGD(), [1.0], 1e16),
        (lambda: keras.optimizers.SGD(), [1.0], float("nan")),
    ],
)
def test_unknown_optimizers_prove_nothing(optimizer, weight, norm):
    _, _, state = parts(optimizer(), weight)
    assert not stays_finite(state, norm)


@pytest.mark.parametrize(("dtype", "rounded"), [("float16", 0.0), ("bfloat16", 0.0), ("float32", 0.0), ("float64", 1e-50)])
def test_epsilon_is_rounded_to_the_dtype_of_the_weights(dtype, rounded):
    optimizer = keras.optimizers.Adam(epsilon=1e-50)
    optimizer.build([keras.Variable(np.ones(2), dtype=dtype)])
    assert optimizer_facts(optimizer).epsilon_in_dtype == pytest.approx(rounded, abs=0.0)


def incident_of(optimizer, write=None):
    """Train on healthy data; call `write(optimizer)` after step 5. Return the first incident."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).standard_normal((128, 4)).astype("float32")
    writes = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: write(optimizer) if write and batch == 5 else None
    )
    guard = NanGuard(verbose=0)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[writes, guard])
    return guard.incidents[0]


def slot_with(optimizer, name, number):
    """Write a number into one entry of the first slot of this name; return the path of the slot."""
    slot = next(v for v in optimizer.variables if name in v.path)
    array = np.array(keras.ops.convert_to_numpy(slot))
    array[1, 2] = number
    slot.assign(array)
    return slot.path


WRITES = pytest.mark.requires_backend("tensorflow", "torch", reason="Keras keeps the state out of its variables there")


@WRITES
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: keras.optimizers.Adam(1e-3), "velocity"),
        (lambda: keras.optimizers.SGD(1e-3, momentum=0.9), "momentum"),
    ],
)
def test_a_slot_that_other_code_wrote_is_the_culprit(make, name):
    """The update carries its NaN into the kernel; the callback has written only the slot."""
    paths = []
    incident = incident_of(make(), lambda optimizer: paths.append(slot_with(optimizer, name, np.nan)))
    found = incident.diagnosis
    assert (found.cause, found.culprit) == ("state_nonfinite", paths[0])
    assert any(sentence.endswith(f"other code has written {paths[0]}.") for sentence in found.evidence)


@pytest.mark.parametrize(
    "write", [None, pytest.param(lambda optimizer: slot_with(optimizer, "accumulator", -1.0), marks=WRITES)]
)
def test_the_root_of_a_negative_slot_is_made_by_the_update(write):
    """Keras accepts a negative `initial_accumulator_value`: no other code has written one."""
    incident = incident_of(keras.optimizers.Adagrad(1e-3, 0.1 if write else -1.0), write)
    found = incident.diagnosis
    assert found.cause == "optimizer_domain" and "kernel" in found.culprit
    assert any("negative values" in sentence for sentence in found.evidence)
    assert not any("other code" in sentence for sentence in found.evidence)
