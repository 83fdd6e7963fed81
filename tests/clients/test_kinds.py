"""Kinds of programs: healthy plain and guarded runs agree, and a bad batch leaves no trace."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from support import kinds, zoo

from keras_nanguard import NanGuard

FAST = ("VAE", "CTC", "graph network", "time series")
TABLE = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in kinds.KINDS]


def run(kind, guard=None, bad=False):
    keras.utils.set_random_seed(0)
    model, data = kind.build(), kind.data()
    if bad:
        array = keras.tree.flatten(data[kind.bad])[0]
        array[5 * zoo.BATCH + 2].reshape(-1)[0] = np.nan
    keras.utils.set_random_seed(1)
    callbacks = [guard] if guard else []
    history = model.fit(**data, batch_size=zoo.BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    return history, zoo.state_of(model)


@pytest.mark.parametrize("name", TABLE)
def test_plain_is_guarded_and_a_bad_batch_is_refused(name):
    """Same history and state, no incident; a bad batch is one refused step per epoch."""
    kind = kinds.KINDS[name]
    if zoo.BACKEND not in kind.on:
        pytest.skip(f"its train step is written for {', '.join(kind.on)}")
    with zoo.as_written():
        plain, state = run(kind)
        guard = NanGuard(verbose=0, diagnose=False)
        history, guarded = run(kind, guard)
    assert guard.incidents == [] and zoo.plain_logs(history) == plain
    assert [path for (path, one), (_, other) in zip(state, guarded, strict=True) if not np.array_equal(one, other)] == []
    guard = NanGuard(verbose=0, diagnose=False)
    history, state = run(kind, guard, bad=True)
    assert history["refused_steps"] == [1, 1] and [incident.batch for incident in guard.incidents] == [5, 5]
    assert all(np.isfinite(value).all() for _, value in state)
