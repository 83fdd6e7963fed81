"""The least cost of the guard that the memory of this machine allows.

    KERAS_BACKEND=jax python benchmarks/memory_passes.py [CASE ...]      # also tensorflow, torch

A guarded step reads four arrays of the size of the weights that a plain step does not read: the
gradients, the new weights, and the two new slots of Adam. Their sums need no copy. If no read can
be fused with another one, a guarded step takes at least the time of a plain step and of these four
reads. For each case of
`overhead_backends.py` this prints the time of a plain step, of one such read on the same backend
(the median of 30), and this limit as a ratio.

A guard whose ratio is close to this limit can become faster only if the reads are fused with those
of the step. For models of less than about 10 MB a read mostly takes the time to start it, which a
guarded step does not need.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from overhead_backends import CASES, measured

READS = 4
"""Additional reads of a guarded step: gradients, new weights, and the two new slots of Adam."""


def sum_of_squares(arrays: Sequence[np.ndarray]) -> Callable[[], Any]:
    """Return a function that reads all arrays once on the running backend, and waits for it."""
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        tensors = [torch.as_tensor(array) for array in arrays]
        return lambda: float(torch.stack(torch._foreach_norm(tensors)).sum())
    if backend == "jax":
        import jax

        compiled = jax.jit(lambda given: sum(keras.ops.sum(keras.ops.square(array)) for array in given))
        placed = [jax.device_put(array) for array in arrays]
        return lambda: float(compiled(placed))
    import tensorflow as tf

    constants = [tf.Variable(array) for array in arrays]
    traced = tf.function(lambda: tf.add_n([tf.reduce_sum(tf.square(array)) for array in constants]))
    return lambda: float(traced())


def seconds(read: Callable[[], Any], times: int = 30) -> float:
    """Return the median time of a read, in seconds."""
    read()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        read()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main(names: Sequence[str]) -> None:
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    for name in names or CASES:
        build, shape, batch, steps = CASES[name]
        x = np.random.default_rng(0).standard_normal((batch * steps, *shape)).astype("float32")
        model = build()
        model.compile("adam", "mse")
        step = measured(model, (x, x.reshape(len(x), -1)[:, :1].copy()), batch, [])[0] / steps
        weights = [np.asarray(weight) for weight in model.get_weights()]
        read = seconds(sum_of_squares(weights))
        size = sum(weight.nbytes for weight in weights) / 1e6
        limit = 1 + READS * read / step
        print(f"{name:14s}{size:8.2f} MB{step * 1e3:9.2f} ms a step{read * 1e3:8.2f} ms a read   at least x{limit:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    main(parser.parse_args().names)
