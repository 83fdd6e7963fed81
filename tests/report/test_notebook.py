"""Guards, incidents, reports and figures in notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.recordings import HOSTILE, synthetic

from keras_nanguard import Finding, GuardError, Incident, NanGuard, repair, scan

pytestmark = pytest.mark.requires_backend("tensorflow", reason="needs no backend: runs once")

ROOT = Path(__file__).parents[2]


class Tags(HTMLParser):
    def __init__(self, fragment):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(fragment)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def reports(name, folder):
    path = folder / "model.weights.h5"
    with h5py.File(path, "w") as file:
        file[f"{name.replace('/', '|')}/kernel"] = np.full((2, 2), np.nan)
    return scan(path), repair(path, weights="zeros", dry_run=True)


def incident(name):
    found = next(Incident.from_dict(e.data) for e in synthetic(900, 2, name=name).events if e.kind == "incident" and name in str(e.data))
    return found.with_(findings=(*found.findings, Finding("gradients", path=name, nan=2, inf=1, size=9)))


@pytest.mark.parametrize("number", range(3), ids=["incident", "scan", "repair"])
def test_names_are_escaped(number, tmp_path):
    """A hostile name gives the same tags as a harmless one, and appears as text."""
    shown = [(incident(name), *reports(name, tmp_path))[number]._repr_html_() for name in (HOSTILE, "net")]
    one, other = map(Tags, shown)
    assert one.tags == other.tags and "table" in one.tags and "owned" in one.text


def test_a_guard():
    """A guard shows its kinds of incidents and its bad rows; its curves are a figure."""
    import keras

    x = np.ones((64, 3), "float32")
    x[5] = np.nan
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    guard = NanGuard(verbose=0)
    assert "0 incidents" in guard._repr_html_() and "table" not in guard._repr_html_()
    model.fit(x, np.ones((64, 1)), batch_size=8, epochs=2, verbose=0, callbacks=[guard])
    text = Tags(guard._repr_html_()).text
    assert "input_nonfinite in 'x'" in text and "bad row x[5]" in text
    figure = guard.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "gradient norm", "learning rate"]
    step, _, high = guard.recording.series("loss", 1500)
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_data(), (step + 1, high))
    assert "incident" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_notebook_shows_figures():
    """In a kernel that has not drawn anything yet, a figure is displayed as an image, which
    requires a loaded backend.
    """
    code = (
        "import sys, types; sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"
        "from keras_nanguard import NanGuard\n"
        "NanGuard(verbose=0).plot(); print('matplotlib.backends.backend_svg' in sys.modules)"
    )
    env = {**os.environ, "MPLBACKEND": "svg"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_the_figure_of_an_incident(tmp_path):
    figure = incident("a$b_{").plot()
    figure.savefig(tmp_path / "incident.png")
    assert (tmp_path / "incident.png").stat().st_size > 1000
    assert [bar.get_width() for bar in figure.axes[0].patches][1] == pytest.approx(2 / 9)


def test_without_matplotlib(monkeypatch):
    """A clear error names the package to install, which is not loaded before."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(GuardError, match="pip install 'keras-nanguard\\[plot\\]'"):
        incident("net").plot()
