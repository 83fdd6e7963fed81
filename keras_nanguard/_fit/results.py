"""Results of `evaluate` and `predict` that are not finite: finds the bad batch and the cause.

Keras passes no batch to these callbacks. After a call that ended in NaN, its data are therefore
read once more, up to the first bad batch. A healthy call costs nothing. Data from a generator
cannot be read twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._fit.epoch_logs import numbers
from keras_nanguard._keras import fitting as keras_fitting, variables as keras_variables

__all__ = ["bad_arrays", "bad_metrics", "diagnosed", "one_batch"]

BATCHES = 64
"""Maximum number of batches that are read."""


def bad_metrics(logs: Any) -> list[Finding]:
    """Return a finding for each metric of an evaluation that is not finite."""
    return [
        Finding("validation", "nonfinite", k, value=v)
        for k, v in numbers(logs).items()
        if not math.isfinite(v)
    ]


def bad_arrays(logs: Any) -> list[Finding]:
    """Return a finding for the first array of predictions that is not finite."""
    for name, array in keras_variables.named_arrays((logs or {}).get("outputs")):
        nan, inf, size = finiteness.counts(array)
        if nan or inf:
            return [Finding("predictions", "nonfinite", name, nan, inf, size)]
    return []


@np.errstate(all="ignore")  # the values are not finite
def diagnosed(model: Any, says: bool = False) -> Diagnosis | None:
    """Return the diagnosis of the running `evaluate` or `predict`, or `None` if no batch is bad.

    Never raises. `says`: whether to print a line if this takes longer than a second.
    """
    from keras_nanguard._diagnose.notice import when_slow

    with when_slow("NanGuard: diagnosing a result that is not finite ..." if says else ""):
        return _diagnosed(model)


def _diagnosed(model: Any) -> Diagnosis | None:
    from keras_nanguard._diagnose.examine import diagnose

    try:
        for x, y, weights in itertools.islice(_batches(), BATCHES):
            predicted = model(x, training=False)
            if not _finite(predicted):
                return diagnose(model, x, None, None).diagnosis
            if y is None or not model.compiled:
                continue
            if not _finite(model.compute_loss(x, y, predicted, weights)):
                return diagnose(model, x, y, weights).diagnosis
    except Exception as error:  # noqa: BLE001
        why = f"The diagnosis failed: {type(error).__name__}: {error}"
        return Diagnosis("unknown", evidence=(why,))
    return None


def one_batch() -> tuple[Any, Any, Any] | None:
    """Return `(x, y, sample_weight)` of the first batch of the running `evaluate`; `None` if
    workers prepare the data.
    """
    adapter = keras_fitting.running_data()
    return None if getattr(adapter, "enqueuer", None) is not None else next(_batches(), None)


def _batches() -> Iterator[tuple[Any, Any, Any]]:
    adapter = keras_fitting.running_data()
    if adapter is None:
        return
    for data in adapter.get_numpy_iterator():
        data = tuple(data) if isinstance(data, (list, tuple)) else (data,)
        yield keras.utils.unpack_x_y_sample_weight(data)


def _finite(value: Any) -> bool:
    arrays = [keras.ops.convert_to_numpy(t) for t in keras.tree.flatten(value)]
    return all(finiteness.is_finite(array) for array in arrays)
