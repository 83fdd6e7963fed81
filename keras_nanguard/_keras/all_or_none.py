"""Writes many variables so that a failure never leaves a mixture of two states.

Memory of a device can be exhausted, a file can become unreadable and Ctrl-C can arrive between any
two variables. A failed write is attempted once more, because memory is often free a moment later.
If it fails again, the finished writes are undone. If the old values are unknown, the other writes
are completed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from keras_nanguard._core.errors import StateLostError
from keras_nanguard._keras import variables as keras_variables

ATTEMPTS = 2
"""Number of attempts of each part. In `finish` an interrupt also ends only one attempt."""


def write_all(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Write each array into its variable: all of them or none.

    The old values are copied, one variable after the other, and written back if anything is raised.
    That takes a second copy of the state in host memory.

    Args:
        pairs: `(variable, array)`, each array of the shape and dtype of its variable.

    Raises:
        StateLostError: if the old values cannot be written back.
        BaseException: the exception raised while writing.
    """
    before: list[tuple[Any, Any]] = []
    try:
        for variable, array in pairs:
            before.append((variable, _repeated(keras_variables.read, variable)))
            _repeated(keras_variables.write, variable, array)
    except BaseException:
        finish(partial(keras_variables.write, *pair) for pair in before)
        raise


def _repeated(part: Callable[..., Any], *args: Any) -> Any:
    """Return `part(*args)`, called once more after an error, but not after an interrupt."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Exception):
            return part(*args)
    return part(*args)


def finish(parts: Iterable[Callable[[], Any]]) -> None:
    """Do every part, even if some raise. Each part can be repeated without harm.

    Raises:
        StateLostError: if a part has failed twice.
        BaseException: an interrupt (`KeyboardInterrupt`, `SystemExit`), after every part is done.
    """
    waiting = list(parts)
    interrupt: BaseException | None = None
    failed: list[BaseException] = []
    for part in waiting:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                part()
                break
            except BaseException as error:  # noqa: BLE001  it is raised again at the end
                interrupt = interrupt or (None if isinstance(error, Exception) else error)
                if attempt == ATTEMPTS:
                    failed.append(error)
    if failed:
        raise StateLostError(
            "Expected to write the complete state of the model. Received:"
            f" {type(failed[0]).__name__}: {failed[0]} ({len(failed)} of {len(waiting)} writes"
            " failed). The model holds values of two different steps: load a checkpoint before you"
            " use it."
        ) from failed[0]
    if interrupt is not None:
        raise interrupt
