"""The figure of a run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.recordings import synthetic

from keras_nanguard import GuardError, NanGuard
from keras_nanguard._report.figure import curves

pytestmark = pytest.mark.requires_backend("tensorflow", reason="needs no backend: runs once")

ROOT = Path(__file__).parents[2]


def test_curves_of_a_run():
    """A figure has a panel for each measured column, and the marks of the incidents."""
    recording = synthetic(900, 2)
    figure = curves(recording)
    names = ["loss", "gradient norm", "learning rate", "loss scale"]
    assert [axes.get_ylabel() for axes in figure.axes] == names
    step, _, high = recording.series("loss", 1500)
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_data(), (step + 1, high))
    assert "incident" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "nothing is recorded yet" in NanGuard(verbose=0).plot().axes[0].texts[0].get_text()


def test_a_notebook_shows_figures():
    """In a new kernel a figure is displayed as an image, which requires a loaded backend."""
    code = (
        "import sys, types; sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"
        "from keras_nanguard import NanGuard\n"
        "NanGuard(verbose=0).plot(); print('matplotlib.backends.backend_svg' in sys.modules)"
    )
    env = {**os.environ, "MPLBACKEND": "svg"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_without_matplotlib(monkeypatch):
    """A clear error names the package to install, which is not loaded before."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(GuardError, match="pip install 'keras-nanguard\\[plot\\]'"):
        NanGuard(verbose=0).plot()
