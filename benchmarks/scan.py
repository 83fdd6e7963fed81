"""The speed of `scan` relative to h5py and NumPy, which only search for NaN and Inf.

    python benchmarks/scan.py [--rounds 7]     # ResNet101V2, weights and Adam's slots

In each round both read the file from the system's cache; the median of the ratios is reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import h5py
import numpy as np

from keras_nanguard import scan


def write(path: Path) -> None:
    """Write the file in another process, so that no backend is loaded in this one."""
    code = (
        "import keras, sys\n"
        "model = keras.applications.ResNet101V2(weights=None, input_shape=(64, 64, 3), classes=10)\n"
        "model.compile('adam', 'mse'); model.optimizer.build(model.trainable_variables)\n"
        f"model.save_weights({str(path)!r})\n"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def plain(path: Path) -> bool:
    """Read every array with h5py and search it for NaN and Inf with NumPy."""
    fine = []
    with h5py.File(path) as file:
        file.visititems(lambda _, item: fine.append(bool(np.isfinite(item[()]).all())) if isinstance(item, h5py.Dataset) else None)
    return all(fine)


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet.weights.h5"
        write(path)
        ratios = []
        for _ in range(rounds + 1):
            times = []
            for read in (plain, scan):
                start = time.perf_counter()
                read(path)
                times.append(time.perf_counter() - start)
            ratios.append(times[0] / times[1])
        size = path.stat().st_size / 2**20
    each = sorted(round(r, 2) for r in ratios[1:])
    print(f"{size:.0f} MiB: scan at {statistics.median(ratios[1:]):.2f} of the speed of h5py and NumPy {each}")


if __name__ == "__main__":
    main()
