"""The arrays in a file are found and named as in the live model, without importing a backend."""

import inspect
import os
import subprocess
import sys
import zipfile

import h5py
import ml_dtypes
import numpy as np
import pytest

from keras_nanguard import scan

NOT_SAVED = ("seed_generator_state", "metrics/", "optimizer/")


def paths(report):
    found = {entry.path for entry in report.variables}
    return {path for path in found if not any(part in path for part in NOT_SAVED)}


def save_in_every_format(model, folder):
    model.save(folder / "model.keras")
    model.save(folder / "legacy.h5")
    model.save_weights(folder / "model.weights.h5")
    # not in the lowest Keras
    sharded = "max_shard_size" in inspect.signature(model.save_weights).parameters
    if sharded:
        model.save_weights(folder / "model.weights.json", max_shard_size=1e-6)
    from keras.src.saving import saving_lib

    saving_lib.save_model(model, str(folder / "unzipped"), zipped=False)
    names = ["model.keras", "legacy.h5", "unzipped", "model.weights.h5"]
    return [*names, *["model.weights.json"] * sharded]


def test_every_format_gives_the_names_of_the_live_model(nested, tmp_path):
    """And its values."""
    model = nested()
    live = scan(model)
    values = {entry.path: entry.statistics for entry in live.variables if entry.role != "slot"}
    assert "backbone/post_bn/moving_variance" in paths(live)
    for name in save_in_every_format(model, tmp_path):
        report = scan(tmp_path / name)
        found = paths(report)
        # without a configuration the flag of one gamma or beta does not follow
        if "weights" in name:
            found = {path.replace("backbone/post_bn/0", "backbone/post_bn/beta") for path in found}
        assert found == paths(live), name
        for entry in report.variables:
            assert values.get(entry.path, entry.statistics) == entry.statistics, (name, entry.path)


def renormalizes(keras):
    """Whether BatchNormalization takes `renorm`; that of the lowest Keras does not."""
    return "renorm" in inspect.signature(keras.layers.BatchNormalization).parameters


@pytest.fixture(scope="module")
def zoo(keras, tmp_path_factory):
    """Return a model with one layer of every class whose variables have names, and its file."""
    layers = keras.layers
    image, text = keras.Input((8, 8, 4)), keras.Input((6,), dtype="int32")
    x = layers.SeparableConv2D(4, 3, padding="same")(image)
    x = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    x = layers.Conv2DTranspose(4, 3, padding="same")(x)
    x = layers.PReLU(shared_axes=[1, 2])(x)
    x = layers.GroupNormalization(2)(x)
    x = layers.BatchNormalization(center=False)(x)
    if renormalizes(keras):
        x = layers.BatchNormalization(renorm=True)(x)
    x = x * 2.0 + 1.0  # operations, not layers
    x = layers.Flatten()(layers.Normalization(mean=[0.5] * 4, variance=[2.0] * 4)(x))
    y = layers.Embedding(10, 4)(text)
    y = layers.MultiHeadAttention(2, 3, use_bias=False)(y, y)
    y = layers.LayerNormalization(center=False)(y)
    if hasattr(layers, "RMSNormalization"):  # not in the lowest Keras
        y = layers.RMSNormalization()(y)
    y = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(y)
    y = layers.TimeDistributed(layers.Dense(3))(y)
    y = layers.RNN(layers.GRUCell(3), return_sequences=True)(y)
    y = layers.SimpleRNN(3, use_bias=False)(y)
    z = layers.Add()([layers.Dense(2)(x), layers.Dense(2, use_bias=False)(y)])
    model = keras.Model([image, text], z)
    path = tmp_path_factory.mktemp("zoo") / "zoo.keras"
    model.save(path)
    return model, path


def test_the_number_of_a_variable_is_turned_into_its_name(zoo):
    model, path = zoo
    assert paths(scan(path)) == paths(scan(model))


def test_a_file_without_layer_names_is_named_from_its_configuration(keras, zoo, tmp_path):
    """Files of older Keras have no layer names; the configuration numbers them like Keras."""
    model, path = zoo
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    with h5py.File(tmp_path / "model.weights.h5", "r+") as file:
        file.visititems(lambda key, node: node.attrs.clear())
    with zipfile.ZipFile(tmp_path / "old.keras", "w") as archive:
        for name in ("config.json", "model.weights.h5"):
            archive.write(tmp_path / name, name)
    known = {entry.path.split("/")[0] for entry in scan(model).variables}
    named = [entry.path for entry in scan(tmp_path / "old.keras").variables]
    assert {path.split("/")[0] for path in named if not path.startswith("seed")} <= known
    assert ("batch_normalization_1/moving_stddev" in named) == renormalizes(keras)


def test_a_subclassed_model_is_named_by_its_layers(keras, tmp_path):
    """Layers in attributes, lists and dicts have their names, and BatchNorm is recognised."""

    class Sub(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras.layers.Dense(3), keras.layers.Dense(4)]
            self.table = {"a": keras.layers.BatchNormalization()}

        def call(self, x, training=False):
            for block in self.blocks:
                x = block(x)
            return self.table["a"](x, training=training)

    model = Sub()
    model(np.zeros((2, 5), np.float32))
    model.save(tmp_path / "sub.keras")
    assert paths(scan(tmp_path / "sub.keras")) == paths(scan(model))


def test_bfloat16_is_read_by_the_name_in_its_attribute(make, tmp_path):
    """Keras saves it as two unnamed bytes: NaN in them is found."""
    path = tmp_path / "brain.weights.h5"
    values = np.array([1.0, np.nan, -np.inf, 0.0], ml_dtypes.bfloat16)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("layers/dense/vars/0", data=values)
        dataset.attrs["dtype"] = "bfloat16"
        file["layers/dense/vars/1"] = values
    named, unnamed = scan(path).variables
    assert (named.dtype, named.statistics.nan, named.statistics.neginf) == ("bfloat16", 1, 1)
    assert unnamed.problems[0].code == "unread"


@pytest.mark.parametrize("compression", (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
def test_weights_are_read_however_the_archive_stores_them(make, compression):
    """A stored member in place, a compressed one through a temporary file: the same result."""
    report = scan(make.keras({make.SECOND_VARIANCE: np.nan}, compression=compression))
    assert [entry.path for entry in report.bad] == ["backbone/second_bn/moving_variance"]


def test_chunked_and_compressed_datasets_and_odd_shapes_are_read_whole(tmp_path):
    """Chunked, compressed, big-endian, scalar, empty, more than one piece: every value."""
    draw = np.random.default_rng(0)
    arrays = {
        "chunked": {"data": draw.normal(size=(300, 70)), "chunks": (7, 70), "compression": "gzip"},
        "tall": {"data": draw.normal(size=(1_300_000,)).astype(">f4")},
        "wide": {"data": draw.normal(size=(2, 1_100_000)).astype(np.float16)},
        "scalar": {"data": np.float32(3.0)},
        "empty": {"data": np.zeros((0, 5), np.float32)},
        "null": {"data": h5py.Empty("f4")},
    }
    path = tmp_path / "layouts.weights.h5"
    with h5py.File(path, "w") as file:
        for name, options in arrays.items():
            file.create_dataset(name, **options)
    found = {entry.path: entry.statistics for entry in scan(path).variables}
    for name in set(arrays) - {"null"}:
        values = np.asarray(arrays[name]["data"])
        assert found[name].size == values.size
        if values.size:
            assert (found[name].min, found[name].max) == (values.min(), values.max())
            assert found[name].mean == pytest.approx(values.mean(dtype="float64"), abs=1e-5)


def test_npz_is_read_in_either_order_and_without_pickle(make):
    """Arrays of an `.npz` equal those of NumPy, in C or Fortran order, compressed or not."""
    matrix = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    path = make.npz(a=matrix, b=np.array([np.nan, 1.0]), c=np.arange(3))
    report = scan(path)
    first = report.variables[0].statistics
    assert (first.min, first.max, first.mean) == (0.0, 11.0, 5.5)
    assert [entry.path for entry in report.bad] == ["b"]
    np.savez_compressed(path, **{"layer/kernel": np.full(9, np.inf)})
    assert scan(path).variables[0].statistics.posinf == 9


def test_a_variable_that_two_answers_fit_keeps_its_number(make):
    """Without a configuration, BatchNorm's gamma or beta alone keeps its number."""
    with h5py.File(make.folder / "x.weights.h5", "w") as file:
        for place in range(3):
            file[f"layers/batch_normalization/vars/{place}"] = np.ones(4)
    names = [entry.name for entry in scan(make.folder / "x.weights.h5").variables]
    assert names == ["0", "moving_mean", "moving_variance"]


def test_a_shard_without_the_name_of_a_layer(make):
    """Keras names a layer only in the first of its shards: in others its group gives the name."""
    with h5py.File(make.folder / "x.weights.h5", "w") as file:
        file["layers/dense_1/vars/0"] = np.ones((4, 2))
        file["optimizer/vars/0"] = np.int64(3)
        file["optimizer/vars"].attrs["name"] = "adam"
    found = [entry.path for entry in scan(make.folder / "x.weights.h5").variables]
    assert found == ["dense_1/0", "optimizer/iteration"]


def test_whole_numbers_in_a_layer_of_floats_keep_all_numbers(make):
    """The second array of a quantized Dense without bias is its scale, not its bias."""
    with h5py.File(make.folder / "x.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones((4, 2), np.int8)
        file["layers/dense/vars/1"] = np.ones(2, np.float32)
    names = [entry.name for entry in scan(make.folder / "x.weights.h5").variables]
    assert names == ["0", "1"]


def test_a_legacy_file_may_contain_the_name_of_the_model(keras, tmp_path):
    """Keras adds it to the variables of a Sequential that it builds at once."""
    layers = [keras.layers.Dense(3, name="a"), keras.layers.BatchNormalization(name="bn")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    model.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as file:
        found = []
        file["model_weights"].visit(found.append)
    assert "a/net/a/kernel" in found or "a/a/kernel" in found
    assert paths(scan(tmp_path / "model.h5")) == paths(scan(model))


def test_no_backend_is_imported_to_scan_or_repair_a_file(make):
    path = make.keras({make.SECOND_VARIANCE: np.nan})
    code = (
        "import sys; from keras_nanguard import repair, scan\n"
        "assert not scan(sys.argv[1]).ok; assert repair(sys.argv[1]).ok\n"
        "slow = ('keras', 'tensorflow', 'jax', 'torch', 'rich', 'tensorstore')\n"
        "print([m for m in slow if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
