"""The cost of diagnosing one incident, in training steps of the same network, in one process.

    python benchmarks/diagnosis.py            # ResNet50 at 64 pixels, batch 32, a NaN in one image, in the loss, in a weight
    python benchmarks/diagnosis.py --check    # exit with 1 if one takes 60 steps or more
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

LIMIT = 60
FAULTS: dict[str, dict[str, Any]] = {
    "a NaN in one image": {"site": "inputs", "rows": (3,), "entries": 1},
    "the loss": {"site": "loss"},
    "gradients": {"site": "gradients"},
    "a kernel": {"site": "weights", "path": "*conv4_block3_2_conv*"},
}


class Clock(keras.callbacks.Callback):
    """Times every step, including all callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(time.perf_counter() - self.start)


def measure(fault: dict[str, Any], batch: int) -> tuple[float, float, str]:
    """Return the time of the median step and of the step with the incident, in seconds, and the
    diagnosis.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    model.compile("adam", "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((batch * 8, 64, 64, 3)).astype("float32"), rng.integers(0, 10, batch * 8)
    clock, guard = Clock(), NanGuard(verbose=0)
    with inject(model, kind="nan", step=6, **fault):
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=[guard, clock])
    diagnosis = guard.incidents[0].diagnosis
    words = f"{diagnosis.cause} in {diagnosis.culprit or 'no place'}, rows {list(diagnosis.samples)}"
    return statistics.median(clock.steps[1:6]), clock.steps[6], words


def main() -> None:
    """Print one line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    worst = 0.0
    for name, fault in FAULTS.items():
        step, incident, words = measure(fault, given.batch)
        worst = max(worst, incident / step)
        print(f"{name:20s} step {step * 1e3:7.1f} ms, incident {incident * 1e3:8.0f} ms = {incident / step:5.1f} steps: {words}")
    if given.check and worst >= LIMIT:
        sys.exit(f"a diagnosis took {worst:.0f} steps; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
