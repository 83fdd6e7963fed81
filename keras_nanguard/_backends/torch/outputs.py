"""Finds the loss in the outputs of a step on torch."""

from __future__ import annotations

from typing import Any

import keras
import torch

from keras_nanguard._core.verdict import logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _scalars(leaves: Any) -> list[Any]:
    found = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 0 and leaf.is_floating_point()
    ]
    return [*found, *(torch.tensor(leaf) for leaf in leaves if isinstance(leaf, float))]


class PlainOutputs:
    """For a step without a trainer: its outputs are returned unchanged, and each scalar among them
    counts as its loss.
    """

    def losses(self, outputs: Any) -> list[Any]:
        """Return the scalars among the outputs."""
        return _scalars(keras.tree.flatten(outputs))


class LogOutputs(PlainOutputs):
    """For a Keras train step: a dict of logs. The host replaces those of a refused step."""

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars(keras.tree.flatten(logged_losses(outputs)))
