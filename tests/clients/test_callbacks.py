"""All stock callbacks together, and those that log: in any order they get the guard's keys."""

import csv

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard


def stock(folder):
    """Return a callback of each kind of Keras that needs no further setup."""
    kinds = keras.callbacks
    return [
        kinds.CSVLogger(folder / "log.csv"),
        kinds.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        kinds.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        kinds.LearningRateScheduler(lambda epoch, rate: rate),
        kinds.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True),
        kinds.ReduceLROnPlateau("val_loss", patience=9),
        kinds.TerminateOnNaN(),
        kinds.BackupAndRestore(folder / "backup"),
        kinds.SwapEMAWeights(),
    ]


def fit(callbacks, bad=(), epochs=2):
    data = zoo.regression()
    for batch in bad:
        zoo.poison(data, batch)
    keras.utils.set_random_seed(0)
    model = zoo.plain(keras.optimizers.Adam(use_ema=True))
    settings = {"batch_size": zoo.BATCH, "epochs": epochs, "shuffle": False, "verbose": 0, "validation_split": 0.25}
    return model.fit(data.x, data.y, callbacks=callbacks, **settings).history


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_all_stock_callbacks_in_any_order(seed, tmp_path):
    """With and without bad data; the CSV file has its columns from the first epoch on."""
    (tmp_path / "plain").mkdir()
    plain = fit(stock(tmp_path / "plain"))
    for bad in ((), (2,)):
        folder = tmp_path / f"bad{len(bad)}"
        folder.mkdir()
        guard = NanGuard(verbose=0, diagnose=False)
        callbacks = [guard, *stock(folder)]
        order = np.random.default_rng(seed).permutation(len(callbacks))
        history = fit([callbacks[place] for place in order], bad)
        with open(folder / "log.csv") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["refused_steps"]) for row in rows] == history["refused_steps"] == [len(bad)] * 2
        assert np.isfinite([value for key in plain for value in history[key]]).all() and (folder / "best.keras").exists()
        assert bad or (zoo.plain_logs(history) == plain and guard.incidents == [])


def test_a_csv_file_that_begins_without_refusals(tmp_path):
    """A logger before the guard has the key in its first epoch, whenever a refusal comes."""
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(logs["refused_steps"])

    data = [zoo.regression(), zoo.poison(zoo.regression(), 5)]

    def batches():
        for epoch in (0, 1):
            for first in range(0, len(data[0].x), zoo.BATCH):
                yield data[epoch].x[first : first + zoo.BATCH], data[epoch].y[first : first + zoo.BATCH]

    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    guard = NanGuard(verbose=0, diagnose=False)
    zoo.plain().fit(batches(), steps_per_epoch=zoo.BATCHES, epochs=2, verbose=0, callbacks=[Sees(), log, guard])
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert seen == [0, 1] and [float(row["refused_steps"]) for row in rows] == [0, 1]


@pytest.mark.requires_backend("tensorflow", reason="Keras' TensorBoard writes by way of TensorFlow")
@pytest.mark.parametrize("first", [False, True])
def test_tensorboard(tmp_path, first):
    """Before or after the guard, with histograms: a point of each number for each epoch."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)
    guard = NanGuard(verbose=0, diagnose=False)
    fit([board, guard] if first else [guard, board], bad=(2,))
    events = loader.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    for tag in ("epoch_refused_steps", "epoch_nanguard/grad_norm", "epoch_nanguard/rollbacks"):
        assert [event.step for event in events.tensors.Items(tag)] == [0, 1]


class RateFinder(keras.callbacks.Callback):
    """Raises the rate in each batch, records losses, restores weights and rate at the end."""

    def on_train_begin(self, logs=None):
        self.losses, self.rates = [], []
        self.kept = (self.model.get_weights(), float(self.model.optimizer.learning_rate))

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        self.rates.append(float(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = 1e-4 * 2.0 ** len(self.losses)
        if not np.isfinite(self.losses[-1]):
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        self.model.set_weights(self.kept[0])
        self.model.optimizer.learning_rate = self.kept[1]


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_a_rate_finder(first):
    """Under `observe` it gets the same losses, overflows included; nothing else is changed."""
    finders, models = [RateFinder(), RateFinder()], []
    for finder, guard in zip(finders, (None, NanGuard("observe", verbose=0, diagnose=False)), strict=True):
        callbacks = [finder] if guard is None else [guard, finder] if first else [finder, guard]
        keras.utils.set_random_seed(0)
        models.append(zoo.plain("sgd", dropout=False))
        data = zoo.regression(batches=40)
        models[-1].fit(data.x, data.y, batch_size=zoo.BATCH, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    plain, guarded = finders
    assert guarded.rates == plain.rates and np.array_equal(plain.losses, guarded.losses, equal_nan=True)
    assert float(models[1].optimizer.learning_rate) == plain.kept[1]
    assert all(np.array_equal(one, other) for one, other in zip(plain.kept[0], models[1].get_weights(), strict=True))
