"""Small model files, made with h5py if possible, and otherwise with Keras once per session."""

import io
import json
import os
import zipfile

import h5py
import numpy as np
import pytest
from support.reading import in_this_process, own_process  # noqa: F401  fixtures of every test here

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def fill_weights(file, bad=None):
    """Write two BatchNormalizations and a Dense layer as Keras 3 writes them."""
    for number, name in enumerate(("first_bn", "second_bn")):
        suffix = f"_{number}" if number else ""
        group = file.create_group(f"layers/functional/layers/batch_normalization{suffix}/vars")
        group.attrs["name"] = name
        for place, value in enumerate((1.0, 0.5, 0.25, 2.0)):
            group[str(place)] = np.full(4, value, np.float32)
    file.create_group("layers/functional/vars").attrs["name"] = "backbone"
    group = file.create_group("layers/dense/vars")
    group.attrs["name"] = "head"
    group["0"], group["1"] = np.arange(12, dtype=np.float32).reshape(4, 3), np.zeros(3, np.float32)
    for location, value in (bad or {}).items():
        file[location][...] = value
    return file


CONFIG = {
    "class_name": "Functional",
    "config": {
        "name": "model",
        "layers": [
            {
                "class_name": "Functional",
                "config": {
                    "name": "backbone",
                    "layers": [
                        {"class_name": "BatchNormalization", "config": {"name": "first_bn"}},
                        {"class_name": "BatchNormalization", "config": {"name": "second_bn"}},
                    ],
                },
            },
            {"class_name": "Dense", "config": {"name": "head", "dtype": "mixed_float16"}},
        ],
    },
}

SECOND_VARIANCE = "layers/functional/layers/batch_normalization_1/vars/3"
FIRST_MEAN = "layers/functional/layers/batch_normalization/vars/2"
KERNEL = "layers/dense/vars/0"


class Maker:
    SECOND_VARIANCE, FIRST_MEAN, KERNEL, CONFIG = SECOND_VARIANCE, FIRST_MEAN, KERNEL, CONFIG

    def __init__(self, folder):
        self.folder = folder

    def weights(self, bad=None, name="model.weights.h5", **options):
        path = self.folder / name
        with h5py.File(path, "w", **options) as file:
            fill_weights(file, bad)
        return str(path)

    def keras(
        self, bad=None, name="model.keras", compression=zipfile.ZIP_STORED, config=CONFIG, extra=()
    ):
        path = self.folder / name
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("metadata.json", '{"keras_version": "3.15.1"}')
            archive.writestr(
                "config.json", config if isinstance(config, (str, bytes)) else json.dumps(config)
            )
            archive.writestr("model.weights.h5", self.weights_bytes(bad))
            for member, data in extra:
                archive.writestr(member, data)
        return str(path)

    def npz(self, name="model.npz", **arrays):
        path = self.folder / name
        np.savez(path, **arrays)
        return str(path)

    def sharded(self, bad=None, name="model"):
        source = self.weights(bad, name="whole.h5")
        weight_map = {}
        with h5py.File(source) as whole:
            for number, top in enumerate(("functional", "dense")):
                shard = f"{name}_{number:05}.weights.h5"
                with h5py.File(self.folder / shard, "w") as file:
                    whole.copy(f"layers/{top}", file.create_group("layers"), top)
                    file.visit(
                        lambda key, shard=shard: (
                            weight_map.update({f"/{key}": [shard]})
                            if key.endswith("vars")
                            else None
                        )
                    )
        path = self.folder / f"{name}.weights.json"
        path.write_text(json.dumps({"metadata": {"total_size": 1.0}, "weight_map": weight_map}))
        os.unlink(source)
        return str(path)

    def raw(self, data, name="raw.bin"):
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    @staticmethod
    def weights_bytes(bad=None):
        buffer = io.BytesIO()
        with h5py.File(buffer, "w") as file:
            fill_weights(file, bad)
        return buffer.getvalue()


@pytest.fixture
def make(tmp_path):
    return Maker(tmp_path)


@pytest.fixture(scope="session")
def keras():
    """Keras, imported only by the tests that need a model."""
    return pytest.importorskip("keras")


@pytest.fixture(scope="session")
def nested(keras):
    """Return a function that trains a convolutional model nested in a functional one."""
    layers = keras.layers

    def build(seed=0):
        keras.utils.set_random_seed(seed)
        inner_input = keras.Input((8, 8, 3))
        x = layers.Conv2D(6, 3, padding="same", name="inner_conv")(inner_input)
        x = layers.BatchNormalization(name="conv_bn")(x)
        x = layers.Activation("relu")(x)
        x = layers.BatchNormalization(scale=False, name="post_bn")(x)
        backbone = keras.Model(inner_input, layers.GlobalAveragePooling2D()(x), name="backbone")
        outer_input = keras.Input((8, 8, 3))
        y = layers.Dropout(0.1, seed=1)(backbone(outer_input))
        model = keras.Model(
            outer_input, layers.Dense(3, activation="softmax", name="head")(y), name="outer"
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return build


@pytest.fixture(scope="session")
def task():
    """Return images of three classes that differ in brightness."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 192)
    images = draw.normal(0.0, 0.3, (192, 8, 8, 3)) + labels[:, None, None, None]
    return images.astype(np.float32), labels
