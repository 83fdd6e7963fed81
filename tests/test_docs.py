"""The docs cannot drift: what the README shows is run, and every name it mentions exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def test_readme_blocks_run(tmp_path, monkeypatch):
    """Every Python block of the README runs, one after the other, on a small model."""
    import keras
    import numpy as np
    tf = pytest.importorskip("tensorflow", reason="the README shows a loop of TensorFlow's")

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 4)).astype("float32"), rng.standard_normal((32, 1)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    optimizer, loss = keras.optimizers.Adam(), keras.losses.MeanSquaredError()

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    names = {"model": model, "x": x, "y": y, "optimizer": optimizer, "train_step": train_step}
    names["batches"] = [(tf.constant(x[:8]), tf.constant(y[:8]))] * 3
    blocks = _blocks(ROOT / "README.md")
    for block in blocks:
        exec(compile(block, "README.md", "exec"), dict(names) if "batches" in block else names)
    assert len(blocks) >= 3
    assert (tmp_path / "run.html").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    """Every relative link of a page names a file that is there, and a heading in it."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{page.name} links to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_public_names_exist():
    """Every public name of the package can be imported, and `dir` lists it."""
    import keras_nanguard

    for name in keras_nanguard.__all__:
        assert getattr(keras_nanguard, name) is not None
        assert name in dir(keras_nanguard)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = keras_nanguard.nothing
