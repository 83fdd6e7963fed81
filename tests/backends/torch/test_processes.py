"""Two processes on PyTorch make the same decisions; `test_process_matrix.py` has the other faults.
"""

from __future__ import annotations

import pytest
from support.several_processes import assert_same, torch_cases

CASES = (
    "module:plain",
    "module:healthy",
    "module:row",
    "module:without",
    "module:three",
    "module:kill",
    "conditional:plain",
    "conditional:healthy",
)
"""Two processes each."""

SAME = ("weights", "optimizer", "rate", "steps", "snapshots", "incidents")


@pytest.fixture
def found(once):
    """The results of the processes of each case."""
    return once("processes", lambda folder: torch_cases(CASES))


def test_a_healthy_run_equals_the_plain_one(found):
    """Bit for bit, without an incident."""
    assert_same(found["module:healthy"], *SAME)
    for guarded, plain in zip(found["module:healthy"], found["module:plain"]):
        assert guarded["incidents"] == [] and guarded["weights"] == plain["weights"]
        assert guarded["optimizer"] == plain["optimizer"]


def test_a_step_in_which_only_one_process_updates(found):
    """The others do not wait for its verdict in their update while it waits for their loss."""
    for guarded, plain in zip(found["conditional:healthy"], found["conditional:plain"]):
        assert guarded["incidents"] == [] and guarded["weights"] == plain["weights"]


def test_a_bad_row_of_one_process(found):
    """All refuse the step and end as without it; the incident names rank and row, on every rank."""
    assert_same(found["module:row"], *SAME)
    assert [left["weights"] for left in found["module:row"]] == [
        left["weights"] for left in found["module:without"]
    ]
    (incident,) = found["module:row"][0]["incidents"]
    assert (incident["step"], incident["refused"], incident["cause"]) == (
        11,
        True,
        "input_nonfinite",
    )
    assert any("rank 1: x, row 5" in finding for finding in incident["findings"])
    assert incident["evidence"][0] == "rank 1: x, row 5." and "rank 1: x, row 5" in incident["line"]


def test_three_bad_batches_of_one_process(found):
    """All roll back and lower the rate, or none does."""
    ranks = found["module:three"]
    assert_same(ranks, *SAME)
    assert [incident["step"] for incident in ranks[0]["incidents"]] == [11, 12, 13]


def test_a_process_that_is_killed(found):
    """The others end with an error that is printed."""
    left, gone = found["module:kill"]
    assert gone is None and "rank 1" in left["error"] and left["steps"] == 11
