"""Keeps callbacks from saving a model that is not finite, and from using NaN as a best value.

After a refused step the state is good. It can still become bad if other code writes it between two
steps, and a validation may give NaN. `ModelCheckpoint`, `EarlyStopping` and `ReduceLROnPlateau` use
the first value they receive as the best one, and no number is less than NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from keras_nanguard._backends import processes
from keras_nanguard._fit.epoch_logs import numbers
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._keras.overrides import Overrides

__all__ = ["Firewall", "shielded"]


class Firewall:
    """Checks the whole state before each save of a model during a guarded fit. It changes the
    instance only.

    Args:
        session: the host side of the transaction; its policy repairs the state before the file is
            written.
        callbacks: the callbacks of the fit.
    """

    def __init__(self, session: Session, callbacks: Iterable[Any]):
        self.session = session
        self._overrides = Overrides()
        if not session.policy.refuse:
            return
        callbacks = list(callbacks)
        own = [(session.model, "save"), (session.model, "save_weights")]
        for target, name in [*own, *keras_fitting.savers(callbacks)]:
            if hasattr(target, name):  # not so a trainer that is no `keras.Model`
                self._overrides.set(target, name, self._looked_at(getattr(target, name)))
        for callback in callbacks:
            by_batches = getattr(callback, "save_freq", "epoch") != "epoch"
            if by_batches and getattr(callback, "save_best_only", False):
                self._overrides.set(callback, "on_train_batch_end", _by_batches(callback, session))

    def close(self) -> None:
        """Restore every method."""
        self._overrides.give_back()

    def _looked_at(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self.session.scan("weights"):
                return save(*args, **kwargs)
            self.session.seen_outside([])
            if not self.session.scan("weights"):
                return save(*args, **kwargs)
            where = kwargs.get("filepath", args[0] if args else "")
            counts, text = self.session.counts, f"Not saved: {where}. The model has NaN or Inf."
            self.session.recorder.event("firewall", counts.step, counts.epoch, text)
            why = "the model has NaN or Inf. An existing file is kept."
            processes.print_line(f"NanGuard: did not save {where}: {why}")
            return None

        return guarded


@contextmanager
def shielded(
    callbacks: Iterable[Any], logs: Any, unmeasured: Container[str] = ()
) -> Iterator[None]:
    """Hide values that are not finite, or that no step has measured (`unmeasured`), from callbacks
    that compare.

    Callbacks that keep the best model find no better one, and the others warn that the metric is
    missing. All other callbacks and History receive the logs unchanged.
    """
    found = numbers(logs).items()
    bad = {key for key, value in found if not math.isfinite(value) or key in unmeasured}
    with Overrides() as overrides:
        for callback in callbacks if bad else ():
            compares = hasattr(callback, "monitor_op") and "on_epoch_end" not in vars(callback)
            if compares and getattr(callback, "monitor", None) in bad:
                overrides.set(callback, "on_epoch_end", _without(callback, callback.monitor))
        yield


def _without(callback: keras.callbacks.Callback, key: str) -> Callable[..., Any]:
    real = callback.on_epoch_end

    def on_epoch_end(epoch: int, logs: Any = None) -> Any:
        logs = {} if logs is None else logs
        if getattr(callback, "save_best_only", False):
            return _never_best(callback, key, logs, lambda seen: real(epoch, seen))
        seen = {k: v for k, v in logs.items() if k != key}
        result = real(epoch, seen)
        # ReduceLROnPlateau adds its rate for those that come after it.
        logs.update({k: v for k, v in seen.items() if k not in logs})
        return result

    return on_epoch_end


def _by_batches(callback: Any, session: Session) -> Callable[..., Any]:
    """Return `on_train_batch_end` for a callback that keeps the best model and compares within an
    epoch.
    """
    real = callback.on_train_batch_end

    def on_train_batch_end(batch: int, logs: Any = None) -> Any:
        key = callback.monitor
        if key in session.logs.unmeasured:
            return _never_best(callback, key, logs or {}, lambda seen: real(batch, seen))
        return real(batch, logs)

    return on_train_batch_end


def _never_best(callback: Any, key: str, logs: Any, run: Callable[[Any], Any]) -> Any:
    """Run a callback that keeps the best model in such a way that it finds no better one. Its file
    name may contain the metric.

    Without the metric it would always save, and with NaN it would save if it has no best value yet.
    """
    comparison, best = callback.monitor_op, callback.best
    callback.monitor_op = lambda value, other: False
    callback.best = math.nan if best is None else best
    try:
        return run({**logs, key: math.nan})
    finally:
        callback.monitor_op, callback.best = comparison, best
