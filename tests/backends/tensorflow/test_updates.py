"""Updates by fused kernels: when they are used, and that they give Keras' bits."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._backends.tensorflow import kernels as fused_kernels, updates
from keras_nanguard._backends.tensorflow.intercept import Update

optimizers = keras.optimizers


def _warmed_up():
    return optimizers.schedules.CosineDecay(0.05, 40, warmup_target=0.08, warmup_steps=6)


def _adam(amsgrad=False):
    return optimizers.Adam(_warmed_up(), amsgrad=amsgrad, clipvalue=0.1, weight_decay=1e-3)


class Shrinks(optimizers.Adam):
    """Adam, and a quotient of its own that has no square root."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.assign_sub(variable, gradient * 0.01 / (variable + 2.0))


BY_KERNELS = {
    "Adam": (_adam, {"descend": 2, "divide": 1}),
    "AMSGrad": (lambda: _adam(amsgrad=True), {"descend": 2, "divide": 1}),
    "EMA": (lambda: optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3), {"descend": 2, "divide": 1}),
    "accumulates": (lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2), {"descend": 2, "divide": 1}),
    "loss scale": (lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 64.0, 5), {"descend": 2, "divide": 1}),
    "another quotient": (lambda: Shrinks(0.01), {"descend": 2, "divide": 1}),
    "SGD": (lambda: optimizers.SGD(_warmed_up(), clipvalue=0.1), {"descend": 1}),
    "Adamax": (optimizers.Adamax, {"descend": 1}),
    "Nadam": (optimizers.Nadam, {"descend": 2}),
    "Lion": (optimizers.Lion, {"descend": 1}),
    "Adadelta": (optimizers.Adadelta, {"descend": 1}),
    "Lamb": (optimizers.Lamb, {"descend": 2}),
    "Muon": (getattr(optimizers, "Muon", optimizers.Lamb), None),
}
"""Optimizers, and how many kernels update one weight; `None` if that depends on the weight."""

AS_IT_IS = {
    "SGD clipped by norms": lambda: optimizers.SGD(_warmed_up(), clipnorm=1.0),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, global_clipnorm=0.5),
    "RMSprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Adagrad": optimizers.Adagrad,
    "Ftrl": optimizers.Ftrl,
    "Adafactor": optimizers.Adafactor,
}


KERNELS = {"descend": "ResourceApplyGradientDescent", "divide": "ResourceApplyAdagradV2"}


@pytest.fixture
def kernels(monkeypatch):
    """The number of traces of each kernel."""
    used = collections.Counter()

    def counting(name, real):
        def kernel(**given):
            used[name] += 1
            return real(**given)

        return kernel

    assert fused_kernels.same_bits(), "on this machine the kernels are not used"
    for name, op in KERNELS.items():
        monkeypatch.setattr(tf.raw_ops, op, counting(name, getattr(tf.raw_ops, op)))
    return used


def network(optimizer):
    """Return a model with a constraint, which is part of its update."""
    limit = keras.constraints.MaxNorm(0.7)
    body = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    model = keras.Sequential([*body, keras.layers.Dropout(0.2), keras.layers.Dense(1, kernel_constraint=limit)])
    model.compile(optimizer, "mse")
    return model


IN_TURN = [(name, False) for name in (*BY_KERNELS, *AS_IT_IS)]
IN_TURN += [(name, True) for name in BY_KERNELS]
IN_TURN += [pytest.param(name, True, marks=pytest.mark.slow) for name in AS_IT_IS]


@pytest.mark.daily(
    *("Adam-True", "another quotient-False", "loss scale-True", "momentum-False")
)
@pytest.mark.parametrize(("name", "in_turn"), IN_TURN)
def test_the_same_bits(kernels, name, in_turn, set_limit):
    """Updates of large weights run one after another (`in_turn`)."""
    if in_turn:
        set_limit("bytes of a large TensorFlow update", 1)
    make, used = BY_KERNELS[name] if name in BY_KERNELS else (AS_IT_IS[name], {})
    data = zoo.regression()
    plain = zoo.run(lambda: network(make()), data)
    assert not kernels
    bad = zoo.run(lambda: network(make()), data.with_poison((2, 5)), guard="undiagnosed")
    assert zoo.differences(bad, plain) == []
    assert bad.guard.session.run.counts.refused == 4
    sites = {finding.site for incident in bad.guard.incidents for finding in incident.findings}
    assert sites.isdisjoint({"weights", "slots"}), "a refused update wrote none"
    assert {"assign_add", "assign_sub", "apply"}.isdisjoint(vars(bad.model.optimizer))
    weights = len(bad.model.trainable_variables)
    assert in_turn or used is None or {kernel: count / weights for kernel, count in kernels.items()} == used


def test_large_arrays(kernels):
    """Arrays of which several threads compute a part each."""

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3001), keras.layers.Dense(67), keras.layers.Dense(1)])
        model.compile(optimizers.Adam(0.01), "mse")
        return model

    data = zoo.regression()
    assert zoo.differences(zoo.run(build, data, guard=True, epochs=1), zoo.run(build, data, epochs=1)) == []
    assert kernels["divide"] == 6


def test_scattered_writes_stay_as_they_are(kernels):
    """A table in which a step writes a few rows is written as in Keras."""

    def build():
        model = keras.Sequential([keras.Input((6,), dtype="int32"), keras.layers.Embedding(20, 4), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        model.compile(optimizers.SGD(0.05), "mse")
        return model

    source = zoo.regression()
    data = zoo.Data((np.abs(source.x * 5) % 20).astype("int32"), source.y)
    assert zoo.differences(zoo.run(build, data, guard=True), zoo.run(build, data)) == []
    assert kernels == {"descend": 2}, "kernel and bias of the dense layer"


class Before(optimizers.Adam):
    """Divides by the moment from before this step."""

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        moment, divisor = self._velocities[index], keras.ops.sqrt(self._velocities[index]) + 1e-3
        self.assign_add(moment, (keras.ops.square(gradient) - moment) * 0.1)
        self.assign_sub(variable, (gradient * learning_rate) / divisor)


def test_a_moment_that_is_written_in_between(kernels):
    """The kernel would read it too late, so a custom update divides by itself."""
    run = zoo.run(lambda: network(Before(1e-4)), zoo.regression(), guard=True)
    assert zoo.differences(run, zoo.run(lambda: network(Before(1e-4)), zoo.regression())) == []
    assert kernels["descend"] and not kernels["divide"]


def test_an_epsilon_of_zero(kernels):
    """TensorFlow may change such a quotient, so a kernel would give other bits."""

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        model.compile(optimizers.Adam(0.01, epsilon=0.0), "mse")
        return model

    run = zoo.run(build, zoo.regression(), guard=True)
    assert run.guard.incidents == [] and zoo.differences(run, zoo.run(build, zoo.regression())) == []
    assert kernels["descend"] and not kernels["divide"]


@pytest.mark.daily("own way to assign")
@pytest.mark.parametrize("how", ["other bits", "float64", "xla", "own way to assign"])
def test_without_a_suitable_kernel(kernels, monkeypatch, how):
    """Without a suitable kernel the update runs as Keras wrote it."""

    class Own(optimizers.SGD):
        def assign_sub(self, variable, value):
            super().assign_sub(variable, 2.0 * value)

    if how == "other bits":
        monkeypatch.setattr(fused_kernels, "same_bits", lambda: False)
    if how == "float64":
        keras.config.set_dtype_policy("float64")

    def build():
        model = network(Own(0.02) if how == "own way to assign" else optimizers.Adam(0.01))
        model.compile(model.optimizer, "mse", jit_compile=how == "xla")
        return model

    guarded = zoo.run(build, zoo.regression(), guard=True)
    assert not kernels and guarded.guard.incidents == []
    if how != "xla":  # it gives other bits itself, to which a bias before a BatchNormalization is too sensitive
        assert zoo.differences(guarded, zoo.run(build, zoo.regression())) == []


@pytest.mark.parametrize(("op", "factor"), zip(KERNELS.values(), ("delta", "grad")))
def test_other_bits_are_seen(monkeypatch, op, factor):
    """A kernel that rounds once instead of twice is detected."""
    real = getattr(tf.raw_ops, op)

    def rounding_once(**given):
        real(**{**given, factor: tf.constant(np.nextafter(np.float32(given[factor]), np.float32(9e9)))})

    monkeypatch.setattr(tf.raw_ops, op, rounding_once)
    assert not fused_kernels.same_bits.__wrapped__()


class Twice(optimizers.SGD):
    """Reads what it has just written; writes one variable twice, and two from one value."""

    def build(self, variables):
        super().build(variables)
        self.seen = [self.add_variable_from_reference(v, name="seen") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        seen = self.seen[self._get_variable_index(variable)]
        self.assign_sub(variable, learning_rate * gradient)
        self.assign(seen, keras.ops.convert_to_tensor(variable) * 2)
        self.assign_add(variable, 0.01 * (seen - variable))
        self.assign(seen, variable)


def test_reads_its_own_writes(kernels):
    """Variables that were assigned one value do not share memory afterwards."""
    data = zoo.regression()
    plain = zoo.run(lambda: network(Twice(0.05)), data)
    run = zoo.run(lambda: network(Twice(0.05)), data.with_poison((2,)), guard="undiagnosed")
    assert zoo.differences(run, plain) == [] and kernels["descend"]
    weight, seen = run.model.trainable_variables[0], run.model.optimizer.seen[0]
    before = np.array(seen.value)
    np.testing.assert_array_equal(before, np.array(weight.value))
    weight.value.assign_add(tf.ones_like(weight.value))
    np.testing.assert_array_equal(before, np.array(seen.value))


def before(op):
    """Return every operation that has to run before this one."""
    known, left = set(), [op]
    while left:
        one = left.pop()
        for other in (*one.control_inputs, *(tensor.op for tensor in one.inputs)):
            if other not in known:
                known.add(other)
                left.append(other)
    return known


@pytest.mark.parametrize(("size", "waits"), [(4, False), (1024, True)])
def test_one_by_one(size, waits):
    """The update of a large weight waits for the previous one; small ones do not."""
    optimizer = keras.optimizers.Adam()
    weights = [keras.Variable(tf.zeros((size, 1024))) for _ in range(3)]
    optimizer.build(weights)

    @tf.function
    def update(gradients):
        updates.Updates([Update(optimizer, optimizer.apply, gradients, weights)], [optimizer], adapted=True, immediate=False).run()

    graph = update.get_concrete_function([tf.TensorSpec((size, 1024))] * 3).graph
    handles = {id(internal): id(external) for external, internal in graph.captures}
    writes = {}
    for op in graph.get_operations():
        if op.type.startswith(("Assign", "ResourceApply")):
            writes.setdefault(handles.get(id(op.inputs[0])), []).append(op)
    first, second, third = (writes[id(w.value.handle)] for w in weights)
    moments = [op for v in optimizer.variables if v.path.endswith("velocity") for op in writes[id(v.value.handle)]]
    assert all(set(first) <= before(op) for op in (*second, *moments[1:])) == waits
    assert all(set(second) <= before(op) for op in (*third, *moments[2:])) == waits
    assert "update_step" not in vars(optimizer)


class Counting(keras.layers.Layer):
    """Counts the traces of a step."""

    def build(self, shape):
        self.traces = 0

    def call(self, x, training=False):
        self.traces += bool(training)
        return x


CLASSES = np.arange(32) % 3


def one_output(metrics=("accuracy", "sparse_categorical_crossentropy"), y=CLASSES):
    model = keras.Sequential([keras.Input((4,)), Counting(), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=metrics, weighted_metrics=metrics)
    return model, y


def two_outputs():
    """Targets in a dict, outputs in a list: the loss, which Keras builds first, takes them by name."""
    inputs = keras.Input((4,))
    counted = Counting()(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name="a")(counted), keras.layers.Dense(1, name="b")(counted)])
    model.compile("adam", {"a": "mse", "b": None}, metrics={"a": ["mae"]})
    return model, {"a": np.ones((32, 1)), "b": np.ones((32, 1))}


class OneHot(keras.Sequential):
    """Passes other targets to its loss and metrics than `fit` is given."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, keras.ops.one_hot(y, 3), y_pred, sample_weight, training)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, keras.ops.one_hot(y, 3), y_pred, sample_weight)


def other_targets():
    model = OneHot([keras.Input((4,)), Counting(), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    return model, CLASSES


FIRST = {
    "metrics": (one_output, 1),
    "no metrics": (lambda: one_output(None), 1),
    "two outputs": (two_outputs, 2),
    "other targets": (other_targets, 2),
    "nested": (lambda: one_output(y=[CLASSES]), 2),
}


@pytest.mark.daily("metrics", "two outputs")
@pytest.mark.parametrize("name", FIRST)
def test_the_first_step_is_traced_once_if_its_variables_can_be_built_before(name):
    """They have Keras' names, and the logs Keras' numbers."""
    found, (build, traces) = [], FIRST[name]
    for guards in ([], [NanGuard(verbose=0, logs=False)]):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        fused_kernels.same_bits.cache_clear()
        model, y = build()
        fitted = model.fit(np.ones((32, 4), "float32"), y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=guards)
        paths = [variable.path for variable in (*model.variables, *model.metrics_variables)]
        logs = zoo.plain_logs(fitted.history)
        found.append((next(layer for layer in model.layers if isinstance(layer, Counting)).traces, paths, logs, model.get_weights()))
    (plain, *expected, weights), (guarded, *received, own) = found
    assert guarded <= min(traces, plain) and received == expected
    assert all(map(np.array_equal, own, weights))
