"""keras.distribution over two JAX processes: a bad row in the data of one of them, and both skip the step.

    python examples/two_processes.py

starts two processes of itself on this machine, each with one CPU device. On a cluster each machine runs one of them.
"""

# ruff: noqa: E402  JAX reads these settings when it is imported

from __future__ import annotations

import os
import socket
import subprocess
import sys

if len(sys.argv) == 1:  # start both processes and wait for them
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [subprocess.Popen([sys.executable, __file__, str(rank), str(port)]) for rank in range(2)]
    try:
        raise SystemExit(max(abs(process.wait(timeout=120)) for process in both))
    finally:
        for process in both:
            process.kill()  # if one of them still waits for the other

RANK, PORT = int(sys.argv[1]), sys.argv[2]
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

import keras
import numpy as np
from keras import distribution, layers

from keras_nanguard import NanGuard

BATCH, BAD, ROW = 32, 7, 20  # the second half of each batch belongs to the second process

distribution.initialize(job_addresses=f"127.0.0.1:{PORT}", num_processes=2, process_id=RANK)
distribution.set_distribution(distribution.DataParallel(auto_shard_dataset=False))

x = np.random.default_rng(0).standard_normal((30, BATCH, 8)).astype("float32")
y = x.sum(axis=2, keepdims=True)
broken = x.copy()
broken[BAD, ROW, 2] = np.nan
mine = slice(RANK * BATCH // 2, (RANK + 1) * BATCH // 2)


def train(inputs, callbacks=()):
    """Train on the part of these batches that belongs to this process; return the weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="tanh"), layers.BatchNormalization(), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    part = inputs[:, mine].reshape(-1, 8), y[:, mine].reshape(-1, 1)
    model.fit(*part, batch_size=BATCH // 2, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks))
    return [np.asarray(v.value) for v in model.trainable_variables]


guard = NanGuard()  # the first process prints
stock, guarded = train(broken), train(broken, [guard])
incident = guard.incidents[0]
if RANK == 0:
    print("bad row of the batch:", *incident.diagnosis.samples)
    print("weights after stock Keras:", "finite" if np.isfinite(stock[0]).all() else "NaN")
print(f"process {RANK}: steps skipped {[i.step for i in guard.incidents]}, sum of its weights {sum(w.sum() for w in guarded):.4f}")
if not all(np.isfinite(w).all() for w in guarded) or incident.diagnosis.samples != (ROW,):
    raise SystemExit("The guard did not help here.")
