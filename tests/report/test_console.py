"""A run on a terminal and in a log: a line per kind, an intact bar, a table at the end."""

import io
import re
import sys

import numpy as np
import pytest

from keras_nanguard import Diagnosis, Finding, Incident, NanGuard, Outcome
from keras_nanguard._fit.bad_data import BadRows
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import BadSample
from keras_nanguard._report.closing_table import MAX_ROWS, table_text

pyte = pytest.importorskip("pyte", reason="needs the terminal emulator pyte")

pytestmark = pytest.mark.requires_backend("torch", reason="what is printed is the same on every backend; checked once")

EPOCHS = 3


class Stream(io.StringIO):
    encoding = "utf-8"

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def train(monkeypatch, stream, bad=True, guard=None, **arguments):
    """Fit on data with two bad rows, with this standard output."""
    import keras

    x = np.ones((80, 3), "float32")
    if bad:
        x[[13, 50]] = np.nan
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    monkeypatch.setattr(sys, "stdout", stream)
    model.fit(x, np.ones((80, 1)), batch_size=8, epochs=EPOCHS, shuffle=False, callbacks=[guard or NanGuard()], **arguments)
    monkeypatch.undo()


def fitted(monkeypatch, terminal, **arguments):
    stream = Stream(terminal)
    train(monkeypatch, stream, **arguments)
    return stream.getvalue()


def shown(written, columns=400):
    """Return the lines that a terminal displays."""
    screen = pyte.Screen(columns, 80)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()]


def test_on_a_terminal(monkeypatch):
    """The bar is redrawn below each line, with no remains, once per epoch; the table is last."""
    monkeypatch.setenv("COLUMNS", "150")
    lines = shown(fitted(monkeypatch, True))
    starts = [re.match(r"\w+|.", line).group() for line in lines]
    assert starts[:7] == ["Epoch", "NanGuard", "NanGuard", "NanGuard", "10", "Epoch", "10"], lines
    assert all(re.fullmatch(r"10/10 ━{20} \S+ \S+/step - loss: \S+ - refused_steps: 2\.\S+", line) for line in lines if "━" in line), lines
    assert sum("━" in line for line in lines) == EPOCHS
    assert "exclude 2 skipped steps of 10" in lines[2]
    assert "skipped 6 of 30 steps, 6 incidents" in "".join(lines)
    assert lines[-1].startswith("╰")


def test_in_a_log_file(monkeypatch):
    """Each line of the guard is a separate line, without colours."""
    written = fitted(monkeypatch, False)
    ours = [line for line in written.split("\n") if "NanGuard" in line]
    assert len(ours) == 4 and all(line.startswith("NanGuard: ") and line.isprintable() for line in ours)
    assert written.count("\n\nNanGuard") <= 1  # the table may be separate
    assert "\x1b" not in written[written.index(ours[-1]) :]
    lines = fitted(monkeypatch, False, verbose=2).split("\n")
    assert sum(bool(re.match(r"10/10 - ", line)) for line in lines) == EPOCHS and "" not in lines[:-1]


def incidents(count):
    diagnosis = Diagnosis("input_nonfinite", "inputs/[red]x[/red]\x1b[2J", advice=("Clean [bold]it[/bold].",))
    finding = (Finding("inputs"),)
    done = (Outcome("skip", "done"),)
    others = [Incident(n, 0, n, finding, outcomes=done, diagnosis=Diagnosis("spike", f"layer_{n}")) for n in range(count)]
    return [Incident(3, 0, 3, finding, outcomes=(*done, Outcome("rollback", "done")), diagnosis=diagnosis), *others, *others[:1]]


def test_the_table(monkeypatch):
    """Names are text and never markup or commands; actions are counted, and so are omitted rows."""
    monkeypatch.setattr(sys, "stdout", Stream(False))
    text = table_text(incidents(2), "[red]head")
    monkeypatch.undo()
    assert "\x1b" not in text and "[red]head" in text and "[red]x[/red]" in text and "[bold]it[/bold]" in text
    assert "skip, rollback" in text and text.index("layer_0") < text.index("[red]x")
    assert f"and {20 + 1 - MAX_ROWS} more kinds" in table_text(incidents(20), "")


class Tee:
    """A replacement of the standard output without `isatty`."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("verbose", [0, 1])
def test_an_output_without_isatty(monkeypatch, verbose):
    tee = Tee()
    train(monkeypatch, tee, verbose=verbose)
    assert "skipped 6 of 30 steps, 6 incidents" in tee.text
    assert "\x1b" not in tee.text.split("Details: ")[-1], "no colours in the table"


def test_a_name_from_the_data():
    """Printed in one line, and without control of the terminal."""
    recorder = Recorder()
    recorder.sample(BadSample("scan\x1b[2J\r\n7.png", 7, "ab" * 32, 1, (3,), "3 NaN of 64 in x"))
    assert BadRows(recorder, None).line() == "NanGuard: 1 distinct bad row so far: scan\ufffd[2J 7.png"


def test_the_rate_at_the_end(monkeypatch):
    """The last line tells by how much the rate was lowered; nothing if it was not."""
    import keras

    x = 50 * np.random.default_rng(0).standard_normal((160, 4)).astype("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    stream = Stream(False)
    monkeypatch.setattr(sys, "stdout", stream)
    model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=5, verbose=0, callbacks=[NanGuard()])
    monkeypatch.undo()
    (told,) = re.findall(r"ended at (\S+) times the configured rate\. Details", stream.getvalue())
    assert float(told) == pytest.approx(float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)), rel=0.01)
    assert "ended at" not in fitted(monkeypatch, False)
