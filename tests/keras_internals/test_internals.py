"""What the library uses of the internals of Keras behaves as expected."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core.variable_names import SECOND_MOMENTS, snake_case
from keras_nanguard._diagnose.examination import computing_in_float32
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    precision,
)
from keras_nanguard._keras.optimizers import second_moments
from keras_nanguard._keras.overrides import Overrides

pytestmark = pytest.mark.filterwarnings(
    "error::DeprecationWarning",
    "ignore:__array__ implementation:DeprecationWarning",  # of Keras on PyTorch
)
"""Deprecations of Keras are found here first."""


def test_iteration_that_a_schedule_sees():
    """`Optimizer._iterations` counts every step, also if gradients are accumulated."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=2)
    assert keras_optimizers.scheduled_iteration(optimizer) == 0
    keras_optimizers.iterations(optimizer).assign(4)
    assert keras_optimizers.scheduled_iteration(optimizer) == 4
    assert keras_optimizers.learning_rate(optimizer) == keras_optimizers.rate_before(optimizer, 0) == 0.25
    assert keras_optimizers.rate_before(optimizer) == 0.5


def test_an_optimizer_rejects_other_variables():
    """By the text of its error, which has no class of its own."""
    dense, optimizer = layers.Dense(1), keras.optimizers.SGD()
    dense.build((None, 1))
    optimizer.build([dense.kernel])
    with pytest.raises(ValueError) as raised:
        optimizer.apply([keras.ops.ones((1,))], [dense.bias])
    assert keras_optimizers.rejects_variable(raised.value)
    assert not keras_optimizers.rejects_variable(ValueError("Expected something else."))


def test_snake_case():
    """Class names are written as Keras writes them in the names of objects."""
    names = [name for room in (layers, keras.losses, keras.optimizers) for name in dir(room)]
    assert [snake_case(name) for name in names] == list(map(keras.src.utils.naming.to_snake_case, names))


def test_second_moments():
    """The arrays that it names exist for each weight; no entry is negative."""
    classes = {name.lower(): getattr(keras.optimizers, name) for name in dir(keras.optimizers)}
    for name in SECOND_MOMENTS.keys() & classes.keys():  # early releases of Keras lack some
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = classes[name](0.1)
        optimizer.build(model.trainable_variables)
        for gradient in (3.0, -2.0):
            optimizer.apply([keras.ops.full(v.shape, gradient) for v in model.trainable_variables])
        found = second_moments([optimizer])
        trained = model.trainable_variables[name == "muon" :]  # of matrices it has no squares
        assert [v.shape for v in found] == [v.shape for v in trained], name
        values = [keras.ops.convert_to_numpy(v) for v in found]
        assert all((v > 0.0).all() and (v <= 13.2).all() for v in values), name  # 0.1 + 9 + 4


def test_operations_losses_and_outputs_are_found():
    inputs = keras.Input((4,), dtype="float16")
    h = layers.Dense(3, dtype="float16", name="low")(inputs)
    outputs = {"x": layers.Dense(1, name="a")(keras.ops.log(h)), "y": layers.Dense(1, name="b")(h)}
    built = keras.Model(inputs, outputs)
    built.compile("sgd", {"x": "mse", "y": "mae"}, auto_scale_loss=False)
    y = np.zeros((2, 1), "float32")
    built.train_on_batch(np.ones((2, 4), "float16"), {"x": y, "y": y})
    found = [op.name.split("_")[0] for op in keras_layers.operations_of(built)]
    assert "log" in found and set(found) <= {"log", "cast"}  # the lowest Keras casts inputs by operations
    assert [name for name, _ in keras_losses.losses_by_output(built)] == ["x", "y"]
    assert keras_layers.output_shapes(built) == [("x", (None, 1)), ("y", (None, 1))]
    assert keras_layers.output_names(built) == ["x", "y"]

    class Subclassed(keras.Model):
        outputs = [keras.KerasTensor((None, 1), name="z")]  # of no layer

    assert keras_layers.output_names(Subclassed()) == ["z"]


def test_a_policy_is_exchanged_and_put_back():
    layer = layers.Dense(2, dtype="mixed_float16")
    with precision.computing_in_float32(keras.Sequential([layer]), (), (), lambda variable: None):
        assert layer.compute_dtype == "float32"
    assert layer.compute_dtype == "float16"


def test_dtypes_are_exchanged_and_put_back():
    """`Variable._value` and `_dtype` of variables, losses and symbolic tensors."""
    inputs = keras.Input((4,), dtype="float16")
    built = keras.Model(inputs, layers.Dense(1, dtype="float16", activation="tanh")(inputs))
    built.compile("sgd", keras.losses.MeanSquaredError(dtype="float16"), auto_scale_loss=False)
    dtypes = lambda: {str(t.dtype) for t in (*built.weights, built.loss, built.inputs[0])}  # noqa: E731
    x, before = np.full((1, 4), 0.3, "float16"), dtypes()
    with computing_in_float32(ReplayableStep(built, built, [])):
        assert (before, dtypes()) == ({"float16"}, {"float32"})
        assert keras.backend.standardize_dtype(built(x).dtype) == "float32"
    assert dtypes() == before and keras.backend.standardize_dtype(built(x).dtype) == "float16"


def test_the_limits_of_files_are_those_of_the_loader_of_keras():
    """A scan rejects exactly the files that Keras itself refuses to load as a bomb."""
    from keras.src.saving import saving_lib

    from keras_nanguard._files.formats import limits

    if not hasattr(saving_lib, "_H5_DATASET_BOMB_FLOOR_BYTES"):  # 3.9, for example
        pytest.skip("this version of Keras loads bombs")
    assert saving_lib._H5_DATASET_BOMB_FLOOR_BYTES == limits.BOMB_FLOOR
    assert saving_lib._H5_DATASET_MAX_EXPANSION == limits.MAX_EXPANSION
    assert saving_lib._ZIP_MEMBER_MAX_EXPANSION == limits.MAX_MEMBER_EXPANSION


def test_an_attribute_set_twice_gets_its_first_value_back():
    """The same attribute can be overridden again; nothing of the values between is kept."""

    class Target:
        name = "of the class"

    target = Target()
    with Overrides() as overrides:
        overrides.set(target, "name", "one")
        overrides.set(target, "name", "two")
        assert target.name == "two" and len(overrides._before) == 1
    assert target.name == "of the class" and "name" not in vars(target)
