"""The files of earlier releases, each in a folder of `tests/formats`, can be read."""

import importlib
import json
import re
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from formats import make
from support.public_api import FORMATS

import keras_nanguard
from keras_nanguard import (
    BundleError,
    FileFormatError,
    GuardError,
    Incident,
    NanGuard,
    Policy,
    PolicyError,
    Recording,
    lint,
    replay,
    scan,
)
from keras_nanguard._core import atomic_files
from keras_nanguard._files import bundles
from keras_nanguard._fit import snapshot_files
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._recording import database
from keras_nanguard._report import files

FOLDER = Path(__file__).with_name("formats")
PAGE = FOLDER.parents[1] / "docs" / "formats.md"
RELEASES = sorted(path.name for path in FOLDER.glob("v*"))
assert "v1.0" in RELEASES
BUNDLE = "run/incidents/incident-00000009-00"


@pytest.fixture(params=RELEASES)
def release(request, tmp_path) -> Path:
    """A copy of the files of one release."""
    return Path(shutil.copytree(FOLDER / request.param, tmp_path / request.param))


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not next to the tests")
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_documented_with_its_number(name):
    """`docs/formats.md` has a row for each format, with its current number."""
    module, constant = FORMATS[name]
    number = getattr(importlib.import_module(f"keras_nanguard.{module}"), constant)
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {name} |")]
    assert len(rows) == 1 and rows[0].split("|")[2].strip() == str(number)


def test_policies(release):
    """The three forms of a policy file give one policy, which is written unchanged."""
    policies = [Policy.load(release / f"policy.{suffix}") for suffix in ("toml", "json", "yaml")]
    assert policies[0] == policies[1] == policies[2]
    assert policies[0].max_abs("norm/moving_mean", "statistics") == 1e5
    assert policies[0].snapshot.every == 4
    rule = next(rule for rule in policies[0].rules if rule.name == "bad-data")
    assert rule.cause == ("input_nonfinite",)
    assert [action.name for action in rule.do] == ["lower_lr"]


def test_incidents(release):
    """An export and the recording have the same incident."""
    (incident,) = files.read(release / "run").incidents
    (exported,) = json.loads((release / "incidents.json").read_text("utf-8"))["incidents"]
    assert incident.to_dict() == exported == Incident.from_dict(exported).to_dict()
    assert (incident.step, incident.refused) == (9, True)
    assert incident.diagnosis.cause == "input_nonfinite"
    assert incident.diagnosis.samples == (3,) and incident.changes == ("lower_lr",)
    assert incident.to_dict() == json.loads((release / "incidents.jsonl").read_text("utf-8"))


def test_recording(release):
    recording = Recording.read(release / "run")
    assert recording.steps["step"].tolist() == list(range(12))
    assert recording.steps["status"].tolist() == [0] * 9 + [1] + [0] * 2
    assert next(event.kind for event in recording.events) == "begin"
    assert recording.meta["status"] == "finished"
    assert [sample.index for sample in recording.samples] == [75]


def test_a_recording_is_continued(release):
    """A later run appends to the file, which then has the current format."""
    network, how = make.model(), {"batch_size": make.BATCH, "shuffle": False, "verbose": 0}
    network.fit(*make.data(bad=False), **how, callbacks=[NanGuard(directory=release / "run", verbose=0)])
    assert Recording.read(release / "run").steps["step"].tolist() == list(range(24))
    with sqlite3.connect(release / "run" / "recording.sqlite") as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (database.FORMAT,)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert tables == set(database.SCHEMA)


def test_bundle(release):
    found = bundles.read(release / BUNDLE)
    assert found.incident.step == 9 and len(found.state) > 8
    assert np.isnan(found.batch[0][0]).sum() == 1


@pytest.mark.requires_backend("tensorflow", reason="the bundle was written there")
def test_bundle_replays(release):
    """The step of a bundle is bad again, with the same cause."""
    again = replay(release / BUNDLE, make.model())
    assert again.result == "bad"
    assert again.diagnosis.cause == "input_nonfinite"
    assert again.diagnosis.samples == (3,)


@pytest.mark.requires_backend(
    "tensorflow", reason="a run resumes only on the backend that wrote its files"
)
def test_snapshots(release):
    """A run resumes from the snapshots, with the changes of the policy."""
    written = snapshot_files.written(release / "run" / "snapshots")
    assert [snapshot_files.read(path).step for path in written] == [8, 12]
    guard_state = atomic_files.read_json(release / "run/snapshots/guard_state.json")
    assert GuardState.from_dict(guard_state).policy_state.refused == (make.BAD,)
    guard = NanGuard(make.POLICY, directory=release / "run", resume=True, verbose=0)
    network, how = make.model(), {"batch_size": make.BATCH, "shuffle": False, "verbose": 0}
    network.fit(*make.data(bad=False), **how, callbacks=[guard])
    events = Recording.read(release / "run").events
    resumed = next(event for event in events if event.kind == "resume")
    assert (resumed.epoch, resumed.step) == (0, 8)  # the newest that is verified
    # what the policy had lowered afterwards
    assert float(network.optimizer.learning_rate) == pytest.approx(0.025)


REPORTS = {"scan": scan, "lint": lint}


@pytest.mark.parametrize("name", REPORTS)
def test_reports(release, name):
    """A report still has every field of earlier releases under the same number."""
    model = make.model()
    model.get_layer("norm").moving_variance.assign(np.full(3, np.nan))
    old = json.loads((release / f"reports/{name}.json").read_text("utf-8"))
    assert _missing(old, REPORTS[name](model).to_dict()) == []


def _missing(old, new, path="") -> list[str]:
    """Return the missing fields, in dictionaries at any depth and the first entry of each list."""
    if isinstance(old, dict) and isinstance(new, dict):
        gone = [[f"{path}.{key}"] for key in old if key not in new]
        kept = [_missing(old[key], new[key], f"{path}.{key}") for key in old if key in new]
        return [name for names in (*gone, *kept) for name in names]
    if isinstance(old, list) and isinstance(new, list) and old and new:
        return _missing(old[0], new[0], f"{path}[]")
    return []


NEWER = {
    "policy.json": (lambda path: Policy.load(path), PolicyError),
    "incidents.jsonl": (lambda path: Incident.from_dict(json.loads(path.read_text("utf-8"))), FileFormatError),
    f"{BUNDLE}/bundle.json": (lambda path: bundles.read(path.parent), BundleError),
    "run/snapshots/snapshot-00000004/snapshot.json": (
        lambda path: snapshot_files.read(path.parent),
        FileFormatError,
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_format_is_refused(release, name):
    """The error of the library names the number."""
    path, (read, error) = release / name, NEWER[name]
    if name.endswith("snapshot.json"):  # sealed with a checksum
        atomic_files.write_json(path, {**atomic_files.read_json(path), "format": 7})
    else:
        text = re.sub(r'"(format|version)": \d', r'"\1": 7', path.read_text("utf-8"))
        path.write_text(text, "utf-8")
    with pytest.raises(error, match=r"7|format 1|version"):
        read(path)


def test_a_newer_recording_is_refused(release):
    """The same for the SQLite file, whose number is its `user_version`."""
    path = release / "run" / "recording.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(GuardError, match=r"newer|version"):
        Recording.read(path)


def test_the_sample_has_the_version_that_wrote_it(release):
    written = Recording.read(release / "run").meta["versions"]["keras_nanguard"]
    old, new = ([*map(int, v.split(".")[:2])] for v in (written, keras_nanguard.__version__))
    assert release.name == f"v{old[0]}.{old[1]}" and old <= new
