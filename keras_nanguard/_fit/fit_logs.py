"""The logs that the other callbacks of a guarded fit receive: without values that no step has
measured, and without those of refused steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._keras import losses as keras_losses, overrides

REFUSED = "refused_steps"
"""Key of the number of skipped steps in the epoch logs and in `History`."""

OWN = "nanguard/"
"""Prefix of the keys of all other logs of the guard."""

HUGEST = 3.4028234663852886e38
"""The largest float32. It is finite, as TerminateOnNaN requires, and not a plausible measurement.
"""


def numbers(logs: Any) -> dict[str, float]:
    """Return the logs that are single numbers; dicts of metrics are flattened, as in Keras."""
    found: dict[str, float] = {}
    for key, value in (logs or {}).items():
        if isinstance(value, Mapping):
            found.update(numbers(value))
        elif (number := number_of(value)) is not None:
            found[key] = number
    return found


def number_of(value: Any) -> float | None:
    """Return a log as a number, `None` if it is not a single one."""
    try:
        if np.ndim(value) or isinstance(value, (str, bytes)):
            return None
        plain = value.detach() if hasattr(value, "detach") else value  # PyTorch warns otherwise
        return float(plain)
    except Exception:  # noqa: BLE001  `None`, a ragged list, text in a tensor, a custom object
        return None


def has_finite(logs: Any, key: str) -> bool:
    """Whether there is a log of this name that is a finite number. A metric that is not finite
    beside a finite loss may be meant so, as 0/0 without positives.
    """
    number = number_of((logs or {}).get(key))
    return number is not None and math.isfinite(number)


def hide_from_progress_bar(callbacks: Any) -> None:
    """Hide the guard's logs from the progress bar, except for a number of refused steps."""
    for callback in getattr(callbacks, "callbacks", ()):
        is_bar = isinstance(callback, keras.callbacks.ProgbarLogger)
        if is_bar and "on_epoch_end" not in vars(callback):
            shown = functools.partial(_without_own, callback.on_epoch_end)
            overrides.set_instance(callback, "on_epoch_end", shown)


def _without_own(shown: Callable[..., Any], epoch: int, logs: Any = None) -> Any:
    others = (logs or {}).items()
    return shown(epoch, {k: v for k, v in others if not is_own(k) or (k == REFUSED and v)})


def is_own(key: str) -> bool:
    """Whether a log is one that the guard adds."""
    return key == REFUSED or key.startswith(OWN)


class FitLogs:
    """The logs of one fit.

    Attributes:
        known: the logs of the last committed step; `None` before the first one.
        shown: the logs that callbacks have received last: `known`, or those of `stand_in`.
        failed: names of the logs of an epoch whose trial has failed.
    """

    def __init__(self, model: Any):
        self.model = model
        self.known: dict[str, Any] | None = None
        self.shown: dict[str, Any] | None = None
        self.failed: frozenset[str] = frozenset()
        self._unmeasured: frozenset[str] = frozenset()

    @property
    def unmeasured(self) -> frozenset[str]:
        """Names of the logs among `shown` that no step has measured."""
        return frozenset() if self.shown is self.known else self._unmeasured

    def fail(self, logs: dict[str, Any]) -> None:
        """Replace all metrics of an epoch by their worst values.

        A metric gets NaN if Keras does not know whether it should grow.
        """
        rising = keras_losses.directed(self.model, "up")
        falling = {"loss", *keras_losses.directed(self.model, "down")}
        self.failed = frozenset(key for key, value in logs.items() if _is_float(value))
        for key in self.failed:
            falls = HUGEST if _is_named(key, falling) else math.nan
            logs[key] = -HUGEST if _is_named(key, rising) else falls

    def stand_in(self, logs: Mapping[str, Any], loss: float) -> dict[str, Any]:
        """Return the logs of a refused step, or of an epoch without committed steps.

        Args:
            logs: the logs that Keras computed. Only their names, and values that are not floats,
                are used.

        Each log gets the value of the last committed step. Without one, `loss` gets the loss of
        this step if it is finite. Everything else gets the worst value: `HUGEST`, or `-HUGEST` for
        a metric that should grow. Text and whole numbers do not change.
        """
        rising = keras_losses.directed(self.model, "up")
        unmeasured: set[str] = set()

        def one(key: str, value: Any, known: Any, grows: bool) -> Any:
            grows = grows or _is_named(key, rising)
            if isinstance(value, Mapping):
                inner = known if isinstance(known, Mapping) else {}
                return {n: one(n, part, inner.get(n), grows) for n, part in value.items()}
            if known is not None:
                return known
            if not _is_float(value):
                return value
            if key == "loss" and math.isfinite(loss):
                return loss
            unmeasured.add(key)
            worst = -HUGEST if grows else HUGEST
            return np.full(np.shape(value), worst) if np.ndim(value) else worst

        shown: dict[str, Any] = one("", logs, self.known, False)
        self.shown, self._unmeasured = shown, frozenset(unmeasured)
        return shown


def _is_named(key: str, names: Iterable[str]) -> bool:
    """Whether a log is that of one of these metrics, perhaps of an output or of a validation."""
    return any(key == name or key.endswith(f"_{name}") for name in names)


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return isinstance(value, float) or finiteness.is_float(name)
