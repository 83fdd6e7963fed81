"""Targets that a loss does not accept are the cause only if the run would not fail without them."""

import contextlib
import functools

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_nanguard import GuardError, NanGuard, diagnose, lint
from keras_nanguard._diagnose.targets import rejected

LABELS = (np.random.default_rng(0).standard_normal((128, 8)).astype("float32")[:, :1] > 0).astype("float32")
ABOVE, BELOW = np.float32(1.0000001), np.float32(-1e-8)


@functools.cache
def fitted(rate, low, high, loss, epochs=3):
    """Train a classifier on labels of these two values; return its incidents, and the loss before it."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.SGD(rate), loss(from_logits=True))
    x = 3 * np.random.default_rng(0).standard_normal((128, 8)).astype("float32")
    y = np.where(np.hstack([LABELS, 1 - LABELS]) > 0, high, low).astype("float32")
    guard = NanGuard(verbose=0)
    model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[guard])
    return guard.incidents


@pytest.mark.parametrize("loss", [keras.losses.BinaryCrossentropy, keras.losses.CategoricalCrossentropy])
@pytest.mark.parametrize(("low", "high"), [(0.0, ABOVE), (BELOW, 1.0), (0.0, 1.01), (-0.01, 1.0)])
def test_a_rate_too_high_is_the_cause_as_with_valid_targets(loss, low, high):
    """The oracle is the run with 0 and 1, which diverges as well, and is recovered."""
    expected, found = fitted(1e12, 0.0, 1.0, loss), fitted(1e12, low, high, loss)
    assert "divergence" in expected[0].diagnosis.causes
    assert found[0].diagnosis.cause == expected[0].diagnosis.cause
    assert found[0].step == expected[0].step
    changes = [{name for incident in run for name in incident.changes} for run in (expected, found)]
    assert changes[0] == changes[1] and "lower_lr" in changes[0]


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 255.0)])
def test_a_loss_that_falls_without_bound_is_due_to_the_targets(low, high):
    assert not fitted(0.1, 0.0, 1.0, keras.losses.BinaryCrossentropy, 8)
    first = fitted(0.1, low, high, keras.losses.BinaryCrossentropy, 8)[0].diagnosis
    assert first.cause == "target_out_of_range"
    assert any("the loss cannot be negative" in sentence for sentence in first.evidence)


def test_targets_that_are_off_by_rounding_are_healthy():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy")
    x = np.ones((16, 8), "float32")
    with contextlib.suppress(GuardError):  # the loss of PyTorch takes none of them
        assert diagnose(model, x, LABELS[:16] * ABOVE).diagnosis.cause == "unknown"
    assert diagnose(model, x, LABELS[:16] * 1.01).diagnosis.cause == "target_out_of_range"


def masked_sparse_categorical_crossentropy(y, p):
    """A loss of the user's, which ignores labels below 0."""
    losses = keras.losses.sparse_categorical_crossentropy(keras.ops.maximum(y, 0), p, from_logits=True)
    return keras.ops.where(keras.ops.squeeze(y, -1) < 0, 0.0, losses)


def test_a_custom_loss_may_accept_any_targets():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", masked_sparse_categorical_crossentropy)
    x, y = np.ones((16, 8), "float32"), np.arange(16)[:, None] % 3
    y[4:] = -100
    assert diagnose(model, x, y).ok
    x[2] = np.nan
    guard = NanGuard(verbose=0)
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[guard])
    assert "not accept" not in str(guard.incidents[0].diagnosis)


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX the loss stays finite")
def test_a_class_index_that_a_custom_loss_does_not_ignore_is_found():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", masked_sparse_categorical_crossentropy)
    y = np.arange(16)[:, None] % 3
    y[4:8], y[10] = -100, 7
    found = diagnose(model, np.ones((16, 8), "float32"), y).diagnosis
    assert (found.cause, found.samples) == ("target_out_of_range", (10,))
    assert "class index 7" in found.evidence[0]


@pytest.mark.skipif(not hasattr(keras.losses, "CategoricalGeneralizedCrossEntropy"), reason="new in Keras 3.9")
def test_a_loss_of_noisy_labels_takes_class_indices():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", keras.losses.CategoricalGeneralizedCrossEntropy())
    x, y = np.ones((6, 8), "float32"), np.arange(6) % 3
    assert diagnose(model, x, y).ok


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX the loss stays finite")
@pytest.mark.parametrize("keys", [False, True])
def test_a_class_index_is_found_in_the_output_that_has_it(keys):
    inputs = keras.Input((8,))
    heads = {"many": 7, "number": 1, "few": 3}
    outputs = {name: keras.layers.Dense(n, name=name)(inputs) for name, n in heads.items()}
    sparse = keras.losses.SparseCategoricalCrossentropy
    losses = {"few": sparse(from_logits=True, name="sparse_few"), "number": "mse"}
    losses["many"] = sparse(from_logits=True, name="sparse_many")  # another order than above
    y = {"few": np.zeros(32, int), "many": np.full(32, 5), "number": np.zeros(32)}
    y["many"][[20, 22]] = 7
    if not keys:
        outputs, losses, y = ([parts[name] for name in heads] for parts in (outputs, losses, y))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", losses)
    guard = NanGuard(verbose=0)
    with pytest.raises(Exception, match="7"):
        model.fit(np.ones((32, 8)), y, batch_size=16, shuffle=False, verbose=0, callbacks=[guard])
    (incident,) = guard.incidents
    assert incident.diagnosis.culprit == "sparse_many" and incident.diagnosis.samples == (4, 6)
    assert "7 classes" in incident.diagnosis.evidence[0]


def test_targets_in_a_dict_belong_to_the_loss_of_their_name():
    """In any order: numbers are not judged by the loss of the probabilities."""
    inputs = keras.Input((8,))
    heads = {"share": keras.layers.Dense(1, "sigmoid"), "count": keras.layers.Dense(1)}
    model = keras.Model(inputs, {name: layer(inputs) for name, layer in heads.items()})
    model.compile("sgd", {"count": "mse", "share": "binary_crossentropy"})
    x, ones = np.ones((16, 8), "float32"), np.ones((16, 1), "float32")
    assert diagnose(model, x, {"share": ones, "count": 5 * ones}).diagnosis.cause == "unknown"
    found = diagnose(model, x, {"share": 5 * ones, "count": ones}).diagnosis
    assert (found.cause, found.culprit) == ("target_out_of_range", "binary_crossentropy")


@pytest.mark.parametrize("far", [False, True])
def test_classes_may_be_on_another_axis(far):
    """Outputs of shape (rows, classes, height, width), as in PyTorch: 21 classes on pictures of 4 x 4."""
    model = keras.Sequential([keras.Input((21, 4, 4)), keras.layers.Rescaling(1.0)])
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True, axis=1)
    model.compile("sgd", sparse)
    x, labels = np.zeros((2, 21, 4, 4), "float32"), np.full((2, 4, 4), 20)
    labels[1, 2, 3] = 20 + far
    found = [hazard.code for hazard in lint(model, x, labels).hazards]
    assert ("labels_out_of_range" in found) == far
    shares = keras.losses.CategoricalCrossentropy(axis=1)
    model.compile("sgd", shares)
    y = np.full((2, 21, 4, 4), 1 / 21, "float32")
    assert "labels_out_of_range" not in [hazard.code for hazard in lint(model, x, y).hazards]


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_mixtures_in_the_dtype_of_the_targets_are_accepted(dtype):
    """Label smoothing and mixup in any dtype, of up to four labels; but nothing beyond a few ulp."""
    loss, shares = keras.losses.BinaryCrossentropy(), np.random.default_rng(0).dirichlet(np.ones(4), 200)
    mixed = shares.astype(dtype).cumsum(axis=1, dtype=dtype)
    assert rejected(loss, np.concatenate([mixed, 1 - mixed]), 4) is None
    ulp = float(ml_dtypes.finfo("float32" if dtype == "float64" else dtype).eps)
    wrong = np.array([[0.0], [1.0], [1.0 + 8 * ulp], [-8 * ulp]], dtype)
    found = rejected(loss, wrong, 1)
    assert found.rows == (2, 3)
    assert np.array_equal(found.valid.ravel(), [0.0, 1.0, 1.0, 0.0])


def test_a_class_index_is_exact():
    found = rejected(keras.losses.SparseCategoricalCrossentropy(), np.array([0, 3, -1, 2]), 3)
    assert found.rows == (1, 2) and found.valid.tolist() == [0, 0, 0, 2]


def test_a_large_class_index_is_shown_in_full():
    found = rejected(keras.losses.SparseCategoricalCrossentropy(), np.array([0, 1234567]), 3)
    assert "class index 1234567 " in found.clause


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX the loss stays finite")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_missing_label_is_no_class_index(value):
    """The loss casts it to some integer, which no class has."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    x, y = np.ones((16, 8), "float32"), np.zeros(16, "float32")
    y[7] = value
    guard = NanGuard(verbose=0)
    with contextlib.suppress(Exception):  # on a CPU the step raises one
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[guard])
    for found in (guard.incidents[0].diagnosis, diagnose(model, x, y).diagnosis):
        assert (found.cause, found.samples) == ("target_nonfinite", (7,))
        assert "Clean 'y'" in found.advice[0] and "'y' contains 1 " in " ".join(found.evidence)
