"""The logs and models that the other callbacks of a guarded fit receive.

They receive logs without values that no step has measured, and no model to save that is not finite.
After a refused step the state is good. It can still become bad if other code writes it between two
steps, and a validation may give NaN. `ModelCheckpoint`, `EarlyStopping` and `ReduceLROnPlateau` use
the first value they receive as the best one, and no number is less than NaN.

Results of `evaluate` and `predict` that are not finite are found as well. Keras passes no batch to
these callbacks. After a call that ended in NaN, its data are therefore read once more, up to the
first bad batch. A healthy call costs nothing. Data from a generator cannot be read twice.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._keras import (
    fitting as keras_fitting,
    layers as keras_layers,
    overrides,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import Overrides

REFUSED = "refused_steps"
"""Key of the number of skipped steps in the epoch logs and in `History`."""

OWN = "nanguard/"
"""Prefix of the keys of all other logs of the guard."""

HUGEST = 3.4028234663852886e38
"""The largest float32. It is finite, as TerminateOnNaN requires, and not a plausible measurement.
"""

BATCHES = 64
"""Maximum number of batches that are read to find the cause of a bad result."""


def numbers(logs: Any) -> dict[str, float]:
    """Return the logs that are single numbers; dicts of metrics are flattened, as in Keras."""
    found: dict[str, float] = {}
    for key, value in (logs or {}).items():
        if isinstance(value, Mapping):
            found.update(numbers(value))
        elif (number := _number(value)) is not None:
            found[key] = number
    return found


def _number(value: Any) -> float | None:
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
    number = _number((logs or {}).get(key))
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
    return shown(epoch, {k: v for k, v in others if not _is_own(k) or (k == REFUSED and v)})


def _is_own(key: str) -> bool:
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
        self.known: Any = None
        self.shown: Any = None
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
        rising = keras_layers.directed(self.model, "up")
        falling = {"loss", *keras_layers.directed(self.model, "down")}
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
        rising = keras_layers.directed(self.model, "up")
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


class Firewall:
    """Protects the callbacks of a guarded fit, by changes to instances only.

    The whole state is checked before each save of a model. Callbacks of Keras that compare values
    do not use one that is not finite, or that no step has measured, as the best one. A `CSVLogger`
    that appends to a file receives those logs of the guard that the file has columns for. All other
    callbacks and History receive the logs unchanged.

    Args:
        session: the `Session`; its policy acts on the state before the file is written.
    """

    def __init__(self, session: Any, callbacks: Sequence[Any]):
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
            run.recording.event("firewall", f"Not saved: {where}. The model has NaN or Inf.")
            why = "the model has NaN or Inf. An existing file is kept."
            run.say(f"NanGuard: did not save {where}: {why}")
            return None

        return guarded

    def _shielded(self, callback: Any, name: str) -> Callable[..., Any]:
        """Return a method of a callback that compares, without values that it may not use.

        They receive it, and a comparison that is never true: it counts as no improvement. If no
        step has measured it, their patience does not shrink either. A metric beside a finite loss
        is treated as in Keras; see `has_finite`.
        """
        real = getattr(callback, name)
        first: int | None = None

        def guarded(number: int, logs: Any = None) -> Any:
            nonlocal first
            first = number if first is None else first
            key, seen = getattr(callback, "monitor", None), self._session.logs
            value = logs.get(key) if logs and isinstance(key, str) else None
            known = _number(value)
            unmeasured = seen.unmeasured | seen.failed
            loss = "val_loss" if str(key).startswith("val_") else "loss"
            usable = known is None or math.isfinite(known) or has_finite(logs, loss)
            if usable and key not in unmeasured:
                return real(number, logs)
            with Overrides() as changed:
                changed.set(callback, "monitor_op", lambda value, other: False)
                if getattr(callback, "best", None) is None:  # any value is better than none
                    changed.set(callback, "best", math.nan)
                if key in unmeasured and hasattr(callback, "patience"):
                    changed.set(callback, "patience", math.inf)
                    for name in {"wait", "cooldown_counter"} & vars(callback).keys():
                        changed.set(callback, name, getattr(callback, name))  # to restore it
                real(number, logs)
            if number == first and hasattr(callback, "wait"):
                callback.wait = 0  # as in Keras, which begins to wait after the first value

        return guarded


def _in_columns(log: Any) -> Callable[..., Any]:
    """Return `CSVLogger.on_epoch_end` for a file that exists: with the guard's logs of its header.

    It appends the logs of its first epoch in the order of their names, whatever the header.
    """
    real = log.on_epoch_end

    def guarded(epoch: int, logs: Any = None) -> Any:
        columns = [] if log.keys is not None else _header(log)
        if columns:
            own = {key: "NA" for key in columns if _is_own(key)}
            logs = own | {k: v for k, v in (logs or {}).items() if k in own or not _is_own(k)}
        return real(epoch, logs)

    return guarded


def _header(log: Any) -> list[str]:
    """Return the columns of the file of a `CSVLogger`, none if it is empty or not a local file."""
    with contextlib.suppress(OSError, csv.Error, UnicodeDecodeError), open(log.filename) as file:
        return next(csv.reader(file, delimiter=log.sep), [])
    return []


# Results that are not finite


def bad_metrics(logs: Any) -> list[Finding]:
    """Return a finding for each metric of an evaluation that is not finite."""
    return [
        Finding("validation", "nonfinite", k, value=v)
        for k, v in numbers(logs).items()
        if not math.isfinite(v)
    ]


def bad_arrays(logs: Any) -> list[Finding]:
    """Return a finding for the first array of predictions that is not finite."""
    for name, array in keras_variables.named_arrays((logs or {}).get("outputs")):
        nan, inf, size = finiteness.counts(array)
        if nan or inf:
            return [Finding("predictions", "nonfinite", name, nan, inf, size)]
    return []


@np.errstate(all="ignore")  # the values are not finite
def diagnosed(model: Any, variables: Sequence[Any]) -> Diagnosis | None:
    """Return the diagnosis of the running `evaluate` or `predict`, or `None` if no batch is bad.

    At the end the model and all random generators are as before.

    Args:
        variables: those that calling it may write.

    Raises:
        StateLostError: if the variables could not be restored.
    """
    from keras_nanguard._backends.shared.replay import preserved
    from keras_nanguard._diagnose.examination import diagnose

    with preserved(variables, model):
        try:
            for x, y, weights in itertools.islice(_batches(), BATCHES):
                predicted = model(x, training=False)
                if not _finite(predicted):
                    return diagnose(model, x, None, None).diagnosis
                is_scored = y is not None and model.compiled
                if is_scored and not _finite(model.compute_loss(x, y, predicted, weights)):
                    return diagnose(model, x, y, weights).diagnosis
        except StateLostError:
            raise
        except Exception as error:  # noqa: BLE001
            why = f"The diagnosis failed: {type(error).__name__}: {error}"
            return Diagnosis("unknown", evidence=(why,))
    return None


def one_batch() -> tuple[Any, Any, Any] | None:
    """Return `(x, y, sample_weight)` of the first batch of the running `evaluate`; `None` if it
    does not evaluate arrays. Reading other data once more may change what it yields next.
    """
    return next(_batches(), None) if keras_fitting.evaluates_arrays() else None


def _batches() -> Iterator[tuple[Any, Any, Any]]:
    adapter = keras_fitting.running_data()
    if adapter is None:
        return
    for data in adapter.get_numpy_iterator():
        data = tuple(data) if isinstance(data, (list, tuple)) else (data,)
        yield keras.utils.unpack_x_y_sample_weight(data)


def _finite(value: Any) -> bool:
    tensors = keras.tree.flatten(value)
    return all(finiteness.is_finite(keras.ops.convert_to_numpy(tensor)) for tensor in tensors)
