"""Which steps stand out from those before, against the definition written with NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from keras_nanguard._policy.outliers import ALIKE, BEFORE, BEYOND, FEWEST, Outliers


def found(losses, norms=None):
    outliers = Outliers()
    norms = losses if norms is None else norms
    outliers.add((step, loss, norm) for step, (loss, norm) in enumerate(zip(losses, norms)))
    return outliers.steps


def by_definition(values):
    usual, steps, last = [], [], -BEFORE
    for step, value in enumerate(values):
        beyond = len(usual) >= FEWEST and value > BEYOND * np.max(usual[-BEFORE:]) > 0
        if beyond and step - last > ALIKE:
            steps.append(step)
        last = step if beyond else last
        if not beyond or step - steps[-1] > ALIKE:
            usual.append(value)
    return steps[-BEFORE:]


@settings(max_examples=150)
@given(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0, 400.0, 1e6]), max_size=140))
def test_as_defined(values):
    assert found(values) == by_definition(values)


def test_one_jump_among_noise():
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 0.5, 200)
    assert found(values) == []
    values[120] *= 1000
    assert found(values) == found(np.ones(200), values) == found(values, np.ones(200)) == [120]


def test_what_the_run_has_come_to_is_no_outlier():
    """Only the first of the steps that stay high stands out."""
    assert found([1.0] * 50 + [1e3] * 100) == [50]


def test_each_recurrence_stands_out():
    values = np.ones(200)
    values[40::57] = 1e3
    assert found(values) == [40, 97, 154]


def test_too_few_to_compare_with():
    assert found([1.0] * (FEWEST - 1) + [1e6]) == []
    assert found([1.0] * FEWEST + [1e6]) == [FEWEST]


@pytest.mark.parametrize("norm", [math.nan, 0.0])
def test_a_step_without_a_norm(norm):
    assert found([1.0] * 30 + [1e3] + [1.0] * 30, [norm] * 61) == [30]


def test_in_parts_as_at_once():
    values = [1.0] * 40 + [1e3] + [1.0] * 60 + [1e4] + [1.0] * 5
    outliers = Outliers()
    for start in range(0, len(values), 7):
        outliers.add((start + i, value, value) for i, value in enumerate(values[start : start + 7]))
    assert outliers.steps == found(values) == [40, 101] and outliers.since(41) == (101,)
    outliers.start_over()
    assert outliers.steps == [] and outliers.seen == -1
