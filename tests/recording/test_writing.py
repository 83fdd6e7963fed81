"""Errors of writing a recording are reported, and neither block nor stop anything else."""

import contextlib
import copy
import os
import pickle
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from support.recordings import NAME, BadSample, File, Recorder, begun, flushed, push, same

from keras_nanguard import Recording
from keras_nanguard._recording.memory import Memory

pytestmark = pytest.mark.requires_backend("torch", reason="independent of the backend: runs once")


def another_fit(made, folder):
    """Record a fit of five steps in the file of this folder."""
    made.begin({}, scaled=True, path=folder / NAME)
    push(made, 5)
    made.end("finished", 5, 0)


def test_nowhere_to_write(tmp_path):
    """A path that cannot be written, or a foreign file: in memory, with the reason."""
    (tmp_path / NAME).write_text("a diary")
    made = begun(tmp_path, steps=5)
    assert "is another file" in made.problem() and (tmp_path / NAME).read_text() == "a diary" and len(made.recording) == 5
    made.end("finished", 5, 0)
    (tmp_path / "file").write_text("")
    other = begun(tmp_path / "file" / "below", steps=5)
    other.end("finished", 5, 0)
    assert other.problem() and len(other.recording) == 5


def test_a_pipe_is_not_written(tmp_path):
    os.mkfifo(tmp_path / NAME)
    made = begun(tmp_path, steps=5)
    made.end("finished", 5, 0)
    assert made.problem() and len(made.recording) == 5


@contextlib.contextmanager
def failing(where, name, error=MemoryError):
    """A function or class raises this error."""

    def fails(*args, **kwargs):
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(where, name, fails)
        yield


@pytest.mark.parametrize("how", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))], ids=["copy", "pickle"])
def test_a_copy_continues_the_file(tmp_path, how):
    """A copy of a recorder continues its file, unless another one has written it meanwhile."""
    made = begun(tmp_path, steps=10)
    made.end("finished", 10, 0)
    other = how(made)
    another_fit(other, tmp_path)
    assert other.problem() == "" and len(Recording.read(tmp_path)) == 15
    same(other.recording, Recording.read(tmp_path))
    made.begin({}, scaled=True, path=tmp_path / NAME)
    assert "in use by another run" in made.problem() and len(Recording.read(tmp_path)) == 15


@pytest.mark.parametrize("method", ["note", "_fold"])
def test_a_lack_of_memory_in_a_step(tmp_path, method):
    """Told once, nothing is written until the next fit, which writes all and tells new ones."""
    made = begun(tmp_path, steps=3)
    assert flushed(made)
    with failing(made, method):
        made._due = 0.0
        made.push(3, 1.0, 1.0, 1.0)
    assert made.problem() == "recording.sqlite is not written: MemoryError" and made.problem() == ""
    push(made, 3, 4)
    made.end("finished", 7, 0)
    assert len(made.recording) == 7 and len(Recording.read(tmp_path)) == 3
    made.begin({}, scaled=True, path=tmp_path / NAME)
    push(made, 5)
    assert flushed(made)
    same(made.recording, Recording.read(tmp_path))
    with failing(made, method, ZeroDivisionError("division by zero")):
        made._due = 0.0
        made.push(5, 1.0, 1.0, 1.0)
    assert made.problem() == "recording.sqlite is not written: division by zero"
    push(made, 3, 6)
    made.end("finished", 9, 0)
    assert len(Recording.read(tmp_path)) == 12


CALLS = {
    "place": lambda made: made.place(3, 1, 3),
    "rate": lambda made: made.rate(0.1),
    "undo": lambda made: made.undo(0),
    "note": lambda made: made.note(epochs=3),
    "event": lambda made: made.event("snapshot", 3, 0),
    "sample": lambda made: made.sample(BadSample("x[7]", 7, "ab" * 32, 1, (3,), "1 NaN of 8 in x")),
    "epoch_means": lambda made: made.epoch_means(0),
    "begin": lambda made: made.begin({}, scaled=True, path=None),
    "end": lambda made: made.end("finished", 3, 0),
    "end_with_process": lambda made: made.end_with_process(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_lack_of_memory_between_two_steps(tmp_path, call):
    """Training goes on, the reason is told after it, and the next fit writes what is in memory."""
    made = begun(tmp_path, steps=3)
    with contextlib.ExitStack() as stack:
        for name in ("add_steps", "put", "fill_rate", "undo"):
            stack.enter_context(failing(Memory, name))
        CALLS[call](made)
    made.end("finished", 3, 0)
    assert made.problem() == "recording.sqlite is not written: MemoryError"
    another_fit(made, tmp_path)
    assert made.problem() == ""
    same(made.recording, Recording.read(tmp_path))


def test_values_of_any_kind(tmp_path):
    """NumPy numbers, objects, half of a surrogate pair: written as values or as text."""
    made = Recorder()
    made.begin({"model": "\ud800", "epochs": np.int64(3), "path": Path("p")}, scaled=True, path=tmp_path / NAME)
    made.event("snapshot", 0, 0, "\ud800", {"rate": np.float32(0.5), "name": "\ud800", "kind": object})
    made.sample(BadSample("scan-\ud800.png", 7, "ab" * 32, 1, (np.int64(5),), "\ud800"))
    made.end("finished", 1, 0)
    assert made.problem() == ""
    found = Recording.read(tmp_path)
    assert (found.meta["model"], found.meta["epochs"], found.meta["path"]) == ("?", 3, "p")
    assert found.events[1].text == "?" and found.events[1].data == {"rate": 0.5, "name": "?", "kind": "<class 'object'>"}
    assert found.samples[0].label == "scan-?.png" and found.samples[0].steps == (5,)


@pytest.mark.parametrize("when", ["__init__", "write"])
def test_an_error_of_any_kind(tmp_path, when):
    """Any error in the writing thread becomes the reason, and blocks nothing."""
    with failing(File, when, RuntimeError("of another kind")):
        made = begun(tmp_path, steps=5)
        assert not flushed(made) and len(made.recording) == 5
        assert made.problem() == "recording.sqlite is not written: of another kind"
        assert made.problem() == ""
        made.end("finished", 5, 0)


def test_locked_for_long(tmp_path, set_limit):
    """At the end of a fit only for a limited time; the next fit writes the rest."""
    set_limit("seconds that a recording waits for a lock", 0.05)
    made = begun(tmp_path, steps=20)
    assert flushed(made)
    other = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    push(made, 20, 20)
    set_limit("seconds that a fit waits for its recording", 0.2)
    assert not flushed(made) and made.problem() == ""
    other.execute("ROLLBACK")
    set_limit("seconds that a fit waits for its recording", 30.0)
    assert flushed(made)
    same(made.recording, Recording.read(tmp_path))
    other.execute("BEGIN IMMEDIATE")
    push(made, 20, 40)
    made.sample(BadSample("x[7]", 7, "ab" * 32, 1, (50,), "3 NaN of 64 in x"))
    made.end("finished", 60, 0)
    assert made.problem() == "recording.sqlite is not written: database is locked" and len(Recording.read(tmp_path)) == 40
    other.close()
    another_fit(made, tmp_path)
    assert made.problem() == "" and len(Recording.read(tmp_path)) == 65
    same(made.recording, Recording.read(tmp_path))


def test_locked_when_a_transaction_ends(tmp_path, monkeypatch):
    """It is undone, so that the next attempt can begin one."""
    locked, real = [0], sqlite3.connect

    class Locked(sqlite3.Connection):
        def execute(self, text, *more):
            if text == "COMMIT" and not locked[0]:
                locked[0] = 1
                raise sqlite3.OperationalError("database is locked")
            return super().execute(text, *more)

    def connect(path, **more):
        return real(path, factory=Locked, **more)

    monkeypatch.setattr(sqlite3, "connect", connect)
    made = begun(tmp_path, steps=20)
    assert flushed(made) and locked == [1] and made.problem() == ""
    locked[0] = 0
    push(made, 20, 20)
    assert flushed(made) and locked == [1] and made.problem() == ""
    made.end("finished", 40, 0)
    same(made.recording, Recording.read(tmp_path))


def test_locked_at_once(tmp_path):
    """If an attempt does not wait, the thread does: it does not keep a processor busy."""
    attempts = []

    def locked(*args):
        attempts.append(args)
        raise sqlite3.OperationalError("database is locked")

    made = begun(tmp_path, steps=20)
    assert flushed(made)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(File, "write", locked)
        push(made, 20, 20)
        made._work(time.time())
        time.sleep(0.3)
        assert 0 < len(attempts) < 10
    assert flushed(made)
    made.end("finished", 40, 0)
    same(made.recording, Recording.read(tmp_path))


def test_a_file_that_is_gone(tmp_path):
    made = begun(tmp_path, steps=10)
    made.end("finished", 10, 0)
    (tmp_path / NAME).unlink()
    another_fit(made, tmp_path)
    assert made.problem() == "" and len(Recording.read(tmp_path)) == 15
    same(made.recording, Recording.read(tmp_path))
