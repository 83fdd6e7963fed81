"""No error in printing, writing or tracking is raised into training."""

import sys
import threading

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import Incident, NanGuard


class Full:
    """A stream with a full disk; its text stays in the buffer, so each `flush` fails again."""

    encoding = "utf-8"

    def write(self, text):
        return len(text)

    def flush(self):
        raise OSError(28, "No space left on device")


class Broken(Full):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class Tee:
    """A logger of a script that only supports writing."""

    def write(self, text):
        pass


class Closed(Full):
    """The errors of a closed file."""

    def write(self, text):
        raise ValueError("I/O operation on closed file")

    @property
    def isatty(self):
        raise ValueError("I/O operation on closed file")

    flush = write


def trained(guard, epochs=2, callbacks=()):
    data = zoo.regression().with_poison([3, 7])
    run = zoo.run(zoo.plain, data, guard=guard, epochs=epochs, callbacks=callbacks)
    assert guard.session.run.counts.refused == 2 * epochs and len(guard.incidents) == 2 * epochs
    assert zoo.bad_entries(run.model) == []
    return run


@pytest.mark.daily("1-*", "2-Broken")
@pytest.mark.parametrize("stream", [Full(), Broken(), Tee(), Closed(), None], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("verbose", [1, 2])
def test_standard_output(monkeypatch, stream, verbose):
    monkeypatch.setattr(sys, "stdout", stream)
    trained(NanGuard(verbose=verbose))


@pytest.mark.parametrize("what", ["line", "table", "epoch"])
def test_text_that_cannot_be_made(monkeypatch, what, capsys):
    """An error in the text of a line or the table ends nothing, and is reported once."""

    def broken(*args, **kwargs):
        raise UnicodeEncodeError("ascii", "x", 0, 1, "no")

    name = {"line": "console.brief_line", "table": "closing_table.table_text", "epoch": "console.epoch_line"}[what]
    monkeypatch.setattr(f"keras_nanguard._report.{name}", broken)
    trained(NanGuard())
    assert capsys.readouterr().out.count("NanGuard: cannot print") == 1


@pytest.mark.parametrize("where", ["opened", "thread"])
def test_recording(monkeypatch, tmp_path, where, capsys):
    """The recording cannot be written: another file has its name, or there is no thread."""
    if where == "opened":
        (tmp_path / "recording.sqlite").mkdir()
    else:
        real = threading.Thread.start

        def start(thread):
            if thread.name == "NanGuard recording":
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
    guard = NanGuard(directory=tmp_path)
    trained(guard)
    assert "recording.sqlite is not written" in capsys.readouterr().out
    assert len(guard.recording.steps["loss"]) == 28


@pytest.mark.parametrize("at_first", [0, 1])
@pytest.mark.parametrize("verbose", [0, 1])
def test_incident_that_cannot_be_recorded(monkeypatch, tmp_path, capsys, verbose, at_first):
    """Still in `guard.incidents`; with `verbose=0`, also if it is set during a fit, no line reports it, or its missing bundle."""
    monkeypatch.setattr(Incident, "to_json", lambda self: 1 / 0)
    monkeypatch.setattr(Incident, "to_dict", lambda self: 1 / 0)
    guard = NanGuard(directory=tmp_path, verbose=at_first)
    trained(guard, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=lambda logs: setattr(guard, "verbose", verbose))])
    said = capsys.readouterr().out
    reports = [f"NanGuard: {what}: ZeroDivisionError" for what in ("cannot record an incident", "no bundle was written")]
    assert all(report in said for report in reports) if verbose else said == ""


def test_layer_that_cannot_be_saved(tmp_path, capsys):
    """A snapshot stores variables, so such a layer has one like any other."""

    @keras.saving.register_keras_serializable("output_gone")
    class Unsaved(keras.layers.Dense):
        def save_own_variables(self, store):
            raise TypeError("this layer cannot be saved")

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), Unsaved(1)])
    model.compile("adam", "mse")
    data = zoo.regression()
    snapshot = {"storage": "disk", "every": 4, "verify_after": 1}
    guard = NanGuard(directory=tmp_path, snapshot=snapshot)
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
    assert np.isfinite(model.get_weights()[0]).all()
    assert "this layer cannot be saved" not in capsys.readouterr().out
    assert list((tmp_path / "snapshots").glob("snapshot-*/state.npz"))
