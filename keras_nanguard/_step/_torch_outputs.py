"""What a refused step hands back in place of its outputs, on torch; see `_outputs`."""

from __future__ import annotations

from typing import Any

import keras
import torch

from keras_nanguard._step._verdict import logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _scalars(leaves: Any) -> list[Any]:
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim == 0 and leaf.is_floating_point()]
    return [*found, *(torch.tensor(leaf) for leaf in leaves if isinstance(leaf, float))]


class PlainOutputs:
    """For a step with no trainer: its outputs go back as they are, and each scalar among them counts as its loss."""

    def losses(self, outputs: Any) -> list[Any]:
        """Return the scalars among the outputs."""
        return _scalars(keras.tree.flatten(outputs))

    def committed(self, outputs: Any) -> Any:
        """Return the outputs."""
        return outputs

    refused = committed


class LogOutputs:
    """For a Keras train step: a dict of logs. A refused one gives those of the restored metrics.

    Where the step logs something that no metric holds, the value of the last committed step stands in.
    """

    def __init__(self, model: Any):
        self.model = model
        self.last: dict[str, Any] = {}
        self._held: dict[tuple[str, ...], bool] = {}

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars(keras.tree.flatten(logged_losses(outputs)))

    def committed(self, outputs: Any) -> Any:
        """Remember the logs that no metric holds, and return all."""
        if isinstance(outputs, dict) and not self._by_metrics(outputs):
            self.last = keras.tree.map_structure(_apart, outputs)
        return outputs

    def refused(self, outputs: Any) -> Any:
        """Return the results of the metrics as they are now, or the logs of the last committed step."""
        if outputs is None or (isinstance(outputs, dict) and self._by_metrics(outputs)):
            return self.last or self.model.get_metrics_result()
        if not isinstance(outputs, dict):
            return outputs
        if self.last:
            return {key: self.last.get(key, value) for key, value in outputs.items()}
        return keras.tree.map_structure(lambda v: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0.0, outputs)

    def _by_metrics(self, outputs: Any) -> bool:
        """Whether metrics hold all of these logs; asked once for each set of them."""
        keys = tuple(outputs)
        if keys not in self._held:
            self._held[keys] = set(self.model.get_metrics_result()) == set(outputs)
        return self._held[keys]


def _apart(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
