"""A table of the clients of Keras that work with a guard: runs `tests/clients`.

    python benchmarks/clients.py                                        # with all three backends, one after the other
    python benchmarks/clients.py tensorflow --write docs/compatibility.md
    python benchmarks/clients.py jax --only Keras --write docs/compatibility.md

Each row is a client and its version. A cell is `yes` if all tests of the client have passed: it
runs unchanged, a healthy run prints nothing and has the same results, and bad data is refused
(under a tuner, a failed trial is never the best one). `no` means that a test failed or took more
than five minutes, `-` that the client is not installed or does not support this backend, `?` that
the tests did not run or did not complete. Clients are independent: if one fails, the table still
has all others. Exits with 1 if one has failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns import pages

ROOT = Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")


@dataclass(frozen=True)
class Client:
    """A client: its name, the distribution whose version is printed (`""`: Keras'), and a pattern of the names of its tests."""

    name: str
    distribution: str
    tests: str


CLIENTS = (
    Client("KerasHub: BERT classifier", "keras-hub", r"\[KerasHub: BERT"),
    Client("KerasHub: ResNet", "keras-hub", r"\[KerasHub: ResNet"),
    Client("KerasRS: ranking", "keras-rs", r"\[KerasRS"),
    Client("Keras 2 (`tf_keras`): a clear error", "tf_keras", r"test_keras_2"),
    Client("KerasTuner: RandomSearch, Hyperband, BayesianOptimization, GridSearch, a `fit` of its own", "keras-tuner", r"test_keras_tuner"),
    Client("Optuna, with its Keras pruning callback", "optuna-integration", r"test_optuna"),
    Client("scikeras: Pipeline, GridSearchCV with 1 and 2 jobs, clone", "scikeras", r"test_scikeras"),
    Client("preset `tune` without a tuner", "", r"TestPreset"),
    Client("all stock callbacks in any order", "", r"test_all_stock|test_a_csv"),
    Client("a learning rate finder, under `observe`", "", r"test_a_rate_finder"),
    Client("TensorBoard, with histograms", "tensorboard", r"test_tensorboard"),
    Client("MLflow: callback and autolog", "mlflow-skinny", r"test_mlflow"),
    Client("Weights & Biases: metrics logger, model checkpoint", "wandb", r"test_wandb"),
    Client("tqdm: TqdmCallback", "tqdm", r"test_tqdm"),
    Client("PyDataset, with and without workers", "", r"\[PyDataset\]|\[workers\]|\[processes\]"),
    Client("generators", "", r"\[generator\]"),
    Client("tf.data: cached, parallel, of unknown length", "tensorflow-cpu", r"\[tf\.data"),
    Client("sparse and ragged tensors of TensorFlow", "tensorflow-cpu", r"test_ragged|test_tensors_of_tensorflow"),
    Client("Hugging Face datasets: NumPy, torch, to_tf_dataset", "datasets", r"\[datasets"),
    Client("torch DataLoader", "torch", r"\[DataLoader\]"),
    Client("grain", "grain", r"\[grain\]"),
    Client("pandas DataFrame", "pandas", r"\[DataFrame\]"),
    Client("SciPy sparse matrices", "scipy", r"test_scipy"),
)


PYTEST = (sys.executable, "-m", "pytest", "--nightly")
"""With all cases of all tests."""

APART = ("-n", "2", "--dist", "worksteal", "--timeout", "300", "--continue-on-collection-errors", "-p", "no:cacheprovider")
"""A test that hangs is ended after this many seconds. One that crashes ends only its worker, and
the others continue.
"""

RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL) +(?:\[ *\d+%\] )?(tests/.*?)(?: - .*)?$")
"""A line of `pytest -v` on several workers, as a test ends."""


def settings_of(backend: str) -> dict[str, Any]:
    """Return the settings of a process that runs tests on a backend."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    return {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def tests_of(clients: Sequence[Client], backend: str) -> list[str]:
    """Return the names of the tests of clients on a backend.

    Raises:
        SystemExit: if there are none.
    """
    listed = subprocess.run([*PYTEST, "tests/clients", "-q", "--collect-only"], **settings_of(backend), check=False).stdout.splitlines()
    names = [name.strip() for name in listed if "::" in name and any(re.search(client.tests, name) for client in clients)]
    if not names:
        raise SystemExit("Expected names of tests of these clients. Received:\n" + "\n".join(listed))
    return names


def outcomes(backend: str, limit: float, clients: Sequence[Client]) -> dict[str, str]:
    """Run the tests of clients on a backend.

    Returns:
        The outcome of each: `passed`, `failed`, `skipped`, or `unfinished` after `limit` seconds.
    """
    names = tests_of(clients, backend)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*PYTEST, *names, "-v", *APART], **{**settings_of(backend), "stdout": log}, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    found = {match[2].strip(): match[1].lower().replace("error", "failed") for match in map(RESULT.search, lines) if match}
    if not found:
        raise SystemExit("Expected outcomes of tests. Received:\n" + "\n".join(lines))
    found = {**dict.fromkeys(names, "unfinished"), **found}
    bad = [f"{outcome}: {name}" for name, outcome in found.items() if outcome in ("failed", "unfinished")]
    print(f"{backend}: {len(found)} tests, {len(bad)} failed or unfinished", *bad, sep="\n  ", file=sys.stderr, flush=True)
    print(*(line for line in lines if line.startswith("E  ")), sep="\n", file=sys.stderr, flush=True)
    return found


def cell(client: Client, found: dict[str, str]) -> str:
    """Return the cell of a client and a backend, `""` if none of its tests was chosen."""
    mine = {outcome for name, outcome in found.items() if re.search(client.tests, name)}
    return "no" if "failed" in mine else "?" if "unfinished" in mine else "yes" if "passed" in mine else "-" if mine else ""


def version(client: Client) -> str:
    """Return the installed version of a client."""
    try:
        found = metadata.version(client.distribution or "keras")
    except metadata.PackageNotFoundError:
        return "not installed"
    return found if client.distribution else f"Keras {found}"


def table(backends: Sequence[str], found: Mapping[str, dict[str, str]], before: str = "") -> str:
    """Return the table as Markdown; clients that were not run keep the cells of the earlier text,
    if any.
    """
    known = _cells(before)
    lines = [f"| client | version | {' | '.join(backends)} |", "|---" * (len(backends) + 2) + "|"]
    for client in CLIENTS:
        cells = [cell(client, found.get(b, {})) or known.get((client.name, b), "?") for b in backends]
        lines.append(f"| {client.name} | {version(client)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(text: str) -> dict[tuple[str, str], str]:
    """Return the cells of a table by client and backend."""
    rows = [[part.strip() for part in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {(row[0], backend): cell for row in rows[1:] for backend, cell in zip(rows[0][2:], row[2:], strict=True)}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("backends", nargs="*", help="those to run; all by default")
    parser.add_argument("--write", type=Path, help="page whose table is replaced, after each backend")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for the tests of a backend")
    parser.add_argument("--only", default="", help="run the clients whose names match this pattern")
    given = parser.parse_args()
    clients = [client for client in CLIENTS if re.search(given.only, client.name)]
    found: dict[str, dict[str, str]] = {}
    for backend in given.backends or BACKENDS:
        found[backend] = outcomes(backend, given.limit, clients)
        before = pages.read(given.write, "clients") if given.write is not None else ""
        made = table(BACKENDS if given.write is not None else list(found), found, before)
        if given.write is not None:
            pages.write(given.write, "clients", made)
    print(made)
    return int(any("failed" in outcome.values() for outcome in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
