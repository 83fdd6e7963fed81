"""The demonstration shows the benefit of the guard, and fails if there is none."""

import re

import pytest

pytest.importorskip("sklearn")

from keras_nanguard.__main__ import main


@pytest.mark.slow
def test_the_guarded_network_is_good(capsys):
    """With stock Keras every prediction is NaN; with the guard none is. A line per kind."""
    assert main(["demo"]) == 0
    reported = capsys.readouterr().out
    found = re.findall(r"(.+): test accuracy ([\d.]+)%, (\d+) NaN and Inf in the model", reported)
    (stock, accuracy, bad), (guarded, better, none) = found
    assert (stock, float(accuracy), guarded, none) == ("stock Keras", 0.0, "NanGuard()", "0")
    assert int(bad) > 0 and float(better) >= 90.0
    table = reported.split("NanGuard() reported:\n")[1].splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in table if "│" in line]
    assert {trouble.split()[0] for times, trouble in cells if times.isdigit()} == {"input_nonfinite", "float16_overflow"}


@pytest.mark.parametrize("result", [(0.95, 1), (0.1, 0)])
def test_a_guard_without_benefit_fails(monkeypatch, result):
    monkeypatch.setattr("keras_nanguard._cli.demo.train", lambda *args: result)
    assert main(["demo"]) == 1
