"""`keras-nanguard watch` displays a run from its files alone, during the run and afterwards."""

import io
import os
import re
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from support.command_line import main
from support.recordings import run_of, synthetic, written

from keras_nanguard import Recording
from keras_nanguard._recording import database
from keras_nanguard._report import dashboard, files

pytestmark = pytest.mark.requires_backend("torch", reason="needs no backend: runs once")


def text_of(recording, width=110, **arguments):
    screen = Console(file=io.StringIO(), width=width)
    screen.print(dashboard.frame(run_of(recording), width, **arguments))
    return screen.file.getvalue()


def test_a_frame():
    """Model, status, step and epoch, curves with last value, counted kinds of incidents."""
    recording = synthetic(900, 8)
    text = text_of(recording)
    assert "net: finished, step 900, epoch 9 of 9, 8 incidents, 2 bad rows" in text
    assert "learning rate" in text and "0.0005" in text and "2 x" in text and "input_nonfinite in 'x'" in text
    assert "none" in text_of(synthetic(900, 0)) and "waiting" in text_of(Recording())


def test_the_last_value_is_of_the_last_step():
    """Not the lowest of the steps that share the last bar."""
    recording = synthetic(1200, 0)
    recording.steps["loss"][:] = np.where(np.arange(1200) < 1199, 0.1, 50.0)
    assert re.search(r"loss +.+ 50 ", text_of(recording)) and " 0.1 " not in text_of(recording)


def test_a_curve_of_the_whole_range_of_floats():
    """A range wider than the largest float64."""
    assert dashboard.curve([-1.7e308, 0.0, 1.7e308], " 12345678") == "158"
    assert dashboard.curve([2.0, 2.0], " 12345678") == "11"


def test_a_run_that_may_have_died():
    recording = synthetic(900, 0)
    for seconds, dead in ((120.5, True), (30, False)):
        meta = {**recording.meta, "status": "running", "written": time.time() - seconds}
        assert ("no update for 12" in text_of(Recording(meta, recording.steps))) is dead


def trained(directory, epochs=2, **arguments):
    import keras

    from keras_nanguard import NanGuard

    x = np.ones((64, 3), "float32")
    x[5] = np.nan
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [NanGuard(directory=directory, verbose=0), *arguments.pop("callbacks", ())]
    model.fit(x, np.ones((64, 1)), batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)


def test_command(tmp_path, capsys):
    trained(tmp_path / "run")
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 1
    assert "finished" in (shown := capsys.readouterr().out) and "3 NaN of 24" in shown and "skipped" in shown
    (tmp_path / "new").mkdir()
    assert main(["watch", str(tmp_path / "new")]) == 0
    assert main(["watch", str(tmp_path / "none")]) == 2 and "not a folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "new"), "--interval", "0"]) == 2
    (tmp_path / "new" / "recording.sqlite").write_text("another file")
    assert main(["watch", str(tmp_path / "new")]) == 2


class Screen(Console):
    """A terminal that changes the run after each frame."""

    def __init__(self, *after):
        super().__init__(file=io.StringIO(), force_terminal=True, width=110)
        self.after = list(after)

    def then(self, _):
        if self.after:
            self.after.pop(0)()


@pytest.mark.parametrize("made", [database.NAME, "snapshots.lock"])
def test_a_run_before_its_first_step(tmp_path, monkeypatch, made):
    """A recording without contents, and a folder without one, are waited for."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / made).touch()
    if made == database.NAME:
        found = files.read(tmp_path)
        assert found.recording.meta == {} and found.incidents == []

    def whole():
        (tmp_path / made).unlink()
        written(tmp_path, synthetic(300, 2))

    screen = Screen(whole)
    monkeypatch.setattr(time, "sleep", screen.then)
    assert dashboard.watch(tmp_path, screen=screen)
    assert "waiting" in screen.file.getvalue() and "net: finished" in screen.file.getvalue()


def test_files_that_become_unreadable(tmp_path, monkeypatch):
    """It keeps the last display, reports the error, and goes on when they can be read."""
    run = synthetic(300, 2)
    written(tmp_path, replace(run, meta={**run.meta, "status": "running"}))
    file = tmp_path / database.NAME
    whole = file.read_bytes()

    def mend():
        file.write_bytes(whole)
        written(tmp_path, run)

    screen = Screen(lambda: file.write_bytes(b"another file"), mend)
    monkeypatch.setattr(time, "sleep", screen.then)
    dashboard.watch(tmp_path, screen=screen)
    shown = screen.file.getvalue()
    reported = re.sub(r"\x1b\[[0-9;]*m|[\W_]", "", shown)  # a line may break anywhere
    assert "whichisanotherfile" in reported and "netfinished" in reported.split("whichisanotherfile")[-1]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_pipe_that_takes_no_unicode(tmp_path, monkeypatch, encoding):
    run = synthetic(300, 2, name="n\u0119t")
    written(tmp_path, run)
    assert text_of(run, ascii_only=True).isascii() is False and "#" in text_of(replace(run, meta={}), ascii_only=True)
    assert not set(dashboard._BARS[1:]) & set(text_of(run, ascii_only=True))
    pipe = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", pipe)
    assert main(["watch", str(tmp_path)]) == main(["report", str(tmp_path / database.NAME)]) == 1
    pipe.flush()
    assert b"n?t: finished" in pipe.buffer.getvalue() and b"n?t/dense" in pipe.buffer.getvalue()
    assert b"#" in pipe.buffer.getvalue() and b"??" not in pipe.buffer.getvalue()


def test_it_follows_a_run_to_its_end(tmp_path):
    """Started during training, it shows later steps, and returns when the run has ended."""
    import keras

    stream, begun, threads = io.StringIO(), threading.Event(), []
    screen = Console(file=stream, force_terminal=True, width=110)

    class Begin(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                threads.append(threading.Thread(target=dashboard.watch, args=(tmp_path, 0.05), kwargs={"screen": screen}))
                threads[0].start()
            begun.wait(0.2)

    trained(tmp_path, 6, callbacks=[Begin()])
    threads[0].join(30)
    assert not threads[0].is_alive()
    assert "running" in stream.getvalue() and "finished" in stream.getvalue()
    assert os.path.exists(tmp_path / "recording.sqlite")
