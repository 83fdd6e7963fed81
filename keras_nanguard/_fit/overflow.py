"""Which overflows of float16 gradients dynamic loss scaling handles alone, by lowering the scale.

They are no incidents. A trial shows whether a step is finite at another loss scale.
"""

from __future__ import annotations

from keras_nanguard._backends.shared.rules import MIN_LOSS_SCALE
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.trial import tried
from keras_nanguard._keras import variables as keras_variables

MUCH_HIGHER = 2.0**10
"""Factor by which a loss scale below the floor has to be too low to be a collapse. Dynamic scaling
takes 20,000 steps for ten doublings, and the gradients of ordinary batches differ by less.
"""


def is_ordinary(run: Run, streak: int, scale: float) -> bool:
    """Return whether dynamic loss scaling handles the last step, in which nothing but the gradients
    is bad.

    After a streak of such steps, or if the scale would fall below the floor, the step must also be
    finite at the lowest loss scale. Then another streak begins.

    Args:
        streak: number of such steps in a row.
    """
    scaling, last_scale = run.policy.loss_scale, run.history.scale
    if streak == 1 and run.scan(before=True):
        return False
    if scaling.is_expected_overflow(streak, scale, last_scale):
        return True
    too_high = scaling.is_too_high(scale * 0.5, last_scale)
    ordinary = not too_high and _is_finite_at(run, MIN_LOSS_SCALE)
    if ordinary:
        run.counts.continue_streak(False)
    return ordinary


def needs_low_scale(run: Run) -> bool:
    """Return whether the loss scale is below the floor, and the last step overflows at one that is
    `MUCH_HIGHER`, and at least the floor.
    """
    scaling = run.policy.loss_scale
    if not scaling.action:
        return False  # then nobody asks
    with run.access.variables_readable():
        scales = [float(keras_variables.read(scale)) for scale, _ in run.train_state().scales]
    low = [scale for scale in scales if MIN_LOSS_SCALE <= scale < scaling.floor]
    return bool(low) and not _is_finite_at(run, max(scaling.floor, MUCH_HIGHER * min(low)))


def _is_finite_at(run: Run, loss_scale: float) -> bool:
    """Return whether the last step is finite at another loss scale, as far as is known."""
    args = run.arguments_to_replay()
    if args is None:
        return False
    return tried(run, lambda trying: trying.is_finite_at(loss_scale, args), False)
