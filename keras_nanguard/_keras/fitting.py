"""The running `fit`, `evaluate` or `predict`: its callbacks, data and printing, and when it ends.

Keras notifies a callback when training begins, but not when it ends by an exception of another
callback or of the data, or by Ctrl-C. So three things are watched: exceptions that pass through the
callbacks of that fit, the deletion of its `CallbackList`, and the running frames when they are
needed.

Private names of Keras:

- ``keras.src.utils.io_utils.print_msg``: prints to the screen or to the log, as configured.
- ``Progbar._prev_total_width``: number of columns of a progress bar, 0 before it is drawn.
- ``OrbaxCheckpoint._save_checkpoint``: all of its saves go through it, and it reads the state
  itself.
- ``Model._initial_epoch``: the epoch at which `fit` starts, as `BackupAndRestore` sets it.
- ``Callback._model``: its model. The property ``model`` writes the state of a step to the variables
  on JAX, so another thread must not read it.
- ``Callback.on_batch_end._is_default``: marks the methods that do nothing.
- ``epoch_iterator``, a local variable of `fit`, `evaluate` and `predict`, its ``data_adapter``,
  ``x`` and ``y`` of `fit`, and the ``_distributed_dataset`` of TensorFlow's: callbacks get no
  reference to them.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import keras
from keras.src.utils import io_utils

from keras_nanguard._core.display import is_terminal
from keras_nanguard._keras import overrides

_HOOKS = tuple(
    f"on_{what}_{when}"
    for what in ("train", "test", "epoch", "train_batch", "test_batch")
    for when in ("begin", "end")
)


_OURS = (
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
    os.path.join(os.path.dirname(os.path.abspath(keras.__file__)), ""),
)
"""The folders of this library and of Keras, with a separator at the end: that of `keras_hub` begins
with the name of that of Keras.
"""


def outside() -> int:
    """Return the `stacklevel` of the user's line, outside of Keras and this library."""
    files = (os.path.abspath(f.f_code.co_filename) for f in _frames(sys._getframe(1)))
    return 1 + sum(1 for _ in itertools.takewhile(lambda file: file.startswith(_OURS), files))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def current_callback_list() -> Any:
    """Return the `CallbackList` that is calling this code, or `None`."""
    owners = (frame.f_locals.get("self") for frame in _frames(sys._getframe(1)))
    return next((o for o in owners if isinstance(o, keras.callbacks.CallbackList)), None)


def model_of(callbacks: Any) -> Any:
    """Return the model of a `CallbackList`, `None` if it has none. Any thread may call this."""
    return getattr(callbacks, "_model", None)


_OF_A_BATCH = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_OF_KERAS = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
"""Callbacks that `fit` adds itself. They use only logs."""


def callbacks_deferred(callbacks: Any) -> bool:
    """Whether Keras may call this `CallbackList` for a batch in another thread, by the same test as
    `CallbackList` in keras/src/callbacks/callback_list.py: none of it acts before the next step.
    """
    return callbacks is not None and all(
        _has_default(c, name)
        for c in callbacks.callbacks
        if not (getattr(c, "async_safe", False) or type(c) in _OF_KERAS)
        for name in _OF_A_BATCH
    )


_BATCH_END = keras.callbacks.CallbackList.on_train_batch_end
"""As it is before other code patches it."""


def _acts_after_batches(callbacks: Any) -> bool:
    """Whether a callback of this list does anything at the end of a train batch.

    If none does, Keras still calls each of them, on JAX in another thread. For a small network this
    takes as long as a step.
    """
    ends = ("on_train_batch_end", "on_batch_end")
    return not all(_has_default(c, name) for c in callbacks.callbacks for name in ends)


def _has_default(callback: Any, name: str) -> bool:
    """Whether this method of a callback is that of Keras, which does nothing. A wrapper or a mock
    of it may have its mark, too."""
    method = getattr(callback, name, None)
    return getattr(method, "_is_default", False) is True and not hasattr(method, "__wrapped__")


_TRAINERS = ("fit", "evaluate", "predict")
"""Functions of Keras that create a `CallbackList`, in their local variable `callbacks`."""


def evaluates() -> bool:
    """Whether the innermost running call of these is `evaluate` or `predict`."""
    calls = (f for f in _frames(sys._getframe(1)) if f.f_code.co_name in _TRAINERS)
    return next((f.f_code.co_name for f in calls if "callbacks" in f.f_locals), "fit") != "fit"


def _is_inside(innermost: FrameType, callbacks: Any, itself: bool = True) -> bool:
    """Whether a frame is inside a call of Keras that uses this list, or of the list (`itself`)."""
    for frame in _frames(innermost):
        trains = frame.f_code.co_name in _TRAINERS
        name = "callbacks" if trains else "self"
        if (trains or itself) and frame.f_locals.get(name) is callbacks:
            return True
    return False


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause the garbage collector while frames of other threads are read.

    CPython 3.11 creates their frame objects on demand. A collection at that moment lets the other
    thread run; Python then takes whatever is in the memory of its old frame for a frame object, and
    can crash.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Fit:
    """One running `fit`, `evaluate` or `predict`, identified by its `CallbackList`.

    Args:
        cut_short: called once when it ends by an exception, or is found to have ended.
        before, after: functions by the name of a method of the list: called with its arguments
            before it, and after it unless it raises.

    Attributes:
        known: whether it was called by a `CallbackList`, not by hand.
    """

    def __init__(
        self,
        callbacks: Any,
        cut_short: Callable[[], None],
        before: Mapping[str, Callable[..., Any]],
        after: Mapping[str, Callable[..., Any]],
    ):
        self.known = callbacks is not None
        self._list: Callable[[], Any] = weakref.ref(callbacks) if self.known else lambda: None
        self._cut_short, self._before, self._after = cut_short, before, after
        self._by_hand = False
        if self.known:
            self._death = weakref.finalize(callbacks, cut_short)
            self._death.atexit = False
            for name in _HOOKS:
                overrides.set_instance(callbacks, name, self._watched(name))

    def begin(self) -> None:
        """Store that training begins, and whether `fit` or a hand-written loop runs it."""
        callbacks = self._list()
        frame = sys._getframe(1)
        self._by_hand = callbacks is not None and not _is_inside(frame, callbacks, itself=False)

    @property
    def by_hand(self) -> bool:
        """Whether a hand-written loop calls the `CallbackList`, and training has not ended."""
        return self._by_hand and self._list() is not None

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the list."""
        callbacks = self._list()
        return list(callbacks.callbacks) if callbacks is not None else []

    @property
    def runs(self) -> bool:
        """Whether a thread is inside the call that created the `CallbackList`, or of the list."""
        callbacks = self._list()
        if callbacks is None:
            return False
        with _collection_paused():
            frames = sys._current_frames()
            # A frame that held itself would hold the fit and its data, too.
            frames[threading.get_ident()] = sys._getframe(1)
            return any(_is_inside(frame, callbacks) for frame in frames.values())

    @property
    def encloses(self) -> bool:
        """Whether this thread is inside of it. A loop that was left by an exception counts, too."""
        callbacks = self._list()
        inside = callbacks is not None and _is_inside(sys._getframe(1), callbacks)
        return inside or self.by_hand

    @property
    def calls(self) -> bool:
        """Whether its own `CallbackList`, and not that of a call inside of it, calls this code."""
        return not self.known or current_callback_list() is self._list()

    def close(self) -> None:
        """Remove the watches."""
        self._by_hand = False
        callbacks = self._list()
        if self.known:
            self._death.detach()  # a list that dies later must not end the next fit
        if callbacks is not None:
            for name in _HOOKS:
                overrides.unset_instance(callbacks, name)

    def _watched(self, name: str) -> Callable[..., Any]:
        find, cut_short = self._list, self._cut_short
        before, after = self._before.get(name), self._after.get(name)
        kind = type(find())
        plain = getattr(kind, name)
        is_stock = kind is keras.callbacks.CallbackList and plain is _BATCH_END

        def hook(*args: Any, **kwargs: Any) -> Any:
            if is_stock and not _acts_after_batches(find()):
                return None
            try:
                if before is not None:
                    before(*args, **kwargs)
                result = plain(find(), *args, **kwargs)
                if after is not None:
                    after(*args, **kwargs)
                return result
            except BaseException:
                cut_short()
                raise

        return hook


# The epoch at which `fit` starts


def begin_at(model: Any, epoch: int | None) -> None:
    """Make `fit` start at this epoch, as `BackupAndRestore` does; `None` undoes it."""
    if epoch is not None:
        model._initial_epoch = _Epoch(epoch)
    elif isinstance(getattr(model, "_initial_epoch", None), _Epoch):
        model._initial_epoch = None


def restored_epoch(model: Any) -> int | None:
    """Return the epoch at which another callback makes `fit` start, `None` if none does."""
    epoch = getattr(model, "_initial_epoch", None)
    return None if epoch is None or isinstance(epoch, _Epoch) else int(epoch)


class _Epoch(int):
    """An epoch that is true even if it is 0: `fit` evaluates `_initial_epoch or initial_epoch`."""

    def __bool__(self) -> bool:
        return True


# The data of the running call. Callbacks get no reference to them


def running_data() -> Any:
    """Return the data adapter of a running `evaluate` or `predict`, `None` for a generator."""
    epochs = _locals_of("evaluate", "predict").get("epoch_iterator")
    adapter = getattr(epochs, "data_adapter", None)
    return None if "Generator" in type(adapter).__name__ else adapter


def evaluates_arrays() -> bool:
    """Whether the data of the innermost running `evaluate` or `predict` is arrays."""
    return type(running_data()).__name__ == "ArrayDataAdapter"


def running_spec() -> Any:
    """Return the `element_spec` of the dataset that the innermost `fit` trains on, or `None`."""
    dataset = getattr(_locals_of("fit").get("epoch_iterator"), "_distributed_dataset", None)
    return getattr(dataset, "element_spec", None)


def running_arrays() -> tuple[Any, Any]:
    """Return `x` and `y` of the innermost `fit` if it trains on arrays, else `(None, None)`;
    without the rows that `validation_split` removes.
    """
    given = _locals_of("fit")
    adapter = getattr(given.get("epoch_iterator"), "data_adapter", None)
    on_arrays = type(adapter).__name__ == "ArrayDataAdapter"
    return (given.get("x"), given.get("y")) if on_arrays else (None, None)


def _locals_of(*calls: str) -> Mapping[str, Any]:
    """Return the local variables of the innermost of these running functions of Keras, or `{}`."""
    frames = (f for f in _frames(sys._getframe(1)) if f.f_code.co_name in calls)
    return next((f.f_locals for f in frames if "epoch_iterator" in f.f_locals), {})


# Printing, and other callbacks


def print_message(text: str) -> None:
    """Print lines like Keras: to the screen, or to the log.

    A progress bar in the current line is cleared first, and its next update draws it again below.
    In a file it cannot be cleared and stays above.
    """
    on_screen = keras.config.is_interactive_logging_enabled()
    if sys.stdout is None and on_screen:  # a program without a console
        return
    bar = _bar_in_line()
    if bar is not None and on_screen:
        width, bar._prev_total_width = bar._prev_total_width, 0
        clearable = "ipykernel" in sys.modules or is_terminal()
        text = (f"\r{' ' * width}\r" if clearable else "\n") + text
    io_utils.print_msg(text)


def _bar_in_line() -> Any:
    """Return the `Progbar` that the innermost running call has drawn, or `None`."""
    callbacks = getattr(_locals_of("fit", "evaluate", "predict").get("callbacks"), "callbacks", ())
    bars = [c.progbar for c in callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]
    drawn = (bar for bar in bars if bar and bar.verbose == 1 and bar._prev_total_width)
    return next(drawn, None)


def savers(callbacks: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return `(callback, method)` of callbacks that save a model without `Model.save`."""
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # Keras 3.6 has none
    return [(c, "_save_checkpoint") for c in callbacks if isinstance(c, orbax)]
