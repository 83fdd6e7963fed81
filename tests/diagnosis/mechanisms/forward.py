"""Layers that leave their domain."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from mechanisms.case import Case, classes, compiled, data, program, stack, unary


@program
def log_of_softmax_that_underflows(bad: bool) -> Case:
    x, y = classes()
    y = keras.utils.to_categorical(y, 3)
    if bad:
        x[10] *= 2000.0

    def loss(y_true: Any, p: Any) -> Any:
        p = p if bad else ops.maximum(p, 1e-7)
        return -ops.sum(y_true * ops.log(p), axis=-1)

    model = stack(layers.Dense(3, name="logits"), layers.Softmax(name="prob"), loss=loss)
    return Case(model, x, y, ("loss_domain",), "loss", (2,), 1)


@program
def log_of_a_negative_activation(bad: bool) -> Case:
    x, y = data()
    model = unary((lambda t: ops.log(t)) if bad else (lambda t: ops.log(ops.abs(t) + 1.0)), "logs")
    return Case(model, x, y, ("forward_domain",), "logs", None, 0)


@program
def square_root_of_a_negative_number(bad: bool) -> Case:
    x, y = data()
    model = unary((lambda t: ops.sqrt(t)) if bad else (lambda t: ops.sqrt(ops.square(t) + 1.0)), "root")
    return Case(model, x, y, ("forward_domain",), "root", None, 0)


@program
def arccos_beyond_one(bad: bool) -> Case:
    x, y = data()
    model = unary((lambda t: ops.arccos(t * 1.5)) if bad else (lambda t: ops.arccos(t * 0.5)), "angle")
    return Case(model, x, y, ("forward_domain",), "angle", None, 0)


@program
def division_by_batch_deviation(bad: bool) -> Case:
    x, y = data()
    x[16:24] = x[16]
    y[16:24] = y[16]
    model = unary(lambda t: (t - ops.mean(t, 0)) / ops.sqrt(ops.var(t, 0) + (0.0 if bad else 1e-3)), "whiten")
    return Case(model, x, y, ("forward_domain", "input_scale"), "whiten", None, 2)


@program
def attention_with_everything_masked(bad: bool) -> Case:
    class Attention(layers.Layer):
        def call(self, t: Any, keep: Any) -> Any:
            score = ops.matmul(t, ops.transpose(t, (0, 2, 1)))
            score = ops.where(keep[:, None, :] > 0, score, -np.inf)
            return ops.matmul(ops.softmax(score), t)

    t, keep = keras.Input((3, 4), name="t"), keras.Input((3,), name="keep")
    h = Attention(name="attend")(t, keep)
    model = compiled(keras.Model([t, keep], layers.Dense(1)(layers.Flatten()(h))))
    x = np.random.default_rng(0).standard_normal((32, 3, 4)).astype("float32")
    mask = np.ones((32, 3), "float32")
    mask[:, 2] = 0
    if bad:
        mask[12] = 0
    return Case(model, [x, mask], x[:, 0, :1], ("forward_domain",), "attend", (4,), 1)


@program
def softmax_by_hand(bad: bool) -> Case:
    def by_hand(z: Any) -> Any:
        e = ops.exp(z)
        return e / ops.sum(e, -1, keepdims=True)

    x, y = classes()
    x[3] *= 500.0
    out = layers.Activation(by_hand if bad else "softmax", name="prob")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="logits"), out])
    model.compile(keras.optimizers.SGD(0.001), keras.losses.SparseCategoricalCrossentropy())
    return Case(model, x, y, ("forward_domain",), "prob", (3,), 0)


@program
def operation_of_a_functional_model(bad: bool) -> Case:
    inputs = keras.Input((4,))
    h = layers.Dense(4, name="a")(inputs)
    h = ops.log(h) if bad else ops.log1p(ops.abs(h))
    model = compiled(keras.Model(inputs, layers.Dense(1)(h)))
    x, y = data()
    return Case(model, x, y, ("forward_domain",), "log", None, 0)


@program
def layer_of_a_nested_model(bad: bool) -> Case:
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), layers.Lambda(ops.sqrt if bad else ops.tanh, name="deep")], name="encoder"
    )
    inputs = keras.Input((4,))
    model = compiled(keras.Model(inputs, layers.Dense(1)(inner(inputs))))
    x, y = data()
    return Case(model, x, y, ("forward_domain",), "encoder", None, 0)


@program
def second_call_of_a_shared_layer(bad: bool) -> Case:
    shared = layers.Lambda(lambda t: ops.log(t) if bad else ops.log(ops.abs(t) + 1.0), name="shared")
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = compiled(keras.Model([a, b], layers.Dense(1)(layers.Add()([shared(a), shared(b)]))))
    x, y = data()
    x = np.abs(x) + 0.1
    other = x.copy()
    if bad:
        other[11, 1] = -1.0
    return Case(model, [x, other], y, ("forward_domain",), "shared", (3,), 1)


class Subclassed(keras.Model):
    """A model that computes between its layers."""

    def __init__(self, bad: bool):
        super().__init__(name="mine")
        self.one, self.two, self.bad = layers.Dense(4, name="one"), layers.Dense(1, name="two"), bad

    def call(self, t: Any) -> Any:
        h = self.one(t)
        return self.two(1.0 / (h - h)) if self.bad else self.two(1.0 / (1.0 + h * h))


@program
def division_in_a_subclassed_model(bad: bool) -> Case:
    model = Subclassed(bad)
    model.compile("sgd", "mse")
    x, y = data()
    return Case(model, x, y, ("forward_domain",), "mine", None, 0)


@program
def nan_row_of_an_embedding(bad: bool) -> Case:
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(10, 4, name="table"), layers.Flatten(), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    if bad:
        table = model.layers[0].embeddings.numpy()
        table[7] = np.nan
        model.layers[0].embeddings.assign(table)
    x = np.random.default_rng(0).integers(0, 10, (64, 3)).astype("int32")
    return Case(model, x, np.ones((64, 1), "float32"), ("state_nonfinite",), "table")
