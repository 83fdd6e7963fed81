"""The measurement against size, in short: models of that size, two fits side by side, a table and a plot of what was found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from campaigns import scale


@pytest.mark.parametrize(("axis", "size", "layers", "rows"), [("depth", 7, 8, 8), ("width", 10_000, 2, 8), ("batch", 16, 4, 16)])
def test_work(axis, size, layers, rows):
    """A point has the layers, the parameters and the rows that it says."""
    work = scale.work(axis, size)
    assert len(work.model.layers) == layers and len(work.batch[0]) == len(work.batch[1]) == rows
    assert axis != "width" or work.model.count_params() == pytest.approx(size, rel=0.05)


def test_both_fits_make_their_steps():
    """Both variants train the same steps from the same weights, one epoch at a time, and end at the same weights."""
    models = []

    def make():
        work = scale.work("depth", 2)._replace(steps=3)
        models.append(work.model)
        return work

    found = scale.timed(make, rounds=2)
    plain, guarded = models
    assert plain.optimizer.iterations == guarded.optimizer.iterations >= 12
    for one, other in zip(plain.get_weights(), guarded.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert len(found["ratios"]) == 2 and set(found["first"]) == set(found["later"]) == {"plain", "guarded"}


POINT = {"first": {"plain": 2.0, "guarded": 3.0}, "later": {"plain": 0.001, "guarded": 0.0011}, "ratios": [1.0, 1.1, 1.3]}


def test_table_and_plot(tmp_path):
    """The table has a line for each point, in the order of their sizes, and the plot is the same file each time."""
    points = {"16": POINT, "4": POINT | {"peak": {"plain": 10_000_000, "guarded": 12_000_000}}}
    found = {("jax", "depth"): {"points": points, "versions": "JAX 1"}}
    lines = scale.table(found).splitlines()
    assert lines[2] == "| depth 4 | JAX | 2.00 s | 3.00 s | 1.50 | 1.00 ms | 1.10 ms | 1.10 | 1.00 to 1.30 | 2 MB |"
    assert lines[3].startswith("| depth 16 |") and lines[-1] == "JAX 1."
    for name in "ab":
        scale.plot(found, tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_text("utf-8") == (tmp_path / "b.svg").read_text("utf-8")


def test_only_unknown_points_are_measured(tmp_path):
    """A run that was cut off goes on with the points that are missing, and what is known stays as it is."""
    asked = []

    def measure(axis, size):
        asked.append(size)
        return {"size": size}

    scale.run("depth", [4, 8], tmp_path, measure)
    scale.run("depth", [4, 8, 16], tmp_path, measure)
    assert asked == [4, 8, 16]
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text("utf-8"))["points"] == {str(size): {"size": size} for size in asked}
