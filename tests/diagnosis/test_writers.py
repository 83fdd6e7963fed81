"""If the arithmetic of an optimizer is proven, none of its steps gives anything but finite numbers.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_nanguard._diagnose.facts import MODERATE, PROVEN, must_stay_finite, optimizer_facts


def parts(optimizer, weight, slot=None):
    """Return the arguments of `must_stay_finite` for one weight and, if given, one value in all its
    float slots.
    """
    variable = keras.Variable(np.asarray(weight, "float32"))
    optimizer.build([variable])
    slots = [v for v in optimizer.variables[2:] if "float" in str(v.dtype)]
    for held in slots:
        if slot is not None:
            held.assign(np.full(held.shape, slot, "float32"))
    return variable, slots, ([optimizer], (optimizer_facts(optimizer),), [keras.ops.convert_to_numpy(v) for v in (variable, *slots)])


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, MODERATE])
def test_moderate_numbers_stay_finite(name, size):
    """The oracle is Keras itself: weights, slots and gradients at the bounds, under every known
    optimizer.
    """
    optimizer = getattr(keras.optimizers, name)(1e3)
    variable, slots, given = parts(optimizer, [size, -size, 0.0], size)
    assert must_stay_finite(*given, norm=MODERATE)
    for gradient in ([MODERATE / 2, -MODERATE / 2, 0.0], [0.0, 0.0, 0.0], [1e-38, 1.0, size / 2]):
        optimizer.apply([keras.ops.convert_to_tensor(np.asarray(gradient, "float32"))], [variable])
        for held in (variable, *slots):
            assert np.isfinite(keras.ops.convert_to_numpy(held)).all()
        variable.assign(np.asarray([size, -size, 0.0], "float32"))
        for held in slots:
            held.assign(np.full(held.shape, size, "float32"))


def test_bad_entries_are_ignored():
    _, _, given = parts(keras.optimizers.Adam(), [1.0, np.nan, np.inf, 3e38])
    assert must_stay_finite(*given, norm=1.0)


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
    _, _, given = parts(optimizer(), weight)
    assert not must_stay_finite(*given, norm=norm)
