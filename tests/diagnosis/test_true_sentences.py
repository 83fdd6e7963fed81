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


def masked(x):
    return ops.where(ops.ones_like(x) > 0, -np.inf, x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: 0 * x + (masked(x) - masked(x)), "from operands (only -Inf; only -Inf)"),
        (lambda x: 0 * x + (ops.where(x > 0, np.inf, x) - ops.where(x > 0, np.inf, x)), "with negative values and Inf;"),
        (lambda x: x / (0 * x), "with negative values; only zeros)"),
    ],
)
def test_operands_are_described_correctly(function, words):
    """Infinite, wholly or in part, is not called finite; zeros are called zeros."""
    reported = text(first(model(calling(function))))
    assert words in reported, reported
    assert ("finite operands" in reported) is ("Inf" not in words)


def test_advice_on_float16_names_the_dtype():
    reported = text(first(model(calling(lambda x: ops.square(x * 400.0)), dtype="mixed_float16")))
    assert "float16_overflow" in reported and "65504" in reported and "LossScaleOptimizer" not in reported


@pytest.mark.parametrize("dtype", ["mixed_float16", "bfloat16"])
def test_advice_on_underflow_names_the_dtype(dtype):
    """No LossScaleOptimizer is suggested if there is one, or if it does not help."""

    def differs(x):
        return x / ((1 + 1e-4 * ops.sigmoid(x)) - 1)

    reported = text(first(model(calling(differs), dtype=dtype)))
    assert "float16_underflow" in reported and "LossScaleOptimizer" not in reported
    assert ("bfloat16 has" in reported, "6e-8 are 0 in float16" in reported) == (dtype == "bfloat16", dtype != "bfloat16")


def test_hyper_parameters_are_named_with_their_values():
    optimizer = keras.optimizers.AdamW(0.5, weight_decay=25.0)
    reported = first(model(optimizer=optimizer), epochs=4).diagnosis
    evidence = " ".join(reported.evidence)
    assert reported.cause == "divergence"
    assert "AdamW has learning_rate=0.5, weight_decay=25, beta_1=0.9, beta_2=0.999, epsilon=1e-07, and no clipping." in evidence


def test_clipping_and_momentum_are_named():
    optimizer = keras.optimizers.SGD(1e13, momentum=0.9, clipnorm=2.0)
    reported = first(model(optimizer=optimizer), epochs=4).diagnosis
    assert "SGD has learning_rate=1e+13, momentum=0.9, clipnorm=2." in " ".join(reported.evidence)
    assert not any("lip the gradients" in line for line in reported.advice)


def test_an_epsilon_of_zero_is_named():
    optimizer = keras.optimizers.Adam(0.01, epsilon=0.0)
    reported = first(model(optimizer=optimizer), np.zeros_like(X), np.zeros_like(Y)).diagnosis
    assert reported.cause == "optimizer_domain" and "epsilon=0 in Adam" in " ".join(reported.evidence)
    assert reported.advice == ("Raise epsilon in Adam to its default of 1e-7: it has to be above 0.",)


def test_a_rate_that_is_not_finite_is_the_only_advice():
    class Odd(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.01 * ops.sqrt(3.0 - ops.cast(step, "float32"))

        def get_config(self):
            return {}

    reported = first(model(optimizer=keras.optimizers.SGD(Odd()))).diagnosis
    assert (reported.cause, len(reported.advice)) == ("optimizer_domain", 1) and "schedule" in reported.advice[0]


def test_steps_count_from_one():
    reported = first(model(optimizer=keras.optimizers.SGD(30.0)), epochs=2)
    named = next(line for line in reported.diagnosis.evidence if "times its lowest earlier value" in line)
    assert 1 < int(named.split()[2]) <= reported.step


def trap(x):
    """Return finite values with an infinite branch that is not taken."""
    return ops.where(x > 0, x, ops.exp(ops.where(x > 0, x * 1000, x)) - 1)


@pytest.mark.parametrize("inside", ["layer", "loss"])
def test_the_where_trap_is_one_of_the_gradient(inside):
    """A finite value, an infinite branch that is not taken, a NaN gradient: `gradient_domain`."""
    if inside == "layer":
        reported = first(model(calling(trap)))
    else:
        reported = first(model(loss=lambda y, p: ops.mean(trap(p * 100) * 1e-3)))
    assert next(f.site for f in reported.findings) == "gradients"
    assert reported.diagnosis.cause == "gradient_domain", reported.diagnosis
    assert ("odd" if inside == "layer" else "lambda") in reported.diagnosis.culprit
    assert "`where`" in text(reported) and "in the backward pass" not in text(reported)


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


def test_targets_are_y():
    y = Y.copy()
    y[21] = np.nan
    reported = first(model(), X, y).diagnosis
    assert "'y' contains 1 NaN, in the row at index 5." in reported.evidence and reported.advice[0].startswith("Clean 'y'")


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


def test_no_replay_is_mentioned_outside_of_training():
    built = model()
    built.layers[0].kernel.assign(np.full((4, 4), 3e38))
    guard = NanGuard(verbose=0)
    built.predict(X, verbose=0, callbacks=[guard])
    (reported,) = guard.incidents
    assert "replay" not in text(reported) and "The bad value reaches an output" in text(reported) and "step" not in str(reported).partition("Cause")[0]


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


def test_a_mask_that_is_multiplied_by_infinity_is_reported():
    reported = first(model(calling(lambda x: x + (1.0 - ops.ones_like(x)) * -np.inf))).diagnosis
    assert (reported.cause, reported.culprit.endswith("odd")) == ("forward_domain", True), reported
    assert "-Inf" in reported.evidence[0] and "0 times Inf is NaN" in reported.advice[0]


def test_a_column_that_is_bad_in_every_row_is_named():
    """One Inf in the data, and standardization makes its whole column NaN."""
    x = X.copy()
    x[:, 2] = np.nan
    reported = first(model(), x).diagnosis
    assert "'x' contains 8 NaN in column 2, in every row." in reported.evidence
    assert any("Column 2 of 'x' is bad in every row" in line for line in reported.advice)


def test_a_softmax_of_nothing_has_its_advice():
    """The advice covers a fully masked row, for each backend's implementation of a softmax."""
    reported = first(model(lambda: layers.Lambda(masked), layers.Softmax)).diagnosis
    assert (reported.cause, reported.culprit.rpartition("/")[2].partition("_")[0]) == ("forward_domain", "softmax")
    assert "at least one entry that is not masked" in reported.advice[0]
