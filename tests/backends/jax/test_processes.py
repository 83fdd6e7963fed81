"""JAX over two processes: one decision, one rollback in lockstep, one of them writes, and a killed run goes on."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_nanguard import Recording

PROGRAM = Path(__file__).parents[2] / "support" / "jax_processes.py"


WAYS = {"data parallel": [], "model parallel": ["model"]}
"""The batches alone spread over the devices of both processes; a kernel spread over those of each, too."""


def started(way, directories, *runs):
    """Start two processes for some runs, one after the other, each process with its directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    piped = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[str(rank), str(port), str(place), *WAYS[way], *runs] for rank, place in enumerate(directories)]
    return [subprocess.Popen([sys.executable, str(PROGRAM), *command], **piped) for command in commands]


def reported(way, directory, *runs):
    """Return for each run what both processes reported at its end, and what each printed during it."""
    ends = [process.communicate(timeout=240) for process in started(way, (directory, directory), *runs)]
    found = [_parted(out) for out, _ in ends]
    assert [len(parts) for parts in found] == [len(runs)] * 2, ends[0][1][-2000:]
    return {run: ([parts[n][0] for parts in found], [parts[n][1] for parts in found]) for n, run in enumerate(runs)}


def _parted(out):
    """Part what a process printed after each line of JSON; returns for each part that line's value and the text before."""
    parts, text = [], ""
    for line in out.splitlines(keepends=True):
        if line.startswith("{"):
            parts.append((json.loads(line), text))
            text = ""
        else:
            text += line
    return parts


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    """How state and batches are spread."""
    return request.param


@pytest.fixture(scope="module")
def runs(way, once):
    """Every run that comes to its end by itself, in one pair of processes; and the directory."""
    ended = ("plain", "without", "bad", "waited", "rollback", "endless", "whole")
    found, directory = once(way, lambda folder: (reported(way, folder, *ended), str(folder)))
    return found, Path(directory)


def same(one, other, tolerance=0.0):
    """Runs of one compiled step end in the same bits; of two, which compilers make of other code, in the same to `tolerance`."""
    for a, b in zip([one["loss"], *one["weights"]], [other["loss"], *other["weights"]]):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_one_recording(way, runs):
    """The first process writes what was recorded, every step once; the other has a folder that went with it."""
    found, directory = runs
    first, second = found["bad"][0]
    recording = Recording.read(directory / "bad")
    assert recording.steps["step"].tolist() == list(range(24)) and np.flatnonzero(recording.steps["status"]).tolist() == [3, 7]
    assert recording.meta["status"] == "finished" and len(recording.samples) >= 1
    assert first["folder"] == str(directory / "bad") and not Path(second["folder"]).exists()


def test_refused_by_both(way, runs):
    """A bad row of either process: both leave the batch out, and end where a run without it ends."""
    found, directory = runs
    (first, second), printed = found["bad"]
    assert first["spread"] == WAYS[way]
    same(first, found["without"][0][0])
    same(first, second)
    same(first, found["plain"][0][0], 1e-5)
    assert first["incidents"] == second["incidents"]
    assert [i[:3] for i in first["incidents"]] == [[3, "input_nonfinite", [1]], [7, "input_nonfinite", [14]]], "rows of the whole batch"
    assert first["folder"] == str(directory / "bad") != second["folder"]
    assert len(list((directory / "bad" / "incidents").iterdir())) == 2
    assert not Path(second["folder"]).exists(), "what the second process wrote is gone with it"
    assert [text.count("refused: inputs") for text in printed] == [1, 0], "one of them reports it, and what comes again is counted"


def test_refused_where_the_host_waits(way, runs):
    """The same, to the bit, if each verdict is read before the next step starts."""
    (first, second), _ = runs[0]["waited"]
    same(first, second)
    same(first, runs[0]["bad"][0][0])
    assert first["incidents"] == second["incidents"] == runs[0]["bad"][0][0]["incidents"]
    assert first["spread"] == WAYS[way]


def test_rolled_back_by_both(way, runs):
    (first, second), _ = runs[0]["rollback"]
    assert first["spread"] == WAYS[way], "what is put back lies where it lay"
    same(first, second)
    assert first["incidents"] == second["incidents"]
    assert [i[3] for i in first["incidents"]] == [["warn", "skip"], ["warn", "skip"], ["warn", "rollback", "lower_lr"]]
    assert first["rate"] == second["rate"] == pytest.approx(1e-3)


def test_stopped_by_both(runs):
    """Nobody waits for the other."""
    (first, second), _ = runs[0]["endless"]
    same(first, second)
    assert first["incidents"] == second["incidents"]
    assert len(first["incidents"]) == 12
    assert first["incidents"][-1][3][-1] == "stop"


def test_killed_and_resumed(way, runs, tmp_path):
    """One process dies; both are started again, go on from the snapshot on disk, and end as if nothing had happened."""
    whole, _ = runs[0]["whole"][0]
    first, second = started(way, (tmp_path, tmp_path), "killed")
    second.communicate(timeout=240)
    assert second.returncode == 9
    first.kill()  # JAX would end it by itself, when it has missed the other one for 100 seconds
    first.communicate(timeout=60)
    left = sorted(path.name for path in (tmp_path / "killed" / "snapshots").iterdir())
    assert any(name.startswith("snapshot-") for name in left)
    both, printed = reported(way, tmp_path, "resumed")["resumed"]
    assert "resuming from" in printed[0]
    for one in both:
        for a, b in zip(one["weights"], whole["weights"]):
            np.testing.assert_array_equal(a, b)


def test_not_the_same_directory(way, runs, tmp_path):
    """Where one process finds a snapshot and the other does not, both learn of it, and neither waits for the other."""
    here = tmp_path / "here"
    shutil.copytree(runs[1] / "whole", here / "killed")
    processes = started(way, (here, tmp_path / "elsewhere"), "resumed")
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert all("Expected all processes to find the same snapshot" in error for error in errors)
