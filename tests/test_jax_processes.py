"""JAX over two processes: one decision, one rollback in lockstep, one of them writes, and a killed run goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution is there on JAX alone")

PROGRAM = Path(__file__).parent / "jax_processes.py"


def started(what, *directories, more=()):
    """Start both processes of a run, with one directory or one for each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PROGRAM)]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen([*command, str(rank), str(port), what, str(place), *more], env=env, stdout=pipe, stderr=pipe, text=True)
        for rank, place in enumerate((directories * 2)[:2])
    ]


def told(what, directory, *more):
    """Return what each process told at its end, and what it printed."""
    both = [process.communicate(timeout=240) for process in started(what, directory, more=more)]
    assert all(out.strip() for out, _ in both), both[0][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in both], [out for out, _ in both]


def same(one, other, tolerance=0.0):
    """Runs of one compiled step end in the same bits; of two, which compilers make of other code, in the same to `tolerance`."""
    for a, b in zip([one["loss"], *one["weights"]], [other["loss"], *other["weights"]]):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module", params=[(), ("model",)], ids=["data parallel", "model parallel"])
def parallel(request):
    """Run with the batches alone spread over the devices of both processes, and with a kernel spread over those of each."""
    return request.param


def test_refused_by_both(parallel, tmp_path):
    """A bad row of either process: both leave the batch out, and end where a run without it ends."""
    plain, without = (told(what, tmp_path / what, *parallel)[0][0] for what in ("plain", "without"))
    (first, second), printed = told("bad", tmp_path, *parallel)
    assert first["spread"] == list(parallel)
    same(first, without)
    same(first, second)
    same(first, plain, 1e-5)
    assert first["incidents"] == second["incidents"]
    assert [i[:3] for i in first["incidents"]] == [[3, "input_nonfinite", [1]], [7, "input_nonfinite", [14]]], "rows of the whole batch"
    assert first["folder"] == str(tmp_path) != second["folder"]
    assert len(list((tmp_path / "incidents").iterdir())) == 2
    assert not Path(second["folder"]).exists(), "what the second process wrote is gone with it"
    assert [text.count("refused: inputs") for text in printed] == [2, 0], "one of them tells"


def test_rolled_back_by_both(parallel, tmp_path):
    (first, second), _ = told("rollback", tmp_path, *parallel)
    assert first["spread"] == list(parallel), "what is put back lies where it lay"
    same(first, second)
    assert first["incidents"] == second["incidents"]
    assert [i[3] for i in first["incidents"]] == [["warn", "skip"], ["warn", "skip"], ["warn", "rollback", "lower_lr"]]
    assert first["rate"] == second["rate"] == pytest.approx(1e-3)


def test_stopped_by_both(tmp_path):
    """Nobody waits for the other."""
    (first, second), _ = told("endless", tmp_path)
    same(first, second)
    assert first["incidents"] == second["incidents"]
    assert len(first["incidents"]) == 12
    assert first["incidents"][-1][3][-1] == "stop"


def test_killed_and_resumed(parallel, tmp_path):
    """One process dies; both are started again, go on from the snapshot on disk, and end as if nothing had happened."""
    (whole, _), _ = told("whole", tmp_path / "whole", *parallel)
    first, second = started("killed", tmp_path / "killed", more=parallel)
    second.communicate(timeout=240)
    assert second.returncode == 9
    first.kill()  # JAX would end it by itself, when it has missed the other one for 100 seconds
    first.communicate(timeout=60)
    left = sorted(path.name for path in (tmp_path / "killed" / "snapshots").iterdir())
    assert any(name.startswith("snapshot-") for name in left)
    both, printed = told("resumed", tmp_path / "killed", *parallel)
    assert "goes on from" in printed[0]
    for one in both:
        for a, b in zip(one["weights"], whole["weights"]):
            np.testing.assert_array_equal(a, b)


def test_not_the_same_directory(tmp_path):
    """Where one process finds a snapshot and the other does not, both are told so, and neither waits for the other."""
    told("whole", tmp_path / "here")
    processes = started("resumed", tmp_path / "here", tmp_path / "elsewhere")
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert all("Expected all processes to find the same snapshot" in error for error in errors)
