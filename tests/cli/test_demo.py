"""The demonstration shows the benefit of the guard, and fails if there is none."""

import os

import pytest

pytest.importorskip("sklearn")

from keras_nanguard._cli import demo

# convolutions in float16 on a CPU
SLOW = pytest.mark.slow if os.environ["KERAS_BACKEND"] == "torch" else ()


@pytest.mark.parametrize("epochs", [pytest.param(2, marks=SLOW)])
def test_the_guarded_run_wins(capsys, epochs):
    """Stock Keras predicts NaN, the guarded run as one without broken images; a line per kind."""
    assert demo.run(epochs) == 0
    reported = capsys.readouterr().out
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:5]]
        for line in reported.splitlines()
        if "│" in line
    }
    stock, guarded, clean = (float(cell) for cell in rows["test accuracy"])
    assert stock == 0.0 and min(guarded, clean) >= 0.9
    assert rows["predictions that are NaN"] == ["357 of 357", "0 of 357", "0 of 357"]
    table = reported.split("NanGuard() reported:\n")[1].splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in table if "│" in line]
    kinds = {trouble.split()[0]: int(times) for times, trouble in cells if times.isdigit()}
    assert set(kinds) == {"input_nonfinite", "float16_overflow"}
    assert sum(kinds.values()) == int(rows["batches refused"][1].split()[0])


def test_a_guard_without_benefit_fails(monkeypatch, capsys):
    result = {demo.ACCURACY: 0.1, demo.LOSS: 0.1, demo.BAD: 0, "predictions that are NaN": "0 of 357"}
    monkeypatch.setattr(demo, "train", lambda *args: result)
    assert demo.run(1) == 1
    assert "did not win" in capsys.readouterr().out
