"""Statistics that lag are reported at a validation that shows it, if they are the reason."""

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard

ROWS, BATCH = 640, 16


def labelled(seed, scale=0.05, shift=0.0, noise=False):
    """Return features of small scale, far from the initial variance of 1, and their classes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, 8)).astype("float32")
    y = rng.integers(0, 3, ROWS) if noise else (x @ np.random.default_rng(9).standard_normal((8, 3))).argmax(1)
    return (x * scale + shift).astype("float32"), y


def network(momentum=0.997, norm=layers.BatchNormalization, dropout=0.0, kind=keras.Sequential, **options):
    keras.utils.set_random_seed(0)
    stack = [keras.Input((8,)), layers.Dense(16), norm(**({"momentum": momentum} if norm is layers.BatchNormalization else {}))]
    stack += [layers.ReLU(), layers.Dropout(dropout), layers.Dense(3)]
    model = kind(stack)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-2), loss, **options)
    return model


def fit(model, *callbacks, epochs=2, held_out=None, **options):
    """Train on 40 steps in each epoch; return the guard and the history."""
    x, y = labelled(0)
    guard = NanGuard(verbose=0)
    validation = labelled(1) if held_out is None else held_out
    options = {"batch_size": BATCH, "validation_data": validation, **options}
    history = model.fit(x, y, epochs=epochs, verbose=0, callbacks=[guard, *callbacks], **options).history
    return guard, history


def lagging(guard):
    return [i for i in guard.incidents if i.diagnosis is not None and i.diagnosis.cause == "batchnorm_statistics"]


class StopAfter(keras.callbacks.Callback):

    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch + 1 >= self.epochs


NO_BATCHES = pytest.mark.requires_backend("jax", "torch", reason="with several steps in one execution no batch is remembered")


@pytest.mark.parametrize("mode", ["graph", pytest.param("steps4", marks=NO_BATCHES)])
def test_reported_once(capsys, mode):
    """Training is fine and validation is not: layer, measurements and advice, once."""
    zoo.supported(zoo.MODES[mode])
    guard, history = fit(network(**zoo.MODES[mode]), epochs=3)
    assert history["loss"][-1] * 2 < history["val_loss"][-1]
    (incident,) = guard.incidents
    assert incident.sites == ("validation",) and not incident.refused and incident.changes == ()
    diagnosis = incident.diagnosis
    assert diagnosis.cause == "batchnorm_statistics" and diagnosis.culprit.endswith("batch_normalization")
    assert any("initial values still have a weight" in text for text in diagnosis.evidence)
    assert "1533" in diagnosis.advice[0] and "recalibrate" in diagnosis.advice[-1]
    assert "in the validation of epoch" in str(incident) and diagnosis.advice[0] in str(incident)


def test_an_optimizer_that_accumulates_gradients():
    """Statistics move in each step, also in those without an update."""
    model = network()
    model.compile(keras.optimizers.Adam(3e-2, gradient_accumulation_steps=2), model.loss)
    guard, _ = fit(model, epochs=3)
    (incident,) = lagging(guard)
    steps = incident.step + 1
    assert any(f"After {steps} steps at momentum" in text for text in incident.diagnosis.evidence), incident.diagnosis.evidence


def test_an_error_of_the_check_never_ends_training(monkeypatch):
    """Training does not need the check."""

    def fails(*args):
        raise AttributeError("no such attribute")

    for name in ("learning", "_measured", "_diagnosis"):
        monkeypatch.setattr(f"keras_nanguard._fit.batchnorm.{name}", fails)
        guard, history = fit(network())
        assert guard.incidents == [] and len(history["loss"]) == 2
        monkeypatch.undo()


def test_the_advice_helps():
    """After `recalibrate` on the training data validation is as good as training."""
    from keras_nanguard import recalibrate

    model = network()
    guard, history = fit(model)
    assert lagging(guard)
    recalibrate(model, labelled(0)[0])
    assert model.evaluate(*labelled(1), verbose=0) < history["val_loss"][-1] / 2


HEALTHY = {
    "a momentum that fits": lambda: fit(network(0.9)),
    "a plan that is long enough": lambda: fit(network(), StopAfter(2), epochs=60),
    "no statistics": lambda: fit(network(norm=layers.LayerNormalization)),
    "frozen statistics": lambda: fit(frozen()),
    "other data to validate on": lambda: fit(network(0.9), epochs=4, held_out=labelled(1, shift=0.3)),
    "nothing to be learned": lambda: fit(network(0.9), epochs=8, held_out=labelled(1, noise=True)),
    "large features": lambda: fit(network(0.9), held_out=labelled(1, scale=3.0)),
    "no validation": lambda: fit(network(), validation_data=None),
    "a generator to validate on": lambda: fit(network(), held_out=batches(), validation_steps=4),
}
"""Moving statistics are not the reason, cannot or will not be, or cannot be checked."""


def frozen():
    model = network()
    model.layers[1].trainable = False
    model.compile(keras.optimizers.Adam(3e-2), model.loss)
    return model


def batches():
    x, y = labelled(1)
    while True:
        for start in range(0, ROWS, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


@pytest.mark.daily("nothing to be learned", "frozen statistics", "other data to validate on")
@pytest.mark.parametrize("name", HEALTHY)
def test_silent(name):
    """Whatever differs between validation and training, if the statistics are no reason."""
    guard, _ = HEALTHY[name]()
    assert guard.incidents == []


def test_leaves_no_trace():
    """The run has the bits of one without: weights, statistics, seeds, slots, metrics."""
    told = []
    for diagnose in (True, False):
        model = network(momentum=0.995, dropout=0.05)
        x, y = labelled(0)
        guard = NanGuard(verbose=0, diagnose=diagnose)
        history = model.fit(x, y, batch_size=BATCH, epochs=4, validation_data=labelled(1), verbose=0, callbacks=[guard]).history
        told.append((history, [np.array(v) for v in (*model.variables, *model.optimizer.variables)], len(guard.incidents)))
    (history, state, looked), (plain, other, not_looked) = told
    assert (looked, not_looked) == (1, 0) and history == plain
    for one, two in zip(state, other):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("policy", ["stop", "raise", "observe"])
def test_ends_nothing(policy):
    """It is reported under every policy and ends training under none."""
    x, y = labelled(0)
    guard = NanGuard(policy, verbose=0)
    model = network()
    history = model.fit(x, y, batch_size=BATCH, epochs=3, validation_data=labelled(1), verbose=0, callbacks=[guard]).history
    assert len(history["loss"]) == 3 and len(lagging(guard)) == 1


class Asks(keras.Sequential):
    """Has to be told whether it trains to compute its loss, as Keras does in steps."""

    missing = zoo.Tally()

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=None):
        if training is None:
            Asks.missing.number += 1
            raise TypeError("training is missing")
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def test_a_failing_check_has_no_effect():
    """A model whose loss cannot be computed outside of its own steps is left alone."""
    guard, history = fit(network(kind=Asks))
    assert guard.incidents == [] and len(history["val_loss"]) == 2
    assert Asks.missing.number


class Drawn(keras.utils.PyDataset):
    """Batches that differ at each read, as with augmentation."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.rng = x, y, np.random.default_rng(0)

    def __len__(self):
        return len(self.x) // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        x = self.x[rows]
        return x + 0.01 * self.rng.standard_normal(x.shape).astype("float32"), self.y[rows]


def test_data_that_differ_at_each_read_are_not_read_again():
    """Validation losses are those of plain Keras."""
    x, y = labelled(0)
    plain = network().fit(x, y, epochs=2, batch_size=BATCH, verbose=0, validation_data=Drawn(*labelled(1)))
    _, history = fit(network(), held_out=Drawn(*labelled(1)))
    assert history["val_loss"] == plain.history["val_loss"]
