"""JAX with several simulated devices: one verdict for all of them, and hardly any additional
communication.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "jax_devices.py"


def reported(devices, *asked):
    root = Path(__file__).parents[3]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, str(PROGRAM), str(devices), *asked], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(zip(asked, map(json.loads, run.stdout.splitlines())))


@pytest.fixture(scope="module")
def on_four(once):
    """All requested results with four devices."""
    asked = ("data", "data float16", "data rollback", "data traffic", "model", "model rollback")
    return once("four devices", lambda folder: reported(4, *asked))


@pytest.mark.parametrize("what", ["data", "data float16", "model"])
def test_refused_on_all_devices(on_four, what):
    """A bad row on the first and on the last of four devices: the run ends like the one without
    these batches.
    """
    found = on_four[what]
    assert found["steps"] == [3, 7]
    assert found["causes"] == ["input_nonfinite"] * 2
    assert found["rows"] == [[1], [14]], "rows of the whole batch, not of the part of a device"
    assert found["far"] <= 1e-5
    assert found["loss"] <= 1e-5
    assert found["spread"] == 4


@pytest.mark.parametrize("what", ["data", "model"])
def test_rolled_back_on_all_devices(on_four, what):
    """The arrays of a rollback have their original placement."""
    found = on_four[f"{what} rollback"]
    assert found["outcomes"] == [["warn", "skip"], ["warn", "skip"], ["warn", "rollback"]]
    assert found["finite"]
    assert found["same place"]


def test_traffic_of_a_verdict(on_four):
    """A verdict adds as many bytes to a step on 8 devices as on 2, and as many for a large model as
    for a small one.
    """
    more = []
    for devices in (2, 4, 8):
        found = (on_four if devices == 4 else reported(devices, "data traffic"))["data traffic"]
        more += [found[f"guarded {width}"] - found[f"plain {width}"] for width in (16, 256)]
        assert found["plain 256"] > 10 * found["plain 16"] > 0, "the gradients are exchanged"
    assert len(set(more)) == 1
    assert 0 <= more[0] <= 32
