"""JAX with simulated devices: one verdict for all, and hardly any more communication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "jax_devices.py"


def reported(*asked):
    root = Path(__file__).parents[3]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PROGRAM), *asked]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(zip(asked, map(json.loads, run.stdout.splitlines())))


DAILY = ("data 4", "model 4 rollback")
NIGHTLY = ("data 4 float16", "data 4 rollback", "model 4")


@pytest.fixture(scope="module")
def on_devices(once, pytestconfig):
    """All requested results, from one process."""
    asked = DAILY + NIGHTLY * pytestconfig.getoption("nightly")
    return once("devices", lambda folder: reported(*asked))


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("what", ["data 4", "data 4 float16", "model 4"])
def test_refused_on_all_devices(on_devices, what):
    """A bad row on the first and on the last device: as without these batches."""
    found = on_devices[what]
    assert found["steps"] == [3, 7]
    assert found["causes"] == ["input_nonfinite"] * 2
    assert found["rows"] == [[1], [14]], "rows of the whole batch, not of the part of a device"
    assert found["far"] <= 1e-5
    assert found["loss"] <= 1e-5
    assert found["spread"] == 4


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("what", ["data 4 rollback", "model 4 rollback"])
def test_rolled_back_on_all_devices(on_devices, what):
    """The arrays of a rollback have their original placement."""
    found = on_devices[what]
    assert found["outcomes"] == [["skip"], ["skip"], ["rollback", "lower_lr"]]
    assert found["finite"]
    assert found["same place"]


@pytest.mark.slow
def test_traffic_of_a_verdict():
    """It adds the same bytes on 2 and on 8 devices, and for small and large models."""
    more = []
    for found in reported("data 2 traffic", "data 8 traffic").values():
        more += [found[f"guarded {width}"] - found[f"plain {width}"] for width in (16, 256)]
        assert found["plain 256"] > 10 * found["plain 16"] > 0, "the gradients are exchanged"
    assert len(set(more)) == 1
    assert 0 <= more[0] <= 32
