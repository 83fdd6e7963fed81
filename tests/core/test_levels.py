"""Level and onset of a loss, from its series alone."""

import numpy as np
import pytest

from keras_nanguard._core.history import WINDOW, level_of, onset


def test_the_level_is_a_median_with_a_robust_spread():
    """The oracle is NumPy: one outlier changes neither."""
    draw = np.random.default_rng(0)
    losses = [*draw.normal(5.0, 0.5, 40), 1e9]
    level = level_of(list(enumerate(losses)))
    last = np.array(losses[-WINDOW:])
    spread = 1.4826 * np.median(np.abs(last - np.median(last)))
    assert level is not None and level.step == 40
    assert (level.value, level.spread) == pytest.approx((np.median(last), spread))


def test_a_short_series_has_no_level():
    assert level_of([(0, 1.0)] * 7) is None and level_of([]) is None


@pytest.mark.parametrize("rises_at", [24, 57, 93])
def test_the_onset_is_the_change_point(rises_at):
    """A loss falls, stays, and rises from one step on: found within the noise of three."""
    draw = np.random.default_rng(rises_at)
    losses = [2.0 * 0.8**step + 0.5 for step in range(rises_at)]
    losses += [0.5 + 0.3 * (step + 1) for step in range(30)]
    series = [(step, loss * (1 + 0.02 * draw.standard_normal())) for step, loss in enumerate(losses)]
    assert abs(onset(series) - rises_at) <= 3


def test_the_onset_of_a_loss_that_never_rises_is_after_the_last_step():
    assert onset([(step, 1.0) for step in range(50)]) == 50


def test_a_loss_that_explodes_at_once_left_its_level_at_once():
    """The loss of a run that overflows in three steps leaves its level in the second."""
    assert onset([(0, 8.0), (1, 1e4), (2, 1e15)]) == 1
    assert onset([]) == 0


def test_nan_and_infinite_losses_do_not_hide_the_onset():
    series = [(step, 1.0) for step in range(20)] + [(20, float("nan")), (21, float("inf")), (22, 1e9)]
    assert onset(series) in (20, 21)
