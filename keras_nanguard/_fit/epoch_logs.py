"""Logs as callbacks may see them: which of them are numbers, and what stands where nothing was measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from math import isfinite, nan
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._keras import layers as keras_layers, overrides

__all__ = ["HUGEST", "OWN", "REFUSED", "Logs", "hide_from_progress_bar", "numbers"]

REFUSED = "refused_steps"
"""Key in the epoch logs and in `History` under which the left-out steps of an epoch stand beside its means."""

OWN = "nanguard/"
"""Beginning of the keys of all other numbers that the guard adds to the epoch logs."""

HUGEST = 3.4028234663852886e38
"""The largest number of float32: finite, as TerminateOnNaN wants it, and no measurement that anybody takes for one."""


def numbers(logs: Any) -> dict[str, float]:
    """Return the logs that are single numbers. The dict that a metric may have as its result is flattened, as Keras does it."""
    found: dict[str, float] = {}
    for key, value in (logs or {}).items():
        if isinstance(value, Mapping):
            found.update(numbers(value))
        elif np.ndim(value) == 0 and not isinstance(value, (str, bytes)):
            try:
                found[key] = float(value.detach() if hasattr(value, "detach") else value)  # PyTorch warns of a gradient
            except (TypeError, ValueError):  # text in a tensor, `None`, an object of the user's
                continue
    return found


def hide_from_progress_bar(callbacks: Any) -> None:
    """Leave what the guard adds to the epoch logs out of the progress bar of a `CallbackList`, refused steps apart where there are any."""
    for callback in getattr(callbacks, "callbacks", ()):
        if isinstance(callback, keras.callbacks.ProgbarLogger) and "on_epoch_end" not in vars(callback):
            overrides.set_instance(callback, "on_epoch_end", functools.partial(_without_own, callback.on_epoch_end))


def _without_own(shown: Callable[..., Any], epoch: int, logs: Any = None) -> Any:
    return shown(epoch, {key: value for key, value in (logs or {}).items() if not key.startswith(OWN) and (key != REFUSED or value)})


class Logs:
    """The logs of one fit.

    Attributes:
        known: those of the last committed step; `None` before there is one.
        shown: those that callbacks have seen last.
        unmeasured: the names of those among `shown` that no step has measured.
        failed: the names of those of an epoch whose trial has failed.
    """

    def __init__(self, model: Any):
        self.model = model
        self.known: Any = None
        self.shown: Any = None
        self.unmeasured: frozenset[str] = frozenset()
        self.failed: frozenset[str] = frozenset()

    @property
    def no_best(self) -> frozenset[str]:
        """The names of those that no callback may take for a best value."""
        return self.unmeasured | self.failed

    def fail(self, logs: dict[str, Any]) -> None:
        """Put the worst numbers in place of all metrics of an epoch, whatever the state that is left behind would measure.

        NaN for a metric of which Keras does not know whether it is to grow.
        """
        rising, falling = keras_layers.rising(self.model), {"loss", *keras_layers.falling(self.model)}
        found = [key for key, value in logs.items() if _is_float(value)]
        for key in found:
            ends = {key.removeprefix("val_"), *(name for name in rising | falling if key.endswith(f"_{name}"))}
            logs[key] = -HUGEST if ends & rising else HUGEST if ends & falling else nan
        self.failed = frozenset(found)

    def measured(self, logs: Any) -> Any:
        """Take over the logs of a committed step, or of metrics that hold some; returns them."""
        self.known = self.shown = logs
        self.unmeasured = frozenset()
        return logs

    def stand_in(self, logs: Mapping[str, Any], loss: float = nan) -> dict[str, Any]:
        """Return what stands for the logs of a step that was refused, or of an epoch in which none has committed.

        Args:
            logs: what would be logged; only the names, and what is no float, count.
            loss: the loss that the step computed.

        For each log the last committed step's value stands, else for `loss` what this step computed, if it is finite, else the
        worst number: `HUGEST`, or `-HUGEST` for a metric that is to grow. Text and whole numbers cannot be bad and stay.
        """
        rising = keras_layers.rising(self.model)
        unmeasured: set[str] = set()

        def one(key: str, value: Any, known: Any, grows: bool) -> Any:
            grows = grows or any(key == name or key.endswith(f"_{name}") for name in rising)
            if isinstance(value, Mapping):
                inner = known if isinstance(known, Mapping) else {}
                return {name: one(name, part, inner.get(name), grows) for name, part in value.items()}
            if known is not None or not _is_float(value):
                return value if known is None else known
            if key == "loss" and isfinite(loss):
                return loss
            unmeasured.add(key)
            worst = -HUGEST if grows else HUGEST
            return np.full(np.shape(value), worst) if np.ndim(value) else worst

        self.shown = one("", logs, self.known, False)
        self.unmeasured = frozenset(unmeasured)
        shown: dict[str, Any] = self.shown
        return shown


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return isinstance(value, float) or finiteness.is_float(str(getattr(dtype, "name", dtype)).rpartition(".")[2])
