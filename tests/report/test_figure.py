"""The figure of a run."""

import sys

import numpy as np
import pytest
from support.recordings import synthetic

from keras_nanguard import GuardError, NanGuard

pytestmark = pytest.mark.requires_backend("torch", reason="needs no backend: runs once")


def test_curves_of_a_run():
    """A figure has a panel for each measured column, and the marks of the incidents."""

    class OfRecording(NanGuard):
        recording = synthetic(900, 2)

    figure = OfRecording(verbose=0).plot()
    names = ["loss", "gradient norm", "learning rate", "loss scale"]
    assert [axes.get_ylabel() for axes in figure.axes] == names
    step, _, high = OfRecording.recording.series("loss", 1500)
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_data(), (step + 1, high))
    assert "incident" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "nothing is recorded yet" in NanGuard(verbose=0).plot().axes[0].texts[0].get_text()


def test_a_notebook_shows_figures(monkeypatch):
    """In a kernel a figure is displayed as an image, which requires a loaded backend."""
    import matplotlib

    before, backend = matplotlib.get_backend(), "matplotlib.backends.backend_svg"
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    matplotlib.use("svg")
    monkeypatch.delitem(sys.modules, backend, raising=False)
    NanGuard(verbose=0).plot()
    assert backend in sys.modules
    matplotlib.use(before)


def test_without_matplotlib(monkeypatch):
    """A clear error names the package to install, which is not loaded before."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(GuardError, match="pip install 'keras-nanguard\\[plot\\]'"):
        NanGuard(verbose=0).plot()
