"""The additional peak memory of a guarded `fit`, in copies of the train state.

    python benchmarks/memory.py [--width 2048] [--jit]

Trains an MLP with Adam (by default 13M parameters, a state of 151 MB) in separate processes, plain
and guarded, through four snapshots, and compares their largest resident sets. The memory of the
library and its trace is measured with an MLP of almost no state, and subtracted.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

VARIANTS = ("plain", "guarded")


def train(variant: str, width: int, jit: bool) -> tuple[int, int]:
    """Return the size of the train state and the peak of this process, in bytes."""
    import keras
    import numpy as np

    from keras_nanguard import NanGuard

    hidden = [keras.layers.Dense(size, "relu") for size in (width, width, width, width // 2)]
    model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])
    model.compile("adam", "mse", jit_compile=jit)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((128 * 40, 1024)).astype("float32"), rng.standard_normal((128 * 40, 10)).astype("float32")
    guards = [NanGuard(snapshot={"every": 10, "verify_after": 5}, verbose=0)] if variant == "guarded" else []
    model.fit(x, y, batch_size=128, shuffle=False, verbose=0, callbacks=guards)
    state = sum(np.prod(v.shape) * 4 for v in (*model.variables, *model.optimizer.variables))
    return int(state), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--jit", action="store_true", help="compile with XLA")
    parser.add_argument("--only", choices=VARIANTS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.only:
        print(*train(a.only, a.width, a.jit))
        return
    state, peaks = measured(a.width, a.jit)
    _, base = measured(16, a.jit)
    more, own = peaks["guarded"] - peaks["plain"], base["guarded"] - base["plain"]
    print(f"state {state / 1e6:.0f} MB, peak {peaks['plain'] / 1e6:.0f} MB plain, {peaks['guarded'] / 1e6:.0f} MB guarded")
    print(f"{(more - own) / state:.2f} copies of the state more, and {own / 1e6:.0f} MB that a model of any size takes")


def measured(width: int, jit: bool) -> tuple[int, dict[str, int]]:
    """Return the size of the train state, and the peak of each variant, in bytes."""
    peaks = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--only", variant, "--width", str(width), *(["--jit"] if jit else [])]
        printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
        state, peaks[variant] = map(int, printed[-2:])
    return state, peaks


if __name__ == "__main__":
    main()
