"""A line that announces a slow operation while it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import keras

from keras_nanguard._backends import processes

__all__ = ["SLOW", "when_slow"]

SLOW = 1.0
"""Seconds after which a slow operation is announced."""


@contextlib.contextmanager
def when_slow(text: str) -> Iterator[None]:
    """Print a line if the context takes longer than `SLOW` seconds; nothing if the text is `""`."""
    if not text:
        yield
        return
    interactive = keras.config.is_interactive_logging_enabled()  # Keras stores it per thread

    def announce() -> None:
        (
            keras.config.enable_interactive_logging
            if interactive
            else keras.config.disable_interactive_logging
        )()
        processes.print_line(text)

    timer = threading.Timer(SLOW, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
