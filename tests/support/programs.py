"""Typical user programs: one for each way to build, compile and feed a Keras model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from support import zoo


@dataclass
class Program:
    """A model, and its data.

    Attributes:
        build: returns the compiled model, given the arguments of `compile` that select the mode.
        data: clean data.
        fit: further arguments of `fit`.
        where: the part of the data that can be bad.
    """

    build: Callable[..., Any]
    data: Callable[[], zoo.Data] = zoo.regression
    fit: dict[str, Any] = field(default_factory=dict)
    where: str = "x"

    def run(self, data: zoo.Data, guard: Any, mode: str) -> zoo.Run:
        """Train it for two epochs."""
        zoo.supported(zoo.MODES[mode])
        return zoo.run(lambda: self.build(**zoo.MODES[mode]), data, guard=guard, **self.fit)

    def again(self, run: zoo.Run, data: zoo.Data, guard: Any) -> zoo.Run:
        """Train the model of a run for two more epochs."""
        return zoo.trained(run.model, data, guard=guard, **self.fit)


PROGRAMS: dict[str, Program] = {}


def program(name: str, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program to the table."""

    def enter(build: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[name] = Program(build, **more)
        return build

    return enter


def compiled(model: Any, optimizer: Any = "adam", loss: Any = "mse", **options: Any) -> Any:
    """Compile a model, and return it."""
    model.compile(optimizer, loss, **options)
    return model


# Optimizers


def _optimizers() -> dict[str, Callable[[], Any]]:
    """Every optimizer of Keras, including those of later releases."""
    kinds = {
        name: kind
        for name, kind in vars(keras.optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer)
    }
    for wrapper in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer"):
        kinds.pop(wrapper, None)
    return {name.lower(): lambda kind=kind: kind(0.01) for name, kind in kinds.items()}


def _multi() -> Any:
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.01), {".*kernel": keras.optimizers.Adam(0.01)})
    return keras.optimizers.MultiOptimizer(chosen)


Opt = keras.optimizers
OPTIMIZERS = _optimizers()
SETTINGS: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: Opt.Adam(0.01, clipnorm=0.1),
    "global-clipnorm": lambda: Opt.Adam(0.01, global_clipnorm=0.1),
    "nesterov": lambda: Opt.SGD(0.01, momentum=0.9, nesterov=True),
    "clipvalue": lambda: Opt.SGD(0.01, momentum=0.9, clipvalue=0.05),
    "ema": lambda: Opt.SGD(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4),
    "accumulation": lambda: Opt.Adam(0.01, gradient_accumulation_steps=4),
    "schedule": lambda: Opt.Adam(Opt.schedules.PiecewiseConstantDecay([5, 9], [0.05, 0.02, 0.01])),
    "weight-decay": lambda: Opt.RMSprop(0.01, momentum=0.5, centered=True, weight_decay=0.01),
    "amsgrad": lambda: Opt.Adam(0.01, amsgrad=True),
    "callable-rate": lambda: Opt.SGD(lambda: 0.01),
    "loss-scale-factor": lambda: Opt.Adam(0.01, loss_scale_factor=8.0),
    "loss-scale-by-hand": lambda: Opt.LossScaleOptimizer(
        Opt.SGD(0.01, momentum=0.9), initial_scale=64.0, dynamic_growth_steps=5
    ),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    SETTINGS["multi"] = _multi


def _optimized(make: Callable[[], Any], **mode: Any) -> Any:
    model = zoo.plain(make(), dropout=False, **mode)
    if "schedulefree" in model.optimizer.name.replace("_", ""):
        # Keras starts its momentum from the weights, and from 0 instead where the first step builds it in a graph
        model.optimizer.build(model.trainable_variables)
    return model


for _name, _make in {**OPTIMIZERS, **SETTINGS}.items():
    program(f"optimizer-{_name}")(functools.partial(_optimized, _make))


# Weights of samples and classes; tests/clients/test_data_sources.py has other ways to feed it


def weighted() -> zoo.Data:
    data = zoo.regression()
    return zoo.Data(data.x, data.y, (np.linspace(0.1, 2, len(data.x), dtype="float32"),))


def labelled() -> zoo.Data:
    data = zoo.regression()
    return zoo.Data(data.x, (data.y[:, 0] > 0).astype("int64"))


program("feed-sample-weight", data=weighted)(
    lambda **mode: zoo.plain("adam", dropout=False, metrics=(), weighted_metrics=["mae"], **mode)
)
program("feed-sample-weight-bad", data=weighted, where="more")(lambda **mode: zoo.plain("adam", dropout=False, **mode))


@program("feed-class-weight", data=labelled, fit={"class_weight": {0: 0.5, 1: 2.0}})
def classes(**mode: Any) -> Any:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, loss=loss, metrics=["accuracy"], **mode)


# Models


@program("model-no-batchnorm")
def no_batchnorm(**mode: Any) -> Any:
    hidden = layers.Dense(8, "tanh")
    return compiled(keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1)]), **mode)


class Branching(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.norm = layers.Dense(8), layers.BatchNormalization()
        self.drop, self.last = layers.Dropout(0.3), layers.Dense(1)
        self.noise = keras.random.SeedGenerator(7)

    def call(self, x, training=None):
        x = self.norm(self.first(x), training=training)
        if training:
            x = x + 0.01 * keras.random.normal(ops.shape(x), seed=self.noise)
        return self.last(self.drop(ops.relu(x), training=training))


program("model-subclassed")(lambda **mode: compiled(Branching(), metrics=["mae"], **mode))


@program("model-nested")
def nested(**mode: Any) -> Any:
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.2)])
    outer = keras.Input((6,))
    model = keras.Model(outer, layers.Dense(1)(keras.Sequential([inner, layers.Dense(4, "relu")])(outer)))
    return compiled(model, metrics=["mae"], **mode)


def several() -> zoo.Data:
    data = zoo.regression()
    return zoo.Data({"a": data.x, "b": data.x[:, ::-1].copy()}, {"p": data.y, "q": (data.y > 0).astype("float32")})


@program("model-many-inputs-outputs", data=several)
def many(**mode: Any) -> Any:
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    x = layers.BatchNormalization()(layers.concatenate([layers.Dense(4)(a), layers.Dense(4)(b)]))
    model = keras.Model(
        {"a": a, "b": b}, {"p": layers.Dense(1, name="p")(x), "q": layers.Dense(1, "sigmoid", name="q")(x)}
    )
    model.compile(
        "adam", {"p": "mse", "q": "binary_crossentropy"}, loss_weights={"p": 1.0, "q": 0.3},
        metrics={"p": ["mae"], "q": ["accuracy", keras.metrics.AUC(name="auc")]}, **mode,
    )  # fmt: skip
    return model


@program("model-shared")
def shared(**mode: Any) -> Any:
    dense, norm, entry = layers.Dense(6), layers.BatchNormalization(), keras.Input((6,))
    model = keras.Model(entry, layers.Dense(1)(norm(dense(norm(dense(entry))))))
    return compiled(model, **mode)


@program("model-frozen")
def frozen(**mode: Any) -> Any:
    model = zoo.plain(**mode)
    model.layers[0].trainable = False
    model.layers[1].trainable = False
    return compiled(model, **mode)


@program("model-regularized")
def regularized(**mode: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(0.5)),
            layers.ActivityRegularization(l2=0.01),
            layers.Dense(1),
        ]
    )
    metrics = ["mae", keras.metrics.R2Score()]
    return compiled(model, keras.optimizers.Adam(0.05), metrics=metrics, **mode)


def words() -> zoo.Data:
    x = zoo.draw(sequence=10)
    return zoo.Data(x, np.tile([1, 2, 3], (len(x), 1)))


@program("model-ctc", data=words)
def ctc(**mode: Any) -> Any:
    body = [layers.GRU(8, return_sequences=True), layers.Dense(6)]
    return compiled(keras.Sequential([keras.Input((10, 6)), *body]), loss=keras.losses.CTC(), **mode)


def sequences() -> zoo.Data:
    x = zoo.draw(sequence=5)
    return zoo.Data(x, x[:, 0, :1].copy())


@program("model-rnn", data=sequences)
def recurrent(**mode: Any) -> Any:
    model = keras.Sequential([keras.Input((5, 6)), layers.LSTM(4, dropout=0.2), layers.Dense(1)])
    return compiled(model, **mode)


@program("model-stateful-rnn", data=sequences)
def stateful(**mode: Any) -> Any:
    if zoo.BACKEND == "torch":
        pytest.skip("Keras itself cannot train a stateful recurrent layer on torch: it writes a state that autograd needs")
    model = keras.Sequential(
        [keras.Input(batch_shape=(zoo.BATCH, 5, 6)), layers.GRU(4, stateful=True), layers.Dense(1)]
    )
    return compiled(model, **mode)


def tokens() -> zoo.Data:
    data = zoo.regression()
    return zoo.Data(np.random.default_rng(1).integers(0, 20, (len(data.x), 5)), data.y)


@program("model-embedding", data=tokens, where="y")
def embedding(**mode: Any) -> Any:
    model = keras.Sequential(
        [keras.Input((5,)), layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    return compiled(model, keras.optimizers.Adam(0.05), **mode)


def images() -> zoo.Data:
    x = np.random.default_rng(0).standard_normal((zoo.BATCHES * zoo.BATCH, 6, 6, 2)).astype("float32")
    return zoo.Data(x, x[:, 0, 0, :1].copy())


@program("model-convolution", data=images)
def convolution(**mode: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)), layers.RandomFlip(seed=3), layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
            layers.ReLU(), layers.MaxPooling2D(), layers.SpatialDropout2D(0.2), layers.Flatten(), layers.Dense(1),
        ]
    )  # fmt: skip
    return compiled(model, **mode)


@program("model-attention", data=sequences)
def attention(**mode: Any) -> Any:
    entry = keras.Input((5, 6))
    x = layers.LayerNormalization()(entry + layers.MultiHeadAttention(2, 3, dropout=0.1)(entry, entry))
    model = keras.Model(entry, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    return compiled(model, **mode)


@program("model-spectral-normalization")
def spectral(**mode: Any) -> Any:
    body = [layers.SpectralNormalization(layers.Dense(6))]
    if "renorm" in inspect.signature(layers.BatchNormalization).parameters:
        body.append(layers.BatchNormalization(renorm=True))
    return compiled(keras.Sequential([keras.Input((6,)), *body, layers.Dense(1)]), **mode)


class LowestSeen(layers.Layer):
    """Stores the lowest input so far, which starts as the largest number."""

    def build(self, shape):
        largest = keras.initializers.Constant(np.finfo("float32").max)
        self.lowest = self.add_weight(shape=(), initializer=largest, trainable=False, name="lowest")

    def call(self, x, training=None):
        if training:
            self.lowest.assign(ops.minimum(self.lowest, ops.min(x)))
        return x - ops.stop_gradient(ops.minimum(self.lowest, 0.0))


@program("model-own-state")
def own_state(**mode: Any) -> Any:
    body = [LowestSeen(), layers.Dense(1)]
    return compiled(keras.Sequential([keras.Input((6,)), *body]), **mode)


def counter() -> Any:
    """Return a native variable of the backend, at 0."""
    if zoo.BACKEND == "torch":
        import torch

        return torch.zeros(())
    import tensorflow as tf

    return tf.Variable(0.0, trainable=False)


class Unlisted(keras.Model):
    """Counts its steps in a variable of the backend, and draws from the global seed."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.calls = counter()

    def call(self, x, training=None):
        if training:
            self.calls.add_(1.0) if zoo.BACKEND == "torch" else self.calls.assign_add(1.0)
            x = x + keras.random.normal(ops.shape(x)) * 0.01 * self.calls
        return self.dense(x)


program("model-unlisted-state")(lambda **mode: compiled(Unlisted(), **mode))


# Precision


def _in(policy: str) -> Callable[..., Any]:
    def build(**mode: Any) -> Any:
        keras.config.set_dtype_policy(policy)
        optimizer = Opt.Adam(0.01)
        if (
            policy == "mixed_float16"
        ):  # a scale that does not overflow: such a step is refused, where Keras half commits it
            optimizer = Opt.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=10)
        try:
            return zoo.plain(optimizer, **mode)
        finally:
            keras.config.set_dtype_policy("float32")

    return build


for _policy in ("mixed_float16", "mixed_bfloat16", "float64", "bfloat16"):
    program(f"precision-{_policy}")(_in(_policy))


# Custom train steps


def differentiated(
    loss: Callable[[], Any], variables: Callable[[], list[Any]], scaled: Callable[[Any], Any] = lambda loss: loss
) -> tuple[Any, list[Any]]:
    """Return the loss, and its (scaled) gradients by the variables that exist after it."""
    if zoo.BACKEND == "torch":
        import torch

        value = loss()
        return value, list(torch.autograd.grad(scaled(value), [v.value for v in variables()], allow_unused=True))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss()
        target = scaled(value)
    return value, tape.gradient(target, variables())


class OwnStep(keras.Model):
    """A custom loss and custom logs, without a call of `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(6), layers.BatchNormalization(), layers.Dense(1)])
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x, training=None):
        return self.body(x, training=training)

    @property
    def metrics(self):
        return [self.tracker]

    def gradients(self, data, scaled=lambda loss: loss):
        """Return the loss, and its (scaled) gradients."""
        x, y = data[:2]
        loss = lambda: ops.mean(ops.square(y - self(x, training=True)))  # noqa: E731
        return differentiated(loss, lambda: self.trainable_variables, scaled)

    def train_step(self, data):
        loss, gradients = self.gradients(data, self.optimizer.scale_loss)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class RawLogs(OwnStep):
    """Logs the loss itself, without a metric."""

    def train_step(self, data):
        loss, gradients = self.gradients(data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "mean": ops.mean(data[0])}


class Adversarial(keras.Model):
    """A GAN: the step of the generator reads the updated discriminator."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(6), layers.BatchNormalization(), layers.Dense(6)]
        )
        self.discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.LeakyReLU(), layers.Dense(1)])
        self.seed = keras.random.SeedGenerator(5)
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, **mode):
        super().compile(**mode)
        self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9)
        self.d_optimizer.build(self.discriminator.trainable_variables)
        self.g_optimizer.build(self.generator.trainable_variables)

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def call(self, x):
        return self.discriminator(x)

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        count = ops.shape(real)[0]
        truth = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], 0)
        compare = keras.losses.BinaryCrossentropy(from_logits=True)
        fake = self.generator(keras.random.normal((count, 3), seed=self.seed), training=True)
        weights = self.discriminator.trainable_variables
        d_loss, gradients = differentiated(
            lambda: compare(truth, self.discriminator(ops.concatenate([real, fake], 0), training=True)), lambda: weights
        )
        self.d_optimizer.apply(gradients, weights)

        def fooled():
            fake = self.generator(keras.random.normal((count, 3), seed=self.seed), training=True)
            return compare(ops.ones((count, 1)), self.discriminator(fake, training=True))

        weights = self.generator.trainable_variables
        g_loss, gradients = differentiated(fooled, lambda: weights)
        self.g_optimizer.apply(gradients, weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


@program("step-gan", data=lambda: zoo.Data(zoo.draw(), zoo.draw(1)))
def gan(**mode: Any) -> Any:
    model = Adversarial()
    model.compile(**mode)
    return model


class Sharpness(OwnStep):
    """Sharpness-aware minimisation: the gradient is taken uphill of the weights."""

    def train_step(self, data):
        weights = self.trainable_variables
        loss, gradients = self.gradients(data)
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients)) + 1e-12
        moves = [0.05 * g / norm for g in gradients]
        for weight, move in zip(weights, moves):
            weight.assign_add(move)
        _, gradients = self.gradients(data)
        for weight, move in zip(weights, moves):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def built(model: Any) -> Any:
    """Create the variables of a compiled model and of its optimizer, and return the model."""
    model(np.zeros((1, 6), "float32"))
    model.optimizer.build(model.trainable_variables)
    return model


program("step-sam")(lambda **mode: built(compiled(Sharpness(), Opt.Adam(0.01), None, **mode)))


class TwicePerStep(OwnStep):
    """Makes two updates in one step with one optimizer."""

    def train_step(self, data):
        for _ in range(2):
            logs = super().train_step(data)
        return logs


for _name, _kind in {"own-loss": OwnStep, "raw-logs": RawLogs, "two-updates": TwicePerStep}.items():
    program(f"step-{_name}")(lambda kind=_kind, **mode: compiled(kind(), loss=None, **mode))


class Averaging(keras.Model):
    """Maintains a slow copy of its weights, after the update, like a momentum encoder."""

    def __init__(self):
        super().__init__()
        self.fast = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(1)])
        self.slow = keras.models.clone_model(self.fast)
        self.slow.trainable = False

    def call(self, x, training=None):
        return self.fast(x)

    def train_step(self, data):
        logs = super().train_step(data)
        for slow, fast in zip(self.slow.weights, self.fast.weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        return logs


program("step-slow-copy")(lambda **mode: compiled(Averaging(), metrics=["mae"], **mode))


class Conditional(keras.Model):
    """Applies its gradients within a conditional."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.odd = self.add_weight(shape=(), initializer="zeros", trainable=False, name="odd")

    def call(self, x, training=None):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        loss, gradients = differentiated(
            lambda: self.compute_loss(x=x, y=y, y_pred=self(x, training=True)), lambda: self.trainable_variables
        )
        self.odd.assign(1.0 - self.odd)

        def update():
            self.optimizer.apply(gradients, self.trainable_variables)
            return 1.0

        done = ops.cond(self.odd > 0.5, update, lambda: 0.0)
        return {"loss": loss, "done": done}


program("step-conditional")(lambda **mode: built(compiled(Conditional(), "sgd", **mode)))
