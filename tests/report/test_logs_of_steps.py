"""Unusual logs (dicts, the loss of one batch): committed steps log as stock Keras."""

import math

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

BAD = (2, 6)
MODES = {"compiled": {}, "eager": {"run_eagerly": True}}
if zoo.BACKEND == "tensorflow":
    MODES |= {"graph": {"jit_compile": False}, "two steps in one": {"jit_compile": False, "steps_per_execution": 2}}
DAILY = pytest.mark.daily("*compiled", "*eager", "*two steps in one")
"""On a CPU "compiled" is a graph on TensorFlow, too."""


class Extremes(keras.metrics.Metric):
    def __init__(self, name="extremes"):
        super().__init__(name=name)
        self.total, self.most = self.add_variable((), "zeros", name="total"), self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(self.total + ops.mean(ops.cast(y_pred, "float32")))
        self.most.assign(ops.maximum(self.most, ops.max(ops.cast(y_pred, "float32"))))

    def result(self):
        return {"total": self.total + 0.0, "most": self.most + 0.0}


class Own(keras.Model):
    """A custom train step in the idiom of each backend, which logs its loss as `logged` defines."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, x, training=False):
        return self.dense(x)

    def logged(self, loss):
        return {"loss": loss}

    def train_step(self, *args):
        return (self._on_jax if zoo.BACKEND == "jax" else self._in_place)(*args)

    def _in_place(self, data):
        from support.programs import differentiated

        x, y, *_ = data
        loss, gradients = differentiated(lambda: ops.mean(ops.square(y - self(x))), lambda: self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logged(loss)

    def _on_jax(self, state, data):
        import jax

        trainable, others, slots, metrics = state
        x, y, *_ = data
        loss, gradients = jax.value_and_grad(lambda w: ops.mean(ops.square(y - self.stateless_call(w, others, x)[0])))(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return self.logged(loss), (trainable, others, slots, metrics)


class Noisy(Own):
    """Logs several numbers of its batch, including whole numbers."""

    def logged(self, loss):
        return {"loss": loss, "twice": 2.0 * loss, "rows": ops.cast(zoo.BATCH, "int32")}


def own(kind, **mode):
    model = kind()
    model.compile(keras.optimizers.SGD(0.05), "mse", **mode)
    return model


def with_dicts(**mode):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {"a": layers.Dense(1, name="a")(inputs), "b": layers.Dense(1, name="b")(inputs)})
    metrics = {"a": [Extremes(), "mae"], "b": [Extremes("others")]}
    model.compile("sgd", {"a": "mse", "b": "mse"}, metrics=metrics, **mode)
    return model


def flat(value):
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in value.items()}


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(flat(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(zoo.plain_logs(flat(logs)))


def fitted(make, data, *callbacks, epochs=2, **more):
    keras.utils.set_random_seed(0)
    recorder, model = Recorder(), make()
    fitting = {"batch_size": zoo.BATCH, "epochs": epochs, "shuffle": False, "verbose": 0, **more}
    model.fit(data.x, data.y, callbacks=[*callbacks, recorder], **fitting)
    return recorder


def several(data):
    data.y = {"a": data.y, "b": 2.0 * data.y}
    return data


@DAILY
@pytest.mark.parametrize("mode", MODES)
def test_a_metric_whose_result_is_a_dict(mode):
    """As in Keras, with several outputs and in validation; a refused step changes nothing."""
    data, one = several(zoo.regression()), zoo.regression(batches=1)
    more = {"validation_data": (one.x, {"a": one.y, "b": one.y})}
    stock = fitted(lambda: with_dicts(**MODES[mode]), data, **more)
    guarded = fitted(lambda: with_dicts(**MODES[mode]), data, NanGuard(verbose=0), **more)
    assert guarded.batches == stock.batches and guarded.epochs == stock.epochs
    assert {"total", "most", "val_most"} <= set(stock.epochs[0])
    if mode != "two steps in one":
        left_out = fitted(lambda: with_dicts(**MODES[mode]), zoo.poison(data, 3), NanGuard(verbose=0, diagnose=False))
        assert left_out.batches[3] == left_out.batches[2] == stock.batches[2] != left_out.batches[4]


@DAILY
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Own, Noisy])
def test_the_loss_of_one_batch(kind, mode):
    """A committed step logs its own, also under a metric's name; a refused one the last one's."""
    stock, guarded = (fitted(lambda: own(kind, **MODES[mode]), zoo.regression(), *more) for more in ((), (NanGuard(verbose=0),)))
    assert guarded.batches == stock.batches and guarded.epochs == stock.epochs
    assert len({logs["loss"] for logs in stock.batches}) > 5
    if mode == "two steps in one":
        return
    bad = zoo.regression()
    for step in BAD:
        zoo.poison(bad, step)
    left_out = fitted(lambda: own(kind, **MODES[mode]), bad, NanGuard(verbose=0, diagnose=False))
    for step in BAD:
        assert left_out.batches[step] == left_out.batches[step - 1] != left_out.batches[step + 1]
    assert left_out.batches[:2] == stock.batches[:2]
    assert all(math.isfinite(v) and v != 0.0 for logs in left_out.batches for v in logs.values())


# Epochs in which no step has committed


HUGE = 3.4028234663852886e38


class Batches(keras.utils.PyDataset):
    """Epochs of three batches; in the epochs `bad` every row is NaN."""

    def __init__(self, bad):
        super().__init__()
        self.bad, self.epoch, self.data = bad, 0, zoo.regression(batches=3)

    def __len__(self):
        return 3

    def __getitem__(self, number):
        rows = slice(number * zoo.BATCH, (number + 1) * zoo.BATCH)
        x = self.data.x[rows]
        return np.full_like(x, np.nan) if self.epoch in self.bad else x, self.data.y[rows]

    def on_epoch_end(self):
        self.epoch += 1


def scored(y_true, y_pred):
    """A metric without a direction known to Keras."""
    return ops.mean(ops.abs(y_true - y_pred)) + 1.0


def measuring():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1, kernel_initializer="zeros")(inputs))
    metrics = ["mae", scored, keras.metrics.R2Score(name="r2"), Extremes()]
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=metrics)
    return model


def trained(bad, *callbacks, model=None, epochs=4):
    """Return History of a fit with these bad epochs, and the model."""
    keras.utils.set_random_seed(0)
    model = model or measuring()
    data = Batches(bad)
    begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: setattr(data, "epoch", epoch))
    history = model.fit(data, epochs=epochs, shuffle=False, verbose=0, callbacks=[begin, *callbacks])
    return {key: values for key, values in history.history.items() if not key.startswith("nanguard/")}, model


def comparing(monitor, mode, folder):
    path = folder / f"{monitor}-{{epoch}}-{{{monitor}:.2f}}.weights.h5"
    every = {"save_best_only": True, "save_weights_only": True, "verbose": 1}
    return {
        "stop": keras.callbacks.EarlyStopping(monitor, mode=mode, patience=3, restore_best_weights=True),
        "plateau": keras.callbacks.ReduceLROnPlateau(monitor, mode=mode, patience=1, factor=0.5),
        "save": keras.callbacks.ModelCheckpoint(path, monitor, mode=mode, **every),
        "save within": keras.callbacks.ModelCheckpoint(folder / "within.weights.h5", monitor, mode=mode, save_freq=3, **every),
    }


COMPARED = [("loss", "auto"), ("mae", "min"), ("mae", "auto"), ("scored", "min"), ("r2", "max"), ("most", "min")]


@pytest.mark.parametrize(("monitor", "mode"), COMPARED)
def test_nothing_measured_is_never_the_best(tmp_path, monitor, mode):
    (tmp_path / "stock").mkdir(), (tmp_path / "guarded").mkdir()
    stock, guarded = comparing(monitor, mode, tmp_path / "stock"), comparing(monitor, mode, tmp_path / "guarded")
    without, plain = trained((), *stock.values(), epochs=3)
    history, model = trained((0,), NanGuard(verbose=0, diagnose=False), *guarded.values())
    measured = [v for v in history[monitor] if abs(v) < 1e30]
    assert len(history[monitor]) == 4 and measured == without[monitor]
    assert {name: float(c.best) for name, c in guarded.items()} == {name: float(c.best) for name, c in stock.items()}
    assert len({len(values) for values in history.values()}) == 1 and "learning_rate" in history
    assert history["learning_rate"][1:] == without["learning_rate"]
    for one, other in zip(plain.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(one, other)
    saved = [sorted(p.name for p in (tmp_path / who).iterdir()) for who in ("stock", "guarded")]
    assert not any(name.startswith(f"{monitor}-1-") for name in saved[1]) and len(saved[0]) == len(saved[1]) > 1


@pytest.mark.parametrize("patience", [0, 1])
def test_patience_does_not_shrink_without_measurements(patience):
    """In the two epochs before the first committed step nothing could improve."""
    waiting = keras.callbacks.EarlyStopping("mae", patience=patience)
    lowering = keras.callbacks.ReduceLROnPlateau("mae", patience=patience)
    history, _ = trained((0, 1), NanGuard(verbose=0, diagnose=False), waiting, lowering)
    assert len(history["mae"]) == 4 and len(set(history["learning_rate"][:3])) == 1


def test_logs_without_measurements(tmp_path, capsys):
    """A finite number that no measurement has and that is worse than any, and a line says so."""
    import csv
    import json

    recorder = Recorder()
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history, _ = trained((0, 1), NanGuard(diagnose=False), recorder, log, keras.callbacks.TerminateOnNaN(), epochs=3)
    worst = {"loss": HUGE, "mae": HUGE, "scored": HUGE, "r2": -HUGE, "total": HUGE, "most": HUGE}
    for logs in (*recorder.batches[:6], *recorder.epochs[:2]):
        assert logs == worst
    assert all(abs(v) < 1e3 for logs in (*recorder.batches[6:], recorder.epochs[2]) for v in logs.values())
    assert history["refused_steps"] == [3, 3, 0] and json.loads(json.dumps(history, allow_nan=False)) == history
    with open(tmp_path / "log.csv") as file:
        assert [float(row["mae"]) for row in csv.DictReader(file)] == history["mae"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "epoch 1:" in line]
    assert len(lines) == 1 and "epoch 1: all 3 steps skipped; +-3.4e+38" in lines[0]


def test_a_later_epoch_without_a_step_repeats_the_last_one(capsys):
    """Its logs are those of the last committed step, also in each of its batches."""
    recorder = Recorder()
    history, _ = trained((1,), NanGuard(diagnose=False), recorder, epochs=3)
    assert all(values[1] == values[0] != values[2] for values in zoo.plain_logs(history).values())
    assert recorder.batches[3:6] == [recorder.batches[2]] * 3
    line = "epoch 2: all 3 steps skipped; the logs are those of the last good step."
    assert line in capsys.readouterr().out


def test_a_first_epoch_without_a_step_logs_a_loss_that_is_finite(capsys):
    """Only the gradients are bad: the loss is a measurement, and no earlier step is named."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((24, 4), "float32")
    with inject(model, site="gradients", kind="nan", step=0, count=3):
        history = model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[NanGuard(diagnose=False)])
    assert history.history["loss"][0] < 1e3
    line = "all 3 steps skipped; the logs have the loss of the last skipped step."
    assert line in capsys.readouterr().out


def test_a_run_that_ends_before_its_first_step_has_no_loss_of_0():
    """If the state is bad from the start, History has no metric of 0."""
    model = measuring()
    model.layers[-1].bias.assign([np.nan])
    history, _ = trained((), NanGuard(verbose=0, diagnose=False), model=model)
    assert zoo.plain_logs(history) == {
        **{k: [HUGE] for k in ("loss", "mae", "scored", "total", "most")},
        "r2": [-HUGE],
    }


def test_a_callback_may_begin_to_act_in_training():
    """Methods that are set on an instance later are called, as in Keras."""
    seen, late = [], keras.callbacks.Callback()

    def begin(epoch, logs):
        late.on_batch_end = lambda batch, logs=None: seen.append(batch)

    data = zoo.regression()
    zoo.fit(zoo.plain(), data, NanGuard(verbose=0), keras.callbacks.LambdaCallback(on_epoch_begin=begin), late)
    assert sorted(seen) == list(range(data.batches)), "in any order: Keras calls them in several threads"
