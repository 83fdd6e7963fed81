"""A line that says what takes its time, printed while it does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import keras

from keras_nanguard._backends import processes

__all__ = ["SLOW", "when_slow"]

SLOW = 1.0
"""Seconds after which a diagnosis is announced."""


@contextlib.contextmanager
def when_slow(text: str) -> Iterator[None]:
    """Print a line if what runs inside takes longer than `SLOW` seconds; nothing where the text is `""`."""
    if not text:
        yield
        return
    interactive = keras.config.is_interactive_logging_enabled()  # which Keras keeps for each thread

    def announce() -> None:
        (keras.config.enable_interactive_logging if interactive else keras.config.disable_interactive_logging)()
        processes.print_line(f"\n{text}")

    timer = threading.Timer(SLOW, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
