"""Faults in the batch, or in the state before the step."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from mechanisms.case import Case, classes, data, linear, mlp, not_on, program, tensorflow_alone, tf


@program
def nan_in_one_input_row(bad: bool) -> Case:
    x, y = data()
    if bad:
        x[21, 2] = np.nan
    return Case(mlp(), x, y, ("input_nonfinite",), "inputs", (5,), 2)


@program
def inf_in_second_input(bad: bool) -> Case:
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    h = layers.Concatenate()([layers.Dense(4, name="da")(a), layers.Dense(4, name="db")(b)])
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(h))
    model.compile("sgd", "mse")
    x, y = data()
    second = np.ones((64, 2), "float32")
    if bad:
        second[35, 0] = np.inf
    return Case(model, {"a": x, "b": second}, y, ("input_nonfinite",), "b", (3,), 4)


@program
def nan_in_one_target_row(bad: bool) -> Case:
    x, y = data()
    if bad:
        y[18] = np.nan
    return Case(mlp(), x, y, ("target_nonfinite",), "targets", (2,), 2)


@program
def nan_in_sample_weight(bad: bool) -> Case:
    x, y = data()
    weight = np.ones(64, "float32")
    if bad:
        weight[9] = np.nan
    return Case(mlp(), x, y, ("target_nonfinite",), "sample_weight", (1,), 1, {"sample_weight": weight})


def _labels(wrong: int | None, **compile_: Any) -> Case:
    x, y = classes()
    y[20] = y[20] if wrong is None else wrong
    loss = "sparse_categorical_crossentropy"
    model = mlp(out=3, activation="softmax", loss=loss, **compile_)
    return Case(model, x, y, ("target_out_of_range",), loss, (4,), 2)


@not_on("jax", "JAX takes no class for a label out of range, and gives no bad number")
def sparse_label_too_large(bad: bool) -> Case:
    return _labels(7 if bad else None)


@program
def binary_labels_of_255(bad: bool) -> Case:
    x, y = data()
    y = (y > 0).astype("float32") * (255.0 if bad else 1.0)
    model = linear(keras.optimizers.SGD(1.0), keras.losses.BinaryCrossentropy(from_logits=True))
    return Case(model, np.repeat(x, 4, 0), np.repeat(y, 4, 0), ("target_out_of_range",), "binary_crossentropy")


@program
def unnormalised_input(bad: bool) -> Case:
    x, y = data()
    if bad:
        x = np.abs(x) * 1e6
    return Case(mlp(loss="mse", activation=None) if not bad else linear(), x, y, ("input_scale",), "inputs")


@program
def huge_targets(bad: bool) -> Case:
    x, y = data()
    return Case(linear(), x, y * (1e25 if bad else 1.0), ("input_scale",), "targets")


@program
def constant_feature_normalised(bad: bool) -> Case:
    x, y = data()
    scale = layers.Lambda(lambda t: (t - ops.mean(t, 0)) / ops.std(t, 0), name="standardise")
    model = keras.Sequential([keras.Input((4,)), scale, layers.Dense(1)])
    model.compile("sgd", "mse")
    if bad:
        x[:, 3] = 2.0
    return Case(model, x, y, ("input_scale", "forward_domain"), "standardise", (), 0)


@program
def weights_loaded_with_nan(bad: bool) -> Case:
    model = mlp()
    if bad:
        kernel = model.layers[0].kernel.numpy()
        kernel[1, 2] = np.nan
        model.layers[0].kernel.assign(kernel)
    x, y = data()
    return Case(model, x, y, ("state_nonfinite",), "first/kernel", None, 0)


@program
def statistics_bad_before_training(bad: bool) -> Case:
    model = mlp(layers.BatchNormalization(name="bn"))
    if bad:
        model.get_layer("bn").moving_variance.assign([np.inf] * 8)
    x, y = data()
    return Case(model, x, y, ("state_nonfinite", "batchnorm_statistics"), "bn", None, 0)


@tensorflow_alone("its train step is written with tf.GradientTape")
def training_flag_lost(bad: bool) -> Case:
    class Mine(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=not bad))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"loss": loss}

    inputs = keras.Input((4,))
    h = layers.BatchNormalization(name="bn")(layers.Dense(8)(inputs))
    model = Mine(inputs, layers.Dense(1)(h))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = data(512)
    return Case(model, x * 3 + 1, y, ("training_flag",), "bn", None, None, {"epochs": 2})


@program
def a_metric_that_is_nan(bad: bool) -> Case:
    def ratio(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(y_true / (y_true - y_true)) if bad else ops.mean(y_true)

    x, y = data()
    return Case(mlp(metrics=[ratio]), x, y, (), "", None, None)
