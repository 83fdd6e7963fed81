"""Programs of several processes, started by tests: `torch_processes.py` and `jax_processes.py`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent

PATHS = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])

LIMIT = 900
"""Maximum seconds of a program on a busy machine; its own waits have shorter limits."""


def torch_cases(cases):
    """Return the results of the processes of each case, by case and rank."""
    env = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "torch_processes.py"), folder, *cases]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=4 * LIMIT)
    assert done.returncode == 0, done.stderr
    return {
        case: json.loads(line) for case, line in zip(cases, done.stdout.splitlines(), strict=True)
    }


def assert_same(ranks, *names):
    """Check that all processes have ended without an error, and report the same values."""
    assert all(left is not None and left.get("error") is None for left in ranks), ranks
    for name in names:
        assert all(left[name] == ranks[0][name] for left in ranks), name


def jax_started(directories, *arguments):
    """Start a process of `jax_processes.py` for each directory, with these runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    piped = {
        "env": {**os.environ, "PYTHONPATH": PATHS},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    program, count = str(HERE / "jax_processes.py"), str(len(directories))
    commands = [
        [str(rank), str(port), str(place), count, *arguments]
        for rank, place in enumerate(directories)
    ]
    return [subprocess.Popen([sys.executable, program, *command], **piped) for command in commands]


def ended(processes):
    """Return output and errors of each process; a full pipe of one blocks no other."""
    with ThreadPoolExecutor(len(processes)) as readers:
        return list(readers.map(lambda process: process.communicate(timeout=LIMIT), processes))


def jax_runs(directory, count, spread, *runs):
    """Return the final report of all processes for each run, and the output of each.

    Args:
        directory: where each run has its folder.
        count: how many processes train together.
        spread: `["model"]` if a kernel is spread, too, else `[]`.
        runs: runs of `jax_processes.py`, one after the other.
    """
    processes = jax_started([directory] * count, *spread, *runs)
    ends = ended(processes)
    found = [_parted(out) for out, _ in ends]
    assert [len(parts) for parts in found] == [len(runs)] * count, [
        error[-2000:] for _, error in ends
    ]
    return {
        run: ([parts[n][0] for parts in found], [parts[n][1] for parts in found])
        for n, run in enumerate(runs)
    }


def _parted(out):
    """Return each line of JSON that a process printed, with the text before it."""
    parts, text = [], ""
    for line in out.splitlines(keepends=True):
        if line.startswith("{"):
            parts.append((json.loads(line), text))
            text = ""
        else:
            text += line
    return parts
