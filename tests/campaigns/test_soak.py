"""A short form of the soak: its counts and measurements are right, and its claims can fail."""

import copy
import threading

import pytest

from campaigns import soak


def last(run, *arguments):
    """Return the last saved results of a run."""
    saved = []
    run(*arguments, saved.append)
    return saved[-1]


@pytest.fixture
def often(monkeypatch):
    """A fault every 23 steps."""
    monkeypatch.setattr(soak, "PERIOD", 23)


@pytest.mark.parametrize("on_disk", [False, True])
def test_long_run(often, on_disk, tmp_path):
    """Each fault is one incident, at its step and with its cause; nothing leaks."""
    before = threading.active_count(), soak.measured()["files"]
    result = last(soak.steady, "disk" if on_disk else "steps", 345, 5, str(tmp_path) if on_disk else None)
    assert threading.active_count() == before[0] and soak.measured()["files"] <= before[1]
    held = soak.claims(result)
    # This process has run other tests before, its backend starts threads on first use, and the
    # recording opens its files later than after a tenth of this short run.
    del held["memory within 1%"], held["no thread"], held["no open file"]
    assert all(held.values()), (held, result["wrong"])
    assert result["done"] and result["steps"] == 345 and result["faults"] == result["refused"] == 15
    assert not on_disk or result["logged"] == 15
    assert len(result["samples"]) == 5 and all(sample["processor_us"] > 0 for sample in result["samples"])


@pytest.mark.parametrize("form", ["same", "one-guard", "fresh"])
def test_fits(form):
    """Each fit has its incident, and the model of an earlier one is released."""
    result = last(soak.fits, form, 3)
    assert result["fits"] == result["faults"] == result["incidents"] == 3
    assert not result["wrong"] and result["finite"] and result["alive"] <= 1


SOUND = {
    "faults": 2,
    "incidents": 2,
    "logged": 2,
    "wrong": [],
    "finite": True,
    "alive": 1,
    "samples": [{"memory": 1000, "threads": 2, "files": 3, "graphs": 4}] * 20,
}


def test_sound():
    assert all(soak.claims(SOUND).values())


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"incidents": 1}, "every incident counted, at its step"),
        ({"wrong": ["missing: (9, True, 'input_nonfinite')"]}, "every incident counted, at its step"),
        ({"logged": 1}, "every incident logged on disk"),
        ({"finite": False}, "every variable finite"),
        ({"alive": 2}, "no model"),
        ({"memory": 1011}, "memory within 1%"),
        ({"threads": 3}, "no thread"),
        ({"files": 4}, "no open file"),
        ({"graphs": 5}, "no graph"),
    ],
)
def test_each_claim_can_fail(change, claim):
    """Growth at the end, or a wrong count, breaks its claim and no other."""
    result = copy.deepcopy(SOUND)
    for name, value in change.items():
        (result["samples"][-1] if name in result["samples"][-1] else result)[name] = value
    result["samples"] = [dict(sample) for sample in SOUND["samples"][:-1]] + result["samples"][-1:]
    assert [name for name, held in soak.claims(result).items() if not held] == [claim]


def test_wrong():
    """A missing incident, and one without a fault, are both named."""
    found = soak.wrong([(1, True, "a"), (2, True, "b")], [(2, True, "b"), (3, True, "c")])
    assert found == ["missing: (1, True, 'a')", "not made: (3, True, 'c')"]
