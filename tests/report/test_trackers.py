"""Numbers in the epoch logs for every tracker, and incidents in the trackers that a run uses,
tested with the real ones.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel

ROOT = Path(__file__).parents[2]
NAMES = {f"nanguard/{name}" for name in ("grad_norm", "rate_factor", "loss_scale", "rollbacks")}


def fit(*callbacks, data=None, epochs=3, **more):
    keras.utils.set_random_seed(0)
    data = data or zoo.poison(zoo.regression(), 3)
    settings = {"batch_size": zoo.BATCH, "epochs": epochs, "shuffle": False, "verbose": 0, **more}
    return zoo.plain().fit(data.x, data.y, callbacks=list(callbacks), **settings)


@pytest.mark.parametrize("first", [False, True])
def test_every_callback_sees_them_from_the_first_epoch_on(tmp_path, first):
    """CSVLogger keeps the columns of its first epoch: they are present, before or after the guard.
    """
    epochs, guard, log = [], NanGuard(verbose=0, diagnose=False), keras.callbacks.CSVLogger(tmp_path / "log.csv")
    sees = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(dict(logs)))
    history = fit(*([guard, log, sees] if first else [log, sees, guard])).history
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
    """`CSVLogger(append=True)` continues a file of a run without the guard, or with other logs of
    it. Each value is in the column of its name, as in the file of plain Keras.
    """
    data = zoo.regression()
    more = {"validation_data": data.all} if validated else {}

    def train(name, *guards):
        """Write a file in several fits; return its header, rows, and the history of the last fit."""
        for guard in guards:
            log = keras.callbacks.CSVLogger(tmp_path / name, append=True)
            callbacks = [log] if guard is None else [log, NanGuard(verbose=0, **guard)]
            history = fit(*callbacks, data=data, epochs=2, **more).history
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
def test_progress_bar_shows_none_of_them(capsys, verbose):
    """The progress bar shows the metrics of the user, and the number of refused steps if there are
    any.
    """
    fit(NanGuard(verbose=0), data=zoo.regression(), epochs=1, verbose=verbose)
    healthy = capsys.readouterr().out
    assert "nanguard" not in healthy and "refused" not in healthy and "mae" in healthy
    fit(NanGuard(verbose=0), epochs=1, verbose=verbose)
    bad = capsys.readouterr().out
    assert "nanguard" not in bad and "refused_steps: 1" in bad


def test_an_epoch_without_a_committed_step():
    """Without measurements the last gradient norm is repeated, and all numbers are finite."""
    data = zoo.regression()
    data.x[:] = np.nan
    history = fit(NanGuard(verbose=0, diagnose=False), data=data, epochs=1).history
    assert history["refused_steps"][0] > 0 and np.isfinite([history[name][0] for name in NAMES]).all()


# The real trackers


@pytest.mark.requires_backend("tensorflow", reason="Keras' TensorBoard writes with TensorFlow")
def test_tensorboard(tmp_path):
    """The event files of Keras' TensorBoard have the numbers as scalars, and each incident as text,
    in the run of training.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    guard = NanGuard(verbose=0)
    history = fit(keras.callbacks.TensorBoard(tmp_path), guard).history
    found = EventAccumulator(str(tmp_path / "train"), size_guidance={"tensors": 0}).Reload()
    tags = found.Tags()["tensors"]
    assert {f"epoch_{name}" for name in NAMES} <= set(tags)

    def values(tag):
        import tensorflow as tf

        return [tf.make_ndarray(event.tensor_proto) for event in found.Tensors(tag)]

    assert [float(value) for value in values("epoch_nanguard/grad_norm")] == pytest.approx(history["nanguard/grad_norm"])
    texts = [value.item().decode() for value in values("nanguard/incident")]
    assert texts == [str(incident) for incident in guard.incidents] and len(texts) == 3
    assert [event.step for event in found.Tensors("nanguard/incident")] == [3, 15, 27]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train"]


def in_a_process(code, folder):
    """Run a training program in a separate process, because a tracker changes the process that
    imports it.
    """
    before = "import keras, sys\nsys.path[:0] = ['tests', '.']\nfrom report.test_trackers import fit\nfrom keras_nanguard import NanGuard\n"
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/m.db", "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", before + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **store}, check=False, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


MLFLOW = """
import mlflow, json
mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/m.db")
mlflow.create_experiment("e", artifact_location=f"file://{sys.argv[1]}/artifacts")
mlflow.set_experiment("e")
class Logs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        mlflow.log_metrics(logs, step=epoch)
with mlflow.start_run() as run:
    history = fit(Logs(), NanGuard(verbose=0)).history
client = mlflow.MlflowClient()
found = client.get_run(run.info.run_id)
page = mlflow.artifacts.load_text(f"{found.info.artifact_uri}/nanguard/report.html")
print(json.dumps({"tags": found.data.tags, "metrics": found.data.metrics, "page": page[:20000], "history": history["nanguard/grad_norm"],
                  "artifacts": [a.path for a in client.list_artifacts(run.info.run_id, "nanguard")]}))
"""


@pytest.mark.slow
@pytest.mark.requires_backend("tensorflow", reason="independent of the backend: runs once")
def test_mlflow(tmp_path):
    """In a real SQLite store: the numbers as metrics, incidents and causes as tags, the report as an artifact."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    found = in_a_process(MLFLOW, tmp_path)
    assert found["tags"]["nanguard.incidents"] == "3" and found["tags"]["nanguard.causes"] == "input_nonfinite"
    assert set(found["metrics"]) >= NAMES and found["metrics"]["nanguard/grad_norm"] == pytest.approx(found["history"][-1])
    assert found["artifacts"] == ["nanguard/report.html"] and "<html" in found["page"].lower() and "input_nonfinite" in found["page"]


WANDB = """
import wandb, json
run = wandb.init(project="p", dir=sys.argv[1], mode="offline")
alerts = []
real = type(run).alert
def alert(self, *args, **kwargs):
    alerts.append(kwargs)
    return real(self, *args, **kwargs)
type(run).alert = alert
class Logs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        wandb.log(logs)
fit(Logs(), NanGuard(verbose=0))
summary = {key: value for key, value in dict(run.summary).items() if isinstance(value, (int, float))}
wandb.finish()
print(json.dumps({"alerts": alerts, "summary": summary}))
"""


@pytest.mark.slow
@pytest.mark.requires_backend("tensorflow", reason="independent of the backend: runs once")
def test_wandb(tmp_path):
    """In a real offline run: the numbers in its history, and one alert for each cause, not for each incident."""
    pytest.importorskip("wandb")
    found = in_a_process(WANDB, tmp_path)
    assert set(found["summary"]) >= NAMES and found["summary"]["refused_steps"] == 1
    assert [alert["title"] for alert in found["alerts"]] == ["NanGuard: input_nonfinite"] and "step 4" in found["alerts"][0]["text"]


# Without any of them


class Fake:
    """A tracker that a program has imported, with or without an active run."""

    def __init__(self, active):
        self.run = self if active else None
        self.active, self.alerts, self.tags, self.texts = active, [], {}, {}

    def alert(self, title, text):
        self.alerts.append(title)

    def active_run(self):
        return self if self.active else None

    def set_tags(self, tags):
        self.tags |= tags

    def log_text(self, text, name):
        self.texts[name] = text


@pytest.mark.parametrize("active", [False, True])
def test_only_where_a_run_is_active(monkeypatch, capsys, active):
    """Without an active run nothing is sent, and the guard imports nothing."""
    wandb, mlflow = Fake(active), Fake(active)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    fit(NanGuard(verbose=0))
    tags = {"nanguard.incidents": 3, "nanguard.causes": "input_nonfinite"}
    assert len(wandb.alerts) == active and mlflow.tags == (tags if active else {})
    assert list(mlflow.texts) == ["nanguard/report.html"] * active
    assert capsys.readouterr().out == "", "and nothing was called in vain"


def test_a_run_that_raises(monkeypatch):
    """A fit that ends in an exception sends its incidents."""
    mlflow = Fake(True)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with pytest.raises(ArithmeticError):
        fit(NanGuard("raise", verbose=0))
    assert mlflow.tags["nanguard.incidents"] == 1


@pytest.mark.requires_backend("tensorflow", reason="independent of the backend: runs once")
@pytest.mark.parametrize("policy", ["recover", "raise"])
def test_a_model_that_guards_itself(monkeypatch, policy):
    """`NanGuardModel` sends the same as a callback, also if its fit ends in an exception, once for
    each fit.
    """
    mlflow = Fake(True)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    inputs = keras.Input((6,))
    model = NanGuardModel(inputs, keras.layers.Dense(1)(inputs))
    model.nanguard_policy, model.nanguard_verbose = policy, 0
    model.compile("sgd", "mse")
    data = zoo.poison(zoo.regression(), 3)
    for _ in (1, 2):
        mlflow.tags, mlflow.texts = {}, {}
        with pytest.raises(ArithmeticError) if policy == "raise" else contextlib.nullcontext():
            model.fit(data.x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0)
        assert mlflow.tags == {"nanguard.incidents": 1, "nanguard.causes": "input_nonfinite"}
        assert list(mlflow.texts) == ["nanguard/report.html"]


def test_a_healthy_run_sends_no_incident(monkeypatch):
    """A healthy run is tagged with none, and has no report and no alert."""
    wandb, mlflow = Fake(True), Fake(True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    fit(NanGuard(verbose=0), data=zoo.regression(), epochs=1)
    assert wandb.alerts == [] and mlflow.tags["nanguard.incidents"] == 0 and mlflow.texts == {}


def test_a_failing_tracker_is_reported_once(monkeypatch, capsys):
    """An error in a tracker does not end training; one line reports it."""
    wandb = Fake(True)
    monkeypatch.setattr(wandb, "alert", lambda **alert: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    fit(NanGuard(verbose=0))
    printed = capsys.readouterr().out
    assert printed.count("cannot send incidents to Weights & Biases: ZeroDivisionError") == 1
