"""The short suite: tests of the main guarantees, which run on an installed package.

`make matrix` runs it in each cell, `make release` on the wheel and on the sdist. The tests are copied elsewhere first, so that the
package comes from where it is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NEEDS", "TESTS", "Result", "run", "tests_of"]

ROOT = Path(__file__).parents[1]

NEEDS = ("pytest>=8", "pytest-xdist>=3.5", "pyyaml>=6", "hypothesis>=6.100", "matplotlib>=3.7")
"""Packages that the tests import in addition to this one and its backend."""

TESTS = (
    # internals of Keras that the library uses
    "tests/keras_internals/test_internals.py",
    # a refused step changes nothing, bit for bit
    "tests/transaction/test_transaction.py::test_bad_batches_never_happened[adam-graph]",
    "tests/report/test_logs.py::test_ordinary_overflows",
    "tests/transaction/test_guard_model.py::test_results_and_files_are_plain_keras",
    # writes of other code between two steps
    "tests/transaction/test_sites.py::TestOutsideWrites::test_detected_and_restored[nan]",
    # the actions of a policy
    "tests/recovery/test_actions.py::TestRollback::test_newest",
    "tests/recovery/test_actions.py::TestLowerLr::test_rate[plain]",
    "tests/recovery/test_actions.py::TestFixLossScale::test_bounds[0.0-4.0]",
    "tests/recovery/test_actions.py::TestStop::test_restored",
    # snapshots on disk, and a killed run
    "tests/recovery/test_snapshots.py::TestResume::test_bit_identical[graph]",
    # diagnosis
    "tests/diagnosis/test_mechanisms.py::test_the_mechanism_is_named_at_once_and_from_its_bundle[nan_in_one_input_row]",
    "tests/diagnosis/test_mechanisms.py::test_the_mechanism_is_named_at_once_and_from_its_bundle[square_root_at_zero]",
    # files of this and of earlier releases, the command line
    "tests/files/test_reading.py::test_every_format_gives_the_names_of_the_live_model",
    "tests/files/test_scan.py::test_a_live_model_is_scanned_with_its_slots_metrics_and_states",
    "tests/cli/test_command_line.py::test_scan_has_exit_codes_for_clean_found_and_misuse",
    "tests/cli/test_command_line.py::test_diagnose_names_the_ruined_layer",
    "tests/test_formats.py",
)

WITHOUT_BACKEND = (
    "tests/policy/test_deciding.py",
    "tests/policy/test_files.py::test_each_format_gives_the_same_policy_and_back",
)
"""Tests that are the same on each backend, and run on TensorFlow."""

FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""With these flags XLA compiles much faster, which is enough for programs that run for
milliseconds.
"""

OUTCOME = re.compile(r"^(FAILED|ERROR) (\S+?)(?: - (.*))?$", re.MULTILINE)
CLOSING = re.compile(r"^.*\d (?:passed|failed|error|skipped).* in [\d.]+s.*$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


@dataclass(frozen=True)
class Result:
    """The result of the short suite.

    Attributes:
        passed, failed, skipped: numbers of tests.
        failures: the name of each failed test and the first line of the reason; or the end of the
            output, if the suite did not run.
    """

    passed: int
    failed: int
    skipped: int
    failures: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether the suite ran and every test passed."""
        return self.passed > 0 and not self.failures


def tests_of(backend: str) -> tuple[str, ...]:
    """Return the tests of the short suite on a backend."""
    return (*TESTS, *(WITHOUT_BACKEND if backend == "tensorflow" else ()))


def environment_of(backend: str) -> dict[str, str]:
    """Return the environment of a process on a backend: quiet, on the CPU, one thread, nothing from this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "JAX_", "XLA_", "TF_"))}
    on_cpu = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "XLA_FLAGS": FAST}
    return {**kept, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "400", **on_cpu}


def run(
    python: Path, backend: str, folder: Path, tests: Sequence[str] = (), source: Path = ROOT, limit: float = 1800.0
) -> Result:
    """Run the short suite with an interpreter.

    Args:
        python: the interpreter of an environment that has the package, a backend and `NEEDS`.
        backend: the backend.
        folder: the folder to which the tests are copied, and in which they run.
        tests: tests to run instead, by their pytest ids.
        source: the folder with the tests: this tree, or an unpacked sdist.
        limit: time limit in seconds.
    """
    if folder != source:
        shutil.copytree(source / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(source / "pyproject.toml", folder)
    command = [str(python), "-m", "pytest", "-q", "-rfE", "--nightly", "--tb=line", "-p", "no:cacheprovider", *(tests or tests_of(backend))]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment_of(backend), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=limit, check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(0, 0, 0, (f"not done after {limit:.0f} seconds",))
    closing = (CLOSING.findall(done.stdout) or [""])[-1]  # a backend may print more at exit
    counts = {word: int(number) for number, word in COUNT.findall(closing)}
    failures = tuple(f"{name.split('/')[-1]}: {(why or '?')[:160]}" for _, name, why in OUTCOME.findall(done.stdout))
    if not failures and (done.returncode or not counts.get("passed")):
        failures = (" ".join(done.stdout.strip().splitlines()[-3:])[-300:] or f"exit code {done.returncode}",)
    return Result(counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), counts.get("skipped", 0), failures)
