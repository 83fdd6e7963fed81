"""Logs for callbacks: which of them are numbers, and what replaces unmeasured values."""

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
"""Key of the number of skipped steps in the epoch logs and in `History`."""

OWN = "nanguard/"
"""Prefix of the keys of all other logs of the guard."""

HUGEST = 3.4028234663852886e38
"""The largest float32. It is finite, as TerminateOnNaN requires, and not a plausible measurement.
"""


def numbers(logs: Any) -> dict[str, float]:
    """Return the logs that are single numbers. A dict as the result of a metric is flattened, as in
    Keras.
    """
    found: dict[str, float] = {}
    for key, value in (logs or {}).items():
        if isinstance(value, Mapping):
            found.update(numbers(value))
        elif np.ndim(value) == 0 and not isinstance(value, (str, bytes)):
            plain = value.detach() if hasattr(value, "detach") else value  # PyTorch warns otherwise
            try:
                found[key] = float(plain)
            except (TypeError, ValueError):  # text in a tensor, `None`, an object of the user's
                continue
    return found


def hide_from_progress_bar(callbacks: Any) -> None:
    """Hide the guard's logs from the progress bar of a `CallbackList`, except for a nonzero number
    of refused steps.
    """
    for callback in getattr(callbacks, "callbacks", ()):
        is_bar = isinstance(callback, keras.callbacks.ProgbarLogger)
        if is_bar and "on_epoch_end" not in vars(callback):
            shown = functools.partial(_without_own, callback.on_epoch_end)
            overrides.set_instance(callback, "on_epoch_end", shown)


def _without_own(shown: Callable[..., Any], epoch: int, logs: Any = None) -> Any:
    others = {k: v for k, v in (logs or {}).items() if not k.startswith(OWN)}
    if not others.get(REFUSED):
        others.pop(REFUSED, None)
    return shown(epoch, others)


class Logs:
    """The logs of one fit.

    Attributes:
        known: those of the last committed step; `None` before the first one.
        shown: those that callbacks have received last.
        unmeasured: names of those among `shown` that no step has measured.
        failed: names of those of an epoch whose trial has failed.
    """

    def __init__(self, model: Any):
        self.model = model
        self.known: Any = None
        self.shown: Any = None
        self.unmeasured: frozenset[str] = frozenset()
        self.failed: frozenset[str] = frozenset()

    @property
    def no_best(self) -> frozenset[str]:
        """Names of the logs that no callback may use as a best value."""
        return self.unmeasured | self.failed

    def fail(self, logs: dict[str, Any]) -> None:
        """Replace all metrics of an epoch by their worst values.

        A metric gets NaN if Keras does not know whether it should grow.
        """
        rising = keras_layers.rising(self.model)
        falling = {"loss", *keras_layers.falling(self.model)}
        found = [key for key, value in logs.items() if _is_float(value)]
        for key in found:
            ends = {name for name in rising | falling if key.endswith(f"_{name}")}
            ends.add(key.removeprefix("val_"))
            logs[key] = -HUGEST if ends & rising else HUGEST if ends & falling else nan
        self.failed = frozenset(found)

    def measured(self, logs: Any) -> Any:
        """Store and return the logs of a committed step."""
        self.known = self.shown = logs
        self.unmeasured = frozenset()
        return logs

    def stand_in(self, logs: Mapping[str, Any], loss: float = nan) -> dict[str, Any]:
        """Return the logs of a refused step, or of an epoch without committed steps.

        Args:
            logs: the logs that Keras computed. Only their names, and values that are not floats,
                are used.
            loss: the loss of the step.

        Each log gets the value of the last committed step. Without one, `loss` gets the loss of
        this step if it is finite. Everything else gets the worst value: `HUGEST`, or `-HUGEST` for
        a metric that should grow. Text and whole numbers do not change.
        """
        rising = keras_layers.rising(self.model)
        unmeasured: set[str] = set()

        def one(key: str, value: Any, known: Any, grows: bool) -> Any:
            grows = grows or any(key == name or key.endswith(f"_{name}") for name in rising)
            if isinstance(value, Mapping):
                inner = known if isinstance(known, Mapping) else {}
                return {n: one(n, part, inner.get(n), grows) for n, part in value.items()}
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
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return isinstance(value, float) or finiteness.is_float(name)
