"""Callbacks of real trackers, in processes, log the keys of the guard at any position."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

BEFORE = """
import json, os, sys
sys.path[:0] = ["tests", "."]
folder = sys.argv[1]
import keras, numpy as np
from clients.test_callbacks import fit
from keras_nanguard import NanGuard
from support import zoo

def all_ways(make):
    # the plain run, then healthy and bad ones with the guard after the other callbacks and before them
    found = {"plain": fit([*make("plain")])}
    for bad in (False, True):
        for first in (False, True):
            guard, others = NanGuard(verbose=0, diagnose=False), make(f"{bad}{first}")
            history = fit([guard, *others] if first else [*others, guard], bad=(2,) if bad else ())
            assert len(guard.incidents) == 2 * bad, guard.incidents
            assert history["refused_steps"] == [int(bad)] * 2 and np.isfinite(history["loss"]).all()
            assert bad or zoo.plain_logs(history) == found["plain"]
            found[f"{bad}{first}"] = history
    return found
"""


def run(code, folder):
    more = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", BEFORE + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more}, check=False, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


MLFLOW = """
import mlflow
mlflow.set_tracking_uri(f"sqlite:///{folder}/m.db")
mlflow.create_experiment("e", artifact_location=f"file://{folder}/artifacts")
mlflow.set_experiment("e")
client = mlflow.MlflowClient()
from mlflow.keras import MlflowCallback
runs = {}
def make(name):
    if mlflow.active_run():
        mlflow.end_run()
    runs[name] = mlflow.start_run(run_name=name).info.run_id
    return [MlflowCallback()] if CALLBACK else []
if not CALLBACK:
    mlflow.keras.autolog(log_models=False)
all_ways(make)
mlflow.end_run()
found = {name: [m.value for m in client.get_metric_history(run, "refused_steps")] for name, run in runs.items() if name != "plain"}
print(json.dumps(found))
"""


@pytest.mark.parametrize("way", ["callback", "autolog"])
def test_mlflow(way, tmp_path):
    """Its callback and autolog log refused steps of each epoch, healthy or bad."""
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny sqlalchemy alembic")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed: pip install sqlalchemy alembic")
    found = run(f"CALLBACK = {way == 'callback'}\n" + MLFLOW, tmp_path)
    assert found == {f"{bad}{first}": [float(bad)] * 2 for bad in (False, True) for first in (False, True)}


WANDB = """
import wandb
from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint
runs, rows = {}, {}
real = wandb.sdk.wandb_run.Run.log
def log(self, data, *args, **kwargs):
    rows.setdefault(self.name, []).append(dict(data))
    return real(self, data, *args, **kwargs)
wandb.sdk.wandb_run.Run.log = log
def make(name):
    wandb.finish()
    wandb.init(project="p", dir=folder, mode="offline", name=name)
    return [WandbMetricsLogger(), WandbModelCheckpoint(os.path.join(folder, name + ".keras"), monitor="val_loss", save_best_only=True)]
all_ways(make)
wandb.finish()
for name in rows:
    model = keras.saving.load_model(os.path.join(folder, name + ".keras"), compile=False)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
print(json.dumps({name: [row["epoch/refused_steps"] for row in found if "epoch/refused_steps" in row] for name, found in rows.items()}))
"""


def test_wandb(tmp_path):
    """The offline logger logs the number of each epoch; its checkpoint saves finite models."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    found = run(WANDB, tmp_path)
    assert found.pop("plain") == []
    assert found == {f"{bad}{first}": [int(bad)] * 2 for bad in (False, True) for first in (False, True)}


TQDM = """
from tqdm.keras import TqdmCallback
all_ways(lambda name: [TqdmCallback(verbose=1, file=open(os.path.join(folder, name + ".txt"), "w"))])
print(json.dumps({name: open(os.path.join(folder, name + ".txt")).read() for name in ("plain", "TrueTrue", "TrueFalse")}))
"""


def test_tqdm(tmp_path):
    pytest.importorskip("tqdm.keras", exc_type=ImportError, reason="tqdm has no callback for Keras here")
    found = run(TQDM, tmp_path)
    assert all("loss" in text for text in found.values()) and "refused_steps" in found["TrueTrue"]
