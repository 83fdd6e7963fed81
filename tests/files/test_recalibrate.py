"""Recalibrating estimates the statistics of the data, and changes nothing else."""

import warnings

import numpy as np
import pytest

from keras_nanguard import GuardError, recalibrate


def chain(keras, *layers, shape=(4,)):
    return keras.Sequential([keras.Input(shape), *layers])


def agrees(layer, data):
    """Compare the statistics of a layer with those of the data, by channel."""
    values = data.astype(np.float64).reshape(-1, data.shape[-1])
    np.testing.assert_allclose(layer.moving_mean.numpy(), values.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), values.var(0), rtol=1e-4)


@pytest.mark.parametrize("batch_size", (1, 7, 64, 500))
def test_the_estimate_is_that_of_all_of_the_data(keras, batch_size):
    """For the first layer, mean and variance are those of all data, independent of the batches."""
    draw = np.random.default_rng(0)
    x = (draw.normal(size=(200, 5, 4)) * [1, 10, 100, 0.01] + [0, 1000, -5, 3]).astype(np.float32)
    model = chain(keras, keras.layers.BatchNormalization(name="bn"), shape=(5, 4))
    report = recalibrate(model, x, batch_size=batch_size)
    agrees(model.get_layer("bn"), x)
    assert (report.layers[0].samples, report.batches) == (1000, -(-200 // batch_size))


def test_statistics_from_one_batch_make_inference_agree_with_training(keras, nested, task):
    backbone, x = nested().get_layer("backbone"), task[0]
    recalibrate(backbone, x, batch_size=len(x))
    inference, training = (
        keras.ops.convert_to_numpy(backbone(x, training=mode)) for mode in (False, True)
    )
    np.testing.assert_allclose(inference, training, atol=1e-4)


def test_nothing_else_moves(keras, task):
    """Weights, slots, metrics, seeds, states and flags keep their bits, and Dropout is off."""
    layers = keras.layers
    body = [layers.GaussianNoise(0.1), layers.BatchNormalization(name="bn"), layers.Dropout(0.5)]
    body += [layers.BatchNormalization(name="frozen", trainable=False), layers.Reshape((4, 1))]
    model = chain(keras, *body, layers.LSTM(3), layers.Dense(1))
    model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(2.0, 3.0, (64, 4)).astype(np.float32)
    model.fit(x, x[:, :1], verbose=0)
    norms = [model.get_layer(name) for name in ("bn", "frozen")]
    moved = {id(v) for norm in norms for v in (norm.moving_mean, norm.moving_variance)}
    everything = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = {id(v): np.array(v.numpy()).tobytes() for v in everything}
    report = recalibrate(model, x, batch_size=16)
    assert [layer.path for layer in report.layers] == ["bn", "frozen"]
    for variable in everything:
        same = np.array(variable.numpy()).tobytes() == before[id(variable)]
        assert same == (id(variable) not in moved), variable.path
    assert not model.get_layer("frozen").trainable
    assert "call" not in vars(model.get_layer("bn"))


def test_layers_of_one_name_are_estimated_each(keras):
    """Within a custom layer they have one path."""
    norm = keras.layers.BatchNormalization

    class Twins(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = norm(name="bn"), norm(name="bn", center=False)

        def call(self, x, training=False):
            return self.b(self.a(x, training=training) + 5.0, training=training)

    model, x = Twins(), np.random.default_rng(0).normal(9.0, 3.0, (40, 4)).astype(np.float32)
    model(x)
    assert [layer.path for layer in recalibrate(model, x).layers] == ["bn", "bn"]
    agrees(model.a, x)
    np.testing.assert_allclose(model.b.moving_mean.numpy(), np.full(4, 5.0), rtol=1e-4)


def test_a_stateful_layer_and_hard_wired_dropout_keep_their_state(keras):
    inputs = keras.Input((3, 2), batch_size=4)
    x = keras.layers.BatchNormalization()(inputs)
    x = keras.layers.Dropout(0.5, name="always")(x, training=True)
    model = keras.Model(inputs, keras.layers.LSTM(2, stateful=True, name="memory")(x))
    model(np.ones((4, 3, 2), np.float32))
    kept = [*model.get_layer("memory").states, *model.get_layer("always").variables]
    before = [np.array(v.numpy()) for v in kept]
    data = np.random.default_rng(0).normal(size=(8, 3, 2)).astype(np.float32)
    recalibrate(model, data, batch_size=4)
    for variable, value in zip(kept, before):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_layer_that_is_hard_wired_to_training_is_estimated_all_the_same(keras):
    """BatchNormalization called with `training=True` gets the estimate, not its own average."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.BatchNormalization(name="bn")(inputs, training=True))
    x = np.random.default_rng(0).normal(9.0, 3.0, (40, 4)).astype(np.float32)
    recalibrate(model, x, batch_size=10)
    agrees(model.get_layer("bn"), x)


def test_masked_positions_are_excluded(keras):
    inputs = keras.Input((6, 2))
    x = keras.layers.Masking(mask_value=0.0)(inputs)
    model = keras.Model(inputs, keras.layers.BatchNormalization(name="bn")(x))
    data = np.random.default_rng(0).normal(5.0, 2.0, (10, 6, 2)).astype(np.float32)
    data[:, 4:] = 0.0
    recalibrate(model, data, batch_size=10)
    agrees(model.get_layer("bn"), data[:, :4])


def test_a_batch_that_is_only_padding_counts_nothing(keras):
    """Neither first nor between others."""
    inputs = keras.Input((6, 2))
    x = keras.layers.Masking(mask_value=0.0)(inputs)
    model = keras.Model(inputs, keras.layers.BatchNormalization(name="bn")(x))
    data = np.random.default_rng(0).normal(5.0, 2.0, (4, 6, 2)).astype(np.float32)
    data[[0, 2]] = 0.0
    (layer,) = recalibrate(model, data, batch_size=1).layers
    assert layer.samples == 12
    agrees(model.get_layer("bn"), data[1::2])


def test_any_source_of_batches_will_do(keras):
    """Arrays, dicts, generators, PyDatasets: the same estimate; `batches` stops early."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return x[index * 10 : index * 10 + 10], np.zeros(10)

    found = []
    warnings.filterwarnings("error", "The structure of")  # more inputs than the model has
    for data in (
        x,
        pytest.importorskip("pandas").DataFrame(x),
        Data(),
        ((x[i : i + 10], 0) for i in range(0, 40, 10)),
        [(x[:10], 0), (x[10:40], 0)],
        [(x[:10], np.zeros(10)), (x[10:40], np.zeros(30))],
        [[x[i : i + 10], np.zeros((10, 1))] for i in range(0, 40, 10)],
        ([x[i : i + 10], np.zeros(10)] for i in range(0, 40, 10)),  # as a DataLoader of PyTorch
    ):
        model = chain(keras, keras.layers.BatchNormalization())
        recalibrate(model, data, batch_size=10)
        found.append(model.layers[0].moving_variance.numpy())
    for variance in found[1:]:
        np.testing.assert_allclose(variance, found[0], rtol=1e-5)
    first = chain(keras, keras.layers.BatchNormalization())
    assert recalibrate(first, Data(), steps=1).batches == 1
    assert recalibrate(first, x, batch_size=10, steps=10**30).batches == 4
    recalibrate(first, Data(), steps=1)
    np.testing.assert_allclose(first.layers[0].moving_mean.numpy(), x[:10].mean(0), atol=1e-6)
    named = keras.Input((4,), name="a")
    model = keras.Model({"a": named}, keras.layers.BatchNormalization()(named))
    recalibrate(model, {"a": x})
    np.testing.assert_allclose(model.layers[-1].moving_variance.numpy(), found[0], rtol=1e-5)


@pytest.mark.parametrize("only", (["post_*"], "post_*"))
def test_only_chosen_layers_are_estimated(nested, task, only):
    """`only` takes names and paths; a string is one pattern."""
    model = nested()
    inner = model.get_layer("backbone")
    before = inner.get_layer("conv_bn").moving_mean.numpy()
    with pytest.raises(GuardError, match=r"matches a pattern.*Received.*pre_"):
        recalibrate(model, task[0], only="pre_*")
    report = recalibrate(model, task[0], only=only)
    assert [layer.path for layer in report.layers] == ["backbone/post_bn"]
    np.testing.assert_array_equal(inner.get_layer("conv_bn").moving_mean.numpy(), before)


def test_errors_keep_the_old_statistics(keras, nested, task):
    """NaN, no data, one value, an interrupt: the error names the layer, nothing is changed."""
    model = nested()
    inner = model.get_layer("backbone")
    before = [v.numpy() for v in model.variables]
    bad = task[0][:32].copy()
    bad[3] = np.nan

    def interrupted():
        yield task[0][:8]
        raise KeyboardInterrupt

    with pytest.raises(GuardError, match="backbone/conv_bn"):
        recalibrate(model, bad)
    with pytest.raises(GuardError, match="at least one batch"):
        recalibrate(model, task[0][:0])
    for scalar in (np.float32(1.0), np.array(1.0)):
        with pytest.raises(GuardError, match="arrays or an iterable of batches"):
            recalibrate(model, scalar)
    with pytest.raises(KeyboardInterrupt):
        recalibrate(model, interrupted())
    single = chain(keras, keras.layers.BatchNormalization(name="bn"))
    with pytest.raises(GuardError, match=r"two values per channel.*one value at bn"):
        recalibrate(single, np.ones((1, 4), np.float32))
    np.testing.assert_array_equal(single.get_layer("bn").moving_variance.numpy(), np.ones(4))
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert "call" not in vars(inner.get_layer("conv_bn"))
    with pytest.raises(GuardError, match="BatchNormalization"):
        recalibrate(chain(keras, keras.layers.Dense(1)), np.ones((3, 4)))


def test_arrays_of_different_lengths_are_refused(keras):
    """As in `fit`, and not cut to the shortest."""
    inputs = [keras.Input((2,)), keras.Input((2,))]
    total = keras.layers.Add()([keras.layers.BatchNormalization()(x) for x in inputs])
    model = keras.Model(inputs, total)
    with pytest.raises(GuardError, match="same number of rows"):
        recalibrate(model, [np.ones((8, 2)), np.ones((4, 2))])


def test_a_list_of_dicts_is_a_list_of_batches(keras):
    """As it is for an iterator of the same batches."""
    first, second = keras.Input((4,), name="first"), keras.Input((2,), name="second")
    norm = keras.layers.BatchNormalization(name="bn")
    output = keras.layers.Concatenate()([norm(first), second])
    model = keras.Model({"first": first, "second": second}, output)
    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=(16, n)).astype("float32") for name, n in (("first", 4), ("second", 2))}
    batches = [{name: x[i : i + 8] for name, x in data.items()} for i in (0, 8)]
    assert recalibrate(model, batches).batches == 2
    agrees(norm, data["first"])
