"""Level, ground lost and onset of a divergence, from a series of losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from keras_nanguard._policy.progress import Level, Progress, level_of, onset

FINITE = st.floats(1e-6, 1e6)


def series(losses, since=0):
    return list(enumerate(map(float, losses), since))


def test_level_is_median_and_deviation():
    """Level and spread are those of NumPy over the last 16 losses, whatever came before."""
    losses = np.random.default_rng(0).normal(3.0, 0.5, 50)
    level = level_of(series(losses))
    last = losses[-16:]
    assert level.step == 49
    assert level.value == pytest.approx(np.median(last))
    assert level.spread == pytest.approx(1.4826 * np.median(np.abs(last - np.median(last))))


def test_level_needs_values():
    """Of fewer than eight losses there is no level; of losses that stand still the spread is a share of it."""
    assert level_of(series([1.0] * 7)) is None
    assert level_of(series([2.0] * 8)) == Level(7, 2.0, 0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", [20, 80, 150])
def test_onset_is_the_change_point(change, seed):
    """A level that is left for good is left at the step at which it was, give or take what noise hides."""
    draw = np.random.default_rng(seed)
    losses = np.where(np.arange(200) < change, draw.normal(1.0, 0.1, 200), draw.normal(2.0, 0.1, 200))
    assert abs(onset(series(losses), Level(0, 1.0, 0.1)) - change) <= 3


def test_onset_passes_over_a_spike_that_came_back():
    """What has returned to the level is not where a later divergence began."""
    losses = [1.0] * 20 + [9.0] * 2 + [0.5] * 60 + [5.0] * 20
    assert onset(series(losses), Level(0, 1.0, 0.2)) == 82


@given(st.lists(FINITE, min_size=1, max_size=60), st.integers(0, 1000))
def test_onset_is_a_step_of_the_series(losses, since):
    """Whatever the losses, the onset is one of their steps, or the one after them."""
    assert since <= onset(series(losses, since), Level(0, 1.0, 0.1)) <= since + len(losses)


class TestProgress:
    def test_lost(self):
        """What is lost is a share of what was won since the start: 0 at the best level, 1 from the start on."""
        progress = Progress()
        progress.note(series([10.0]))
        for value in (8.0, 2.0):
            progress.note(series([value] * 16, 16))
        assert progress.start == 10.0 and progress.best.value == 2.0
        assert [progress.lost(Level(0, value, 0.1)) for value in (2.0, 6.0, 10.0, 99.0)] == [0.0, 0.5, 1.0, 1.0]

    def test_rollback(self):
        """The levels of steps that a rollback undoes are forgotten; what came before a snapshot is not."""
        progress = Progress()
        for at in range(0, 100, 16):
            progress.note(series([100.0 - at] * 16, at))
        progress.rolled_back(40, 100)
        assert [level.step for level in progress.levels] == [15, 31] and progress.since == 100
        assert progress.note(series([50.0] * 4, 96)) is None, "the steps before the rollback are no part of a level"

    def test_onset_that_is_known(self):
        """Where the whole of what was trained is at fault the levels are not asked."""
        progress = Progress()
        progress.note(series([1.0] * 16))
        progress.begins_at = 7
        assert progress.onset(series([1.0] * 50)) == 7

    @pytest.mark.parametrize("losses", [[-1.0] * 16, [0.0] * 16, [2.0] * 8 + [-3.0] * 9])
    def test_losses_of_both_signs(self, losses):
        """Of a loss that is not positive neither ratio nor progress is defined."""
        progress = Progress()
        progress.note(series(losses))
        assert progress.signed

    @given(st.lists(st.lists(FINITE, min_size=8, max_size=16), min_size=1, max_size=20))
    def test_lost_is_a_share(self, windows):
        """For any losses the share that is lost lies between 0 and 1, and the best level has lost nothing."""
        progress = Progress()
        for number, window in enumerate(windows):
            progress.note(series(window, 16 * number))
        for level in progress.levels:
            assert 0.0 <= progress.lost(level) <= 1.0
        if progress.best.value < progress.start:
            assert progress.lost(progress.best) == 0.0
        assert math.isfinite(progress.best.value)


def test_levels_take_no_more_memory_as_a_run_goes_on():
    """Of older levels the lowest of several is kept: the best one, the first half and the second, are what they were."""
    draw, progress, every = np.random.default_rng(0), Progress(), []
    for number in range(5000):
        values = draw.uniform(0.5, 1.0, 16) + 4.0 * np.exp(-number / 500)
        level = progress.note(series(values, 16 * number))
        every.append(level)
    assert len(progress.levels) <= 256
    assert progress.best == min(every, key=lambda level: level.value)
    early, late = progress.halves(every[-1])
    half = 16 * 2500
    assert early == min(level.value for level in every if level.step < half)
    assert late == pytest.approx(min(level.value for level in every if level.step >= half), rel=0.02)
    assert not progress.signed


def test_jump_or_slide():
    """A loss that leaves its level at once has jumped; one that leaves it step by step has not."""
    jumped, slid = Progress(), Progress()
    flat = [1.0] * 32
    for progress, after in ((jumped, [9.0] * 16), (slid, [1.0 + 0.2 * i for i in range(16)])):
        progress.note(series([2.0, *flat[:15]]))
        progress.note(series(flat))
        losses = series([*flat, *after])
        assert progress.jumps_at(progress.onset(losses), losses) is (progress is jumped)
