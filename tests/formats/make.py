"""Write a sample of each file format with the current library, once for each release that changes a
format.

    python tests/formats/make.py 1.0

An existing folder is never changed: `tests/test_formats.py` reads every folder with the current
library.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_nanguard
from keras_nanguard import NanGuard, Policy, diagnose, lint, recalibrate, repair, replay, scan
from keras_nanguard.__main__ import main

POLICY = {
    "preset": "recover",
    "snapshot": {"every": 4, "verify_after": 2, "storage": "disk"},
    "limits": [{"site": "statistics", "max_abs": 1e5}],
    "rules": [
        {
            "name": "bad-data",
            "cause": "input_nonfinite",
            "do": [{"lower_lr": {"factor": 0.5}}],
        }
    ],
}
BATCH, BATCHES, BAD = 8, 12, 9


def model() -> keras.Model:
    """Return the network of the samples."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(3, name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(1, name="head"),
    ]
    made = keras.Sequential([keras.Input((2,), name="features"), *layers], name="sample")
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return made


def data(bad: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return the data of the samples, with one value that is NaN."""
    x = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 2)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    if bad:
        x[BAD * BATCH + 3, 1] = np.nan
    return x, y


def write() -> None:
    """Write all samples into the working directory."""
    guard = NanGuard(POLICY, directory="run", verbose=0)
    network = model()
    network.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard])
    guard.report("incidents.json")
    guard.report("incidents.jsonl")
    guard.bad_samples("bad_samples.csv")
    Path("policy.toml").write_text(guard.policy.to_toml(), "utf-8")
    Path("policy.json").write_text(json.dumps(guard.policy.to_dict(), indent=1), "utf-8")
    Path("policy.yaml").write_text(_yaml(guard.policy), "utf-8")
    broken = model()
    broken.get_layer("norm").moving_variance.assign(np.full(3, np.nan))
    with tempfile.TemporaryDirectory() as elsewhere:
        file = str(Path(elsewhere, "broken.keras"))
        broken.save(file)
        reports = {
            "scan": scan(file),
            "repair": repair(file, str(Path(elsewhere, "repaired.keras"))),
            "recalibrate": recalibrate(broken, data(bad=False)[0]),
            "lint": lint(broken),
            "examination": diagnose(broken, data(bad=False)[0]),
            "replay": replay(guard.incidents[0].bundle, network),
        }
    Path("reports").mkdir()
    for name, report in reports.items():
        Path("reports", f"{name}.json").write_text(
            json.dumps(report.to_dict(), indent=1).replace(elsewhere, "."), "utf-8"
        )
    for name, words in {
        "checked_policy": ("check-policy", "policy.toml"),
        "compared_runs": ("report", "run", "run"),
    }.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            main([*words, "--json"])
        Path("reports", f"{name}.json").write_text(
            printed.getvalue().splitlines()[0] + "\n", "utf-8"
        )


def _yaml(policy: Policy) -> str:
    import yaml

    return yaml.safe_dump(policy.to_dict(), sort_keys=False)


if __name__ == "__main__":
    folder = Path(__file__).parent / f"v{sys.argv[1]}"
    folder.mkdir()
    os.chdir(folder)
    write()
    versions = f"keras_nanguard {keras_nanguard.__version__}, Keras {keras.__version__}"
    print(f"{folder}, written by {versions}")
