"""The processor time of the recorder per step: `python benchmarks/recorder.py`. Needs no backend.

Measured separately: the step itself (one append), the recording in memory (about once a second),
and the thread that writes the file.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.writer import File

STEPS, ROUNDS = 1000, 50


def cost(work: Callable[[], object]) -> float:
    """Return processor time for each step, in microseconds."""
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / 1000 / STEPS


def main() -> None:
    made, found = Recorder(), {"in the step": [], "into memory": [], "into the file": []}
    made.begin({}, scaled=False, path=None)
    with tempfile.TemporaryDirectory() as folder:
        file = File(Path(folder) / "recording.sqlite", "benchmark", made._memory.unwritten())
        for number in range(ROUNDS):
            steps = range(number * STEPS, (number + 1) * STEPS)
            found["in the step"].append(cost(lambda steps=steps: [made.push(step, 0.5, 0.25, 1.0) for step in steps]))
            found["into memory"].append(cost(made._fold))
            new = made._memory.unwritten()
            found["into the file"].append(cost(lambda new=new: file.write(new)))
        file.close()
    for name, costs in found.items():
        print(f"{name:15}{statistics.median(costs):6.2f} us for each step")


if __name__ == "__main__":
    main()
