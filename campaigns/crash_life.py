"""One life of a run that may be killed: a training process.

It is forked from a process that has imported Keras but has not run an operation."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_nanguard import NanGuard
from keras_nanguard._core import atomic_files
from keras_nanguard._fit.snapshot_files import SnapshotFile, SnapshotFolder
from keras_nanguard._fit.snapshots import Ring

LOG = Path(__file__).resolve().parent / "crash.jsonl"

EPOCHS, BATCHES, ROWS, WIDTH = 3, 31, 16, 32
BAD = (20,)
"""Batches of the data with a NaN in them."""

SNAPSHOT = {"storage": "disk", "every": 4, "verify_after": 2, "keep": 2}

START, COMPILE, TRAIN, WRITE, RENAME, REMOVE, RECORD = range(7)
PHASES = ("starting", "first step", "training", "writing a snapshot", "syncing or renaming", "removing an older one", "noting it verified")


class Beat(keras.callbacks.Callback):
    """Records the phase of training."""

    def __init__(self, phase: Any):
        super().__init__()
        self.phase = phase

    def on_train_begin(self, logs: Any = None) -> None:
        self.phase[0] = COMPILE

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.phase[0] = TRAIN


def network() -> Any:
    """Return a network with all kinds of state to restore: statistics, seeds, slots, a schedule."""
    keras.utils.set_random_seed(0)
    rate = keras.optimizers.schedules.CosineDecay(0.01, EPOCHS * BATCHES)
    layers = keras.layers
    stack = [layers.Dense(WIDTH, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *stack])
    model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
    return model


def data() -> tuple[Any, Any]:
    """Return the data, in the order of training."""
    x = np.random.default_rng(0).standard_normal((BATCHES * ROWS, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    for batch in BAD:
        x[(batch % BATCHES) * ROWS + 3, 2] = np.nan
    return x, y


def state_of(model: Any) -> dict[str, Any]:
    """Return the whole state of a model, by number and path."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    arrays = {f"{i} {v.path}": np.array(keras.ops.convert_to_numpy(v.value)) for i, v in enumerate(variables)}
    if keras.backend.backend() == "torch":
        import torch

        arrays["generator"] = torch.get_rng_state().numpy()
    return arrays


def nothing() -> None:
    """Change nothing."""


def live(directory: Path, result: Path, phase: Any, pause: float = 0.0, tampered: Callable[[], None] = nothing) -> None:
    """Train to the end, in this process, and write the final state."""
    _marked(phase, pause)
    tampered()
    guard = NanGuard(directory=directory, resume=True, snapshot=SNAPSHOT, diagnose=False)
    model = network()
    model.fit(*data(), batch_size=ROWS, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Beat(phase), guard])
    with (result.with_suffix(".part")).open("wb") as file:
        np.savez(file, **state_of(model))
    os.replace(result.with_suffix(".part"), result)


def _marked(phase: Any, pause: float) -> None:
    """Let each part of a snapshot record itself, and take a little longer, as on a slow disk."""

    def mark(owner: Any, name: str, number: int) -> None:
        real = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            before, phase[0] = phase[0], number
            try:
                time.sleep(pause)
                return real(*args, **kwargs)
            finally:
                time.sleep(pause)
                phase[0] = before

        setattr(owner, name, marked)

    mark(SnapshotFolder, "write", WRITE)
    mark(Ring, "_prune", REMOVE)
    mark(SnapshotFile, "mark_verified", RECORD)
    mark(atomic_files, "publish", RENAME)
    mark(atomic_files, "flush_to_disk", RENAME)


def forked(work: Callable[[], None], output: Path) -> int:
    """Run a function in a separate process, whose output goes to a file; return its process number.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            work()
            sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001  this process ends here after any error
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; return its exit status, negative for a signal."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def same(one: Path, other: Path) -> bool:
    """Whether two final states are the same, bit for bit."""
    with np.load(one) as a, np.load(other) as b:
        return sorted(a) == sorted(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)


def never_killed(folder: Path) -> tuple[Path, float]:
    """Run once without a kill; return the final state and the duration."""
    phase = mmap.mmap(-1, 1)
    begin = time.monotonic()
    code = ended(forked(lambda: live(folder / "whole", folder / "whole.npz", phase), folder / "whole.log"))
    if code:
        raise SystemExit((folder / "whole.log").read_text())
    return folder / "whole.npz", time.monotonic() - begin


def records() -> list[dict[str, Any]]:
    """Return all records of the log."""
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []


def append(record: dict[str, Any]) -> None:
    """Append a record to the log."""
    with LOG.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def versions() -> str:
    """Return the versions for a page."""
    backend = sys.modules[keras.backend.backend()]
    return f"Keras {keras.__version__}, {keras.backend.backend()} {backend.__version__}, Python {sys.version.split()[0]}"
