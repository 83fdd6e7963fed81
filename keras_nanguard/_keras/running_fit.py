"""The running `fit`, `evaluate` or `predict`: its callbacks, and when it ends.

Keras notifies a callback when training begins, but not when it ends by an exception of another
callback or of the data, or by Ctrl-C. So three things are watched: exceptions that pass through the
callbacks of that fit, the deletion of its `CallbackList`, and the running frames when they are
needed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import keras

from keras_nanguard._keras import overrides

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
        around: functions that return the context in which all callbacks run a method, from the
            arguments of the method, by its name.
    """

    def __init__(
        self,
        callbacks: Any,
        cut_short: Callable[[], None],
        around: Mapping[str, Callable[..., AbstractContextManager[None]]],
    ):
        self._callbacks = weakref.ref(callbacks) if callbacks is not None else None
        self._cut_short, self._around = cut_short, around
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
        """Store that training begins, and whether `fit` or a hand-written loop runs it."""
        callbacks = self._list()
        frame = sys._getframe(1)
        self._by_hand = callbacks is not None and not _is_inside(frame, callbacks, itself=False)

    @property
    def by_hand(self) -> bool:
        """Whether a hand-written loop calls the `CallbackList`, and training has not ended."""
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

    def _watched(self, name: str) -> Callable[..., Any]:
        reference, cut_short = self._callbacks, self._cut_short
        assert reference is not None

        plain, around = getattr(type(reference()), name), self._around.get(name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            try:
                with around(*args, **kwargs) if around is not None else nullcontext():
                    return plain(reference(), *args, **kwargs)
            except BaseException:
                cut_short()
                raise

        return hook
