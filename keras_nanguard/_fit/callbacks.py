"""The logs and models that the other callbacks of a guarded fit receive.

They receive logs without values that no step has measured, and no model to save that is not finite.
After a refused step the state is good. It can still become bad if other code writes it between two
steps, and a validation may give NaN. `ModelCheckpoint`, `EarlyStopping` and `ReduceLROnPlateau` use
the first value they receive as the best one, and no number is less than NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import finiteness
from keras_nanguard._keras import fitting as keras_fitting, layers as keras_layers, overrides
from keras_nanguard._keras.overrides import Overrides

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
            except (TypeError, ValueError):  # text in a tensor, `None`, a custom object
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
        known: the logs of the last committed step; `None` before the first one.
        shown: the logs that callbacks have received last.
        unmeasured: names of the logs among `shown` that no step has measured.
        failed: names of the logs of an epoch whose trial has failed.
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
        rising = keras_layers.directed(self.model, "up")
        falling = {"loss", *keras_layers.directed(self.model, "down")}
        found = [key for key, value in logs.items() if _is_float(value)]
        for key in found:
            ends = {name for name in rising | falling if key.endswith(f"_{name}")}
            ends.add(key.removeprefix("val_"))
            logs[key] = -HUGEST if ends & rising else HUGEST if ends & falling else math.nan
        self.failed = frozenset(found)

    def stand_in(self, logs: Mapping[str, Any], loss: float = math.nan) -> dict[str, Any]:
        """Return the logs of a refused step, or of an epoch without committed steps.

        Args:
            logs: the logs that Keras computed. Only their names, and values that are not floats,
                are used.
            loss: the loss of the step.

        Each log gets the value of the last committed step. Without one, `loss` gets the loss of
        this step if it is finite. Everything else gets the worst value: `HUGEST`, or `-HUGEST` for
        a metric that should grow. Text and whole numbers do not change.
        """
        rising = keras_layers.directed(self.model, "up")
        unmeasured: set[str] = set()

        def one(key: str, value: Any, known: Any, grows: bool) -> Any:
            grows = grows or any(key == name or key.endswith(f"_{name}") for name in rising)
            if isinstance(value, Mapping):
                inner = known if isinstance(known, Mapping) else {}
                return {n: one(n, part, inner.get(n), grows) for n, part in value.items()}
            if known is not None or not _is_float(value):
                return value if known is None else known
            if key == "loss" and math.isfinite(loss):
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


class Firewall:
    """Checks the whole state before each save of a model during a guarded fit. It changes the
    instance only.

    Args:
        session: the `Session`; its policy acts on the state before the file is written.
        callbacks: the callbacks of the fit.
    """

    def __init__(self, session: Any, callbacks: Sequence[Any]):
        self._session, self._overrides = session, Overrides()
        if not session.run.policy.refuse:
            return
        own = [(session.run.model, "save"), (session.run.model, "save_weights")]
        for target, name in [*own, *keras_fitting.savers(callbacks)]:
            if hasattr(target, name):  # a trainer that is not a `keras.Model` may have none
                self._overrides.set(target, name, self._looked_at(getattr(target, name)))
        for callback in callbacks:
            by_batches = getattr(callback, "save_freq", "epoch") != "epoch"
            if by_batches and getattr(callback, "save_best_only", False):
                guarded = _by_batches(callback, session.logs)
                self._overrides.set(callback, "on_train_batch_end", guarded)

    def close(self) -> None:
        """Restore every method."""
        self._overrides.give_back()

    def _looked_at(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            session = self._session
            if not session.run.scan("weights"):
                return save(*args, **kwargs)
            session.seen_outside([])
            if not session.run.scan("weights"):
                return save(*args, **kwargs)
            where = kwargs.get("filepath", args[0] if args else "")
            text = f"Not saved: {where}. The model has NaN or Inf."
            session.run.event("firewall", text)
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


def _by_batches(callback: Any, known: Logs) -> Callable[..., Any]:
    """Return `on_train_batch_end` for a callback that keeps the best model and compares within an
    epoch.
    """
    real = callback.on_train_batch_end

    def on_train_batch_end(batch: int, logs: Any = None) -> Any:
        key = callback.monitor
        if key in known.unmeasured:
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
