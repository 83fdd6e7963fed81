"""Detects which `fit` a callback belongs to, and whether it is still running.

Keras notifies a callback when training begins, but not when it ends by an exception of another
callback or of the data, or by Ctrl-C. So three things are watched: exceptions that pass through the
callbacks of that fit, the deletion of its `CallbackList`, and the running frames when they are
needed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import keras

from keras_nanguard._keras import overrides

__all__ = ["Fit", "callbacks_deferred", "outside", "surrounding"]

_HOOKS = tuple(
    f"on_{what}_{when}"
    for what in ("train", "test", "epoch", "train_batch", "test_batch")
    for when in ("begin", "end")
)


_OURS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(os.path.abspath(keras.__file__)),
)


def outside() -> int:
    """Return the `stacklevel` with which a warning points at the user's line, outside of Keras and
    this library.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level


def surrounding() -> Any:
    """Return the `CallbackList` that is calling this code, or `None`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back
    return None


_OF_A_BATCH = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_OF_KERAS = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
"""Callbacks that `fit` adds itself. They use only logs."""


def callbacks_deferred(callbacks: Any) -> bool:
    """Whether Keras may call this `CallbackList` for a batch in another thread, so that none of it
    acts before the next step.

    `CallbackList` in keras/src/callbacks/callback_list.py applies the same test.
    """
    if callbacks is None:
        return False
    stock = keras.callbacks.Callback
    return all(
        getattr(getattr(c, name), "__func__", None) is getattr(stock, name)
        for c in callbacks.callbacks
        if not (getattr(c, "async_safe", False) or type(c) in _OF_KERAS)
        for name in _OF_A_BATCH
    )


_TRAINERS = ("fit", "evaluate", "predict")
"""Functions of Keras that create a `CallbackList`, in their local variable `callbacks`."""


def _is_inside(frame: FrameType | None, callbacks: Any, itself: bool = True) -> bool:
    """Whether a frame is inside a call of Keras that uses this list, or of the list (`itself`)."""
    while frame is not None:
        trains = frame.f_code.co_name in _TRAINERS
        name = "callbacks" if trains else "self"
        if (trains or itself) and frame.f_locals.get(name) is callbacks:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
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
        around_epoch_end: called with the logs of an epoch; returns the context in which the
            callbacks receive them.
        begun: called after all callbacks have run `on_train_begin`.
        before_epoch: called with an epoch before any callback runs `on_epoch_begin`.
    """

    def __init__(
        self,
        callbacks: Any,
        cut_short: Callable[[], None],
        around_epoch_end: Callable[[Any], AbstractContextManager[None]],
        begun: Callable[[], None],
        before_epoch: Callable[[int], None],
    ):
        self._before_epoch = before_epoch
        self._callbacks = weakref.ref(callbacks) if callbacks is not None else None
        self._cut_short, self._around_epoch_end, self._begun = cut_short, around_epoch_end, begun
        self._by_hand = False
        if callbacks is not None:
            self._death = weakref.finalize(callbacks, cut_short)
            self._death.atexit = False
            for name in _HOOKS:
                overrides.set_instance(callbacks, name, self._watched(name))

    def _list(self) -> Any:
        """Return the `CallbackList`, `None` if there is none or it is gone."""
        return self._callbacks() if self._callbacks is not None else None

    def begin(self) -> None:
        """Store that training begins, and whether `fit` runs it or a loop of the user's own."""
        callbacks = self._list()
        frame = sys._getframe(1)
        self._by_hand = callbacks is not None and not _is_inside(frame, callbacks, itself=False)

    @property
    def by_hand(self) -> bool:
        """Whether a loop of the user's own calls the `CallbackList`, and training has not ended."""
        return self._by_hand and self._list() is not None

    @property
    def known(self) -> bool:
        """Whether it was called by a `CallbackList`, not by hand."""
        return self._callbacks is not None

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the list."""
        callbacks = self._list()
        return list(callbacks.callbacks) if callbacks is not None else []

    @property
    def runs(self) -> bool:
        """Whether a thread is inside the call that created the `CallbackList`, or of the list
        itself.
        """
        callbacks = self._list()
        if callbacks is None:
            return False
        with _collection_paused():
            frames = sys._current_frames()
            # A frame that held itself would hold the fit and its data, too.
            frames[threading.get_ident()] = sys._getframe(1)
            return any(_is_inside(frame, callbacks) for frame in frames.values())

    def close(self) -> None:
        """Remove the watches."""
        self._by_hand = False
        callbacks = self._list()
        if self._callbacks is not None:
            self._death.detach()  # a list that dies later must not end the next fit
        if callbacks is not None:
            for name in _HOOKS:
                overrides.unset_instance(callbacks, name)

    def _epoch_begin(self, callbacks: Any, epoch: int, logs: Any = None) -> Any:
        self._before_epoch(epoch)
        return type(callbacks).on_epoch_begin(callbacks, epoch, logs)

    def _epoch_end(self, callbacks: Any, epoch: int, logs: Any = None) -> Any:
        with self._around_epoch_end(logs):
            return type(callbacks).on_epoch_end(callbacks, epoch, logs)

    def _train_begin(self, callbacks: Any, logs: Any = None) -> Any:
        result = type(callbacks).on_train_begin(callbacks, logs)
        self._begun()
        return result

    def _watched(self, name: str) -> Callable[..., Any]:
        reference, cut_short = self._callbacks, self._cut_short
        assert reference is not None

        around: Callable[..., Any] = getattr(type(reference()), name)
        if name == "on_epoch_end":
            around = self._epoch_end
        elif name == "on_epoch_begin":
            around = self._epoch_begin
        elif name == "on_train_begin":
            around = self._train_begin

        def hook(*args: Any, **kwargs: Any) -> Any:
            try:
                return around(reference(), *args, **kwargs)
            except BaseException:
                cut_short()
                raise

        return hook
