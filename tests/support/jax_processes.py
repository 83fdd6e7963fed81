"""Processes that train together on JAX.

`python jax_processes.py RANK PORT DIRECTORY COUNT [model] RUN ...`

With `model` each process has two devices, over which a kernel is also spread. Each run has a folder
with its name in the directory. Prints one line of JSON at the end of each run.
"""

# ruff: noqa: E402  what JAX reads when it starts is set before it is imported

from __future__ import annotations

import contextlib
import json
import os
import sys

RANK, PORT, DIRECTORY, COUNT, *RUNS = sys.argv[1:]
RANK, COUNT = int(RANK), int(COUNT)
PARALLEL = RUNS[0] == "model" and bool(RUNS.pop(0))
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={2 if PARALLEL else 1}"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

from unittest import mock

import jax
import keras
import numpy as np
from keras import distribution, layers

from keras_nanguard import NanGuard
from keras_nanguard._core import memory
from keras_nanguard.testing import inject

BATCH, STEPS = 16, 24
BAD = {3: 1, 7: 14}
"""Bad batch and its row: one row of the first process, one of the last."""

LAST = COUNT - 1
ROWS = BATCH // COUNT
"""Rows of the batch of each process."""

DISK = {"preset": "recover", "snapshot": {"storage": "disk", "every": 4, "verify_after": 1, "keep": 3}}


class Die(keras.callbacks.Callback):
    """Ends the last process without any message."""

    def on_train_batch_end(self, batch, logs=None):
        if RANK == LAST and batch == 13:
            os._exit(9)


class Spoils(keras.callbacks.Callback):
    """Writes NaN into a variable, only in the copy of the first process."""

    def __init__(self, moment=False, statistic=False):
        super().__init__()
        self.moment, self.statistic = moment, statistic

    def on_train_batch_end(self, batch, logs=None):
        if batch == 9:
            self.spoil()

    def spoil(self):
        self.model.jax_state_sync()
        variable = self.model.layers[-1].kernel
        if self.moment:
            optimizer = self.model.optimizer
            variable = optimizer._momentums[optimizer._get_variable_index(variable)]
        if self.statistic:
            variable = self.model.layers[1].moving_mean
        value = variable.value
        parts = [np.array(shard.data) for shard in value.addressable_shards]
        if RANK == 0:
            for part in parts:
                part[0] = np.nan
        devices = [shard.device for shard in value.addressable_shards]
        placed = [jax.device_put(*pair) for pair in zip(parts, devices)]
        made = jax.make_array_from_single_device_arrays(value.shape, value.sharding, placed)
        variable._value = made


class SpoilsEpoch(keras.callbacks.Callback):
    """Does the same between two epochs, so that steps start before verdicts are read."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            spoils = Spoils(moment=True)
            spoils.set_model(self.model)
            spoils.spoil()


class Waits(keras.callbacks.Callback):
    """Is called for each batch, so that each verdict is read before the next step."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def data(what):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, BATCH, 8)).astype("float32")
    y = x.sum(2, keepdims=True)
    kept = [i for i in range(STEPS) if what not in ("plain", "without") or i not in BAD]
    if what in ("bad", "waited", "endless"):
        for batch, row in BAD.items() if what != "endless" else ((b, 3) for b in range(STEPS)):
            x[batch, row, 2] = np.nan
    mine = slice(RANK * ROWS, (RANK + 1) * ROWS)
    if (what == "batch" and RANK == LAST) or what == "all":
        x[list(BAD), mine] = np.nan
    if what == "three" and RANK == 0:
        x[9:12, mine] = np.nan
    return x[kept][:, mine].reshape(-1, 8), y[kept][:, mine].reshape(-1, 1)


def model():
    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="tanh", name="hidden"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )
    net.compile(keras.optimizers.Adam(1e-2), "mse")
    return net


def placed():
    """Return how batches, and with `model` also a kernel, are spread over the devices."""
    devices = distribution.list_devices()
    if not PARALLEL:
        return distribution.DataParallel(devices=devices, auto_shard_dataset=False)
    layout = distribution.LayoutMap(distribution.DeviceMesh((2, 2), ("batch", "model"), devices))
    layout[".*hidden/kernel"] = (None, "model")
    return distribution.ModelParallel(layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False)


def main():
    distribution.initialize(job_addresses=f"127.0.0.1:{PORT}", num_processes=COUNT, process_id=RANK)
    for what in RUNS:
        print(json.dumps(reported(what)), flush=True)


def done(incident):
    """Return the performed actions."""
    return [outcome.action for outcome in incident.outcomes if outcome.status == "done"]


def numbers(variable):
    """Return the copy of a variable in this process."""
    parts = (np.asarray(shard.data) for shard in variable.value.addressable_shards)
    return [float(number) for part in parts for number in part.astype("float64").ravel()]


def reported(what):
    """Train in one of the ways, independently of earlier runs, and report the result."""
    keras.backend.clear_session(free_memory=False)
    distribution.set_distribution(placed())
    net, (x, y) = model(), data(what)
    on_disk = what in ("killed", "resumed", "whole")
    folder = os.path.join(DIRECTORY, "killed" if what == "resumed" else what)
    preset = DISK if on_disk else "observe" if what == "observed" else "recover"
    guard = NanGuard(preset, directory=folder, verbose=1, resume=what == "resumed")
    others = {"killed": Die, "waited": Waits, "weights": Spoils, "ahead": SpoilsEpoch}
    others["slots"] = others["observed"] = lambda: Spoils(moment=True)
    others["statistics"] = lambda: Spoils(statistic=True)
    callbacks = [] if what == "plain" else [guard, *([others[what]()] if what in others else [])]
    fault = contextlib.nullcontext()
    if what in ("rollback", "memory"):
        fault = inject(net, site="gradients", step=5, count=3)
    short = mock.patch.multiple(memory, SMALL=0, room=lambda root=None: 0.0)
    with fault, short if what == "memory" and RANK == LAST else contextlib.nullcontext():
        options = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        history = net.fit(x, y, epochs=2 if what == "ahead" else 1, **options)
    return {
        "loss": history.history["loss"],
        "weights": [numbers(v) for v in net.trainable_variables],
        "state": [numbers(v) for v in (*net.non_trainable_variables, *net.optimizer.variables)],
        "spread": [part for part in net.layers[0].kernel.value.sharding.spec if part],
        "rate": float(np.asarray(net.optimizer.learning_rate)),
        "incidents": [
            [i.step, i.diagnosis.cause, list(i.diagnosis.samples), done(i)] for i in guard.incidents
        ],
        "snapshots": [s.step for s in guard.session.run.ring.snapshots] if guard.session else [],
        "findings": [[str(f) for f in i.findings] for i in guard.incidents],
        "evidence": [list(i.diagnosis.evidence) for i in guard.incidents],
        "folder": guard.session.run.directory if guard.session is not None else "",
    }


main()
