"""Protects what the other callbacks of a guarded fit save and compare.

After a refused step the state is good. It can still become bad if other code writes it between two
steps, and a validation may give NaN. `ModelCheckpoint`, `EarlyStopping` and `ReduceLROnPlateau` use
the first value they receive as the best one, and no number is less than NaN.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_nanguard._fit.fit_logs import has_finite, is_own, number_of
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._keras.overrides import Overrides


class Firewall:
    """Protects the callbacks of a guarded fit, by changes to instances only.

    The whole state is checked before each save of a model. Callbacks of Keras that compare values
    do not use one that is not finite, or that no step has measured, as the best one. A `CSVLogger`
    that appends to a file receives those logs of the guard that the file has columns for. All other
    callbacks and History receive the logs unchanged.

    Args:
        session: its policy acts on the state before the file is written.
    """

    def __init__(self, session: Session, callbacks: Sequence[Any]):
        self._session, self._overrides = session, Overrides()
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger) and callback.append:
                self._overrides.set(callback, "on_epoch_end", _in_columns(callback))
        if not session.run.refuses:
            return
        own = [(session.run.model, "save"), (session.run.model, "save_weights")]
        for target, name in [*own, *keras_fitting.savers(callbacks)]:
            if hasattr(target, name):  # a trainer that is not a `keras.Model` may have none
                self._overrides.set(target, name, self._checked(getattr(target, name)))
        kinds = keras.callbacks
        saving = (kinds.ModelCheckpoint, getattr(kinds, "OrbaxCheckpoint", kinds.ModelCheckpoint))
        comparing = (kinds.EarlyStopping, kinds.ReduceLROnPlateau, *saving)
        for callback in callbacks:
            if not isinstance(callback, comparing) or not getattr(callback, "save_best_only", True):
                continue
            by_batches = getattr(callback, "save_freq", "epoch") != "epoch"
            for name in ("on_epoch_end", "on_train_batch_end")[: 1 + by_batches]:
                if name not in vars(callback):
                    self._overrides.set(callback, name, self._shielded(callback, name))

    def close(self) -> None:
        """Restore every method."""
        self._overrides.give_back()

    def _checked(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that saves the model only if its state is finite."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            run = self._session.run
            if bad := run.scan():
                self._session.seen_outside()
                bad = run.scan()
            if not bad:
                return save(*args, **kwargs)
            where = kwargs.get("filepath", args[0] if args else "")
            run.record_event("firewall", f"Not saved: {where}. The model has NaN or Inf.")
            why = "the model has NaN or Inf. An existing file is kept."
            run.log.line(f"NanGuard: did not save {where}: {why}")
            return None

        return guarded

    def _shielded(self, callback: Any, name: str) -> Callable[..., Any]:
        """Return a method of a callback that compares, without values that it may not use.

        They receive it, and a comparison that is never true: it counts as no improvement. If no
        step has measured it, their patience does not shrink either, nor for the first value, which
        is the best one in Keras. A metric beside a finite loss is treated as in Keras; see
        `has_finite`.
        """
        real = getattr(callback, name)
        first: int | None = None

        def guarded(number: int, logs: Any = None) -> Any:
            nonlocal first
            key, seen = getattr(callback, "monitor", None), self._session.logs
            value = logs.get(key) if logs and isinstance(key, str) else None
            known = number_of(value)
            unmeasured = seen.unmeasured | seen.failed
            compares = value is not None and number >= getattr(callback, "start_from_epoch", 0)
            if first is None and compares and key not in unmeasured:
                first = number
            loss = "val_loss" if str(key).startswith("val_") else "loss"
            usable = known is None or math.isfinite(known) or has_finite(logs, loss)
            if usable and key not in unmeasured:
                return real(number, logs)
            with Overrides() as changed:
                changed.set(callback, "monitor_op", lambda value, other: False)
                if getattr(callback, "best", None) is None:  # any value is better than none
                    changed.set(callback, "best", math.nan)
                if (key in unmeasured or number == first) and hasattr(callback, "patience"):
                    changed.set(callback, "patience", math.inf)
                    for name in {"wait", "cooldown_counter"} & vars(callback).keys():
                        changed.set(callback, name, getattr(callback, name))  # to restore it
                real(number, logs)

        return guarded


def _in_columns(log: Any) -> Callable[..., Any]:
    """Return `CSVLogger.on_epoch_end` for a file that exists: with the guard's logs of its header.

    It appends the logs of its first epoch in the order of their names, whatever the header.
    """
    real = log.on_epoch_end

    def guarded(epoch: int, logs: Any = None) -> Any:
        columns = [] if log.keys is not None else _header(log)
        if columns:
            own = {key: "NA" for key in columns if is_own(key)}
            logs = own | {k: v for k, v in (logs or {}).items() if k in own or not is_own(k)}
        return real(epoch, logs)

    return guarded


def _header(log: Any) -> list[str]:
    """Return the columns of the file of a `CSVLogger`, none if it is empty or not a local file."""
    with contextlib.suppress(OSError, csv.Error, UnicodeDecodeError), open(log.filename) as file:
        return next(csv.reader(file, delimiter=log.sep), [])
    return []
