"""Which rows of a batch are to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from keras_nanguard._backends.shared.replay import ReplayResult
from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import Origin

__all__ = ["bad_rows", "bisected"]

MAX_TRIALS = 16
"""Maximum number of replays in the search for a row."""


def bad_rows(run: ReplayResult, count: int) -> tuple[int, ...]:
    """Return the rows that are bad in a replay, none if all of them are.

    The origin of the bad value is the most precise; then the loss values per sample; then the
    outputs of the model.
    """
    origin: Origin | None = run.origin
    if origin is not None and origin.rows:
        return origin.rows
    if origin is not None and origin.all_rows and origin.source == "operation":
        return ()
    for _, values in (*run.sample_losses, *run.outputs):
        array = finiteness.widen(np.asarray(values))
        if count and array.ndim and array.shape[0] == count:
            wrong = ~np.isfinite(array).reshape(count, -1).all(axis=1)
            if wrong.any() and not wrong.all():
                return tuple(int(i) for i in np.flatnonzero(wrong))
    return ()


def bisected(count: int, is_bad: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    """Return the one row on which the step is bad, none if there is not exactly one.

    Args:
        count: number of rows.
        is_bad: runs the step on these rows only and returns whether it is bad.
    """
    trials, found = 0, list(range(count))
    while len(found) > 1 and trials < MAX_TRIALS:
        left, right = found[: len(found) // 2], found[len(found) // 2 :]
        bad_left, bad_right = is_bad(left), is_bad(right)
        trials += 2
        if bad_left == bad_right:
            return ()
        found = left if bad_left else right
    return tuple(found) if len(found) == 1 else ()
