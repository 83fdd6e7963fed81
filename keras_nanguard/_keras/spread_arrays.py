"""Arrays that are sharded over several processes, and the error when one of them does not
respond.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._core.errors import GuardError, expected


def whole(value: Any) -> Any:
    """Return an array that this process can read: one sharded over processes is gathered by all of
    them.
    """
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return value
    import jax
    from jax.experimental import multihost_utils

    with waiting_for("an array that is sharded over them", jax.process_count()):
        return multihost_utils.process_allgather(value, tiled=True)


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor or array of any backend as a NumPy array, without a copy where possible."""
    if hasattr(value, "detach"):
        # torch: NumPy supports neither its gradients, nor its devices, nor its bfloat16.
        value = value.detach().cpu()
        is_known = "bfloat16" not in str(value.dtype)
        return np.asarray(value.numpy() if is_known else keras.ops.convert_to_numpy(value))
    if hasattr(value, "numpy"):
        # TensorFlow: `.numpy()` copies a tensor; neither a mirrored variable nor a scalar of
        # bfloat16 converts to an array.
        value = value.read_value() if hasattr(value, "read_value") else value
        return np.asarray(value if len(value.shape) else value.numpy())
    return np.asarray(whole(value))  # of JAX: `convert_to_numpy` of Keras copies it


def rows_by_process(value: Any, rows: Sequence[int], here: int) -> dict[int, list[int]]:
    """Return rows of a batch by the rank of the process that has them, as indices into its own
    part.

    Args:
        value: an array of the batch, which may be sharded over processes.
        rows: indices into the first dimension of the whole array.
        here: the rank of this process, to which an array belongs that is not sharded.
    """
    if getattr(value, "is_fully_addressable", True):
        return {here: list(rows)}
    owners = np.full(value.shape[0], np.iinfo(int).max)
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        owners[index[0]] = np.minimum(owners[index[0]], device.process_index)
    found: dict[int, list[int]] = {}
    for row in rows:
        own = np.flatnonzero(owners == owners[row])
        found.setdefault(int(owners[row]), []).append(int(np.searchsorted(own, row)))
    return dict(sorted(found.items()))


@contextlib.contextmanager
def waiting_for(what: str, processes: int) -> Iterator[None]:
    """Name the exchange and the time in the error if another process has ended or does not respond.

    The backend sets the time limit: the process group on PyTorch, the coordination service on JAX.
    After that time it raises a `RuntimeError` that names neither the exchange nor the time.

    Args:
        what: a description of the exchange.
        processes: number of processes.

    Raises:
        GuardError: instead of the `RuntimeError`.
    """
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        seconds = (
            f"after {time.monotonic() - started:.1f} s of waiting for {what}:"
            f" {str(error).strip().partition(chr(10))[0]}"
        )
        remedy = (
            "Check the output of the other processes: one has ended, or runs a different number of"
            " steps. Then restart all of them."
        )
        raise GuardError(
            expected(f"an answer from all {processes} processes", f"none {seconds}", remedy)
        ) from error
