"""A diagnosis that takes its time says so, once, and only where lines are printed at all."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard
from keras_nanguard._diagnose import explain_step, notice


def fit(capsys, verbose=1, seconds=0.0, monkeypatch=None):
    """Fit with one bad row in the third batch, each diagnosis slowed by so many seconds; return what was printed."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    x[20] = np.nan
    real = explain_step.gather
    monkeypatch.setattr(notice, "SLOW", 0.2 if seconds else 600.0)
    monkeypatch.setattr(explain_step, "gather", lambda *args: (time.sleep(seconds), real(*args))[1])
    guard = NanGuard(verbose=verbose)
    model.fit(x, x[:, :1] * 0, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
    return capsys.readouterr().out, guard


def test_a_slow_diagnosis_is_announced_before_its_line(capsys, monkeypatch):
    out, guard = fit(capsys, seconds=0.6, monkeypatch=monkeypatch)
    announced = "NanGuard: diagnosing step 3 (epoch 1, batch 3) ..."
    assert out.count(announced) == 1 == len(guard.incidents)
    assert out.index(announced) < out.index("NanGuard: step 3 (epoch 1, batch 3) refused")


@pytest.mark.parametrize(("verbose", "seconds"), [(1, 0.0), (0, 0.6)])
def test_a_quick_one_and_a_silent_guard_say_nothing(capsys, monkeypatch, verbose, seconds):
    out, guard = fit(capsys, verbose, seconds, monkeypatch)
    assert "diagnosing" not in out and len(guard.incidents) == 1


def test_no_thread_is_left_and_no_line_comes_late(capsys, monkeypatch):
    """What ends in time is not announced afterwards."""
    monkeypatch.setattr(notice, "SLOW", 0.2)
    with notice.when_slow("slow"):
        pass
    time.sleep(0.4)
    assert capsys.readouterr().out == ""


def test_it_goes_where_the_lines_of_keras_go(capsys, monkeypatch):
    """Without interactive logging it is logged instead of printed."""
    monkeypatch.setattr(notice, "SLOW", 0.05)
    keras.config.disable_interactive_logging()
    try:
        with notice.when_slow("slow"):
            time.sleep(0.3)
    finally:
        keras.config.enable_interactive_logging()
    assert "slow" not in capsys.readouterr().out
