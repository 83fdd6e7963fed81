"""A diagnosis that takes its time says so, once, and only where lines are printed at all."""

from __future__ import annotations

import threading
import types

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard
from keras_nanguard._diagnose import explain_step, notice

LONG = 60.0
"""Seconds to wait for what is bound to come."""


@pytest.fixture
def announced(monkeypatch):
    """What takes longer than a moment is slow, as nothing is in the other tests; an event that is set when it has been announced."""
    monkeypatch.setattr(notice, "SLOW", 0.05)
    event, real = threading.Event(), notice.processes.print_line
    monkeypatch.setattr(notice, "processes", types.SimpleNamespace(print_line=lambda text: (real(text), event.set())))
    return event


def fit(capsys, monkeypatch, verbose=1, during=lambda: None):
    """Fit with one bad row in the third batch; `during` is called in each diagnosis. Return what was printed, and the guard."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    x[20] = np.nan
    real = explain_step.gather
    monkeypatch.setattr(explain_step, "gather", lambda *args: (during(), real(*args))[1])
    guard = NanGuard(verbose=verbose)
    model.fit(x, x[:, :1] * 0, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
    return capsys.readouterr().out, guard


def test_a_slow_diagnosis_is_announced_before_its_line(capsys, monkeypatch, announced):
    """A diagnosis that ends only when it has been announced."""
    out, guard = fit(capsys, monkeypatch, during=lambda: announced.wait(LONG))
    line = "NanGuard: diagnosing step 3 (epoch 1, batch 3) ..."
    assert out.count(line) == 1 == len(guard.incidents)
    assert out.index(line) < out.index("NanGuard: skipped step 3 (epoch 1)")


def test_a_quick_one_says_nothing(capsys, monkeypatch):
    out, guard = fit(capsys, monkeypatch)
    assert "diagnosing" not in out and len(guard.incidents) == 1


def test_a_silent_guard_says_nothing(capsys, monkeypatch, announced):
    """Not even of a diagnosis that is slow."""
    out, guard = fit(capsys, monkeypatch, verbose=0, during=lambda: announced.wait(0.3))
    assert "diagnosing" not in out and len(guard.incidents) == 1 and not announced.is_set()


def test_no_thread_is_left_and_no_line_comes_late(capsys, monkeypatch):
    """What ends in time is not announced afterwards: nothing is left that could."""
    monkeypatch.setattr(notice, "SLOW", LONG)
    before = set(threading.enumerate())
    with notice.when_slow("slow"):
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before and capsys.readouterr().out == ""


def test_it_goes_where_the_lines_of_keras_go(capsys, announced):
    """Without interactive logging it is logged instead of printed."""
    keras.config.disable_interactive_logging()
    try:
        with notice.when_slow("slow"):
            assert announced.wait(LONG)
    finally:
        keras.config.enable_interactive_logging()
    assert "slow" not in capsys.readouterr().out
