"""The file of a recording equals the memory, survives its process, and is safe to read."""

import json
import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support import recordings
from support.limits import limit
from support.recordings import (
    COMMITTED,
    NAME,
    OVERFLOW,
    REFUSED,
    BadSample,
    File,
    begun,
    event_of,
    flushed,
    push,
    same,
)

from keras_nanguard import GuardError, Recording

pytestmark = pytest.mark.requires_backend("torch", reason="independent of the backend: runs once")

ROOT = Path(__file__).parents[2]


def test_file_equals_memory(tmp_path):
    """Steps, events and samples, also after changes to written rows."""
    made = begun(tmp_path)
    for block in range(6):
        push(made, 3000, 3000 * block)
        made.event("incident", 3000 * block, block, **event_of(recordings.incident(3000 * block, block, 0, block)))
        made.sample(BadSample("x[7]", 7, "ab" * 32, block + 1, tuple(range(block + 1)), "3 NaN of 64 in x"))
        made.rate(1e-3)
        assert flushed(made)
        same(made.recording, Recording.read(tmp_path))
        made.undo(3000 * block + 2990)
    made.undo(200)
    made.end("finished", 18000, 5)
    found = Recording.read(tmp_path)
    same(made.recording, found)
    assert found.meta["status"] == "finished" and len(found) == 18000 and made.problem() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME]
    same(found, Recording.read(tmp_path / NAME))


def test_thinned_steps_in_the_file(tmp_path, set_limit):
    """If older steps are removed, the file equals the memory, also after a restart; nothing else
    is removed."""
    set_limit("steps of a recording", 4096)
    made = begun(tmp_path)
    made.sample(BadSample("x[7]", 7, "ab" * 32, 1, (0,), "3 NaN of 64 in x"))
    for block in range(6):
        push(made, 2048, 2048 * block)
        made.undo(2048 * block - 3000) if block == 3 else None
        assert flushed(made)
        same(made.recording, Recording.read(tmp_path))
    made.end("finished", 6 * 2048, 0)
    assert len(made.recording) <= 4096
    resumed = begun(tmp_path, steps=2048)
    assert flushed(resumed)
    same(resumed.recording, Recording.read(tmp_path))
    resumed.end("finished", 2048, 0)
    found = Recording.read(tmp_path)
    assert found.steps["step"].max() == 7 * 2048 - 1
    assert len(found.samples) == 1 and [e.kind for e in found.events] == ["begin", "end"] * 2


def test_totals_of_removed_steps(tmp_path, set_limit):
    """The file counts the refused steps that were removed from it, also over two processes."""
    set_limit("steps of a recording", 1024)
    for process in (1, 2):
        made = begun(tmp_path)
        for step in range(10_000):
            made.push(step, 1.0, 1.0, 1.0, (COMMITTED, REFUSED, OVERFLOW)[step % 3])
            if step == 9000:
                made.undo(8998, again=frozenset(range(8998, 9001)))
        assert flushed(made)
        for recording in (made.recording, Recording.read(tmp_path)):
            assert recordings.run_of(recording).totals == (10_000 * process, 6664 * process, 3332 * process, 2 * process)
        made.end("finished", 10_000, 0)


def test_changes_to_old_steps(tmp_path):
    """Steps that a rollback undoes are written again, however long ago they were written."""
    made = begun(tmp_path, steps=50)
    assert flushed(made)
    push(made, 500, 50)
    made.undo(20)
    made.end("finished", 550, 0)
    same(made.recording, Recording.read(tmp_path))


def test_the_last_run_owns_the_file(tmp_path):
    """A run whose directory another one has taken over stops writing, and reports this once."""
    first = begun(tmp_path, steps=10)
    assert flushed(first)
    second = begun(tmp_path, steps=10)
    assert flushed(second)
    push(first, 10, 10)
    assert not flushed(first) and "is in use by another run" in first.problem() and first.problem() == ""
    second.end("finished", 10, 0)
    assert len(Recording.read(tmp_path)) == 20


WRITES = """
import sys
from pathlib import Path
from support.recordings import NAME, Recorder, flushed
made = Recorder()
made.begin({"model": "net"}, scaled=False, path=Path(sys.argv[1]) / NAME)
step = 0
while True:
    for _ in range(300):
        made.push(step, 1.0 * step, 1.0, 1.0)
        step += 1
    made.event("snapshot", step, 0)
    flushed(made)
    print(step, flush=True)
"""


DIES = """
import sys
from pathlib import Path
from keras_nanguard._recording.database import NAME
from keras_nanguard._recording.recorder import Recorder
made = Recorder()
made.begin({"model": "net"}, scaled=False, path=Path(sys.argv[1]) / NAME)
for step in range(20):
    if step % 8 == 0:
        made.place(step, step // 8, step)
    made.push(step, 1.0 * step, 1.0, 1.0)
made.event("snapshot", 19, 2)
raise RuntimeError("no more data")
"""


def test_process_that_ends_within_a_fit(tmp_path):
    """An exception outside of the fit: the file has all steps until then; the fit has failed."""
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=where, check=False)
    assert done.returncode == 1 and done.stderr.endswith("RuntimeError: no more data\n")
    found = Recording.read(tmp_path)
    assert found.steps["step"].tolist() == list(range(20)) and found.meta["status"] == "failed"
    last = found.events[-1]
    assert (last.kind, last.step, last.epoch, last.data) == ("end", 20, 2, {"status": "failed"})


def writing(folder):
    """Start a process that records, and prints the number of steps in the file after each flush."""
    command = [sys.executable, "-c", WRITES, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))})


def reached(recording):
    """Return the number of steps, after a check that only older ones are missing."""
    step = recording.steps["step"]
    assert np.all(np.diff(step) >= 1) and np.all(np.diff(step[-limit("steps of a recording") // 4 :]) == 1)
    return int(step[-1]) + 1


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_whole_after_kill(tmp_path, kills):
    """After `kill -9` it has every flushed step, in order, and the next process continues."""
    least = 0
    for number in range(kills):
        with writing(tmp_path) as process:
            flushed = int(process.stdout.readline())
            deadline = time.monotonic() + random.Random(number).uniform(0.0, 0.2)
            while time.monotonic() < deadline:
                flushed = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGKILL)
            flushed = max([flushed, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        least += flushed
        found = Recording.read(tmp_path)
        assert reached(found) >= least and found.meta["status"] == "running"
        least = reached(found)
        connection = sqlite3.connect(tmp_path / NAME)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()


def test_two_readers_while_it_is_written(tmp_path):
    """Nobody waits, and each reader sees one moment: all steps until then, in order."""
    seen, failed = [[], []], []

    def follow(counts):
        try:
            for _ in range(15):
                found = Recording.read(tmp_path)
                counts.append(reached(found))
        except (GuardError, AssertionError) as error:
            failed.append(error)

    with writing(tmp_path) as process:
        process.stdout.readline()
        threads = [threading.Thread(target=follow, args=(counts,)) for counts in seen]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        process.kill()
    assert not failed and all(counts == sorted(counts) and counts[-1] > counts[0] for counts in seen)


def test_read_from_a_folder_that_cannot_be_written(tmp_path):
    """A finished run on a mounted archive, or of another user."""
    made = begun(tmp_path, steps=5)
    made.end("finished", 5, 0)
    os.chmod(tmp_path / NAME, 0o444)
    os.chmod(tmp_path, 0o555)
    try:
        assert len(Recording.read(tmp_path)) == 5
    finally:
        os.chmod(tmp_path, 0o755)


def test_documented_schema(tmp_path):
    """The file identifies itself, and docs/recording.md lists each table with its columns."""
    made = begun(tmp_path)
    made.end("finished", 0, 0)
    connection = sqlite3.connect(tmp_path / NAME)
    page = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8").split("### Schema")[1]
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert len(tables) == 4
    for table in tables:
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        line = next(line for line in page.splitlines() if line.startswith(f"| `{table}` |"))
        assert [name for name in names if f"`{name}`" not in line and not name.endswith(("_min", "_max"))] == []
    connection.close()


# Files from elsewhere


def valid(folder):
    made = begun(folder, steps=9000)
    made.event("incident", 5, 0, **event_of(recordings.incident(5, 0, 5)))
    made.end("finished", 9000, 0)
    return folder / NAME


def changed(*statements):
    def change(path):
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return change


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_text(path):
    """Write a schema that is not UTF-8, which SQLite's message then quotes."""
    raw = path.read_bytes()
    place = raw.index(b"CREATE TABLE meta") - 6
    path.write_bytes(raw[:place] + b"\xff" + raw[place + 1 :])


def piped(path):
    path.unlink()
    os.mkfifo(path)


NESTED: list = []
for _ in range(400):
    NESTED = [NESTED]

HOSTILE = {
    "a pipe": piped,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a large number": changed("UPDATE steps SET loss = zeroblob(50000000) WHERE id = 8500"),
    "nothing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("a diary"),
    "another database": lambda path: (path.unlink(), changed("CREATE TABLE t (a)")(path)),
    "newer": changed("PRAGMA user_version = 99"),
    "a view": changed("DROP TABLE steps", "CREATE VIEW steps AS SELECT * FROM samples"),
    "a trigger": changed("CREATE TRIGGER t AFTER INSERT ON meta BEGIN DELETE FROM steps; END"),
    "an endless view": changed(
        "DROP TABLE samples", "CREATE VIEW samples AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    ),
    "another column": changed("ALTER TABLE meta ADD COLUMN more"),
    "nested JSON": changed("UPDATE events SET data = replace(hex(zeroblob(100000)), '00', '[')"),
    "lists in lists": changed(f"UPDATE events SET data = '{json.dumps({'a': NESTED})}'"),
    "cut": cut,
    "no text": no_text,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_from_elsewhere(tmp_path, name):
    """A file that is not a recording, or a damaged one, gives an error; nothing in it is run."""
    HOSTILE[name](valid(tmp_path))
    start = time.process_time()
    with pytest.raises(GuardError, match=r"Expected .* Received: .*"):
        Recording.read(tmp_path)
    assert time.process_time() - start < 10


def test_a_journal_that_names_another_file(tmp_path):
    """SQLite would remove the file that a journal names, in a foreign directory, too."""
    path, victim = valid(tmp_path), tmp_path / "thesis.txt"
    victim.write_text("precious")
    magic, name = bytes.fromhex("d9d505f920a163d7"), str(victim).encode()
    head = (magic + struct.pack(">5I", 0, 0, path.stat().st_size // 4096, 512, 4096)).ljust(512, b"\0")
    tail = struct.pack(">I", 2**30 // 4096 + 1) + name + struct.pack(">2I", len(name), sum(name)) + magic
    (tmp_path / f"{NAME}-journal").write_bytes(head + tail)
    assert len(Recording.read(path)) == 9000
    with pytest.raises(GuardError, match="names another file"):
        File(path, "me", [])
    made = begun(tmp_path, resumed=3, steps=10)
    made.end("finished", 10, 0)
    assert "names another file" in made.problem() and victim.read_text() == "precious"


def test_a_recording_that_is_a_link(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    path = valid(tmp_path / "mine")
    (tmp_path / "theirs" / NAME).symlink_to(path)
    before = path.read_bytes()
    assert len(Recording.read(tmp_path / "theirs")) == 9000
    with pytest.raises(GuardError, match="a link"):
        File(tmp_path / "theirs" / NAME, "me", [])
    assert path.read_bytes() == before


def test_texts_that_are_too_long(tmp_path):
    path = valid(tmp_path)
    changed("UPDATE events SET text = hex(zeroblob(3000000)) WHERE kind = 'begin'")(path)
    assert [event.kind for event in Recording.read(path).events] == ["incident", "end"]


def test_tables_that_are_too_long(tmp_path, set_limit):
    path = valid(tmp_path)
    set_limit("rows of a table that are read", 100)
    assert Recording.read(path).steps["step"].tolist() == list(range(8900, 9000))
