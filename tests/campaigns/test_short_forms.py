"""Each benchmark runs in its shortest form, on one backend that it was written for."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SHORT = {
    "comparison.py": ("torch", ["--rounds", "1", "--only", "NanGuard"]),
    "diagnosis.py": ("torch", ["--batch", "4"]),
    "diverges.py": ("torch", ["mlp-adam", "--seeds", "0"]),
    "healthy.py": ("torch", ["pure_noise_targets_nadam"]),
    "memory.py": ("torch", ["--width", "64"]),
    "memory_passes.py": ("torch", ["mlp"]),
    "overhead.py": ("tensorflow", ["--models", "mlp", "--rounds", "2"]),
    "overhead_backends.py": ("torch", ["mlp", "--rounds", "2"]),
    "recorder.py": ("torch", []),
    "recovers.py": ("torch", ["--count", "2", "--only", "NanGuard()"]),
    "scan.py": ("torch", ["--rounds", "1"]),
    "special_paths.py": ("jax", ["late_verdict", "--rounds", "2", "--cases", "mlp"]),
}
"""The backend and the arguments of each script."""

OTHERS = {"clients.py", "diverging_programs.py", "healthy_programs.py", "more_diverging_programs.py", "program_options.py"}
"""A script with an environment of its own, and modules that the scripts import."""


def test_each_script_has_a_short_form():
    assert {path.name for path in BENCHMARKS.glob("*.py")} == {*SHORT, *OTHERS}


@pytest.mark.parametrize("name", [name for name, (backend, _) in SHORT.items() if backend == keras.backend.backend()])
def test_runs(name, tmp_path):
    """It ends without an error and prints a result; the faults of `recovers.py` do no harm."""
    settings = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, BENCHMARKS / name, *SHORT[name][1]]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, cwd=tmp_path, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]


@pytest.mark.requires_backend("tensorflow", reason="only TensorFlow has all of them")
def test_each_client_has_tests(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    clients = importlib.import_module("clients")
    names = clients.tests_of(clients.CLIENTS, "tensorflow")
    assert [client.name for client in clients.CLIENTS if not any(re.search(client.tests, name) for name in names)] == []
