"""A model that already misbehaves is examined in inference and in training mode."""

import contextlib
import json

import keras
import mechanisms
import numpy as np
import pytest
from keras import layers

from keras_nanguard import GuardError, NanGuard, diagnose


@pytest.fixture(scope="module")
def trained():
    keras.utils.set_random_seed(0)
    body = [layers.Dense(8), layers.BatchNormalization(name="bn"), layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input((4,)), *body, layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).standard_normal((256, 4)).astype("float32")
    model.fit(x, x[:, :1], epochs=10, verbose=0)
    return model, x[:32], x[:32, :1].copy()


@pytest.fixture
def variance(trained):
    variable = trained[0].get_layer("bn").moving_variance
    before = np.array(variable.value)
    yield variable
    variable.assign(before)


def test_a_healthy_model_is_healthy(trained):
    found = diagnose(*trained)
    assert found.ok
    assert (found.step, found.first_bad("inference"), found.first_bad("training")) == ("finite", "", "")
    assert "Nothing bad" in str(found)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e9])
def test_one_ruined_moving_variance_is_found(trained, variance, value):
    broken = np.array(variance.value)
    broken[2] = value
    variance.assign(broken)
    found = diagnose(*trained)
    assert found.diagnosis.cause == "batchnorm_statistics"
    assert "bn" in found.diagnosis.culprit
    assert found.first_bad("training") == ""
    assert not found.ok


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_a_channel_that_is_constant_in_the_batch_is_healthy(scale):
    """One that is rarely active, with its statistics over all of the data."""
    rng = np.random.default_rng(0)
    whole = np.hstack([rng.random((1024, 3)), np.where(rng.random((1024, 1)) < 0.02, scale, 0.0)]).astype("float32")
    norm = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), layers.ReLU(), norm])
    norm.moving_mean.assign(whole.mean(axis=0))
    norm.moving_variance.assign(whole.var(axis=0))
    batch = whole[whole[:, 3] == 0.0][:32]
    assert diagnose(model, batch).ok
    norm.moving_mean.assign([0.5, 0.5, 0.5, 1e4])
    assert diagnose(model, batch).diagnosis.cause == "batchnorm_statistics"


def test_a_frozen_model_within_reads_its_statistics_in_both_modes():
    """As in transfer learning. Each layer of it divides by 0 if it reads other ones."""
    x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
    backbone = keras.Sequential([keras.Input((4,)), *(layers.BatchNormalization() for _ in range(12))])
    backbone.trainable = False
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(backbone(inputs, training=False)))
    model.compile("adam", "mse")
    found = diagnose(model, x, x[:, :1])
    assert found.ok
    assert [row.maximum for row in found.training] == [row.maximum for row in found.inference]


def normalized(mean, variance):
    """Return a healthy model, with its moving statistics."""
    norm = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((64,)), norm, layers.Dense(1)])
    norm.moving_mean.assign(np.full(64, mean))
    norm.moving_variance.assign(np.full(64, variance))
    return model


@pytest.mark.parametrize("rows", [2, 3, 4, 32])
def test_statistics_of_all_data_are_right_for_a_few_rows_of_it(rows):
    """Two rows are close together in some channels, by chance."""
    x = 20.0 * np.random.default_rng(0).standard_normal((rows, 64)).astype("float32")
    assert diagnose(normalized(0.0, 400.0), x).ok


def test_statistics_of_all_data_are_right_for_rows_of_one_class():
    """Classes that are far apart have a larger variance than each of them; a note says so."""
    x = np.random.default_rng(0).normal(200.0, 1.0, (32, 64)).astype("float32")
    found = diagnose(normalized(100.0, 1e4), x)
    assert found.ok and not found.diagnosis.advice
    assert "64 of 64 channels" in str(found) and "Similar rows" in str(found)


@pytest.mark.requires_backend("jax", reason="elsewhere the step raises an exception")
def test_targets_that_the_loss_ignores_come_with_advice():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    labels = np.zeros(16, "int64")
    labels[3] = 7
    found = diagnose(model, np.ones((16, 4), "float32"), labels).diagnosis
    assert (found.cause, found.samples) == ("target_out_of_range", (3,))
    assert found.advice


@pytest.mark.parametrize("rate, step", [(1e-20, "finite"), (1e30, "bad")])
def test_gradients_whose_squares_overflow_are_judged_by_their_update(rate, step):
    """As in training: a step that leaves everything finite commits."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(rate), lambda y, prediction: 1e20 * (prediction - y))
    x = np.ones((32, 4), "float32")
    assert diagnose(model, x, x[:, :1]).step == step
    model.fit(x, x[:, :1], verbose=0, callbacks=[guard := NanGuard(verbose=0)])
    assert bool(guard.incidents) == (step == "bad")


def test_a_normalization_that_is_called_more_than_once():
    """Its statistics are those of all calls together."""
    inputs, normalization = [keras.Input((4,)) for _ in range(3)], layers.BatchNormalization()
    model = keras.Model(inputs, layers.Dense(1)(layers.add([normalization(x) for x in inputs])))
    x = [np.random.default_rng(n).normal(1000.0, 1.0, (32, 4)).astype("float32") for n in range(3)]
    normalization.moving_mean.assign(np.full(4, 1000.0))
    assert diagnose(model, x).ok
    normalization.moving_mean.assign(np.full(4, 1100.0))
    assert diagnose(model, x).diagnosis.cause == "batchnorm_statistics"


def test_a_bad_row_is_found_without_targets(trained):
    model, x, _ = trained
    x = x.copy()
    x[3] = np.nan
    found = diagnose(model, x)
    assert (found.diagnosis.cause, found.diagnosis.samples, found.step) == ("input_nonfinite", (3,), "")
    assert found.first_bad("inference") == model.layers[0].path
    json.dumps(found.to_dict(), allow_nan=False)


class Imputed(layers.Layer):
    """Replaces NaN by 0."""

    def call(self, x):
        return keras.ops.where(keras.ops.isnan(x), 0.0, x)


class Logarithm(layers.Layer):
    def call(self, x):
        return keras.ops.log(x)


@pytest.mark.parametrize("examined", [False, True])
def test_imputed_values_are_not_the_cause(examined):
    """Most rows miss a value, also the one whose logarithm is undefined."""
    inputs = keras.Input((4,))
    amount = Logarithm(name="log")(Imputed()(inputs)[:, :1])
    model = keras.Model(inputs, layers.Dense(1)(amount))
    model.compile("sgd", "mse")
    x, y = np.ones((16, 4), "float32"), np.zeros((16, 1), "float32")
    x[2:12, 2], x[5, 0] = np.nan, -1.0
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[guard := NanGuard(verbose=0)])
    found = diagnose(model, x, y).diagnosis if examined else guard.incidents[0].diagnosis
    assert (found.cause, found.culprit, found.samples) == ("forward_domain", "log", (5,))


class WithNone(keras.Model):
    """A model one of whose outputs is `None`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x), None


def test_an_output_may_be_none():
    model, x = WithNone(), np.ones((8, 4), "float32")
    model(x)
    assert diagnose(model, x).ok
    x[3] = np.nan
    assert diagnose(model, x).diagnosis.samples == (3,)


class Taken(layers.Layer):
    """Rows of a table of its own."""

    def build(self, shape):
        self.table = self.add_weight(shape=(4, 2), name="table")

    def call(self, ids):
        return keras.ops.sum(keras.ops.take(self.table, ids, axis=0), axis=1)


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX an index beyond a table gives NaN")
@pytest.mark.parametrize("own", [False, True])
def test_the_layer_with_an_index_beyond_its_table_is_named(own):
    """Negative indices count from the end."""
    layer = Taken(name="own") if own else keras.Sequential([layers.Embedding(4, 2), layers.GlobalAveragePooling1D()])
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layer, layers.Dense(1)])
    model.compile("sgd", "mse")
    ids = np.arange(24).reshape(8, 3) % 4
    ids[1, 1], ids[6, 2] = -3, 9
    found = diagnose(model, ids, np.ones((8, 1), "float32")).diagnosis
    assert found.cause == "forward_domain" and "-3" not in str(found)
    assert ("mbedding" in str(found)) is not own
    assert ("own" in found.culprit) is own
    if not own:
        assert found.samples == (6,) and "index 9" in found.evidence[0]


@pytest.mark.requires_backend("jax", reason="elsewhere an index beyond a table raises an exception")
def test_the_advice_for_nan_of_an_embedding_is_about_its_table():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(4, 2, name="table")])
    found = diagnose(model, np.array([[0, 1, 2], [1, 9, 3]])).diagnosis
    assert (found.cause, found.samples) == ("forward_domain", (1,))
    assert "table' inside its domain: make input_dim larger" in found.advice[0]


def test_weights_without_targets_are_not_targets(trained):
    weights = np.full(32, np.nan, "float32")
    for y in (None, trained[2]):
        assert "'y'" not in str(diagnose(trained[0], trained[1], y, weights))


def test_a_bad_gradient_shows_in_the_train_step_only():
    case = mechanisms.PROGRAMS["square_root_at_zero"](True)
    found = diagnose(case.model, case.x[16:24], case.y[16:24])
    assert (found.diagnosis.cause, found.step) == ("gradient_domain", "bad")
    assert found.first_bad("training") == ""


@pytest.mark.parametrize("names", [("first",), ("first", "second")])
def test_a_loss_is_named_before_any_fit(names):
    """The culprit is the function given to `compile`, although no step has built the losses yet."""

    def fine(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2)

    def cross_entropy(y_true, y_pred):
        return -keras.ops.mean(y_true * keras.ops.log(y_pred))

    inputs = keras.Input((4,))
    outputs = {n: layers.Dense(1, kernel_initializer="zeros", name=n)(inputs) for n in names}
    model = keras.Model(inputs, outputs)
    model.compile("adam", {n: cross_entropy if n == names[-1] else fine for n in names})
    found = diagnose(model, np.ones((4, 4), "float32"), {n: np.ones((4, 1)) for n in names})
    assert (found.diagnosis.cause, found.diagnosis.culprit) == ("loss_domain", "cross_entropy")


def test_labels_out_of_range_are_found():
    case = mechanisms.batch.sparse_label_too_large(True)
    found = diagnose(case.model, case.x[16:24], case.y[16:24])
    assert (found.diagnosis.cause, found.diagnosis.samples) == ("target_out_of_range", (4,))


class Subclassed(keras.Model):
    """A model whose output shapes are not known before it is called."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def test_labels_out_of_range_of_a_subclassed_model(capfd):
    """Classes are those of the outputs seen, or not stated. A step that raises is not skipped."""
    model = Subclassed()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.random.default_rng(0).standard_normal((8, 4)).astype("float32"), np.arange(8) % 3
    y[5] = 7
    guard, raised = NanGuard(), True
    with contextlib.suppress(Exception):  # on some backends the step raises one
        model.fit(x, y, verbose=0, callbacks=[guard])
        raised = False
    printed = capfd.readouterr().out
    assert ("NanGuard: error in step 1 (epoch 1): " in printed) == raised
    assert not (raised and "skipped" in printed)
    examined = diagnose(model, x, y)
    for found in (*(i.diagnosis for i in guard.incidents), examined.diagnosis):
        text = str(found)
        assert found.cause == "target_out_of_range" and "class index 7" in text
        assert "0 classes" not in text and "-1" not in text


def test_a_layer_with_a_space_in_its_name_is_the_culprit():
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(name="my bn")])
    model.get_layer("my bn").moving_variance.assign([1e9] * 4)
    found = diagnose(model, np.random.default_rng(0).standard_normal((32, 4)).astype("float32"))
    assert found.diagnosis.culprit == model.get_layer("my bn").moving_variance.path


def test_only_models_are_examined():
    with pytest.raises(GuardError, match="Expected a Keras model"):
        diagnose("model.keras", np.zeros((1, 4)))


@pytest.mark.parametrize(
    ("x", "y", "what"),
    [
        ((8, 5), None, "the forward pass in inference mode raised ValueError: "),
        ((8, 5), (8, 1), "the forward pass in inference mode raised ValueError: "),
        ((8, 4), (8, 7, 9), "a train step raised "),
    ],
)
def test_data_that_the_model_does_not_take_is_an_error(trained, x, y, what):
    """It has the text of the exception."""
    with pytest.raises(GuardError, match=what) as caught:
        diagnose(trained[0], np.zeros(x, "float32"), None if y is None else np.zeros(y, "float32"))
    assert "\x1b" not in str(caught.value)


class OnlyInSteps(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that cannot be read outside of a step."""

    readable = True

    def __call__(self, step):
        if not self.readable:
            raise IndexError(step)
        return 0.01


def test_a_rate_that_cannot_be_read_does_not_hide_the_cause(trained):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    rate = OnlyInSteps()
    model.compile(keras.optimizers.SGD(rate), "mse")
    x = np.full((8, 4), np.nan, "float32")
    rate.readable = False
    found = diagnose(model, x, np.zeros((8, 1), "float32"))
    assert found.diagnosis.cause == "input_nonfinite"
    assert "learning_rate" not in str(found)
