"""Which `fit` a callback works for, and whether it still runs.

A callback hears when training begins, and not when it is cut short: by an exception of another callback, of the data, or
by Ctrl-C. So the end is watched from three sides: exceptions that pass through the callbacks of that fit, the death of
its `CallbackList`, and, for whatever slips through, a look at the running frames the next time it matters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras

from keras_nanguard import _state

__all__ = ["Fit"]

_HOOKS = tuple(
    f"on_{what}_{when}" for what in ("train", "test", "epoch", "train_batch", "test_batch") for when in ("begin", "end")
)


class Fit:
    """One running `fit`, `evaluate` or `predict`, known by its `CallbackList`.

    Args:
        cut_short: called once when it ends by an exception, or is found to have ended unnoticed.
    """

    def __init__(self, callbacks: Any, cut_short: Callable[[], None]):
        self._callbacks = weakref.ref(callbacks) if callbacks is not None else None
        self._cut_short = cut_short
        if callbacks is not None:
            weakref.finalize(callbacks, cut_short).atexit = False
            for name in _HOOKS:
                _state.set_instance(callbacks, name, self._watched(name))

    @classmethod
    def around(cls, cut_short: Callable[[], None]) -> Fit:
        """Return the fit from inside of which this is called."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.callbacks.CallbackList):
                return cls(owner, cut_short)
            frame = frame.f_back
        return cls(None, cut_short)

    @property
    def known(self) -> bool:
        """Whether it was called from inside of a `CallbackList` at all, and not by hand."""
        return self._callbacks is not None

    @property
    def runs(self) -> bool:
        """Whether some thread is inside of the call that made the `CallbackList`, or of the list itself."""
        callbacks = self._callbacks() if self._callbacks is not None else None
        if callbacks is None:
            return False
        for frame in sys._current_frames().values():
            at: FrameType | None = frame
            while at is not None:
                name = "callbacks" if at.f_code.co_name in ("fit", "evaluate", "predict") else "self"
                if at.f_locals.get(name) is callbacks:
                    return True
                at = at.f_back
        return False

    def close(self) -> None:
        """Take the watch off again."""
        callbacks = self._callbacks() if self._callbacks is not None else None
        if callbacks is not None:
            for name in _HOOKS:
                _state.unset_instance(callbacks, name)

    def _watched(self, name: str) -> Callable[..., Any]:
        reference, cut_short = self._callbacks, self._cut_short
        assert reference is not None

        def hook(*args: Any, **kwargs: Any) -> Any:
            callbacks = reference()
            try:
                return getattr(type(callbacks), name)(callbacks, *args, **kwargs)
            except BaseException:
                cut_short()
                raise

        return hook
