"""Finds the losses in the outputs of a step that never calls `compute_loss`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.verdict import logged_losses


def scalars(outputs: Any) -> list[Any]:
    """Return the scalars among the outputs of a loop's step, each of which counts as its loss."""
    leaves = keras.tree.flatten(outputs)
    return [keras.ops.convert_to_tensor(leaf) for leaf in leaves if _is_scalar(leaf)]


def losses_in_logs(logs: Any) -> list[Any]:
    """Return the losses among the logs of a Keras train step."""
    return scalars(logged_losses(logs))


def _is_scalar(leaf: Any) -> bool:
    if isinstance(leaf, (float, np.floating)):
        return True
    is_tensor = keras.ops.is_tensor(leaf) and getattr(leaf, "ndim", None) == 0
    return is_tensor and finiteness.is_real(leaf.dtype)
