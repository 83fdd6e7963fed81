"""What is told of a birth, whatever backend it was seen on: pure functions of arrays and of the stack."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import Operand, Origin

__all__ = ["CONSTANT", "MAX_ORIGINS", "Casts", "bad_rows", "operand", "users_line"]

CONSTANT = Origin(1 << 60, "constant", "constant", "other")
"""Stands for an infinite constant of the program itself."""

MAX_ORIGINS = 20000
"""Births that are kept of one run; a masked overflow inside a long loop can make very many."""

TINY = {"float16": 6e-5, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-290}

_LIBRARIES = ("site-packages", "/keras/src/", "/tensorflow/python/", "importlib", "contextlib.py", "functools.py")


class Casts:
    """Whose the overflow in a cast is: a layer casts its inputs before its `call`, so it is the layer's own."""

    def __init__(self) -> None:
        self._paths: dict[int, tuple[str, ...]] = {}

    def entered(self, frames: Sequence[tuple[str, str]], origins: Iterable[Origin | None]) -> None:
        """Note that the innermost of these frames now takes in what came of these births."""
        path = tuple(frame for frame, _ in frames)
        for origin in origins:
            if origin is not None and origin.op == "Cast" and origin.source == "operation":
                before = self._paths.get(origin.order)
                if before is None or (len(path) > len(before) and path[: len(before)] == before):
                    self._paths[origin.order] = path

    def complete(self, origin: Origin) -> Origin:
        """Return the birth with the layer that its cast belongs to."""
        path = self._paths.get(origin.order)
        if path is None or origin.source != "operation" or len(path) <= len(origin.frames):
            return origin
        return Origin(**{**{n: getattr(origin, n) for n in Origin.__slots__}, "frames": path, "culprit": path[-1]})


def operand(array: np.ndarray[Any, Any], dtype: str) -> Operand:
    """Return what is told of one float input of an operation."""
    array = finiteness.widen(array)
    finite = array[np.isfinite(array)]
    magnitude = np.abs(finite)
    positive = magnitude[magnitude > 0]
    bad = {"NaN": np.isnan(array), "Inf": array == np.inf, "-Inf": array == -np.inf} if finite.size < array.size else {}
    return Operand(
        max_abs=float(magnitude.max()) if magnitude.size else 0.0,
        zero=bool(positive.size < magnitude.size),
        negative=bool((finite < 0).any()),
        dtype=dtype,
        tiny=bool(positive.size and positive.min() < TINY.get(dtype, 0.0)),
        infinite=bool(bad),
        holds=" and ".join(word for word, where in bad.items() if where.any()),
        whole=bool(bad) and not finite.size,
    )


def bad_rows(array: np.ndarray[Any, Any], rows: int) -> tuple[tuple[int, ...], bool]:
    """Return the rows with a bad entry, none where all are bad, and whether all are."""
    if not rows or array.ndim == 0 or array.shape[0] != rows:
        return (), False
    bad = ~np.isfinite(finiteness.widen(array)).reshape(rows, -1).all(axis=1)
    found = tuple(int(i) for i in np.flatnonzero(bad))
    return ((), True) if len(found) == rows else (found, False)


def users_line() -> str:
    """Return `file:line` of the code that made the operation, where that is no library's: a layer's, a loss's.

    Whoever called the library stands above it on the stack and made nothing, so the search ends there.
    """
    frame: Any = sys._getframe(2)
    caller = sys._getframe(1).f_code.co_filename
    while frame is not None and frame.f_code.co_filename == caller:
        frame = frame.f_back
    while frame is not None and "/keras_nanguard/" not in frame.f_code.co_filename:
        path = frame.f_code.co_filename
        if not any(part in path for part in _LIBRARIES) and not path.startswith("<"):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
