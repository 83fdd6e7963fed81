"""`keras-nanguard report`: what a guarded run has written down, told again."""

from __future__ import annotations

import json

import pytest

from keras_nanguard._cli._parser import main
from keras_nanguard._errors import GuardError
from keras_nanguard._incident import Diagnosis, Finding, Incident
from keras_nanguard.reports import files

INCIDENTS = [
    Incident(7, 0, 7, (Finding("gradients", "nonfinite", "dense/kernel", 3, 0, 8),), True),
    Incident(9, 1, 1, (Finding("loss", "nonfinite", value=float("nan")),), True, diagnosis=Diagnosis("loss_domain", "mse", (2,))),
]


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_round_trip(tmp_path, ending):
    path = files.write(INCIDENTS, "head", tmp_path / f"run.{ending}")
    assert [i.to_json() for i in files.read(path)] == [i.to_json() for i in INCIDENTS]


def test_folder_of_bundles(tmp_path):
    for incident in INCIDENTS:
        folder = tmp_path / f"incident-{incident.step}"
        folder.mkdir()
        (folder / "incident.json").write_text(incident.to_json())
    assert [i.step for i in files.read(tmp_path)] == [7, 9]
    assert [i.step for i in files.read(tmp_path / "incident-9")] == [9]


def test_command(tmp_path, capsys):
    path = files.write(INCIDENTS, "head", tmp_path / "run.json")
    assert main(["report", str(path)]) == 1
    assert "loss_domain in 'mse'" in capsys.readouterr().out
    assert main(["report", str(path), "--json"]) == 1
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [7, 9]
    for ending in ("md", "html"):
        assert main(["report", str(path), "-o", str(tmp_path / f"out.{ending}")]) == 1
        assert "dense/kernel" in (tmp_path / f"out.{ending}").read_text()


HOSTILE = ["", "[", "[" * 100_000, "null", "[1]", '{"format": 99}', '{"format": 1, "incidents": [{"format": 1}]}', "\x00", '{"format": 1}']


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_hostile(tmp_path, capsys, text, ending):
    path = tmp_path / f"bad.{ending}"
    path.write_text(text)
    if text == "" and ending == "jsonl":
        assert files.read(path) == []
        return
    with pytest.raises(GuardError):
        files.read(path)
    assert main(["report", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_missing(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert "Expected" in capsys.readouterr().err
