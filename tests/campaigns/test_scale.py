"""A short measurement against size: models of that size, two fits, a table and a plot."""

import json

import numpy as np

from campaigns import scale


def test_both_fits_make_their_steps():
    """Both make the same steps from the same weights, and end with the same ones."""
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


def test_only_unknown_points_are_measured(tmp_path):
    """An interrupted run continues with the missing points, and keeps the known ones."""
    asked = []

    def measure(axis, size):
        asked.append(size)
        return {"size": size}

    scale.run("depth", [4, 8], tmp_path, measure)
    scale.run("depth", [4, 8, 16], tmp_path, measure)
    assert asked == [4, 8, 16]
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text("utf-8"))["points"] == {str(size): {"size": size} for size in asked}
