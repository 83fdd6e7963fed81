"""The cost of the guard on JAX and PyTorch, in paired rounds with plain `fit`.

    KERAS_BACKEND=jax python benchmarks/overhead_backends.py [CASE ...]
    KERAS_BACKEND=torch python benchmarks/overhead_backends.py [CASE ...]
    KERAS_BACKEND=jax python benchmarks/overhead_backends.py --processes 2 [CASE ...]

With `--processes` several processes on this machine share each batch, with Keras' `DataParallel`.

Each round times one epoch of each variant, in an order that changes from round to round, and takes ratios within the round.
For each case it prints the median time of a plain step, and the median and quartiles of each ratio,
in wall time and in processor time (which other work on the machine does not affect). Snapshots are
included, the first epoch of each fit is not. PyTorch runs on one thread.

With millions of parameters on PyTorch, glibc returns freed arrays to the system, and ratios of 0.99
and of 1.25 have been seen for the same program. Let it keep them:
`MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=20000000000 MALLOC_TOP_PAD_=500000000`.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers

from keras_nanguard import NanGuard

EPOCHS = 4
VARIANTS = {
    "plain": list,
    "NanGuard": lambda: [NanGuard(verbose=0)],
    "TerminateOnNaN": lambda: [keras.callbacks.TerminateOnNaN()],
}


def mlp(width, depth, features, norm=False):
    hidden = [layer for _ in range(depth) for layer in (layers.Dense(width, "relu"), *([layers.BatchNormalization()] * norm))]
    return keras.Sequential([keras.Input((features,)), *hidden, layers.Dense(1)])


def cnn():
    body = [keras.Input((32, 32, 3))]
    for width in (16, 32, 64):
        body += [layers.Conv2D(width, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*body, layers.GlobalAveragePooling2D(), layers.Dense(1)])


def transformer():
    inputs = keras.Input((64, 64))
    x = inputs
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        hidden = layers.Dense(64)(layers.Dense(256, "relu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(hidden))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


CASES = {
    "mlp": (lambda: mlp(32, 2, 16), (16,), 32, 200),
    "mlp-batchnorm": (lambda: mlp(64, 2, 16, norm=True), (16,), 32, 100),
    "wide": (lambda: mlp(2048, 4, 1024), (1024,), 128, 10),
    "cnn": (cnn, (32, 32, 3), 32, 20),
    "transformer": (transformer, (64, 64), 32, 15),
}


class Clock(keras.callbacks.Callback):
    """Times each epoch."""

    async_safe = True

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        spent = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        self.epochs = [*getattr(self, "epochs", []), spent]


def measured(model, data, batch, callbacks):
    """Return the wall time and the processor time of the fastest epoch after the first."""
    clock = Clock()
    model.fit(*data, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[clock, *callbacks])
    return [min(part) for part in zip(*clock.epochs[1:])]


def reported(ratios):
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"x{middle:.3f} [{low:.2f}, {high:.2f}]"


def spread(names, count, rounds):
    """Run this program in several processes that train together; return the exit status of the
    first that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    started = []
    for rank in range(count):
        env = {**settings, "BENCH_PLACE": f"{place} {count} {rank}"}
        output = subprocess.DEVNULL if rank else None
        started.append(subprocess.Popen([sys.executable, __file__, *names, "--rounds", str(rounds)], env=env, stdout=output))
    return next((code for code in [process.wait() for process in started] if code), 0)


def join():
    """Join the other processes, if there are any; return the number of processes."""
    if "BENCH_PLACE" not in os.environ:
        return 1
    place, count, rank = os.environ["BENCH_PLACE"].split()
    keras.distribution.initialize(job_addresses=place, num_processes=int(count), process_id=int(rank))
    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False))
    return int(count)


def main(names, rounds):
    count = join()
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    print(f"keras {keras.__version__} on {keras.backend.backend()}, {rounds} rounds, {count} processes")
    for name in names or CASES:
        build, shape, batch, steps = CASES[name]
        batch //= count
        x = np.random.default_rng(0).standard_normal((batch * steps, *shape)).astype("float32")
        data = (x, x.reshape(len(x), -1)[:, :1].copy())
        keras.utils.set_random_seed(0)  # the same weights, and the same orders below, in all processes
        models = {variant: build() for variant in VARIANTS}
        for model in models.values():
            model.compile("adam", "mse")
        times = []
        for _ in range(rounds):
            order = random.sample(list(VARIANTS), len(VARIANTS))
            times.append({variant: measured(models[variant], data, batch, VARIANTS[variant]()) for variant in order})
        plain = statistics.median(taken["plain"][0] for taken in times) / steps
        print(f"{name:14s}{plain * 1e3:8.2f} ms a step")
        for variant in [v for v in VARIANTS if v != "plain"]:
            wall, processor = ([taken[variant][kind] / taken["plain"][kind] for taken in times] for kind in (0, 1))
            print(f"    {variant:16s} wall {reported(wall)}   processor {reported(processor)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--processes", type=int, default=1, help="processes that train together (JAX)")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.processes > 1:
        sys.exit(spread(given.names, given.processes, given.rounds))
    main(given.names, given.rounds)
