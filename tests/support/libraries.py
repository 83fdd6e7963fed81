"""Model libraries on Keras 3, each with a small model and its own `fit`; no downloads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from support import zoo

GOOD = 5
"""Number of good batches; a bad run has one more, the last."""
ROWS = zoo.BATCH * (GOOD + 1)

LIBRARIES: dict[str, Library] = {}


@dataclass(frozen=True)
class Library:
    """A model of a library, with its data, the part that can be bad, and its backends."""

    package: str
    build: Callable[[], Any]
    data: Callable[[], dict[str, Any]]
    bad: str = "x"
    fit: Callable[..., Any] | None = None
    on: tuple[str, ...] = ("tensorflow", "jax", "torch")

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
        fit = self.fit or _fit
        history = fit(model, data, epochs=1, verbose=0, callbacks=[guard] if guard else []).history
        return history, zoo.state_of(model)


def _first(data: Any, rows: int) -> Any:
    return {name: _first(part, rows) for name, part in data.items()} if isinstance(data, dict) else data[:rows]


def _fit(model: Any, data: dict[str, Any], **more: Any) -> Any:
    return model.fit(**data, batch_size=zoo.BATCH, shuffle=False, **more)


def library(name: str, package: str, data: Callable[[], dict[str, Any]], **more: Any) -> Callable[[Any], Any]:
    """Add a library to the table."""

    def enter(build: Any) -> Any:
        LIBRARIES[name] = Library(package, build, data, **more)
        return build

    return enter


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, *shape)).astype("float32")


def whole(high: int, *shape: int, low: int = 0) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, (ROWS, *shape)).astype("int32")


def ones(*shape: int) -> np.ndarray:
    return np.ones((ROWS, *shape), "float32")


# KerasHub: models whose inputs are tokens or text go bad by their weights

SMALL = {"vocabulary_size": 30, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 8}


def tokens() -> dict[str, Any]:
    x = {"token_ids": whole(30, 8, low=1), "padding_mask": np.ones((ROWS, 8), "int32"), "segment_ids": np.zeros((ROWS, 8), "int32")}
    return {"x": x, "y": whole(3), "sample_weight": ones()}


@library("KerasHub: BERT classifier", "keras_hub", tokens, bad="sample_weight")
def bert() -> Any:
    from keras_hub import models

    return models.BertTextClassifier(models.BertBackbone(**SMALL), num_classes=3, preprocessor=None)


def sentences() -> dict[str, Any]:
    return {"x": [" ".join(f"w{word}" for word in row) for row in whole(20, 6)], "y": whole(3), "sample_weight": ones()}


@library("KerasHub: BERT classifier on text", "keras_hub", sentences, bad="sample_weight")
def bert_on_text() -> Any:
    from keras_hub import models

    tokenizer = models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{word}" for word in range(20))])
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    return models.BertTextClassifier(models.BertBackbone(**SMALL), num_classes=3, preprocessor=preprocessor)


def text() -> dict[str, Any]:
    x = {"token_ids": whole(30, 8), "padding_mask": np.ones((ROWS, 8), "int32")}
    return {"x": x, "y": whole(30, 8), "sample_weight": ones(8)}


@library("KerasHub: GPT-2 with LoRA", "keras_hub", text, bad="sample_weight")
def gpt2() -> Any:
    from keras_hub import models

    backbone = models.GPT2Backbone(**SMALL)
    backbone.enable_lora(2)
    return models.GPT2CausalLM(backbone, preprocessor=None)


def images() -> dict[str, Any]:
    return {"x": normal(16, 16, 3), "y": whole(3)}


@library("KerasHub: ResNet", "keras_hub", images)
def resnet() -> Any:
    from keras_hub import models

    backbone = models.ResNetBackbone([64], [7], [64, 64], [1, 1], [1, 2], "basic_block", image_shape=(16, 16, 3))
    return models.ResNetImageClassifier(backbone, num_classes=3, preprocessor=None)


@library("KerasHub: ViT", "keras_hub", images)
def vit() -> Any:
    from keras_hub import models

    backbone = models.ViTBackbone((16, 16, 3), patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16)
    return models.ViTImageClassifier(backbone, num_classes=3, preprocessor=None)


# KerasRS


@library("KerasRS: ranking with FeatureCross", "keras_rs", lambda: {"x": normal(6), "y": whole(2).astype("float32")})
def ranking() -> Any:
    import keras_rs

    inputs = keras.Input((6,))
    crossed = keras_rs.layers.FeatureCross()(inputs, keras_rs.layers.FeatureCross()(inputs, inputs))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(crossed))
    model.compile("adam", "binary_crossentropy")
    return model


@library("KerasRS: ranking of lists", "keras_rs", lambda: {"x": normal(5, 3), "y": whole(4, 5).astype("float32")})
def ranking_of_lists() -> Any:
    import keras_rs

    model = keras.Sequential([keras.Input((5, 3)), layers.Dense(8, activation="relu"), layers.Dense(1), layers.Reshape((5,))])
    model.compile("adam", keras_rs.losses.PairwiseHingeLoss(), metrics=[keras_rs.metrics.NDCG(k=3)])
    return model


def retrieval_model() -> Any:
    """Two towers with an in-batch loss, without accidental hits and with hard negatives."""
    import keras_rs

    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.query, self.candidate = layers.Dense(4), layers.Embedding(20, 4)
            self.hits, self.hard = keras_rs.layers.RemoveAccidentalHits(), keras_rs.layers.HardNegativeMining(4)

        def build(self, shape):
            self.query.build((None, 6))
            self.candidate.build((None,))

        def call(self, x):
            return {"query": self.query(x["query"]), "candidate": self.candidate(x["candidate"])}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            logits, labels = ops.matmul(y_pred["query"], ops.transpose(y_pred["candidate"])), ops.eye(zoo.BATCH)
            logits, labels = self.hard(self.hits(logits, labels, x["candidate"]), labels)
            return ops.mean(keras.losses.categorical_crossentropy(labels, logits, from_logits=True))

    model = Towers()
    model.compile("adam")
    return model


library("KerasRS: retrieval", "keras_rs", lambda: {"x": {"query": normal(6), "candidate": whole(20)}, "y": whole(20)})(retrieval_model)


# Others


@library("KerasCV", "keras_cv", lambda: {"x": normal(32, 32, 3), "y": np.eye(3, dtype="float32")[whole(3)]})
def keras_cv() -> Any:
    from keras_cv import models

    stages = {"stackwise_filters": [4, 8], "stackwise_blocks": [1, 1], "stackwise_strides": [1, 2]}
    backbone = models.ResNetBackbone(**stages, include_rescaling=False, input_shape=(32, 32, 3))
    model = models.ImageClassifier(backbone, num_classes=3)
    model.compile("adam", "categorical_crossentropy")
    return model


def simulated() -> dict[str, Any]:
    theta = normal(2)
    return {"theta": theta, "x": theta + 0.1 * normal(2, seed=1)}


def amortized(model: Any, data: dict[str, Any], **more: Any) -> Any:
    import bayesflow

    return model.fit(dataset=bayesflow.OfflineDataset(data, zoo.BATCH, model.adapter, shuffle=False), shuffle=False, **more)


def approximator(network: str, **more: Any) -> Any:
    import bayesflow

    adapter = bayesflow.Adapter().rename("theta", "inference_variables").rename("x", "inference_conditions")
    found = getattr(bayesflow.networks, network)(subnet_kwargs={"widths": (8,)}, **more)
    model = bayesflow.ContinuousApproximator(inference_network=found, adapter=adapter)
    model.compile(keras.optimizers.Adam(1e-3))
    return model


library("BayesFlow: coupling flow", "bayesflow", simulated, fit=amortized)(lambda: approximator("CouplingFlow", depth=2))
library("BayesFlow: flow matching", "bayesflow", simulated, fit=amortized)(lambda: approximator("FlowMatching"))


@library("TensorFlow Probability in the loss", "tensorflow_probability", lambda: {"x": normal(6), "y": normal(1)}, on=("tensorflow",))
def likelihood() -> Any:
    from tensorflow_probability import distributions

    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(2)])
    model.compile("adam", lambda y, p: -distributions.Normal(p[:, :1], ops.softplus(p[:, 1:]) + 1e-3).log_prob(y))
    return model
