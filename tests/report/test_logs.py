"""What other callbacks, History and the console receive."""

import csv
import math
import threading

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import GuardError, NanGuard, NanGuardModel

NAMES = {f"nanguard/{name}" for name in ("grad_norm", "rate_factor", "loss_scale", "rollbacks")}


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches, self.epochs, self.bad = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))
        self.bad += zoo.bad_entries(self.model)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def fit(data, *callbacks, epochs=2, model=None, **kwargs):
    keras.utils.set_random_seed(0)
    model = model or zoo.plain()
    history = model.fit(
        data.x, data.y, batch_size=zoo.BATCH, epochs=epochs, shuffle=False, callbacks=list(callbacks), **{"verbose": 0, **kwargs}
    )
    return model, history.history


class Threads(keras.callbacks.Callback):
    async_safe = True

    def __init__(self):
        super().__init__()
        self.seen = set()

    def on_train_batch_end(self, batch, logs=None):
        self.seen.add(threading.get_ident())


def test_callbacks_are_called_in_the_thread_that_keras_chooses():
    """Stock Keras calls them in other threads on JAX and PyTorch; so does a guarded run."""
    stock, ours, of_model = Threads(), Threads(), Threads()
    fit(zoo.regression(), stock)
    fit(zoo.regression(), NanGuard(verbose=0), ours)
    plain = zoo.plain()
    model = NanGuardModel(plain.inputs, plain.outputs)
    model.compile("adam", "mse")
    fit(zoo.regression(), of_model, model=model)
    here = {threading.get_ident()}
    assert (ours.seen == here) == (of_model.seen == here) == (stock.seen == here)


@pytest.mark.parametrize("guard_first", [True, False])
def test_no_callback_sees_a_nan(guard_first):
    """Nor in the model, at any position of the guard in the list."""
    recorder, guard = Recorder(), NanGuard(verbose=0)
    fit(zoo.poison(zoo.regression(), 3), *((guard, recorder) if guard_first else (recorder, guard)))
    values = [v for logs in (*recorder.batches, *recorder.epochs) for v in logs.values()]
    assert all(math.isfinite(v) for v in values) and recorder.bad == []


def test_healthy_history_is_unchanged():
    """Except for the guard's own keys, History has the keys and values of an unguarded run."""
    data = zoo.regression()
    history = fit(data, NanGuard(verbose=0))[1]
    assert zoo.plain_logs(history) == fit(data)[1] and history["refused_steps"] == [0, 0]
    assert set(history) - set(zoo.plain_logs(history)) == {"refused_steps", *NAMES}
    assert set(fit(data, NanGuard(verbose=0, logs=False))[1]) == {*zoo.plain_logs(history), "refused_steps"}


@pytest.mark.parametrize("first", [False, True])
def test_every_callback_sees_our_numbers_from_the_first_epoch_on(tmp_path, first):
    """CSVLogger keeps the columns of its first epoch: ours are among them, in any order."""
    epochs, guard, log = [], NanGuard(verbose=0, diagnose=False), keras.callbacks.CSVLogger(tmp_path / "log.csv")
    sees = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(dict(logs)))
    history = fit(zoo.poison(zoo.regression(), 3), *([guard, log, sees] if first else [log, sees, guard]), epochs=3)[1]
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and all(NAMES | {"refused_steps"} <= set(row) for row in rows)
    for name in NAMES | {"refused_steps"}:
        assert [float(row[name]) for row in rows] == [float(logs[name]) for logs in epochs] == history[name]
    assert history["refused_steps"] == [1, 1, 1] and isinstance(history["refused_steps"][0], int)
    assert all(value > 0 for value in history["nanguard/grad_norm"]) and history["nanguard/rate_factor"] == [1.0] * 3


@pytest.mark.parametrize(
    ("before", "now", "validated"),
    [
        (None, {}, False),
        (None, {}, True),
        ({}, {}, True),
        ({}, {"logs": False}, False),
        ({"logs": False}, {}, True),
    ],
    ids=str,
)
def test_an_older_csv_file_keeps_its_columns(tmp_path, before, now, validated):
    """`append=True` continues a file with other logs; values are in their columns, as in Keras."""
    data = zoo.regression()
    more = {"validation_data": data.all} if validated else {}

    def train(name, *guards):
        """Write a file in several fits; return its header, rows, and the history of the last fit."""
        for guard in guards:
            log = keras.callbacks.CSVLogger(tmp_path / name, append=True)
            callbacks = [log] if guard is None else [log, NanGuard(verbose=0, **guard)]
            history = fit(data, *callbacks, epochs=2, **more)[1]
        with open(tmp_path / name) as file:
            reader = csv.DictReader(file, restkey="too many")
            return reader.fieldnames, list(reader), history

    columns, plain, _ = train("plain.csv", None, None)
    header, rows, history = train("guarded.csv", before, now)
    _, first, _ = train("first.csv", before)
    assert rows[:2] == first and len(rows) == 4
    for row, other, n in zip(rows[2:], plain[2:], range(2), strict=True):
        assert "too many" not in row and {key: row[key] for key in columns} == other
        for key in {*header} - {*columns}:
            known = not key.startswith("val_") and key in history
            assert float(row[key]) == history[key][n] if known else row[key] == "NA"
    assert ("refused_steps" in header) == (before is not None)
    assert ("nanguard/rollbacks" in header) == (before == {})


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_bar_shows_none_of_our_numbers(capsys, verbose):
    """Only the metrics of the user, and the number of refused steps if there are any."""
    fit(zoo.regression(), NanGuard(verbose=0), epochs=1, verbose=verbose)
    healthy = capsys.readouterr().out
    assert "nanguard" not in healthy and "refused" not in healthy and "mae" in healthy
    fit(zoo.poison(zoo.regression(), 3), NanGuard(verbose=0), epochs=1, verbose=verbose)
    bad = capsys.readouterr().out
    assert "nanguard" not in bad and "refused_steps: 1" in bad


def test_an_epoch_without_a_committed_step():
    """Without measurements the last gradient norm is repeated, and all numbers are finite."""
    data = zoo.regression()
    data.x[:] = np.nan
    history = fit(data, NanGuard(verbose=0, diagnose=False), epochs=1)[1]
    assert history["refused_steps"][0] > 0 and np.isfinite([history[name][0] for name in NAMES]).all()


def test_one_line_for_each_incident(capsys):
    """One for an incident, an epoch with skipped steps, a new bad row; then the table."""
    guard = NanGuard()
    fit(zoo.poison(zoo.regression(), 3), guard, epochs=1)
    out = capsys.readouterr().out.splitlines()
    lines = [line for line in out if line.startswith("NanGuard: ")]
    assert len(lines) == 4 and out[:4] == lines and out[-1].startswith("╰")
    assert lines[0].startswith("NanGuard: skipped step 4 (epoch 1): NaN in x[26]. Clean 'x'.")
    assert lines[1] == "NanGuard: epoch 1 metrics exclude 1 skipped step of 12."
    assert lines[3].startswith("NanGuard: skipped 1 of 12 steps, 1 incident. Details: ")
    assert all(len(line) <= 120 for line in out)
    assert lines[2] == "NanGuard: 1 distinct bad row so far: x[26]"


def test_silence(capsys):
    """With `verbose=0` nothing is printed, and in a healthy fit nothing either."""
    fit(zoo.poison(zoo.regression(), 3), NanGuard(verbose=0), epochs=1)
    fit(zoo.regression(), NanGuard(), epochs=1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verbose", [1, 2])
def test_ordinary_overflows(capsys, verbose):
    """Loss scaling skips steps until gradients fit: healthy, with lines only at `verbose=2`."""
    keras.config.set_dtype_policy("mixed_float16")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.0**24)
    model = zoo.plain(scaled, dropout=False)
    _, history = fit(zoo.regression(), NanGuard(verbose=verbose), model=model, epochs=1)
    assert 0 < history["refused_steps"][0] < 12
    assert ("metrics exclude" in capsys.readouterr().out) is (verbose == 2)


def test_overflows_down_to_a_small_scale(capsys):
    """Gradients in the thousands need a scale below 16: all these overflows are ordinary."""
    keras.config.set_dtype_policy("mixed_float16")

    def run(*callbacks):
        keras.utils.set_random_seed(0)  # before the model draws its weights
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-9))
        data = zoo.regression(batches=24)
        data.y *= 8000.0
        fit(data, *callbacks, model=zoo.plain(scaled, dropout=False), epochs=1)
        return float(keras.ops.convert_to_numpy(scaled.dynamic_scale))

    stock, guard = run(), NanGuard()
    assert stock < 2.0**6, "the scale has not come down"
    assert run(guard) == stock and guard.incidents == [] and capsys.readouterr().out == ""


def test_printing_follows_keras(capsys, caplog):
    """If Keras' interactive logging is off, the lines go to Keras' log."""
    keras.config.disable_interactive_logging()
    try:
        fit(zoo.poison(zoo.regression(), 3), NanGuard(), epochs=1)
    finally:
        keras.config.enable_interactive_logging()
    assert "NanGuard" not in capsys.readouterr().out


def test_summary_and_reports(tmp_path):
    """They contain every incident, and a report is written completely or not at all."""
    import json

    guard = NanGuard(verbose=0)
    fit(zoo.poison(zoo.regression(), 3), guard)
    assert "24 steps, 2 skipped, 2 incidents" in guard.summary()
    whole = json.loads(guard.report(tmp_path / "r.json").read_text())
    assert [i["step"] for i in whole["incidents"]] == [3, 15] and whole["format"] == 1
    lines = guard.report(tmp_path / "r.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 15]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "r.jsonl"]


def test_a_summary_is_of_all_fits():
    """Steps, refused steps and incidents over the same fits; an evaluation adds none."""
    guard, data = NanGuard(verbose=0, diagnose=False), zoo.poison(zoo.regression(), 3)
    for fits in (1, 2):
        model, _ = fit(data, guard, epochs=1)
        model.evaluate(*zoo.regression().all[:2], verbose=0, callbacks=[guard])
        assert f"{12 * fits} steps, {fits} skipped, {fits} incident" in guard.summary()


def test_the_same_rows_in_each_epoch(capsys):
    """One line, counted in the final table; `verbose=2` prints each."""
    data = zoo.poison(zoo.poison(zoo.regression(), 3), 7)
    guard = NanGuard(diagnose=False)
    fit(data, guard, epochs=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NanGuard: ")]
    starts = (
        "skipped step 4 (epoch 1): ",
        "epoch 1 metrics exclude 2 skipped steps of 12.",
        "skipped 6 of 36 steps, 6 incidents. ",
    )
    assert len(lines) == 3 and all(line.startswith(f"NanGuard: {start}") for line, start in zip(lines, starts)), lines
    assert len(guard.incidents) == 6
    talks = NanGuard(diagnose=False)
    talks.verbose = 2
    fit(data, talks, epochs=3)
    assert capsys.readouterr().out.count(" refused: inputs") == 6
    with pytest.raises(GuardError, match="verbose to be 0, 1 or 2"):
        talks.verbose = 3


def test_the_lines_of_a_second_fit(capsys):
    """They are those that another guard would print."""
    guard, bad = NanGuard(diagnose=False), zoo.poison(zoo.regression(), 3)
    model, _ = fit(zoo.poison(zoo.poison(zoo.regression(), 7), 9), guard, epochs=1)
    capsys.readouterr()
    zoo.fit(model, bad, guard, epochs=2)
    second = capsys.readouterr().out
    zoo.fit(model, bad, NanGuard(diagnose=False), epochs=2)
    assert second == capsys.readouterr().out and "epoch 1 metrics exclude 1 skipped step of 12." in second


class WithLogs(keras.callbacks.Callback):
    """Adds logs that are no numbers."""

    def __init__(self, **logs):
        super().__init__()
        self.logs = logs

    def on_epoch_end(self, epoch, logs=None):
        logs |= self.logs


def test_logs_that_are_no_arrays():
    """A ragged list is a value like any other to Keras, so it must not end a guarded fit."""
    by_class = [[0.5], [0.1, 0.2]]
    _, history = fit(zoo.regression(), WithLogs(by_class=by_class), NanGuard(verbose=0), epochs=1)
    assert history["by_class"] == [by_class] and math.isfinite(history["loss"][0])


@pytest.mark.requires_backend("torch", reason="only its tensors have gradients")
def test_tensors_with_a_gradient_in_the_logs():
    import torch

    several = [torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)]
    _, history = fit(zoo.regression(), WithLogs(several=several, single=several[0]), NanGuard(verbose=0), epochs=1)
    assert history["several"] == [several] and history["single"] == [several[0]]
