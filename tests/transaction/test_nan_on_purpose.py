"""NaN as a marker for "not seen yet" is tolerated; a number that becomes NaN is not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo

from keras_nanguard import NanGuard

MODES = {"compiled": {}, "eager": {"run_eagerly": True}}


class Last(layers.Layer):
    """Stores a mean of its inputs, NaN before the first one; `reset` sets it to NaN again."""

    def __init__(self, reset=False, first=np.nan):
        super().__init__()
        self.reset, self.first = reset, first

    def build(self, shape):
        first = keras.initializers.Constant(self.first)
        self.seen = self.add_weight(shape=(), initializer=first, trainable=False, name="last_seen")

    def call(self, x, training=False):
        if training:
            known, now = ops.where(ops.isnan(self.seen), ops.mean(x), 0.9 * self.seen + 0.1 * ops.mean(x)), np.float32("nan")
            self.seen.assign(ops.where(ops.isnan(self.seen), known, now) if self.reset else known)
        return x


class Reads(Last):
    """Reads its marker as a number."""

    def call(self, x, training=False):
        return x + ops.cast(self.seen, x.dtype)


def model(layer, **mode):
    keras.utils.set_random_seed(0)
    built = keras.Sequential([keras.Input((6,)), layer, layers.Dense(1)])
    built.compile(keras.optimizers.SGD(0.05), "mse", **mode)
    return built


def fitted(built, data, *callbacks, epochs=2):
    zoo.fit(built, data, *callbacks, epochs=epochs)
    return [np.array(ops.convert_to_numpy(v)) for v in built.weights]


@pytest.mark.daily("False-compiled", "True-eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reset", [False, True])
def test_a_marker_is_tolerated(tmp_path, mode, reset):
    """Training equals that of stock Keras, also if the model is saved each epoch."""
    guard = NanGuard(verbose=0, snapshot={"every": 5})
    save = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    stock = fitted(model(Last(reset), **MODES[mode]), zoo.regression())
    built = model(Last(reset), **MODES[mode])
    zoo.assert_same(stock, fitted(built, zoo.regression(), guard, save), 1e-5)
    assert guard.incidents == [] and len(list(tmp_path.iterdir())) == 2
    built.layers[0].seen.assign(1.0)
    fitted(built, zoo.regression(), guard)  # it remembers what was a mark
    assert guard.incidents == []


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_batch_is_refused_with_a_marker_in_the_state(mode):
    """The batch is to blame, and the marker is unchanged."""
    guard = NanGuard(verbose=0)
    data = zoo.regression(batches=1)
    data.x[3, 0] = np.nan
    weights = fitted(model(Last(), **MODES[mode]), data, guard, epochs=1)
    assert [i.diagnosis.cause for i in guard.incidents] == ["input_nonfinite"]
    assert "state" not in guard.incidents[0].sites
    assert np.isnan(weights[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_number_that_becomes_nan_is_found(mode):
    """It is refused in the step that writes it."""
    guard = NanGuard(verbose=0, diagnose=False)
    weights = fitted(model(Last(reset=True, first=1.0), **MODES[mode]), zoo.regression(), guard, epochs=1)
    assert guard.incidents[0].step == 0 and guard.incidents[0].findings[0].path.endswith("last_seen")
    assert weights[0] == 1.0


def test_only_inf_is_on_purpose():
    """NaN in it is found before it is in a snapshot, and repaired; Inf in it stays."""

    class Limits(Last):
        def build(self, shape):
            first = keras.initializers.Constant(np.inf)
            self.seen = self.add_weight(shape=(2,), initializer=first, trainable=False)

        def call(self, x):
            return x

    policy = {"rules": [{"name": "mend", "do": [{"repair": {"source": "zeros"}}]}]}
    guard = NanGuard(policy, verbose=0, diagnose=False, snapshot={"every": 5})
    spoil = zoo.Before(lambda model: model.layers[0].seen.assign([np.nan, np.inf]), batch=7)
    weights = fitted(model(Limits()), zoo.regression(), guard, spoil, epochs=1)
    assert [o.status for i in guard.incidents for o in i.outcomes] == ["done"]
    np.testing.assert_array_equal(weights[0], [0.0, np.inf])


@pytest.mark.shared
@pytest.mark.parametrize("which", ["frozen weight", "statistic", "of Keras' own"])
def test_invalid_markers_are_found_before_the_first_step(which):
    """NaN in a weight, a statistic or a state of Keras' own layers is no marker."""
    inputs = keras.Input((6,))
    frozen, norm = layers.Dense(4, trainable=False), layers.SpectralNormalization(layers.Dense(4))
    built = keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization(name="norm")(norm(frozen(inputs)))))
    built.compile("sgd", "mse")
    states = {"frozen weight": frozen.kernel, "statistic": built.get_layer("norm").moving_mean, "of Keras' own": norm.vector_u}
    states[which].assign(np.full(states[which].shape, np.nan))
    guard = NanGuard(verbose=0, diagnose=False)
    fitted(built, zoo.regression(), guard, epochs=1)
    assert guard.incidents[0].step == 0 and guard.incidents[0].findings[0].path == states[which].path
    assert guard.session.run.step == 0


@pytest.mark.shared
def test_a_marker_that_is_read_as_a_number_is_named():
    """It makes the loss NaN: the step is refused, and the diagnosis names the variable."""
    guard = NanGuard(verbose=0)
    fitted(model(Reads()), zoo.regression(), guard, epochs=1)
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis.cause == "state_nonfinite" and "last_seen" in diagnosis.culprit


class Masked(layers.Layer):
    """Has a mask of -Inf, which it only reads."""

    def build(self, shape):
        def hides_last(shape, dtype=None):
            return ops.convert_to_tensor([[0.0] * (shape[1] - 1) + [-np.inf]], dtype)

        self.mask = self.add_weight(shape=(1, shape[-1]), initializer=hides_last, trainable=False)

    def call(self, x):
        return ops.softmax(x + self.mask)


class BuiltByFirstStep(keras.Model):
    """Its variables do not exist before a step runs, on backends where Keras does not build it."""

    def __init__(self, layer):
        super().__init__()
        self.mask, self.layer, self.out = Masked(), layer, layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.layer(self.mask(x), training=training))


@pytest.mark.shared
@pytest.mark.parametrize("mode", zoo.MODES)
def test_what_the_first_step_creates_is_tolerated(mode):
    """A mask of -Inf, and a mark of NaN that the first step reads and writes."""
    zoo.supported(zoo.MODES[mode])

    def weights(*callbacks):
        keras.utils.set_random_seed(0)
        built = BuiltByFirstStep(Last(reset=True))
        built.compile(keras.optimizers.SGD(0.05), "mse", **zoo.MODES[mode])
        return fitted(built, zoo.regression(), *callbacks)

    guard = NanGuard(verbose=0, snapshot={"every": 5})
    zoo.assert_same(weights(), weights(guard), 1e-5)
    assert guard.incidents == []


@pytest.mark.requires_backend("torch", reason="its loop is written for torch")
def test_what_the_first_step_of_a_loop_creates_is_tolerated():
    """As in `fit`, in which Keras builds the model first."""
    built, guard = BuiltByFirstStep(Last(reset=True)), NanGuard(verbose=0, snapshot={"every": 5})
    optimizer, data = keras.optimizers.SGD(0.05), zoo.regression()

    def train(x, y):
        loss = ops.mean(ops.square(built(x, training=True) - y))
        loss.backward()
        optimizer.apply([v.value.grad for v in built.trainable_variables], built.trainable_variables)
        built.zero_grad()

    with guard.watch(built, optimizer):
        step = guard.step(train)
        for first in range(0, len(data.x), zoo.BATCH):
            step(*(ops.convert_to_tensor(a[first : first + zoo.BATCH]) for a in data.all))
    assert guard.incidents == [] and guard.session.run.counts.committed == data.batches
