"""Typical custom layers, and Keras layers at the limits of their domain."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from mechanisms.case import Case, data, not_on, program, stack


def images(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return small images and labels."""
    rng = np.random.default_rng(2)
    x = rng.random((rows, 8, 8, 1)).astype("float32")
    return x, rng.integers(0, 3, rows).astype("int32")


def convnet(policy: str = "float32", **compile_: Any) -> Any:
    """Return a convolutional network with BatchNorm, in which rows interact."""
    keras.utils.set_random_seed(0)
    norm = layers.BatchNormalization(name="bn", dtype=policy)
    body = [layers.Conv2D(4, 3, name="conv", dtype=policy), norm]
    body += [layers.Activation("relu", dtype=policy), layers.MaxPooling2D(dtype=policy)]
    body += [layers.Flatten(dtype=policy), layers.Dense(3, "softmax", dtype="float32", name="head")]
    model = keras.Sequential([keras.Input((8, 8, 1)), *body])
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", **compile_)
    return model


@program
def nan_row_where_batchnorm_mixes_rows(bad: bool) -> Case:
    x, y = images()
    if bad:
        x[27] = np.nan
    return Case(convnet(), x, y, ("input_nonfinite",), "inputs", (3,), 3)


@program
def overflowing_row_where_batchnorm_mixes_rows(bad: bool) -> Case:
    x, y = images()
    if bad:
        x[27] *= 1e30
    return Case(convnet(), x, y, ("input_scale", "forward_domain"), "", (3,), 3)


@not_on("tensorflow", reason="TensorFlow pools a row of NaN to -3.4e38, so its step is finite")
def nan_row_that_max_pooling_swallows(bad: bool) -> Case:
    model = stack(
        layers.MaxPooling2D(name="pool"),
        layers.Conv2D(2, 3),
        layers.Flatten(),
        layers.Dense(3, activation="softmax"),
        shape=(8, 8, 1),
        loss="sparse_categorical_crossentropy",
    )
    x, y = images()
    if bad:
        x[11] = np.nan
    return Case(model, x, y, ("input_nonfinite",), "inputs", (3,), 1)


@program
def batchnorm_on_one_row_in_float16(bad: bool) -> Case:
    class OwnBatchNorm(layers.Layer):
        def call(self, t: Any) -> Any:
            centred = t - ops.mean(t, 0)
            return centred / ops.sqrt(ops.mean(ops.square(centred), 0) + (1e-8 if bad else 1e-3))

    policy = "mixed_float16"
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, dtype=policy), OwnBatchNorm(dtype=policy, name="own"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse", auto_scale_loss=False)
    x, y = data(8)
    return Case(model, x, y, ("float16_underflow",), "own", None, 0, {"batch_size": 1})


@program
def root_mean_square_of_zeros(bad: bool) -> Case:
    class RootMeanSquare(layers.Layer):
        def call(self, t: Any) -> Any:
            return t * ops.rsqrt(ops.mean(ops.square(t), -1, keepdims=True) + (0.0 if bad else 1e-6))

    model = stack(RootMeanSquare(name="rms"), layers.Dense(1))
    x, y = data()
    x[37] = 0.0
    return Case(model, x, y, ("forward_domain",), "rms", (5,), 4)


@program
def variational_encoder_with_free_variance(bad: bool) -> Case:
    class Sampling(layers.Layer):
        def call(self, t: Any) -> Any:
            log_variance = t if bad else ops.clip(t, -8.0, 8.0)
            self.add_loss(-0.5 * ops.mean(1 + log_variance - ops.exp(log_variance)))
            return t

    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="z"), Sampling(name="sampling"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.layers[0].kernel.assign(np.eye(4))
    x, y = data()
    if bad:
        x[30] = 300.0
    return Case(model, x, y, ("loss_domain", "forward_domain"), "sampling", (6,), 3)


@program
def mask_of_minus_1e9_in_float16(bad: bool) -> Case:
    class Attention(layers.Layer):
        def call(self, t: Any, keep: Any) -> Any:
            score = ops.matmul(t, ops.transpose(t, (0, 2, 1)))
            hide = (1.0 - ops.cast(keep[:, None, :], "float32")) * (-1e9 if bad else -1e4)
            return ops.matmul(ops.softmax(score + ops.cast(hide, score.dtype)), t)

    t, keep = keras.Input((3, 4), name="t"), keras.Input((3,), name="keep")
    h = Attention(name="attend", dtype="mixed_float16")(t, keep)
    model = keras.Model([t, keep], layers.Dense(1)(layers.Flatten()(h)))
    model.compile("sgd", "mse", auto_scale_loss=False)
    x = np.random.default_rng(0).standard_normal((32, 3, 4)).astype("float32")
    mask = np.ones((32, 3), "float32")
    mask[12] = 0
    return Case(model, [x, mask], x[:, 0, :1], ("float16_overflow",), "attend", (4,), 1)


@program
def cholesky_of_no_covariance(bad: bool) -> Case:
    class Whiten(layers.Layer):
        def call(self, t: Any) -> Any:
            size = ops.cast(ops.shape(t)[0], "float32")
            covariance = ops.matmul(ops.transpose(t), t) / size
            covariance = covariance - 10.0 * keras.ops.eye(4) if bad else covariance + 1e-3 * keras.ops.eye(4)
            return ops.matmul(t, ops.cholesky(covariance))

    model = stack(Whiten(name="whiten"), layers.Dense(1))
    x, y = data()
    return Case(model, x, y, ("forward_domain",), "whiten", None, 0)


@program
def index_beyond_an_embedding(bad: bool) -> Case:
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(10, 4, name="table"), layers.Flatten(), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).integers(0, 10, (64, 3)).astype("int32")
    if bad:
        x[21, 1] = 10
    return Case(model, x, np.ones((64, 1), "float32"), ("forward_domain",), "table", (5,), 2)
