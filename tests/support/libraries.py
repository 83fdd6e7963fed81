"""Model libraries on Keras 3, each with a small model; no downloads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

from support import zoo

GOOD = 5
"""Number of good batches; a bad run has one more, the last."""
ROWS = zoo.BATCH * (GOOD + 1)

LIBRARIES: dict[str, Library] = {}


@dataclass(frozen=True)
class Library:
    """A model of a library, with its data and the part that can be bad."""

    package: str
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    bad: str = "x"

    def train(self, guard: Any = None, bad: bool = False) -> tuple[dict[str, list[float]], list[tuple[str, np.ndarray]]]:
        """Return history and state after good batches, and one bad batch if requested."""
        importlib.import_module(self.package)  # some draw random numbers as they are imported
        keras.utils.set_random_seed(0)
        model, data = self.build(), self.data()
        if bad:
            array = next(part for part in keras.tree.flatten(data[self.bad]) if getattr(part, "dtype", None) == np.float32)
            array[GOOD * zoo.BATCH + 2 : GOOD * zoo.BATCH + 3].reshape(-1)[:1] = np.nan
        rows = zoo.BATCH * (GOOD + bad)
        data = {name: _first(part, rows) for name, part in data.items()}
        keras.utils.set_random_seed(1)
        settings = {"batch_size": zoo.BATCH, "shuffle": False, "epochs": 1, "verbose": 0}
        history = model.fit(**data, **settings, callbacks=[guard] if guard else []).history
        return history, zoo.state_of(model)


def _first(data: Any, rows: int) -> Any:
    return {name: _first(part, rows) for name, part in data.items()} if isinstance(data, dict) else data[:rows]


def library(name: str, package: str, data: Callable[[], dict[str, Any]], **more: Any) -> Callable[[Any], Any]:
    """Add a library to the table."""

    def enter(build: Any) -> Any:
        LIBRARIES[name] = Library(package, build, data, **more)
        return build

    return enter


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, *shape)).astype("float32")


def whole(high: int, *shape: int, low: int = 0) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, (ROWS, *shape)).astype("int32")


def ones(*shape: int) -> np.ndarray:
    return np.ones((ROWS, *shape), "float32")


# KerasHub: a model whose inputs are tokens goes bad by its weights

SMALL = {"vocabulary_size": 30, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 8}


def tokens() -> dict[str, Any]:
    x = {"token_ids": whole(30, 8, low=1), "padding_mask": np.ones((ROWS, 8), "int32"), "segment_ids": np.zeros((ROWS, 8), "int32")}
    return {"x": x, "y": whole(3), "sample_weight": ones()}


@library("KerasHub: BERT classifier", "keras_hub", tokens, bad="sample_weight")
def bert() -> Any:
    from keras_hub import models

    return models.BertTextClassifier(models.BertBackbone(**SMALL), num_classes=3, preprocessor=None)


def images() -> dict[str, Any]:
    return {"x": normal(16, 16, 3), "y": whole(3)}


@library("KerasHub: ResNet", "keras_hub", images)
def resnet() -> Any:
    from keras_hub import models

    backbone = models.ResNetBackbone([64], [7], [64, 64], [1, 1], [1, 2], "basic_block", image_shape=(16, 16, 3))
    return models.ResNetImageClassifier(backbone, num_classes=3, preprocessor=None)


# KerasRS


@library("KerasRS: ranking with FeatureCross", "keras_rs", lambda: {"x": normal(6), "y": whole(2).astype("float32")})
def ranking() -> Any:
    import keras_rs

    inputs = keras.Input((6,))
    crossed = keras_rs.layers.FeatureCross()(inputs, keras_rs.layers.FeatureCross()(inputs, inputs))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(crossed))
    model.compile("adam", "binary_crossentropy")
    return model
