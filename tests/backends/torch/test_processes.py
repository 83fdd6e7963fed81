"""Several processes on PyTorch decide as one: after each fault all of them hold the same weights, optimizer state and rate."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

SUPPORT = Path(__file__).parents[2] / "support" / "torch_processes.py"

SHORT = ("module:plain", "module:healthy", "module:row", "module:without", "module:three", "module:kill")
"""The cases of the normal run, of two processes each."""

PROGRAMS = ("module", "own buffers", "keras", "accumulate", "reports")
FAULTS = ("healthy", "row", "batch", "all", "three", "loss", "spike", "weights", "memory")
LONG = (
    *(f"{program}:{fault}" for program in PROGRAMS for fault in ("plain", "without", *FAULTS)),
    *("module:raise", "keras:kill", "module:row:4", "module:three:4", "module:without:4", "module:kill:4"),
)
"""The whole matrix."""


@functools.cache
def run(cases):
    """Return what the processes of each case have left; all cases share one start of PyTorch."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SUPPORT), folder, *cases]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return {case: json.loads(line) for case, line in zip(cases, done.stdout.splitlines(), strict=True)}


def assert_alike(ranks):
    """Check that all processes have ended without an error, with the same state, incidents and outcomes."""
    assert all(left is not None and left["error"] is None for left in ranks), ranks
    for name in ("weights", "optimizer", "rate", "steps", "snapshots", "incidents"):
        assert all(left[name] == ranks[0][name] for left in ranks), name


def test_a_healthy_run_is_the_plain_one():
    """Bit for bit, without an incident."""
    found = run(SHORT)
    assert_alike(found["module:healthy"])
    for guarded, plain in zip(found["module:healthy"], found["module:plain"]):
        assert guarded["incidents"] == [] and guarded["weights"] == plain["weights"]
        assert guarded["optimizer"] == plain["optimizer"]


def test_a_bad_row_of_one_process():
    """All refuse the step and end as without it; the incident names rank and row, on every rank."""
    found = run(SHORT)
    assert_alike(found["module:row"])
    assert [left["weights"] for left in found["module:row"]] == [left["weights"] for left in found["module:without"]]
    (incident,) = found["module:row"][0]["incidents"]
    assert (incident["step"], incident["refused"], incident["cause"]) == (11, True, "input_nonfinite")
    assert any("rank 1: x, row 5" in finding for finding in incident["findings"])
    assert incident["evidence"][0] == "rank 1: x, row 5." and "rank 1: x, row 5" in incident["line"]


def test_three_bad_batches_of_one_process():
    """All roll back and lower the rate, or none does."""
    found = run(SHORT)["module:three"]
    assert_alike(found)
    assert [incident["step"] for incident in found[0]["incidents"]] == [11, 12, 13]


def test_a_process_that_is_killed():
    """The others end with an error, not with silence."""
    left, gone = run(SHORT)["module:kill"]
    assert gone is None and "rank 1" in left["error"] and left["steps"] == 11


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in LONG if not case.endswith((":plain", ":without", ":without:4"))])
def test_the_matrix(case):
    """All processes end alike, or all that are left with an error."""
    ranks, (program, fault, *count) = run(LONG)[case], case.split(":")
    if fault in ("kill", "raise"):
        *others, gone = ranks
        assert all(left["error"] for left in others) and (gone is None or "disk full" in gone["error"])
        return
    assert_alike(ranks)
    steps = [incident["step"] for incident in ranks[0]["incidents"]]
    assert bool(steps) is (fault not in ("healthy", "spike"))
    if fault in ("healthy", "row", "batch", "all"):
        plain = ":".join([program, "without" if steps else "plain", *count])
        assert ranks[0]["weights"] == run(LONG)[plain][0]["weights"]
