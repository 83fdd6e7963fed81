"""The numbers of a step on the host: every combination of finite, NaN and infinite numbers."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from keras_nanguard import Finding
from keras_nanguard._backends import current
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.agreement import Agreement

NAN, INF = math.nan, math.inf
FINE = Verdict(False, 1.0, 2.0, 3.0, 4.0, 5.0, 1.0)
SUMS = ("loss", "gradients", "statistics", "weights", "slots")
SCALES = {1.0: True, 2.0**15: True, 0.0: False, -1.0: False, NAN: False, INF: False}


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), st.floats(2.0**-14, 2.0**20))
def test_the_gradient_norm_is_that_of_the_unscaled_gradients(gradients, scale):
    half = sum((scale * g) ** 2 for g in gradients) / 2
    found = FINE._replace(gradients=half, scale=scale).gradient_norm
    assert found == pytest.approx(float(np.linalg.norm(gradients)), rel=1e-9, abs=1e-150)


@pytest.mark.parametrize(("gradients", "scale"), [(1.0, 0.0), (-1.0, 1.0), (NAN, 1.0), (1.0, NAN)])
def test_there_may_be_no_gradient_norm(gradients, scale):
    """There is no division by a scale of 0, and no root of an invalid sum of squares."""
    assert math.isnan(FINE._replace(gradients=gradients, scale=scale).gradient_norm)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_every_combination_of_sums(refused, scale):
    for bad in itertools.product((1.5, NAN, INF, -INF), repeat=5):
        verdict = Verdict(refused, *bad, scale)
        fine = dict(zip(SUMS, map(math.isfinite, bad)))
        assert verdict.scale_is_valid is SCALES[scale]
        assert verdict.finite is (all(fine.values()) and SCALES[scale])
        alone = not fine["gradients"] and fine["loss"] and fine["statistics"]
        assert verdict.only_gradients is (refused and alone and SCALES[scale])


def report(verdict=FINE, **counts):
    rows = tuple((site, f"a/{site}") for site in counts)
    return Report(verdict, rows, np.array(list(counts.values()), dtype="int64").reshape(-1, 3)).findings()


def test_a_finding_for_each_bad_row():
    found = report(inputs=(1, 0, 8), loss=(0, 0, 1), gradients=(0, 2, 4), weights=(3, 4, 9))
    assert found == [
        Finding("inputs", "nonfinite", "a/inputs", 1, 0, 8),
        Finding("gradients", "nonfinite", "a/gradients", 0, 2, 4),
        Finding("weights", "nonfinite", "a/weights", 3, 4, 9),
    ]
    assert all(type(n) is int for finding in found for n in (finding.nan, finding.inf, finding.size))


@pytest.mark.parametrize("site", SUMS[1:])
def test_a_sum_that_overflows_is_an_explosion_unless_entries_are_bad(site):
    assert report(FINE._replace(**{site: INF})) == [Finding(site, "explosion", "", 0, 0, None, INF)]
    assert report(FINE._replace(**{site: INF}), **{site: (0, 1, 2)}) == [Finding(site, "nonfinite", f"a/{site}", 0, 1, 2)]


def test_gradients_that_were_not_counted():
    """Memory was short: a NaN in the sum is one of a gradient. Other sites were counted."""
    kinds = [
        [finding.kind for finding in report(FINE._replace(**{site: NAN}), **{counted: (0, 0, 4)})]
        for site, counted in (("gradients", "outputs"), ("gradients", "gradients"), ("statistics", "outputs"))
    ]
    assert kinds == [["nonfinite"], ["explosion"], ["explosion"]]


def test_bad_slots_explain_a_bad_sum_over_weights_and_slots():
    """Small slots are summed with the weights: no explosion of the weights is reported, too."""
    assert [f.site for f in report(FINE._replace(weights=NAN), slots=(1, 0, 2))] == ["slots"]
    assert [f.site for f in report(FINE._replace(slots=NAN), weights=(1, 0, 2))] == ["weights", "slots"]


@pytest.mark.parametrize("scale", [0.0, INF, -1.0])
def test_a_scale_that_scales_nothing_is_a_collapse(scale):
    assert report(FINE._replace(scale=scale)) == [Finding("loss_scale", "collapse", "", value=scale)]


def test_a_bad_loss_scale_is_seen_by_all_processes(monkeypatch):
    """The scale is a number that all of them compute, so its incident does not wait for others."""
    monkeypatch.setattr(current, "host", lambda: SimpleNamespace(SPREADS_ARRAYS=True))
    agreement = Agreement()
    agreement.count = 2
    assert agreement.all_see(FINE) and not agreement.all_see(FINE._replace(weights=NAN))
    assert agreement.all_see(FINE._replace(scale=-1.0))
