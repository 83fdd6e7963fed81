"""The calls of a function: a measure of cost that is the same on each machine, busy or not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def calls_of(function: Callable[..., object], *arguments: object) -> list[str]:
    """Call a function, and return the names of all Python and C functions that it runs, in order,
    itself first.
    """
    names: list[str] = []

    def note(frame, event, called):
        if event in ("call", "c_call"):
            names.append(called.__name__ if event == "c_call" else frame.f_code.co_name)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a garbage collection calls the registered callbacks
    sys.setprofile(note)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return names[:-1]  # the last one is `setprofile`
