"""Fault injection on PyTorch: around the train function, which runs one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_nanguard._backends.shared.faults import FaultHook


class Hook(FaultHook):
    """One fault, injected into every train step of one model."""

    def _wrap(self) -> None:
        model, real = self.model, self.model.make_train_function

        def make(force: bool = False) -> Any:
            if model.train_function is None or force:
                real(force=force)
                model.train_function = self._around(model.train_function)
            return model.train_function

        self.set(model, "make_train_function", make)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def train_function(data: Any) -> Any:
            self.seen += 1
            with torch.no_grad():
                data = [self._spoiled(data[0], self._now), *data[1:]]
                self._write(self._now)
            with self._inside():
                return function(data)

        return train_function
