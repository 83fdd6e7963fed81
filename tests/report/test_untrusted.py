"""No content of a recording controls a terminal or a page; each form is written or rejected."""

import io
import json
import os
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console
from support import recordings
from support.command_line import main

from campaigns.fuzz_files import sqlite
from campaigns.fuzz_recipes import json_text
from keras_nanguard import BundleError, Diagnosis, FileFormatError, GuardError, Incident, Recording
from keras_nanguard._core.plain_values import MAX_DEPTH, check_depth, loads
from keras_nanguard._diagnose.bundle import _readme
from keras_nanguard._files import bundles
from keras_nanguard._report import cards, console, dashboard, files, html
from keras_nanguard._report.reported_run import ReportedRun

ESCAPE = "\x1b]0;owned\x07"


def log(folder, **changes):
    """Write a recording of one incident with some fields replaced, and return its path."""
    plain = {**recordings.incident(3, 0, 3).to_dict(), **changes}
    event = recordings.Event(3, 0, 1.0, "incident", "", plain)
    recordings.written(folder, Recording(events=(event,)))
    return str(folder / "recording.sqlite")


FIELDS = {
    "an action": {"outcomes": [{"action": ESCAPE, "status": "done", "detail": ""}]},
    "a path": {"findings": [{"site": "loss", "kind": "nonfinite", "path": ESCAPE}], "diagnosis": None},
    "an unknown field": {"findings": [{"site": "loss", "kind": "nonfinite", ESCAPE: 1}]},
    "another field": {ESCAPE: 1},
    "a number": {"values": {"loss": ESCAPE}},
    "a format": {"format": ESCAPE},
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("form", ([], ["--json"]))
def test_nothing_commands_a_terminal(tmp_path, capsys, name, form):
    """Neither a report nor the error for it contains a control character of the file."""
    main(["report", log(tmp_path, **FIELDS[name]), *form])
    main(["report", str(tmp_path), str(tmp_path)])
    main(["watch", "--once", str(tmp_path)])
    captured = capsys.readouterr()
    assert "owned" in captured.out + captured.err
    assert not {c for c in captured.out + captured.err if c != "\n" and not c.isprintable()} - {" "}


def test_the_dashboard_shows_status_and_epochs_as_text():
    recording = Recording(meta={"model": ESCAPE, "status": ESCAPE, "epochs": 3})
    screen = io.StringIO()
    Console(file=screen, width=80).print(dashboard.frame(ReportedRun((), recording)))
    assert "owned" in screen.getvalue() and "\x1b" not in screen.getvalue()


def test_lists_in_lists_are_refused(tmp_path, capsys):
    """All that can be read can be written again: nesting is limited for the stack's sake."""
    deep: list = []
    for _ in range(900):
        deep = [deep]
    decision = {"rule": "a", "actions": [{"action": "skip", "more": deep}], "reason": "", "terminal": False}
    for form in ([], ["--json"], ["-o", str(tmp_path / "report.json")], ["-o", str(tmp_path / "report.html")]):
        assert main(["report", log(tmp_path, decision=decision), *form]) == 2
    assert "deeper than" in capsys.readouterr().err
    with pytest.raises(FileFormatError, match="deeper than"):
        Incident.from_dict({**recordings.incident(3, 0, 3).to_dict(), "decision": decision})


def test_depth_is_counted_exactly():
    """The limit is read, one level more is rejected, and so is more than Python can handle."""
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for levels in (MAX_DEPTH + 2, 100_000):
        with pytest.raises(ValueError, match="deeper"):
            loads("[" * levels + "]" * levels)
    check_depth({"a": [1, 2, {"b": None}], "c": "[" * 1000})


def test_the_sentence_that_refuses_a_file_is_short(tmp_path):
    with pytest.raises(GuardError) as caught:
        files.read(log(tmp_path, values={"loss": "9" * 1_000_000 + "x"}))
    assert len(str(caught.value)) < 1000


def test_a_path_that_no_file_has(capsys):
    assert main(["report", "a\0b"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "incidents" / "incident-00000003-00"
    folder.mkdir(parents=True)
    np.savez(folder / "batch.npz", **{"0": np.array([[1.0, np.nan], [1.0, 2.0]], np.float32)})
    (folder / "bundle.json").write_text(json.dumps({"batch": {"tuple": [0]}, "dtypes": ["float32"]}))
    (folder / "layers.txt").write_text("a table")
    return folder


def test_links_and_pipes_in_a_bundle_are_not_followed(bundle, tmp_path):
    """Nothing from outside of the run's directory is shown, and no pipe is waited for."""
    assert cards.layer_table(bundle) == "a table" and len(cards.batch_rows(bundle, (0,))) == 1
    (tmp_path / "secret.txt").write_text("secret")
    np.savez(tmp_path / "secret.npz", **{"0": np.ones((2, 2), np.float32)})
    for name in ("layers.txt", "batch.npz"):
        (bundle / name).unlink()
        (bundle / name).symlink_to(tmp_path / f"secret{(bundle / name).suffix}")
    assert cards.layer_table(bundle) == "" and cards.batch_rows(bundle, (0,)) == []
    for name in ("layers.txt", "batch.npz", "bundle.json"):
        (bundle / name).unlink()
        os.mkfifo(bundle / name)
    assert cards.layer_table(bundle) == "" and cards.batch_rows(bundle, (0,)) == []


def test_a_member_that_unpacks_without_limit_is_omitted(bundle):
    """It declares 1 KB, and `zipfile` would unpack 64 MB of it at once, in this process."""
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((2, 108), np.float32))
    with zipfile.ZipFile(bundle / "batch.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("0.npy", buffer.getvalue() + bytes(64 << 20))
        archive.infolist()[0].file_size = len(buffer.getvalue())
        archive.infolist()[0].CRC = zlib.crc32(buffer.getvalue())
    with pytest.raises(FileFormatError, match=r"stored or deflated.*numpy\.savez"):
        bundles.batch_arrays(bundle, 64 << 20)
    assert cards.batch_rows(bundle, (0,)) == []


@pytest.mark.parametrize("budget", [0, 15])
def test_a_batch_larger_than_the_budget_is_not_read(bundle, budget):
    with pytest.raises(BundleError, match="more than a bundle may have"):
        bundles.batch_arrays(bundle, budget)
    assert bundles.batch_arrays(bundle, 16)


def test_a_readme_has_no_control_characters():
    incident = Incident(3, 0, 3, (), diagnosis=Diagnosis("unknown", ESCAPE))
    text = _readme(incident, {"notes": [ESCAPE], "model": {"config": True}})
    assert text.count("owned") == 2 and text.replace("\n", "").isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([ESCAPE, "nan", 10**400, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.sampled_from(["site"]), inner, max_size=3),
    max_leaves=8,
)
"""Any JSON value, and parts of an incident."""

WHOLE = recordings.incident(3, 0, 3).to_dict()


@given(st.sampled_from(sorted(WHOLE)), JSON, st.booleans())
def test_an_incident_is_accepted_or_rejected(name, value, within):
    """Any value in any field is rejected with one sentence, or shown and written in each form."""
    data = json.loads(json.dumps(WHOLE))
    inner = data[name][0] if isinstance(data[name], list) and data[name] else data[name]
    if within and isinstance(inner, dict) and inner:
        inner[sorted(inner)[0]] = value
    else:
        data[name] = value
    assert html.page(ReportedRun((), Recording(events=(recordings.Event(3, 0, 1.0, "incident", "", data),))))
    try:
        found = Incident.from_dict(data)
    except FileFormatError as error:
        assert len(str(error)) < 2000 and str(error).isprintable()
        return
    assert Incident.from_dict(json.loads(found.to_json())).to_json() == found.to_json()
    line = console.incident_line(found)
    assert all(c.isprintable() for c in line.replace("\n", " "))
    assert ReportedRun([found]).summary
    assert html.page(ReportedRun([found]))


CELLS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=20) | st.binary(max_size=8) | JSON.map(json_text)
COLUMNS = {"meta": 2, "steps": 11, "events": 7, "samples": 7}


@given(st.sampled_from(sorted(COLUMNS)), st.data())
def test_a_recording_is_accepted_or_rejected(table, data):
    """Any row in any table is rejected with one sentence, or shown in each form."""
    row = data.draw(st.tuples(*[CELLS] * COLUMNS[table]))
    if table == "meta":
        known = ("model", "status", "written", "began", "base", "epochs", "versions", "backend", "policy", "since", "refused")
        row = (data.draw(st.sampled_from(known)), json_text(data.draw(JSON)))
    good = {"meta": [["model", '"net"'], ["status", '"running"']], "steps": [[0, 0, 0, 0, 0.5, 1.0, 0.1, 1.0, 1.7e9, 0, 0]]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.sqlite"
        path.write_bytes(sqlite({"tables": good | {table: [*good.get(table, []), list(row)]}}))
        try:
            found = Recording.read(path)
        except GuardError as error:
            assert len(str(error)) < 2000 and str(error).isprintable()
            return
    assert repr(found) and len(found) >= 0 and html.page(ReportedRun((), found))
    screen = io.StringIO()
    Console(file=screen, width=80).print(dashboard.frame(ReportedRun((), found)))
    assert "\x1b" not in screen.getvalue()
