"""The limits of the library that tests change, and the place of each."""

from __future__ import annotations

import importlib

LIMITS = {
    "bytes that any file may declare": "_files.formats.limits.BOMB_FLOOR",
    "times its size that a file may declare": "_files.formats.limits.MAX_EXPANSION",
    "seconds until a reader hangs": "_files.isolated.STALL_SECONDS",
    "seconds until a reader is abandoned": "_files.isolated.EXIT_SECONDS",
    "seconds of trials": "_fit.divergence.SECONDS",
    "share of the time of trials": "_fit.divergence.SHARE",
    "values of a chunk of the row search": "_fit.bad_data._CHUNK",
    "steps of a recording": "_recording.memory.MAX_STEPS",
    "seconds that a recording waits for a lock": "_recording.writer.LOCKED",
    "seconds that a fit waits for its recording": "_recording.writer.WAIT",
    "rows of a table that are read": "_recording.reading.MAX_ROWS",
    "bundles of a directory": "_files.bundles.MAX_BUNDLES",
    "bytes of the configuration in a bundle": "_diagnose.bundle.MAX_JSON",
    "bytes of a bundle": "_files.bundles.MAX_BYTES",
    "bytes of remembered batches": "_backends.shared.batches.MAX_BYTES",
    "remembered batches": "_fit.steps.MAX_BATCHES",
    "reports of a TensorFlow program": "_backends.tensorflow.step.CAPACITY",
    "bytes of a large TensorFlow update": "_backends.tensorflow.updates.LARGE",
    "entries of a sparse batch made dense": "_keras.arrays.MAX_SPREAD",
    "bytes that are allocated unchecked": "_core.memory.SMALL",
    "bytes that are left free": "_core.memory.RESERVE",
}
"""Paths within `keras_nanguard`; the fixture `set_limit` sets one of them for one test."""


def limit(name: str) -> float:
    """Return the value of a limit."""
    module, _, constant = LIMITS[name].rpartition(".")
    return getattr(importlib.import_module(f"keras_nanguard.{module}"), constant)
