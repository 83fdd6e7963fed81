"""Between a running fit and the callbacks that keep a model: nothing that is not finite is saved or taken for the best.

A refused step leaves nothing bad to save. What is left are writes by someone else between two steps, and validation that
is not finite: `ModelCheckpoint`, `EarlyStopping` and `ReduceLROnPlateau` take the first value they see for the best one,
and no number is ever less than NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from keras_nanguard import _state
from keras_nanguard._fit._session import Session
from keras_nanguard._overrides import Overrides

__all__ = ["Firewall", "shielded"]


class Firewall:
    """Looks at the whole state before each save of a model, on the instance only, while a fit is guarded.

    Args:
        session: the host's half of the transaction; its policy heals what can be healed before the file is written.
        callbacks: the callbacks of the fit.
    """

    def __init__(self, session: Session, callbacks: Iterable[Any]):
        self.session = session
        self._overrides = Overrides()
        if not session.policy.refuse:
            return
        for target, name in [(session.model, "save"), (session.model, "save_weights"), *_state.savers(callbacks)]:
            if not hasattr(target, name):  # a trainer that is no `keras.Model`
                continue
            self._overrides.set(target, name, self._looked_at(getattr(target, name)))

    def close(self) -> None:
        """Give every method back."""
        self._overrides.give_back()

    def _looked_at(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self.session.scan("weights"):
                return save(*args, **kwargs)
            self.session.seen_outside([])
            if not self.session.scan("weights"):
                return save(*args, **kwargs)
            where = kwargs.get("filepath", args[0] if args else "")
            _state.print_line(f"NanGuard: not saved: {where}. The model holds NaN or Inf, and what was there before stays.")
            return None

        return guarded


@contextmanager
def shielded(callbacks: Iterable[Any], logs: Any) -> Iterator[None]:
    """Hide a metric that is not finite from the callbacks that would compare it with the best one so far.

    They say by themselves that they miss it, and keep what they know. All others, and History, see it as it is.
    """
    bad = {k for k, v in (logs or {}).items() if np.ndim(v) == 0 and not math.isfinite(float(v))}
    with Overrides() as overrides:
        for callback in callbacks if bad else ():
            if hasattr(callback, "monitor_op") and getattr(callback, "monitor", None) in bad and "on_epoch_end" not in vars(callback):
                overrides.set(callback, "on_epoch_end", _without(callback, callback.monitor))
        yield


def _without(callback: keras.callbacks.Callback, key: str) -> Callable[..., Any]:
    seen = callback.on_epoch_end

    def on_epoch_end(epoch: int, logs: Any = None) -> Any:
        return seen(epoch, {k: v for k, v in (logs or {}).items() if k != key})

    return on_epoch_end
