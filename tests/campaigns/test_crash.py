"""A short form of the campaign of kills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHORT = """
import json, sys, tempfile
from pathlib import Path
from campaigns import crash, crash_faults, crash_life

with tempfile.TemporaryDirectory() as folder:
    for record in crash.killed_runs(2, 3, Path(folder)):
        print(json.dumps(record))
    case = crash_faults.Case(Path(folder), Path(folder) / "whole.npz")
    print(json.dumps({"kind": "fault", **case.train(Path(folder) / "quota", crash_faults.failing(122, 30))}))
"""


@pytest.mark.requires_backend("torch", reason="one backend is enough: a life takes seconds to compile on the others")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_short_form():
    """Two kills and a full quota: every run ends with the bits of the one that was never killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(r["kind"] == "kill" for r in records) == 2 and not any(r["back"] or r["broken"] for r in records if r["kind"] == "kill")
    assert all(r["same"] for r in records if r["kind"] in ("end", "fault")) and sum(r["kind"] == "end" for r in records) >= 1
    fault = records[-1]
    assert sum("cannot write snapshots" in line for line in fault["said"]) == 1, fault
