"""A diagnosis is true: small failing programs with the whole text of their diagnosis."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo

from keras_nanguard import NanGuard

RNG = np.random.default_rng(0)
X = RNG.standard_normal((128, 4)).astype("float32")
Y = RNG.standard_normal((128, 1)).astype("float32")


def model(*hidden, optimizer=None, dtype="float32", name=None, **compiled):
    """Return a small network that contains these layers."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(dtype)
    try:
        made = keras.Sequential(
            [keras.Input((4,), name=name, dtype="float32"), layers.Dense(4), *(h() for h in hidden), layers.Dense(1, dtype="float32")]
        )
        made.compile(optimizer or keras.optimizers.SGD(0.01), **{"loss": "mse", **compiled})
    finally:
        keras.config.set_dtype_policy("float32")
    return made


def calling(function):

    class Odd(layers.Layer):
        def call(self, x):
            return function(x)

    return lambda: Odd(name="odd")


def first(built, x=X, y=Y, **fit):
    guard = NanGuard("stop", verbose=0)
    built.fit(x, y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **fit}, callbacks=[guard])
    return guard.incidents[0]


def text(incident):
    return str(incident.diagnosis)


def test_hyper_parameters_are_named_with_their_values():
    optimizer = keras.optimizers.AdamW(0.5, weight_decay=25.0)
    reported = first(model(optimizer=optimizer), epochs=4).diagnosis
    evidence = " ".join(reported.evidence)
    assert reported.cause == "divergence"
    assert "AdamW has learning_rate=0.5, weight_decay=25, beta_1=0.9, beta_2=0.999, epsilon=1e-07, and no clipping." in evidence


def test_a_layer_with_infinite_output_is_not_a_where_trap():
    """If the next layer saturates it, the forward pass is to blame, not the NaN gradient."""
    reported = first(model(calling(lambda x: ops.exp(x * 1000)), lambda: layers.Activation("tanh")))
    assert reported.diagnosis.cause == "forward_domain" and reported.diagnosis.culprit.endswith("odd")


@pytest.mark.parametrize("name", [None, "age"])
def test_data_has_the_name_that_the_user_gave(name):
    """The input is `x`, or has the name of its `keras.Input`, and is never called `inputs`."""
    x = X.copy()
    x[21, 2] = np.nan
    reported = first(model(name=name), x)
    shown = "x/age" if name else "x"
    assert f"inputs {shown}: 1 NaN of 32" in str(reported) and f"input_nonfinite in {shown!r}" in str(reported)
    evidence = " ".join(reported.diagnosis.evidence)
    assert f"comes from the batch, in {shown!r}." in evidence and f"{shown!r} contains 1 NaN, in the row at index 5." in evidence
    assert reported.diagnosis.advice[0].startswith(f"Clean {shown!r}") and "inputs" not in evidence


def test_of_several_inputs_each_has_its_name():
    keras.utils.set_random_seed(0)
    age, unnamed = keras.Input((4,), name="age"), keras.Input((4,))
    built = keras.Model([age, unnamed], layers.Dense(1)(layers.Concatenate()([age, unnamed])))
    built.compile("sgd", "mse")
    bad = X.copy()
    bad[21, 2] = np.inf
    assert "input_nonfinite in 'x/age'" in str(first(built, [bad, X]))
    assert "input_nonfinite in 'x/1'" in str(first(built, [X, bad]))


def test_no_rate_cures_a_first_step_that_overflows():
    """Its overflow in the forward pass is cured neither by a rate nor by clipping."""
    recurrent = layers.SimpleRNN(16, activation="relu", recurrent_initializer=keras.initializers.Constant(9.0))
    keras.utils.set_random_seed(0)
    built = keras.Sequential([keras.Input((60, 4)), recurrent, layers.Dense(1)])
    built.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.abs(RNG.standard_normal((16, 60, 4))).astype("float32")
    reported = first(built, x, Y[:16]).diagnosis
    if reported.cause == "divergence":
        assert not any("learning rate" in line or "Clip" in line for line in reported.advice), reported
    assert zoo.bad_entries(built) == []


def test_a_scalar_of_bfloat16_is_checked():
    """An operation with a scalar bfloat16 operand can be the one that overflows."""
    reported = first(model(calling(lambda x: x * 3e38 * 30.0), dtype="mixed_bfloat16")).diagnosis
    assert reported.culprit.endswith("odd") and reported.cause != "unknown", reported


def test_weights_that_are_nan_have_not_grown():
    if keras.backend.backend() == "jax":
        pytest.skip("Keras reads no variable during a fit on JAX, so what a callback writes is without effect")
    built = model()
    nan = np.full((4, 4), np.nan)

    guard = NanGuard(verbose=0)
    built.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard, zoo.After(lambda _: built.layers[0].kernel.assign(nan), 4)])
    reported = guard.incidents[0]
    assert (reported.step, reported.diagnosis.cause) == (5, "state_nonfinite") and "have grown" not in text(reported)
    assert "finite after the step before, so other code has written it" in text(reported)
    assert reported.diagnosis.advice[0].startswith("Find the code that writes to")


def test_a_constraint_is_to_blame_for_what_it_writes():
    """It divides by the norm of a column of zeros: neither optimizer nor callback did it."""
    kernel = np.eye(4, dtype="float32")
    kernel[:, 3] = 0.0

    class UnitNorm(keras.constraints.Constraint):
        def __call__(self, w):
            return w / ops.sqrt(ops.sum(ops.square(w), axis=0))

    initial = {"kernel_initializer": lambda shape, dtype=None: ops.convert_to_tensor(kernel)}
    built = model(lambda: layers.Dense(4, activation="relu", kernel_constraint=UnitNorm(), name="unit", **initial))
    reported = first(built).diagnosis
    assert (reported.cause, reported.culprit.endswith("unit/kernel")) == ("optimizer_domain", True), reported
    assert "other code" not in text(first(built)) and "the constraint UnitNorm of" in reported.advice[0]


def test_a_column_that_is_bad_in_every_row_is_named():
    """One Inf in the data, and standardization makes its whole column NaN."""
    x = X.copy()
    x[:, 2] = np.nan
    reported = first(model(), x).diagnosis
    assert "'x' contains 8 NaN in column 2, in every row." in reported.evidence
    assert any("Column 2 of 'x' is bad in every row" in line for line in reported.advice)
