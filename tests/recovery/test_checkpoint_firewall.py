"""No callback saves a bad model, or treats NaN as best, at any position in the list."""

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, scan
from keras_nanguard._fit.run import Run
from keras_nanguard.testing import corrupt


class Vandal(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            corrupt(self.model.trainable_variables[0], "nan")


class BadValidation(keras.utils.PyDataset):
    """A validation set that contains a NaN until the first epoch ends."""

    def __init__(self):
        super().__init__()
        self.bad, (self.x, self.y) = True, zoo.regression(batches=1).all

    def __len__(self):
        return 1

    def __getitem__(self, index):
        x = np.array(self.x)
        x[0] = np.nan if self.bad else x[0]
        return x, self.y

    def mend(self, epoch, logs):
        self.bad = False


def ordered(guard, others, first):
    return [guard, *others] if first else [*others, guard]


def fit(callbacks, epochs=3, dropout=True, **kwargs):
    data = zoo.regression()
    if "validation_data" in kwargs:
        callbacks = [*callbacks, keras.callbacks.LambdaCallback(on_epoch_end=kwargs["validation_data"].mend)]
    model = zoo.plain(dropout=dropout)
    history = model.fit(
        *data.all, batch_size=zoo.BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks, **kwargs
    )
    return model, history.history


def finite_file(path):
    model = keras.models.load_model(path) if str(path).endswith(".keras") else zoo.plain()
    if not str(path).endswith(".keras"):
        model.load_weights(path)
    return zoo.bad_entries(model) == []


def saving(folder):
    """Every way in which Keras' own callbacks save a model."""
    checkpoint = keras.callbacks.ModelCheckpoint
    return {
        "model": (checkpoint(folder / "m.keras"), "m.keras"),
        "weights": (checkpoint(folder / "w.weights.h5", save_weights_only=True), "w.weights.h5"),
        "backup": (keras.callbacks.BackupAndRestore(folder / "b", delete_checkpoint=False), "b/latest.weights.h5"),
    }


@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize("what", ["model", "weights", "backup"])
def test_saved_files_are_finite(tmp_path, what, guard_first):
    """Stock Keras saves values that another callback ruined; the guard restores the state first."""
    (plain, _), (kept, name) = saving(tmp_path / "stock")[what], saving(tmp_path / "ours")[what]
    (tmp_path / "ours").mkdir()
    (tmp_path / "stock").mkdir()
    fit([Vandal(), plain], epochs=2)
    assert not finite_file(tmp_path / "stock" / name), "stock Keras does not save NaN any more"
    guard = NanGuard(verbose=0)
    model, _ = fit([Vandal(), *ordered(guard, [kept], guard_first)], epochs=2)
    assert finite_file(tmp_path / "ours" / name)
    assert [i.findings[0].site for i in guard.incidents] == ["weights"]
    assert guard.incidents[0].diagnosis.cause == "state_nonfinite", "the update of the last step cannot have made it"
    assert "a callback" in guard.incidents[0].diagnosis.advice[0]
    assert zoo.bad_entries(model) == []
    assert not {"save", "save_weights"} & set(vars(model))


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_save_of_a_bad_model_is_prevented(tmp_path, capsys, verbose):
    """If the policy restores nothing, the old file stays, and a line says so if `verbose`."""
    policy = {"escalation": ["skip"], "max_consecutive_refused": 99}
    kept, guard = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"), NanGuard(policy, verbose=verbose)
    fit([Vandal(), guard, kept], epochs=2)
    said = capsys.readouterr().out
    assert "did not save" in said if verbose else said == ""
    assert [event.kind for event in guard.recording.events].count("firewall") == 1
    assert finite_file(tmp_path / "m.keras")


def test_a_healthy_state_is_read_once_per_save_and_at_the_end(tmp_path, monkeypatch):
    """The state is read a second time only after the policy has acted on a bad one."""
    scans, scan_ = [], Run.scan
    monkeypatch.setattr(Run, "scan", lambda run, **kwargs: scans.append(run.step) or scan_(run, **kwargs))
    fit([NanGuard(verbose=0), keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")], epochs=3)
    assert scans == [12, 24, 36, 36]


def test_observing_changes_nothing(tmp_path):
    """Under `observe` the file is written unchanged, and the incident reported."""
    guard = NanGuard("observe", verbose=0)
    fit([Vandal(), guard, keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")], epochs=2)
    assert not finite_file(tmp_path / "m.keras")


@pytest.mark.parametrize(("guard_first", "mode"), [(True, "auto"), (False, "min")])
def test_nan_of_the_validation_is_never_best(tmp_path, guard_first, mode):
    """Stock Keras keeps the NaN of a first validation as best for ever; the guard hides it."""

    def best(folder):
        path = tmp_path / folder / "{epoch}-{val_loss:.1f}.keras"
        path.parent.mkdir()
        more = {"patience": 9, "restore_best_weights": True}
        return [
            keras.callbacks.ModelCheckpoint(path, "val_loss", mode=mode, save_best_only=True),
            keras.callbacks.EarlyStopping("val_loss", mode=mode, **more),
        ]

    stock = best("stock")
    fit(stock, validation_data=BadValidation())
    # Keras 3.6 starts from infinity instead of the first value, and is not fooled by NaN
    assert all(np.isnan(callback.best) for callback in stock) or zoo.OLD, "stock Keras keeps a NaN no more"
    ours, guard = best("ours"), NanGuard(verbose=0)
    _, history = fit(ordered(guard, ours, guard_first), validation_data=BadValidation())
    assert all(np.isfinite(callback.best) for callback in ours)
    assert np.isnan(history["val_loss"][0]) and np.isfinite(history["val_loss"][1:]).all()
    assert guard.incidents[0].findings[0].site == "validation"
    saved = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert saved[0].startswith("2-") and "nan" not in "".join(saved)


def test_a_metric_that_is_meant_to_be_nan_is_compared_as_in_keras(tmp_path):
    """0/0 beside a finite loss: the same files and the same end as without the guard."""

    def undefined(y_true, y_pred):
        return 0.0 * keras.ops.mean(y_pred) / 0.0

    ends = []
    for name, guards in (("stock", []), ("ours", [NanGuard(verbose=0)])):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "{epoch}.weights.h5"
        best = {"mode": "max", "monitor": "val_undefined"}
        kept = keras.callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True, **best)
        stops = keras.callbacks.EarlyStopping(patience=2, **best)
        data, model = zoo.regression(), zoo.plain(metrics=[undefined])
        options = {"epochs": 6, "verbose": 0, "validation_data": data.all}
        history = model.fit(*data.all, callbacks=[kept, stops, *guards], **options)
        ends.append((len(history.epoch), sorted(p.name for p in (tmp_path / name).iterdir())))
    assert ends[0] == ends[1]


def test_rate_is_not_lowered_for_a_nan():
    """`ReduceLROnPlateau` would never find a better loss than a NaN that it has seen."""

    def rate_after(*callbacks):
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=2, min_delta=0)
        model, history = fit([*callbacks, plateau], epochs=4, dropout=False, validation_data=BadValidation())
        assert len(history["learning_rate"]) == 4
        return float(model.optimizer.learning_rate)

    first = float(zoo.plain().optimizer.learning_rate)
    assert rate_after() < 0.5 * first or zoo.OLD, "stock Keras keeps a NaN no more"
    assert rate_after(NanGuard(verbose=0)) == pytest.approx(first)


@pytest.mark.parametrize("patience", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "more", "start"),
    [
        ("ReduceLROnPlateau", {"min_delta": 0}, 0),
        ("ReduceLROnPlateau", {"min_delta": 0}, 2),
        ("EarlyStopping", {}, 0),
        ("EarlyStopping", {}, 2),
        ("EarlyStopping", {"start_from_epoch": 1}, 0),
    ],
)
def test_patience_begins_after_the_first_value(kind, more, start, patience):
    """Stock Keras never acts on the first value, also if it is NaN; the guard does not change that."""
    first = max(start, more.get("start_from_epoch", 0))
    for guards in ([], [NanGuard(verbose=0)]):
        acts, data = getattr(keras.callbacks, kind)(patience=patience, **more), BadValidation()
        data.mend = lambda epoch, logs, data=data: setattr(data, "bad", epoch < first)
        options = {"dropout": False, "validation_data": data, "initial_epoch": start}
        _, history = fit([acts, *guards], epochs=start + 4, **options)
        nans = np.isnan(history["val_loss"])
        assert nans[: first - start + 1].all() and not nans[first - start + 1 :].any()
        if guards or not zoo.OLD:
            assert len(nans) > first - start + 1, "it does not end training in its first epoch"
            assert len(set(history.get("learning_rate", [0.0, 0.0])[:2])) == 1


def test_a_file_name_may_contain_a_nan(tmp_path):
    """A checkpoint that keeps every epoch compares nothing. It is saved as in stock Keras."""
    path = tmp_path / "{epoch}-{val_loss:.2f}.weights.h5"
    kept = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    fit([kept, NanGuard(verbose=0)], epochs=2, validation_data=BadValidation())
    assert [p.name.split("-")[0] for p in sorted(tmp_path.iterdir())] == ["1", "2"]
    assert (tmp_path / "1-nan.weights.h5").exists()


class OwnBest(keras.callbacks.Callback):
    """A user's callback that looks like those of Keras."""

    def __init__(self):
        super().__init__()
        self.monitor, self.monitor_op, self.best = "val_loss", np.less, np.inf
        self.read = []

    def on_epoch_end(self, epoch, logs=None):
        self.read.append(float(logs[self.monitor]))
        if self.monitor_op(logs[self.monitor], self.best):
            self.best = logs[self.monitor]


class ReadsBefore(keras.callbacks.ReduceLROnPlateau):
    """Requires the metric, and leaves the comparison to Keras."""

    def __init__(self):
        super().__init__(patience=9)
        self.read = []

    def on_epoch_end(self, epoch, logs=None):
        self.read.append(float(logs[self.monitor]))
        super().on_epoch_end(epoch, logs)


@pytest.mark.parametrize("kind", [OwnBest, ReadsBefore])
def test_own_code_reads_the_logs_of_keras(kind):
    """Also a NaN, as without the guard. What Keras compares for it makes no NaN the best."""
    stock, ours = kind(), kind()
    for callbacks in ([stock], [ours, NanGuard(verbose=0)]):
        keras.utils.set_random_seed(0)
        fit(callbacks, dropout=False, validation_data=BadValidation())
    assert np.isnan(stock.read).any()
    np.testing.assert_allclose(ours.read, stock.read, rtol=1e-6)
    assert np.isfinite(ours.best)


def test_averages_swapped_in_are_finite(tmp_path):
    """`SwapEMAWeights` swaps averages of good steps into a checkpoint."""
    data = zoo.poison(zoo.regression(), 3)
    model = zoo.plain(optimizer=keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9))
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    kept = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")
    model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[swap, kept, NanGuard(verbose=0)])
    assert finite_file(tmp_path / "m.keras")
    assert zoo.bad_entries(model) == []


@pytest.mark.parametrize("heals", [True, False])
def test_orbax(tmp_path, heals):
    """`OrbaxCheckpoint` saves without `Model.save`; it is checked as well."""
    pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    tell = {"escalation": ["skip"], "max_consecutive_refused": 99}
    kept = keras.callbacks.OrbaxCheckpoint(str(tmp_path), save_freq="epoch", save_on_background=False, max_to_keep=5)
    fit([Vandal(), NanGuard("recover" if heals else tell, verbose=0), kept], epochs=2)
    saved = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert len(saved) == (2 if heals else 1)
    assert all(scan(tmp_path / name).ok for name in saved)
