"""Which `fit` a callback works for, and whether it still runs.

A callback hears when training begins, and not when it is cut short: by an exception of another callback, of the data, or
by Ctrl-C. So the end is watched from three sides: exceptions that pass through the callbacks of that fit, the death of
its `CallbackList`, and, for whatever slips through, a look at the running frames the next time it matters.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import keras

from keras_nanguard import _overrides

__all__ = ["Fit", "outside"]

_HOOKS = tuple(
    f"on_{what}_{when}" for what in ("train", "test", "epoch", "train_batch", "test_batch") for when in ("begin", "end")
)


_OURS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.abspath(keras.__file__)))


def outside() -> int:
    """Return the `stacklevel` at which the caller's warning points at the user's own line, past Keras and this library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(frame: FrameType | None, callbacks: Any) -> bool:
    while frame is not None:
        name = "callbacks" if frame.f_code.co_name in ("fit", "evaluate", "predict") else "self"
        if frame.f_locals.get(name) is callbacks:
            return True
        frame = frame.f_back
    return False


class Fit:
    """One running `fit`, `evaluate` or `predict`, known by its `CallbackList`.

    Args:
        cut_short: called once when it ends by an exception, or is found to have ended unnoticed.
        around_epoch_end: called with the logs of an epoch; returns the context in which the callbacks see them.
    """

    def __init__(self, callbacks: Any, cut_short: Callable[[], None], around_epoch_end: Callable[[Any], AbstractContextManager[None]]):
        self._callbacks = weakref.ref(callbacks) if callbacks is not None else None
        self._cut_short, self._around_epoch_end = cut_short, around_epoch_end
        if callbacks is not None:
            self._death = weakref.finalize(callbacks, cut_short)
            self._death.atexit = False
            for name in _HOOKS:
                _overrides.set_instance(callbacks, name, self._watched(name))

    @classmethod
    def around(cls, cut_short: Callable[[], None], around_epoch_end: Callable[[Any], AbstractContextManager[None]]) -> Fit:
        """Return the fit from inside of which this is called."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.callbacks.CallbackList):
                return cls(owner, cut_short, around_epoch_end)
            frame = frame.f_back
        return cls(None, cut_short, around_epoch_end)

    @property
    def known(self) -> bool:
        """Whether it was called from inside of a `CallbackList` at all, and not by hand."""
        return self._callbacks is not None

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the list."""
        callbacks = self._callbacks() if self._callbacks is not None else None
        return list(callbacks.callbacks) if callbacks is not None else []

    @property
    def runs(self) -> bool:
        """Whether some thread is inside of the call that made the `CallbackList`, or of the list itself."""
        callbacks = self._callbacks() if self._callbacks is not None else None
        if callbacks is None:
            return False
        frames = sys._current_frames()
        frames[threading.get_ident()] = sys._getframe(1)  # a frame that held itself would hold the fit and its data, too
        return any(_is_inside(frame, callbacks) for frame in frames.values())

    def close(self) -> None:
        """Take the watch off again."""
        callbacks = self._callbacks() if self._callbacks is not None else None
        if self._callbacks is not None:
            self._death.detach()  # a list that dies later must not end the next fit
        if callbacks is not None:
            for name in _HOOKS:
                _overrides.unset_instance(callbacks, name)

    def _epoch_end(self, callbacks: Any, epoch: int, logs: Any = None) -> Any:
        with self._around_epoch_end(logs):
            return type(callbacks).on_epoch_end(callbacks, epoch, logs)

    def _watched(self, name: str) -> Callable[..., Any]:
        reference, cut_short = self._callbacks, self._cut_short
        assert reference is not None

        around = self._epoch_end if name == "on_epoch_end" else getattr(type(reference()), name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            try:
                return around(reference(), *args, **kwargs)
            except BaseException:
                cut_short()
                raise

        return hook
