"""The rules of the transaction as plain arithmetic, for finite and bad numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.shared.rules import NUMBERS

ARRAYS = rules.Operations(np.isfinite, np.logical_not, np.where, np.minimum, np.maximum)
"""The same rules on arrays, as in a compiled step."""

OPERATIONS = {"numbers": (NUMBERS, float), "arrays": (ARRAYS, np.float32)}

NAN, INF = math.nan, math.inf
NUMBER = [0.0, 1.5, -2.0, NAN, INF, -INF]
INITIAL = 2.0**15

@pytest.mark.parametrize("ops, number", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("halted", [True, False])
def test_commits_if_all_is_finite(ops, number, finite, halted):
    """A step commits if everything is finite, each loss scale is finite and above 0, and no earlier step halts it."""
    truth = bool if ops is NUMBERS else np.bool_
    for count in range(3):
        for scales in itertools.product([1.0, 2.0**-14, 0.0, -1.0, NAN, INF], repeat=count):
            given = (ops, truth(finite), [number(scale) for scale in scales])
            found = rules.may_commit(*given, truth(True)) if halted else rules.may_commit(*given)
            valid = all(math.isfinite(scale) and scale > 0 for scale in scales)
            assert bool(found) == (valid and finite and not halted), scales


@pytest.mark.parametrize("ops, number", OPERATIONS.values(), ids=OPERATIONS)
def test_two_scales_are_valid_if_both_are(ops, number):
    scales = [2.0, 2.0**-14, 0.0, -1.0, NAN, INF, -INF]
    with np.errstate(all="ignore"):
        for one, other in itertools.product(scales, repeat=2):
            found = float(rules.common_scale(ops, [number(one), number(other)], 1.0))
            if math.isfinite(one) and math.isfinite(other):
                assert found == min(one, other)
            else:
                assert not math.isfinite(found)


def closed_form(loss, gradients, scale, counter):
    """Return the loss scale after a refused step, as documented."""
    if not (math.isfinite(scale) and scale > 0):
        return INITIAL, 0
    if math.isfinite(loss) and not math.isfinite(gradients):
        return (max(scale / 2, rules.MIN_LOSS_SCALE) if scale > rules.MIN_LOSS_SCALE else scale), 0
    return scale, counter


SCALES = [2.0**15, 1.0, 2.0**-13, 2.0**-14, 2.0**-14 * 1.5, 2.0**-20, 0.0, -4.0, NAN, INF, -INF]


@pytest.mark.parametrize("ops, number", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_the_loss_scale_after_a_refusal(ops, number, scale):
    """Halved if only the gradients are bad, reset if invalid, otherwise unchanged."""
    for loss, gradients, counter in itertools.product(NUMBER, NUMBER, (0, 7)):
        with np.errstate(all="ignore"):
            found = rules.scale_after_refusal(ops, number(loss), number(gradients), number(scale), counter, number(INITIAL))
            halted = rules.scale_after_refusal(ops, number(loss), number(gradients), number(scale), counter, number(INITIAL), True)
        assert tuple(map(float, found)) == closed_form(loss, gradients, scale, counter), (loss, gradients, scale, counter)
        np.testing.assert_array_equal(np.float64(halted), (scale, counter))
