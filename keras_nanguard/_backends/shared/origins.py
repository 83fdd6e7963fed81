"""Finds the origin of NaN and Inf in one recorded run: common code of all backends.

A backend records its operations one by one, and has a number for each tensor. An operation with
finite inputs and a result that is not finite is an *origin*, which is passed on to all results
derived from it. The origin of a bad loss or gradient is read from the loss or gradient itself, so a
bad value that is masked away (`where`, `max`, a metric that is not trained on) is never blamed.
Infinite constants of the program (a mask of -Inf) are deliberate and are ignored; the operation
that turns them into NaN (a softmax over a fully masked row) is the origin.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.observations import Operand, Origin
from keras_nanguard._keras import arrays as keras_arrays

CONSTANT = Origin(1 << 60, "constant", "constant", "other")
"""Represents an infinite constant of the program itself."""

_CAPITALIZED = (
    *("acos", "acosh", "asin", "atan2", "atanh", "cholesky", "cosh", "digamma", "erfinv", "exp"),
    *("expm1", "lgamma", "log", "log1p", "mul", "pow", "qr", "reciprocal", "rsqrt", "sinh"),
    *("softplus", "sqrt", "svd", "tan", "xlogy"),
)

_NAMES = {
    **{name: name.capitalize() for name in _CAPITALIZED},
    **dict.fromkeys(("log2", "log10", "logit", "binary_cross_entropy"), "Log"),
    **dict.fromkeys(("div", "addcdiv", "binary_cross_entropy_backward"), "RealDiv"),
    **dict.fromkeys(("fmod", "rem", "remainder"), "FloorMod"),
    **dict.fromkeys(("acosh_backward", "logit_backward"), "ReciprocalGrad"),
    **dict.fromkeys(("_linalg_eigh", "eigh"), "SelfAdjointEig"),
    **dict.fromkeys(("_to_copy", "convert_element_type"), "Cast"),
    "_linalg_svd": "Svd",
    "_log_softmax": "LogSoftmax",
    "_softmax": "Softmax",
    "erf_inv": "Erfinv",
    "exp2": "Exp",
    "integer_pow": "Pow",
    "linalg_cholesky_ex": "Cholesky",
    "linalg_inv_ex": "MatrixInverse",
    "linalg_qr": "Qr",
    "linalg_solve_ex": "MatrixSolve",
    "linalg_vector_norm": "Sqrt",
}
"""Names of operations of JAX and PyTorch that `causes` knows by TensorFlow's names. All others keep
their own name.
"""

TINY = {"float16": 6e-5, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-290}

_LIBRARIES = (
    "site-packages",
    "/keras/src/",
    "/tensorflow/python/",
    "importlib",
    "contextlib.py",
    "functools.py",
)

_OURS = str(Path(__file__).parents[2]) + os.sep
"""The folder of this package."""


class Inputs(NamedTuple):
    """The facts about the inputs of one operation: the origin behind each of them, `None` if it is
    finite; the facts about each float one; and the paths of the variables among them.
    """

    parents: list[Origin | None]
    operands: tuple[Operand, ...]
    variables: tuple[str, ...]


class OriginTracker:
    """The bad values of one run. Each backend has a subclass, a context in which its operations are
    recorded.

    Args:
        batch: `(name, tensor)` of the arrays that go into the step.
        variables: names of the variables, by their number in the backend.
        tolerated: numbers of the variables that may be infinite.
        rows: number of rows of the batch.

    Attributes:
        phase: the running phase: `"forward"`, `"loss"`, `"regularizer"`, `"backward"` or
            `"update"`.
        frames: the running layers, outermost first, as `(path, class)`.
        count: number of operations so far.
    """

    def __init__(
        self,
        batch: Sequence[tuple[str, Any]] = (),
        variables: dict[int, str] | None = None,
        tolerated: Iterable[int] = (),
        rows: int = 0,
    ):
        self.phase, self.rows, self.count = "forward", rows, 0
        self.frames: list[tuple[str, str]] = []
        self._variables, self._tolerated = variables or {}, set(tolerated)
        self._lineage: dict[int, Origin] = {}
        self._casts: dict[int, tuple[str, ...]] = {}
        self._arrays: list[tuple[finiteness.Array, Origin]] = []
        for place, (name, tensor) in enumerate(batch):
            if not is_finite(tensor):
                origin = Origin(place - len(batch), "batch", name, "forward")
                self._arrays.append((keras_arrays.dense(tensor), origin))
                self._keep(tensor, origin)

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Run a phase. Its operations belong to no layer until a probe names one."""
        before = self.phase, self.frames
        self.phase, self.frames = phase, []
        try:
            yield
        finally:
            self.phase, self.frames = before

    @contextlib.contextmanager
    def in_call(self, frame: tuple[str, str], phase: str) -> Iterator[None]:
        """Run a layer or a loss, as `(path, class)`, of a phase of the forward pass."""
        before = self.phase
        self.frames = [*self.frames, frame]
        if before == "forward":
            self.phase = phase
        try:
            yield
        finally:
            self.frames = self.frames[:-1]
            if before == "forward" and self.phase == phase:
                self.phase = "forward"

    def of(self, tensor: Any) -> Origin | None:
        """Return the origin behind a tensor, or `None` if it is finite or unknown."""
        return self._completed(self._lineage.get(self._key(tensor)))

    def of_gradient(self, gradient: Any) -> Origin | None:
        """Return the origin behind a gradient."""
        return self.of(gradient)

    def written(self, variable: Any) -> Origin | None:
        """Return the origin of the bad value that was last written into this variable, if any."""
        number = self.number_of(variable)
        return None if number is None else self._completed(self._lineage.get(number))

    @staticmethod
    def number_of(variable: Any) -> int | None:
        """Return the number by which the backend identifies a variable, `None` if it has none."""
        return None

    def entered(self, tensor: Any) -> None:
        """Record that the innermost layer receives this tensor as an input.

        A layer casts its inputs before its `call`, so an overflow in such a cast is its own.
        """
        origin = self._lineage.get(self._key(tensor))
        if origin is not None and origin.op == "Cast" and origin.source == "operation":
            path, before = self._here(), self._casts.get(origin.order)
            if before is None or (len(path) > len(before) and path[: len(before)] == before):
                self._casts[origin.order] = path

    def _here(self) -> tuple[str, ...]:
        """Return the running layers, outermost first."""
        return tuple(frame for frame, _ in self.frames)

    def _keep(self, tensor: Any, origin: Origin) -> None:
        """Store the origin behind a bad tensor."""
        self._lineage[self._key(tensor)] = origin

    def _of_batch(self, array: finiteness.Array) -> Origin | None:
        """Return the origin of the array of the batch with these values, possibly in another dtype.

        The step converts a NumPy array to a tensor that no operation has produced.
        """
        with np.errstate(all="ignore"):
            for other, origin in self._arrays:
                if other.shape == array.shape and np.array_equal(
                    other.astype(array.dtype), array, equal_nan=array.dtype.kind in "fcV"
                ):
                    return origin
        return None

    def _key(self, tensor: Any) -> int:
        """Return the number of a tensor."""
        return id(tensor)

    def _completed(self, found: Origin | None) -> Origin | None:
        """Return an origin with the layer to which its cast belongs."""
        path = self._casts.get(found.order, ()) if found is not None else ()
        if found is None or found.source != "operation" or len(path) <= len(found.frames):
            return found
        return replace(found, frames=path, culprit=path[-1])

    def _parent(self, tensor: Any) -> Origin | None:
        """Return the origin behind an input of an operation, `None` if it is finite."""
        if is_finite(tensor):
            return None
        number = self._key(tensor)
        if number in self._lineage:
            return self._lineage[number]
        if number in self._variables and number not in self._tolerated:
            return self._stored(tensor)
        return self._of_batch(keras_arrays.dense(tensor)) or CONSTANT

    def _stored(self, tensor: Any) -> Origin:
        """Return the origin of the initial value of a variable."""
        origin = self._add(self._variables[self._key(tensor)], tensor)
        self._keep(tensor, origin)
        return origin

    def _inputs(self, tensors: Iterable[Any]) -> Inputs:
        """Return the facts about the inputs of an operation."""
        tensors = list(tensors)
        numbers = map(self._key, tensors)
        return Inputs(
            [self._parent(tensor) for tensor in tensors],
            tuple(map(operand, filter(finiteness.is_inexact, tensors))),
            tuple(self._variables[n] for n in numbers if n in self._variables),
        )

    def _inherited(self, op: str, inputs: Inputs, bad: Sequence[Any], constant: bool) -> Origin:
        """Return the earliest origin behind the inputs of an operation with `bad` results, or its
        own; `constant`: whether it creates an infinite constant of the program.
        """
        known = [p for p in inputs.parents if p is not None and p is not CONSTANT]
        if known:
            return min(known, key=lambda origin: origin.order)
        nan = (finiteness.counts(keras_arrays.dense(tensor))[0] for tensor in bad)
        if constant or (CONSTANT in inputs.parents and not any(nan)):
            return CONSTANT
        return self._add(_NAMES.get(op, op), bad[0], inputs)

    def _add(self, op: str, result: Any, inputs: Inputs | None = None) -> Origin:
        """Return a new origin: an operation, or, without `inputs`, the variable at the path `op`
        that had the value from the start.
        """
        array = keras_arrays.dense(result)
        rows, every = bad_rows(array, self.rows)
        nan, inf, size = finiteness.counts(array)
        path, layer_class = self.frames[-1] if self.frames else ("", "")
        return Origin(
            order=self.count,
            source="variable" if inputs is None else "operation",
            op=op,
            phase=self.phase,
            frames=self._here(),
            culprit=path,
            layer_class=layer_class,
            nan=nan,
            inf=inf,
            size=size,
            operands=() if inputs is None else inputs.operands,
            dtype=dtype_of(result),
            rows=rows,
            all_rows=every,
            variables=() if inputs is None else inputs.variables,
            line=users_line() if self.phase != "backward" else "",
        )


def dtype_of(tensor: Any) -> str:
    """Return the name of the dtype of a tensor or an array of any backend, `""` if it has none."""
    return finiteness.dtype_name(getattr(tensor, "dtype", ""))


def is_finite(tensor: Any) -> bool:
    """Whether no entry of this tensor or array is NaN or Inf."""
    return not finiteness.is_inexact(tensor) or finiteness.is_finite(keras_arrays.dense(tensor))


def operand(tensor: Any) -> Operand:
    """Return the facts about one float input of an operation."""
    array, dtype = finiteness.widen(keras_arrays.dense(tensor)), dtype_of(tensor)
    finite = array[np.isfinite(array)]
    magnitude = np.abs(finite)
    positive = magnitude[magnitude > 0]
    bad = {}
    if finite.size < array.size:
        lower = array == -np.inf
        bad = {"NaN": np.isnan(array), "Inf": np.isinf(array) & ~lower, "-Inf": lower}
    return Operand(
        max_abs=float(magnitude.max()) if magnitude.size else 0.0,
        zero=bool(positive.size < magnitude.size),
        negative=bool((finite.real < 0).any()),
        tiny=bool(positive.size and positive.min() < TINY.get(dtype, 0.0)),
        holds=" and ".join(word for word, where in bad.items() if where.any()),
        whole=bool(bad) and not finite.size,
    )


def bad_rows(array: finiteness.Array, rows: int) -> tuple[tuple[int, ...], bool]:
    """Return the rows with a bad entry (none if all are bad), and whether all are bad."""
    if not rows or array.ndim == 0 or array.shape[0] != rows:
        return (), False
    bad = ~np.isfinite(finiteness.widen(array)).reshape(rows, -1).all(axis=1)
    found = tuple(int(i) for i in np.flatnonzero(bad))
    return ((), True) if len(found) == rows else (found, False)


def users_line() -> str:
    """Return `file:line` of the user's code that called the operation, in a layer or a loss.

    The search ends at the first library function outside of the model, because code further out on
    the stack called that function.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        path = frame.f_code.co_filename
        if not any(part in path for part in _LIBRARIES) and not path.startswith("<"):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
