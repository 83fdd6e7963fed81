"""What the flight recorder costs a step, in processor time: `python benchmarks/recorder.py`. Needs neither Keras nor a backend.

Told for each step: in the step itself (one append), when steps are put into arrays, about once a second, and in the thread that writes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from keras_nanguard._recording.database import Database
from keras_nanguard._recording.recorder import Recorder

STEPS, ROUNDS = 1000, 50


def cost(work: Callable[[], object]) -> float:
    """Return processor time for each step, in microseconds."""
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / 1000 / STEPS


def main() -> None:
    made, found = Recorder(), {"in the step": [], "into arrays": [], "into the file": []}
    made.begin({}, scaled=False, path=None)
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "recording.sqlite", "benchmark")
        for number in range(ROUNDS):
            steps = range(number * STEPS, (number + 1) * STEPS)
            found["in the step"].append(cost(lambda steps=steps: [made.push(step, 0.5, 0.25, 1.0) for step in steps]))
            found["into arrays"].append(cost(made._fold))
            changes = made._changes()
            found["into the file"].append(cost(lambda changes=changes: database.write(changes)))
        database.close()
    for name, costs in found.items():
        print(f"{name:15}{statistics.median(costs):6.2f} us for each step")


if __name__ == "__main__":
    main()
