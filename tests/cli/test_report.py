"""`keras-nanguard report` prints the recorded incidents of a guarded run."""

import json

import numpy as np
import pytest
from support.command_line import main
from support.recordings import Event, event_of, flushed, incidents_of, synthetic, written

from keras_nanguard import Diagnosis, Finding, Incident, NanGuard, Recording

NAME = "recording.sqlite"
INCIDENTS = [
    Incident(7, 0, 7, (Finding("gradients", "nonfinite", "dense/kernel", 3, 0, 8),), True),
    Incident(
        9,
        1,
        1,
        (Finding("loss", "nonfinite", value=float("nan")),),
        True,
        diagnosis=Diagnosis("loss_domain", "mse", (2,)),
    ),
]


def test_endings_in_any_case(tmp_path, capsys):
    """A recording, and several runs compared as HTML, whatever the case of the ending."""
    written(tmp_path, synthetic())
    path = (tmp_path / NAME).rename(tmp_path / "run.SQLITE")
    assert len(Recording.read(path)) == 2000
    main(["report", str(path), str(path), "-o", str(tmp_path / "ALL.HTML")])
    assert "<html" in (tmp_path / "ALL.HTML").read_text()


def recorded(folder):
    events = [Event(i.step, i.epoch, 1.7e9, "incident", **event_of(i)) for i in INCIDENTS]
    written(folder, Recording(events=tuple(events)))
    return folder / NAME


@pytest.mark.parametrize("ending", ["json", "JSONL"])
def test_exports(tmp_path, ending):
    """Each incident as it is; the file is for programs, and no report is made from it."""
    path = tmp_path / f"run.{ending}"
    assert main(["report", str(recorded(tmp_path)), "-o", str(path)]) == 1
    text = path.read_text()
    found = json.loads(text)["incidents"] if ending == "json" else map(json.loads, text.splitlines())
    assert list(found) == [i.to_dict() for i in INCIDENTS]
    assert main(["report", str(path)]) == 2


def test_command(tmp_path, capsys):
    path = recorded(tmp_path)
    assert main(["report", str(path)]) == 1
    assert "loss_domain in 'mse'" in capsys.readouterr().out
    assert main(["report", str(path), "--json"]) == 1
    assert capsys.readouterr().out.splitlines() == [i.to_json() for i in INCIDENTS]
    for ending in ("jsonl", "html"):
        assert main(["report", str(path), "-o", str(tmp_path / f"out.{ending}")]) == 1
        assert "dense/kernel" in (tmp_path / f"out.{ending}").read_text()


def test_skipped_steps_are_those_of_the_recording(tmp_path, capsys):
    """Also steps without an incident: overflows of loss scaling and repeated bad steps."""
    recording = synthetic(steps=300, incidents=3)
    written(tmp_path, recording)
    main(["report", str(tmp_path)])
    skipped, overflows = sum(recording.steps["status"] > 0), sum(recording.steps["status"] == 2)
    assert skipped > overflows > 0
    printed = capsys.readouterr().out
    assert f"300 steps, {skipped} skipped" in printed and f"{overflows} of those were ordinary" in printed


def test_a_missing_folder_is_named_as_the_user_named_it(tmp_path, capsys):
    path = tmp_path / "missing" / "run.jsonl"
    with pytest.raises(FileNotFoundError) as caught:
        NanGuard(verbose=0).report(path)
    assert caught.value.filename == str(path)
    assert main(["report", str(recorded(tmp_path)), "-o", str(path)]) == 2
    said = f"keras-nanguard: {path} cannot be written: No such file or directory.\n"
    assert capsys.readouterr().err == said


def test_an_output_in_a_file_is_named_as_the_user_named_it(tmp_path, capsys):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "run.html"
    assert main(["report", str(recorded(tmp_path)), "-o", str(path)]) == 2
    assert f"keras-nanguard: {path} cannot be written: " in capsys.readouterr().err


@pytest.mark.requires_backend("torch", reason="needs no backend: runs once")
def test_a_recording_is_enough(tmp_path, capsys):
    """A healthy loop has no log, a copied recording neither: incidents are among the events."""
    run, healthy = synthetic(300, 2), synthetic(300, 0)
    for name, recording in (("run", run), ("healthy", healthy)):
        (tmp_path / name).mkdir()
        written(tmp_path / name, recording)
    assert main(["report", str(tmp_path / "healthy")]) == 0
    for path in (tmp_path / "run", tmp_path / "run" / NAME):
        assert main(["report", str(path), "-o", str(tmp_path / "run.html")]) == 1
        recording = Recording.read(path)
        assert len(incidents_of(recording)) == 2 and recording.meta["model"] == "net"
    assert "loss_domain in &#39;net/dense&#39;" in (tmp_path / "run.html").read_text()
    (tmp_path / "run" / NAME).unlink()
    gone = (tmp_path / "run", tmp_path / "run" / NAME)
    assert [main(["report", str(path)]) for path in gone] == [2, 2]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.requires_backend("torch", reason="needs no backend: runs once")
@pytest.mark.parametrize("command", [["report"], ["watch", "--once"]])
@pytest.mark.parametrize("recording", [None, b""])
def test_bundles_without_a_recording(tmp_path, capsys, command, recording):
    """A run whose recording is lost is not one without incidents; before its first step it is."""
    if recording is not None:
        (tmp_path / NAME).write_bytes(recording)
    first = main([*command, str(tmp_path)])
    assert first == (2 if recording is None and command == ["report"] else 0)
    (tmp_path / "incidents" / "000007").mkdir(parents=True)
    assert main([*command, str(tmp_path)]) == 2
    assert NAME in capsys.readouterr().err


def test_the_directory_of_a_guard(tmp_path, capsys):
    """`keras-nanguard report run1` after `directory="run1"`: all incidents, also meanwhile."""
    keras = pytest.importorskip("keras")
    x = np.ones((32, 3), "float32")
    x[5] = np.nan
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    run, met = tmp_path / "run1", []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert flushed(guard._log.recorder)
            met.append(len(incidents_of(Recording.read(run))))

    guard = NanGuard(directory=run, verbose=0)
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(x, np.ones((32, 1)), callbacks=[guard, Watch()], **settings)
    assert met == [1, 2]
    assert [i.to_json() for i in incidents_of(Recording.read(run))] == [i.to_json() for i in guard.incidents]
    assert main(["report", str(run)]) == 1
    assert "2 skipped, 2 incidents" in capsys.readouterr().out
    clean = NanGuard(directory=tmp_path / "clean", verbose=0)
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[clean])
    assert main(["report", str(tmp_path / "clean")]) == 0


@pytest.mark.parametrize("form", [[], ["--json"], ["-o", "report.html"], ["-o", "report.json"]], ids=str)
def test_a_damaged_recording_is_named(tmp_path, monkeypatch, capsys, form):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).write_bytes(b"SQLite format 3\0 and then something else")
    assert main(["report", ".", *form]) == 2
    captured = capsys.readouterr()
    assert NAME in captured.err and "Traceback" not in captured.err
    assert not captured.out and not list(tmp_path.glob("report.*"))
