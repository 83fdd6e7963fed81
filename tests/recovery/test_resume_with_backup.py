"""`NanGuard(directory, resume=True)` with `BackupAndRestore`: the later state is used."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard, NanGuardModel

EPOCHS, BATCHES, BATCH = 4, 6, 16


class Dies(keras.callbacks.Callback):
    """Simulates the end of the process at the beginning of an epoch, or in its validation."""

    def __init__(self, epoch, in_validation=False):
        super().__init__()
        self.epoch, self.in_validation = epoch, in_validation

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch
        if epoch == self.epoch and not self.in_validation:
            raise RuntimeError("dies")

    def on_test_begin(self, logs=None):
        if self.now == self.epoch:
            raise RuntimeError("dies")


def life(kind, callbacks, make=keras.Model, bad=None, **more):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    outputs = layers.Dense(1)(layers.Dense(16, "relu")(inputs))
    model = make(inputs, outputs, **kind)
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(BATCHES * BATCH, 8)).astype("float32")
    if bad is not None:
        x[bad * BATCH, 0] = np.nan
    data = {"x": x, "y": x.sum(1, keepdims=True), "batch_size": BATCH, "shuffle": False}
    try:
        model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks, **more)
    except RuntimeError as error:
        assert str(error) == "dies"
    return model


@pytest.fixture(scope="module")
def whole():
    return life({}, []).get_weights()


@pytest.mark.parametrize("every", [100, 5], ids=["backup later", "guard later"])
@pytest.mark.parametrize("front", ["first", "last", "model"])
def test_nothing_is_lost(tmp_path, whole, front, every, capsys):
    """The second process ends like an uninterrupted run, wherever the guard is in the list."""
    freq = "epoch" if every == 100 else 10 * BATCHES
    for lives in range(2):
        guard = NanGuard(directory=tmp_path / "run", resume=True, snapshot={"every": every, "verify_after": 1})
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=freq)
        if every == 5 and not lives:  # an old backup: of the beginning of epoch 1
            life({}, [keras.callbacks.BackupAndRestore(tmp_path / "backup"), Dies(1)])
        more = [] if lives else [Dies(2)]
        if front == "model":
            model = life({"guard": guard}, [backup, *more], NanGuardModel)
        else:
            both = [guard, backup] if front == "first" else [backup, guard]
            model = life({}, [*both, *more])
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == EPOCHS * BATCHES
    for one, other in zip(model.get_weights(), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    said = capsys.readouterr().out
    assert ("another callback resumes from epoch 3" in said) == (every == 100)
    assert ("resuming from" in said) == (every == 5)


@pytest.mark.parametrize("guard_first", [True, False], ids=["guard first", "guard last"])
def test_rate_of_the_epoch_is_not_restored(tmp_path, guard_first):
    """Between two epochs another callback sets the next rate, and that of the snapshot yields."""
    rates = []

    def run(*more):
        guard = NanGuard(directory=tmp_path / "run", resume=True, snapshot={"every": BATCHES, "verify_after": 1}, verbose=0)
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 * 0.5**epoch)
        both = [guard, scheduler] if guard_first else [scheduler, guard]
        return life({}, [*both, *more])

    class Watches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
            if len(rates) == 2 * BATCHES + 3:
                raise RuntimeError("dies")

    run(Watches())
    model = run(Watches())
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == EPOCHS * BATCHES
    again = rates[2 * BATCHES + 3 :]
    np.testing.assert_allclose(again[-BATCHES:], 0.01 * 0.5**3)
    np.testing.assert_allclose(again[:-BATCHES], 0.01 * 0.5**2)


def test_the_rate_of_a_later_backup_is_kept(tmp_path):
    """The rate of a backup that is later than the last snapshot stays, lowered and halved."""
    rates = []

    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
            self.model.optimizer.learning_rate = rates[-1] / 2

    def run(folder, *more):
        lower = {"name": "bad data", "cause": "input_nonfinite", "do": "lower_lr"}
        policy = {"rules": [lower], "lower_lr": {"min_lr": 1e-12}, "snapshot": {"every": 100}}
        guard = NanGuard(policy, directory=folder / "run", resume=True, verbose=0)
        backup = keras.callbacks.BackupAndRestore(folder / "backup")
        return life({}, [guard, Halves(), backup, *more], bad=2)

    run(tmp_path / "whole")
    expected = rates.copy()
    rates.clear()
    run(tmp_path, Dies(2))
    run(tmp_path)
    assert len(expected) == EPOCHS
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_a_resumed_normalization_computes_with_the_restored_values(tmp_path):
    """As with `BackupAndRestore`, the layer need not be adapted again."""
    x = np.random.default_rng(0).normal(100.0, 5.0, (32, 3)).astype("float32")
    predicted = []
    for adapts, dies in ((True, False), (True, True), (False, False)):
        keras.utils.set_random_seed(0)
        norm = layers.Normalization()
        if adapts:
            norm.adapt(x)
        model = keras.Sequential([keras.Input((3,)), norm, layers.Dense(1)])
        model.compile("sgd", "mse")
        resumes = {"directory": tmp_path, "resume": True} if predicted else {}
        guard = NanGuard(verbose=0, snapshot={"every": 2, "verify_after": 1}, **resumes)
        how = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        with pytest.raises(RuntimeError) if dies else contextlib.nullcontext():
            model.fit(x, x[:, :1] - 100.0, **how, callbacks=[guard, *([Dies(1)] if dies else [])])
        predicted.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(predicted[2], predicted[0], rtol=1e-4)


@pytest.mark.parametrize("epoch, in_validation", [(1, True), (2, False), (EPOCHS - 1, True)])
def test_each_epoch_ends_once(tmp_path, whole, epoch, in_validation):
    """Also one whose last step has a snapshot, if the process dies before its end or after it."""
    ended, validated = [], (np.zeros((4, 8), "float32"), np.zeros((4, 1), "float32"))
    for more in ([Dies(epoch, in_validation)], []):
        guard = NanGuard(directory=tmp_path, resume=True, verbose=0, snapshot={"every": BATCHES, "verify_after": 0})
        end = keras.callbacks.LambdaCallback(on_epoch_end=lambda number, logs: ended.append((number, logs["val_loss"])))
        model = life({}, [guard, end, *more], validation_data=validated)
    assert [number for number, _ in ended] == [*range(EPOCHS)] and np.isfinite([loss for _, loss in ended]).all()
    for one, other in zip(model.get_weights(), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
