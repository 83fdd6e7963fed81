"""Results of `evaluate` and `predict` that are not finite, and their diagnosis.

Keras passes no batch to these callbacks. After a call that ended in NaN, its data are therefore
read once more, up to the first bad batch. A healthy call costs nothing. Data from a generator
cannot be read twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._fit.fit_logs import numbers
from keras_nanguard._keras import arrays as keras_arrays, fitting as keras_fitting

BATCHES = 64
"""Maximum number of batches that are read to find the cause of a bad result."""


def bad_metrics(logs: Any) -> list[Finding]:
    """Return a finding for each metric of an evaluation that is not finite."""
    return [
        Finding("validation", "nonfinite", k, value=v)
        for k, v in numbers(logs).items()
        if not math.isfinite(v)
    ]


def bad_arrays(logs: Any) -> list[Finding]:
    """Return a finding for the first array of predictions that is not finite."""
    for name, array in keras_arrays.named_arrays((logs or {}).get("outputs")):
        nan, inf, size = finiteness.counts(array)
        if nan or inf:
            return [Finding("predictions", "nonfinite", name, nan, inf, size)]
    return []


@np.errstate(all="ignore")  # the values are not finite
def diagnosed(model: Any, variables: Sequence[Any]) -> Diagnosis | None:
    """Return the diagnosis of the running `evaluate` or `predict`, or `None` if no batch is bad.

    At the end the model and all random generators are as before.

    Args:
        variables: those that calling it may write.

    Raises:
        StateLostError: if the variables could not be restored.
    """
    from keras_nanguard._backends.shared.replay import preserved
    from keras_nanguard._diagnose.diagnose import diagnose

    try:
        with preserved(variables, model):
            for x, y, weights in itertools.islice(_batches(), BATCHES):
                predicted = model(x, training=False)
                if not _finite(predicted):
                    return diagnose(model, x, None, None).diagnosis
                is_scored = y is not None and model.compiled
                if is_scored and not _finite(model.compute_loss(x, y, predicted, weights)):
                    return diagnose(model, x, y, weights).diagnosis
        return None
    except StateLostError:
        raise
    except Exception as error:  # noqa: BLE001
        why = f"The diagnosis failed: {type(error).__name__}: {error}"
        return Diagnosis("unknown", evidence=(why,))


def one_batch() -> tuple[Any, Any, Any] | None:
    """Return `(x, y, sample_weight)` of the first batch of the running `evaluate`; `None` if it
    does not evaluate arrays. Reading other data once more may change what it yields next.
    """
    return next(_batches(), None) if keras_fitting.evaluates_arrays() else None


def _batches() -> Iterator[tuple[Any, Any, Any]]:
    adapter = keras_fitting.running_data()
    if adapter is None:
        return
    for data in adapter.get_numpy_iterator():
        data = tuple(data) if isinstance(data, (list, tuple)) else (data,)
        yield keras.utils.unpack_x_y_sample_weight(data)


def _finite(value: Any) -> bool:
    tensors = keras.tree.flatten(value)
    return all(finiteness.is_finite(keras.ops.convert_to_numpy(tensor)) for tensor in tensors)
