"""The smallest memory limits under which plain and guarded runs complete.

    python campaigns/memory.py [--quick] [--backends tensorflow jax torch] [--sizes 1 2 4] [--write]

Claim: a guarded run completes under each limit under which the plain run completes. A run fits
under a limit if it completes three times out of three, because the memory of the same run varies by
about 50 MB. The limit is a cgroup, whose processes are killed if they need more, not counting the
page cache (Linux, as root, with write access to `/sys/fs/cgroup`). Each run is a separate process,
in the environment of its backend (`.venv`, `.venv-jax`, `.venv-torch`; variables such as
PYTHON_TENSORFLOW name others). Results are appended to `campaigns/memory.jsonl`; runs with a result
are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__ is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import pages

ROOT = Path(__file__).resolve().parents[1]
PAGE, LOG = ROOT / "campaigns/results/memory.md", ROOT / "campaigns/memory.jsonl"

GB, MB = 1 << 30, 1 << 20
BACKENDS = {"tensorflow": ".venv", "jax": ".venv-jax", "torch": ".venv-torch"}
LAYERS, STEPS, BAD_STEP = 8, 6, 3
GRID = 64 * MB
"""Limits are multiples of it."""

WHAT = {"plain": "", "guarded": "guard", "with a NaN": "guard fault", "with a directory": "guard directory"}
"""The columns of the table, and the run of each."""

REPEATS = 3
"""Number of times that a run must complete under a limit to fit."""


# One run, in a separate process


def child(backend: str, state: float, guarded: str) -> None:
    """Train a network whose state has this size in GB with Adam for a few steps, and print the
    result.
    """
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import numpy as np

    from keras_nanguard import NanGuard

    width = int(math.sqrt(state * GB / 3 / 4 / LAYERS))
    keras.utils.set_random_seed(0)
    narrow = keras.initializers.RandomUniform(-0.01, 0.01)
    stack = [keras.layers.Dense(width, use_bias=False, kernel_initializer=narrow) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *stack, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-6), "mse")
    x = np.random.default_rng(0).standard_normal((4 * STEPS, width)).astype("float32")
    y = x[:, :1].copy()
    if "fault" in guarded:
        x[4 * BAD_STEP] = np.nan
    callbacks: list[NanGuard] = []
    if guarded:
        directory = tempfile.mkdtemp(dir=os.environ.get("CAMPAIGN_FOLDER")) if "directory" in guarded else None
        callbacks = [NanGuard(snapshot={"every": 2, "verify_after": 1}, directory=directory)]
    begin = time.monotonic()
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    variables = [*model.variables, *model.optimizer.variables]
    found: dict[str, Any] = {"seconds": time.monotonic() - begin, "state": sum(int(np.prod(v.shape)) * 4 for v in variables)}
    for guard in callbacks:
        found |= {"refused": guard.session.run.counts.refused, "steps": guard.session.run.step}
        found |= {"causes": [i.diagnosis.cause for i in guard.incidents]}
    found["finite"] = bool(np.isfinite(keras.ops.convert_to_numpy(model.trainable_variables[-1])).all())
    print("RESULT " + json.dumps(found))


# Limits


@contextmanager
def limited(limit: float) -> Iterator[Path]:
    """Yield the folder of a new cgroup with this limit of memory."""
    top = Path("/sys/fs/cgroup")
    first = top / "memory" if (top / "memory").is_dir() else top
    folder = first / f"campaign-{os.getpid()}"
    folder.mkdir()
    try:
        if math.isfinite(limit):
            (folder / ("memory.limit_in_bytes" if first != top else "memory.max")).write_text(str(int(limit)))
        yield folder
    finally:
        for _ in range(50):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def run(backend: str, state: float, guarded: str, limit: float) -> dict[str, Any]:
    """Run once under a limit in bytes; return the result."""
    python = os.environ.get(f"PYTHON_{backend.upper()}") or str(ROOT / BACKENDS[backend] / "bin/python")
    with limited(limit) as group, tempfile.TemporaryDirectory(dir=os.environ.get("CAMPAIGN_FOLDER")) as folder:
        command = ["bash", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "_", python, __file__]
        command += ["--child", backend, str(state), guarded]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CAMPAIGN_FOLDER": folder}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        peak = next(int(p.read_text()) for n in ("memory.max_usage_in_bytes", "memory.peak") if (p := group / n).exists())
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), "")
    said = [line for line in done.stdout.splitlines() if line.startswith("NanGuard")]
    result = json.loads(line[7:]) if line else {}
    if not line and done.returncode != -9:
        result["error"] = (done.stderr.strip().splitlines() or ["?"])[-1][-300:]
    what = {"backend": backend, "gb": state, "guarded": guarded, "limit": limit, "peak": peak}
    return {**what, "ended": bool(line), "code": done.returncode, "said": said, **result}


# The campaign


def records() -> list[dict[str, Any]]:
    """Return all records of the log."""
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []


def known(backend: str, state: float, guarded: str, limit: float, repeat: int = 0) -> dict[str, Any]:
    """Return the result of one run, which runs unless the log has its result."""
    key = {"backend": backend, "gb": state, "guarded": guarded, "limit": limit, "repeat": repeat}
    for record in records():
        if all(record.get(name, 0) == value for name, value in key.items()):
            return record
    record = {**run(backend, state, guarded, limit), "repeat": repeat}
    with LOG.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)
    return record


def fits(backend: str, state: float, guarded: str, limit: float) -> bool:
    """Whether a run completes under a limit each time; stops at the first one that is killed."""
    return all(known(backend, state, guarded, limit, repeat)["ended"] for repeat in range(REPEATS))


def smallest(backend: str, state: float, guarded: str, first: float) -> float:
    """Return the smallest limit on the grid, from `first` on, under which a run fits; end the
    campaign if there is none.
    """
    begin = math.ceil(first / GRID) * GRID
    for limit in range(begin, begin + 24 * GRID, GRID):
        if fits(backend, state, guarded, limit):
            return limit
    last = records()[-1]
    sys.exit(f"{backend}, {guarded or 'plain'}: no run completes under {last['limit'] / GB:.2f} GB: exit {last['code']} {last.get('error', '')}")


def measure(backend: str, state: float) -> None:
    """Find the smallest limit of a plain run, and of a guarded one; then run with a fault, and with
    a directory, under the limit of the plain one.
    """
    peak = known(backend, state, "", math.inf)["peak"]
    plain = smallest(backend, state, "", peak)
    smallest(backend, state, "guard", plain)
    for also in ("guard fault", "guard directory"):
        smallest(backend, state, also, plain)


def table(earlier: str = "") -> str:
    """Return the table of the page; rows without a result in the log keep their earlier content."""
    head = ("backend", "train state", *(f"{what} completes from" for what in WHAT), "all gradients", "printed lines")
    rows = {(cells[0], float(cells[1].split()[0])): cells for cells in pages.rows(earlier)}
    for backend, state in {(r["backend"], r["gb"]) for r in records()}:
        rows[backend, state] = _row(backend, state, [r for r in records() if (r["backend"], r["gb"]) == (backend, state)])
    order = sorted(rows, key=lambda key: (list(BACKENDS).index(key[0]), key[1]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *(rows[key] for key in order)))


def _row(backend: str, state: float, found: list[dict[str, Any]]) -> list[str]:
    limits = {guarded: _least([r for r in found if r["guarded"] == guarded]) for guarded in WHAT.values()}
    shown = [f"{limits[guarded] / GB:.2f} GB" if limits[guarded] else "not measured" for guarded in WHAT.values()]
    said = next((r["said"] for r in found if r["guarded"] == "guard" and r["limit"] == limits["guard"]), [])
    return [backend, f"{state:g} GB", *shown, f"{state / 3:.2f} GB", "; ".join(line.removeprefix("NanGuard: ") for line in said)]


def _least(found: list[dict[str, Any]]) -> float:
    """Return the smallest limit under which all runs of a kind completed, 0 if there is none."""
    limits = {r["limit"] for r in found if math.isfinite(r["limit"])}
    each = {limit: [r["ended"] for r in found if r["limit"] == limit] for limit in limits}
    return min((limit for limit, ended in each.items() if ended.count(True) == REPEATS), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--sizes", nargs="+", type=float, default=[1, 2, 4], help="GB of train state")
    parser.add_argument("--quick", action="store_true", help="a quarter of a GB, on the first backend")
    parser.add_argument("--write", action="store_true", help="write the table of the page from the log")
    options = parser.parse_args()
    for state in [0.25] if options.quick else options.sizes:
        for backend in options.backends[: 1 if options.quick else None]:
            measure(backend, state)
    print(table())
    if options.write:
        pages.write(PAGE, "limits", table(pages.read(PAGE, "limits")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], float(sys.argv[3]), sys.argv[4])
    else:
        main()
