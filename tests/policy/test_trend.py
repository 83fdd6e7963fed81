"""The trend of loss and gradient norm: silent on healthy runs of every kind, awake to jumps and to divergence."""

from __future__ import annotations

import math
import random
import timeit

import pytest
from hypothesis import given, settings, strategies as st

from keras_nanguard._policy.settings import TrendCheck
from keras_nanguard._policy.trend import Trend


def noise(seed, sigma, steps=3000):
    source = random.Random(seed)
    return [math.exp(source.gauss(0, sigma)) for _ in range(steps)]


def reported(losses, norms=None, trend=None):
    """Return step, site and kind of all findings of the trend in a run."""
    trend = trend or Trend()
    pairs = enumerate(losses if norms is None else zip(losses, norms, strict=True))
    found = [(step, trend.push(step, *(pair if norms is not None else (pair, None)))) for step, pair in pairs]
    return [(step, finding.site, finding.kind) for step, findings in found for finding in findings]


HEALTHY = {
    "heavy tails, batch size 1": lambda n: noise(n, 1.5),
    "very heavy tails": lambda n: noise(n, 2.5),
    "loss goes to zero and jitters there": lambda n: [
        2.3 * math.exp(-k / 40) + 1e-12 * v for k, v in enumerate(noise(n, 3.0))
    ],
    "memorised, with a wrong label now and then": lambda n: [
        1e-9 + 2.3 * math.exp(-k / 40) + (3.0 if k % 97 == 50 else 0.0) for k in range(3000)
    ],
    "a critic that goes through zero": lambda n: [
        5 * math.sin(k / 300) + 0.1 * (v - 1) for k, v in enumerate(noise(n, 0.5))
    ],
    "a negative log likelihood": lambda n: [10 - k / 3 + v for k, v in enumerate(noise(n, 1.0))],
    "around zero": lambda n: [random.Random(n * 7919 + k).gauss(0, 1) for k in range(3000)],
    "from a million down to one": lambda n: [1e6 * math.exp(-k) + v for k, v in enumerate(noise(n, 0.7))],
    "huge and stable": lambda n: [1e9 * v for v in noise(n, 1.0)],
    "tiny and stable": lambda n: [1e-9 * v for v in noise(n, 1.5)],
    "epochs": lambda n: [(3.0 if (k // 100) % 2 else 1.0) * v for k, v in enumerate(noise(n, 0.3))],
    "a cyclic rate": lambda n: [math.exp(2.5 * math.sin(k / 50)) * v for k, v in enumerate(noise(n, 0.5))],
    "a warm-up": lambda n: [7.0 * v if k < 200 else 2.0 * v for k, v in enumerate(noise(n, 0.3))],
    "exactly zero": lambda n: [0.0] * 500,
    "constant": lambda n: [1.25] * 500,
    "zeros, with a reward now and then": lambda n: [
        v if k % 17 == n % 17 else 0.0 for k, v in enumerate(noise(n, 1.0))
    ],
    "zeros, then a loss": lambda n: [0.0] * 300 + noise(n, 1.0, 300),
    "small, then large by a new weight of a term": lambda n: noise(n, 0.3, 300) + [800 * v for v in noise(n, 0.3, 300)],
    "bad values in between": lambda n: [
        math.nan if k % 9 == 0 else math.inf if k % 11 == 0 else v for k, v in enumerate(noise(n, 1.0))
    ],
}


@pytest.mark.parametrize("name", sorted(HEALTHY))
@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_is_never_interrupted(name, seed):
    """No false alarm, on the loss and on the gradient norm alike."""
    run = HEALTHY[name](seed)
    assert reported(run) == []
    assert reported([1.0] * len(run), [abs(value) for value in run]) == []


@pytest.mark.parametrize("start", [0, 3, 50, 400])
@pytest.mark.parametrize("growth", [3.0, 10.0, 100.0])
@pytest.mark.parametrize("site", ["loss", "gradients"])
def test_divergence_is_reported_before_it_overflows(start, growth, site):
    """Growth from about 1 by any factor a step, from the first step on or later, is an explosion well below 1e15."""
    healthy = noise(start, 0.3, start)
    run = healthy + [growth**k for k in range(60) if growth**k < 1e30]
    losses, norms = (run, [0.0] * len(run)) if site == "loss" else ([0.0] * len(run), run)
    steps = [step for step, where, kind in reported(losses, norms) if kind == "explosion" and where == site]
    assert steps and run[steps[0]] < 1e15


def test_tenfold_growth_from_one_is_reported_within_twelve_steps():
    """1, 10, 100, ... is reported before 1e10, with no healthy step before it."""
    (first, *_) = reported([10.0**k for k in range(12)])
    assert first[2] == "explosion" and first[0] < 10


def test_slow_divergence_is_reported_too():
    """A loss that grows by 5% a step never jumps, and is still reported when it is a million times where it began."""
    steps = [step for step, _, kind in reported([1.05**k for k in range(600)]) if kind == "explosion"]
    assert steps and 1e6 <= 1.05 ** steps[0] < 3e6


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.05, 0.4), st.integers(30, 300), st.floats(1.0, 6.0))
def test_a_jump_of_more_than_ten_thousand_is_reported_once(seed, sigma, steps, beyond):
    """One finite jump is one spike; the next healthy value re-arms it."""
    healthy = noise(seed, sigma, steps)
    level = sorted(healthy)[steps // 2]
    jump = level * 10 ** (4.3 + beyond / 10)
    assert reported([*healthy, jump, *healthy, jump]) == [(steps, "loss", "spike"), (2 * steps + 1, "loss", "spike")]


def test_nan_and_infinity_blind_nothing():
    """Values that are not finite never enter the statistics: a spike is reported after them as before."""
    poison = [math.nan, math.inf, -math.inf] * 50
    assert reported([*noise(1, 0.3, 100), *poison, 1e6]) == [(250, "loss", "spike")]
    assert reported([*poison, *noise(1, 0.3, 100), 1e6]) == [(250, "loss", "spike")]


def test_a_lasting_shift_is_reported_once_and_becomes_the_level():
    """A plateau a hundred thousand times higher is one spike; a jump from there is another."""
    assert reported([1.0] * 100 + [1e5] * 400) == [(100, "loss", "spike")]
    assert reported([0.01] * 100 + [150.0] * 400 + [150.0 * 9e3]) == [(100, "loss", "spike")]
    assert [step for step, _, _ in reported([0.01] * 100 + [150.0] * 400 + [150.0 * 2e4])] == [100, 500]


def test_an_explosion_that_goes_on_is_reported_again_a_thousand_times_higher():
    """A policy that only warns does not report the same divergence at every step."""
    found = reported([10.0**k for k in range(40)])
    explosions = [step for step, _, kind in found if kind == "explosion"]
    assert 2 <= len(explosions) <= 12 and len(found) <= 13


def test_settling_after_a_rollback_arms_the_trend_again():
    """After a rollback the same divergence is reported again, and what was learned is kept."""
    trend = Trend()
    run = noise(0, 0.3, 100) + [10.0**k for k in range(1, 9)]
    first = reported(run, trend=trend)
    trend.discard_pending()
    assert reported([1.0, 1.0], trend=trend) == []
    assert [kind for _, _, kind in reported([10.0**k for k in range(1, 9)], trend=trend)] == [kind for _, _, kind in first]


def test_thresholds_come_from_the_policy():
    """`enabled`, `spike_factor`, `explosion_factor`, `patience` and `warmup` do what they say."""
    assert reported([1.0] * 100 + [1e8] * 5, trend=Trend(TrendCheck(enabled=False))) == []
    assert reported([1.0] * 100 + [30.0], trend=Trend(TrendCheck(spike_factor=20.0))) == [(100, "loss", "spike")]
    low = TrendCheck(explosion_factor=100.0, patience=2)
    assert reported([1.0] * 100 + [200.0] * 5, trend=Trend(low)) == [(101, "loss", "explosion")]
    late = TrendCheck(warmup=50, spike_factor=100.0)
    assert reported([1.0] * 40 + [500.0], trend=Trend(late)) == []
    assert reported([1.0] * 60 + [500.0], trend=Trend(late)) == [(60, "loss", "spike")]


@pytest.mark.parametrize("step", [3, 10, 19])
def test_a_jump_by_orders_of_magnitude_before_a_level_is_known(step):
    """A positive loss is compared with the largest one so far; one of both signs, or a gradient norm, has to jump a millionfold."""
    start = [2.3, 0.9, 1.7, *noise(1, 0.3, 30)][:step]
    assert reported([*start, 5e3]) == [(step, "loss", "spike")]
    assert reported([*start, 1e3]) == []
    assert reported([-2.3, *start[1:], 5e3]) == []
    assert reported(start, [*start[:-1], 5e3]) == []


@settings(max_examples=100)
@given(st.lists(st.tuples(st.one_of(st.none(), st.floats()), st.one_of(st.none(), st.floats())), max_size=60))
def test_nothing_makes_the_trend_raise(pairs):
    """None, NaN, infinities, subnormal and negative numbers all go through, and findings carry what was measured."""
    trend = Trend()
    for step, (loss, norm) in enumerate(pairs):
        for finding in trend.push(step, loss, norm):
            assert finding.value in (loss, norm) and math.isfinite(finding.value)


def test_a_healthy_step_costs_next_to_nothing():
    """Both series together stay under three microseconds (the best of several runs: machines are noisy)."""
    trend, values = Trend(), noise(0, 1.0, 5000)

    def run():
        for step, value in enumerate(values):
            trend.push(step, value, value)

    assert min(timeit.repeat(run, number=1, repeat=7)) / len(values) < 3e-6
