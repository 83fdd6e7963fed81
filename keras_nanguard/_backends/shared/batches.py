"""The data of a step: its batch by name, the faults and parts of that, batches in memory, and the
losses among the outputs of a step that never calls `compute_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared.iterators import reads_iterator
from keras_nanguard._core import finiteness
from keras_nanguard._core.data import arguments, is_iterator, leaves
from keras_nanguard._core.observations import BadArray, Spread
from keras_nanguard._keras import arrays as keras_arrays

OUTLIER = 30.0
"""Multiple of the typical magnitude of a row above which a row is an outlier."""

FUNCTIONS = (FunctionType, MethodType, partial)
"""Types of the arguments that are looked into like the function of a step."""

MAX_BYTES = 64 << 20
"""Maximum bytes of remembered batches. A larger batch is not remembered."""


@dataclass(frozen=True)
class Part:
    """One array of a batch: its role, its path and its value."""

    role: str
    path: str
    value: Any

    @property
    def array(self) -> finiteness.Array:
        """Its numbers."""
        return keras_arrays.by_rows(self.value)


def parts(args: Any) -> list[Part]:
    """Return the arrays of a batch, given the arguments of the step: `(data,)` in Keras."""
    return [Part(role, path, value) for role, path, value in arguments(args) if _has_numbers(value)]


def _has_numbers(value: Any) -> bool:
    name = finiteness.dtype_name(getattr(value, "dtype", None))
    return name.startswith(("bool", "int", "uint", "float", "bfloat", "complex"))


def row_count(args: Any) -> int:
    """Return the number of rows of a batch; 0 if its arrays have none, or do not agree."""
    lengths = {
        int(p.value.shape[0]) for p in parts(args) if len(p.value.shape) and p.value.shape[0]
    }
    return lengths.pop() if len(lengths) == 1 else 0


def mapped(args: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return the batch with each float or integer array replaced by `change(role, array)`; it may
    have one array in several roles. What replaces a NumPy array is one, too.
    """
    places = keras.tree.map_structure(lambda value: SimpleNamespace(value=value), args)
    roles = {id(at): role for role, _, at in arguments(places) if _has_numbers(at.value)}

    def changed(at: Any) -> Any:
        value = change(roles[id(at)], at.value) if id(at) in roles else at.value
        return keras_arrays.as_array(value) if isinstance(at.value, np.ndarray) else value

    return keras.tree.map_structure(changed, places)


def without(args: Any, rows: Sequence[int]) -> Any:
    """Return the batch without some rows."""
    count = row_count(args)
    kept = np.setdiff1d(np.arange(count), np.asarray(rows, dtype=int))

    def taken(role: str, value: Any) -> Any:
        return current.replay().without_rows(value, kept) if sum(value.shape[:1]) else value

    return mapped(args, taken)


def bad(args: Any, roles: Sequence[str]) -> tuple[BadArray, ...]:
    """Return the arrays with these roles that hold NaN or Inf, with the rows."""
    found = []
    for part in parts(args):
        if part.role not in roles:
            continue
        array = finiteness.widen(part.array)
        nan, inf, _ = finiteness.counts(array)
        if nan or inf:
            rows = _bad_rows(part, array, row_count(args))
            column = _bad_column(part, array) if len(rows) > 1 else None
            found.append(BadArray(part.path, rows, nan, inf, column))
    return tuple(found)


def _bad_rows(part: Part, array: finiteness.Array, count: int) -> tuple[int, ...]:
    """Return the rows of a widened array with NaN or Inf; none unless they are the batch's."""
    if tuple(int(n) for n in part.value.shape[:1]) != (count,):
        return ()
    if keras_arrays.has_coordinates(part.value):
        places, values, _ = keras_arrays.coordinates(part.value)
        return tuple(int(i) for i in np.unique(places[~np.isfinite(finiteness.widen(values)), 0]))
    splits = getattr(part.value, "nested_row_splits", ())  # of a ragged tensor, the outermost first
    if array.shape[:1] != (count,) and not splits:
        return ()
    wrong = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
    for split in reversed(splits):
        wrong = np.searchsorted(keras_arrays.as_array(split), wrong, "right") - 1
    return tuple(int(i) for i in np.unique(wrong))


def _bad_column(part: Part, array: finiteness.Array) -> int | None:
    """Return the only column of a dense matrix, widened, that holds NaN or Inf."""
    if array.ndim != 2 or array.shape != tuple(part.value.shape) or array.shape[1] < 2:
        return None
    columns = np.flatnonzero(~np.isfinite(array).all(axis=0))
    return int(columns[0]) if len(columns) == 1 else None


def spreads(args: Any, role: str) -> tuple[Spread, ...]:
    """Return the magnitudes of the arrays with this role."""
    found = []
    for part in parts(args):
        if part.role == role and (array := part.array).dtype.kind in "fiuV":
            own = spread(part.path, array)
            is_ragged = keras_arrays.is_ragged(part.value)
            found.append(replace(own, outliers=()) if is_ragged else own)
    return tuple(found)


def spread(name: str, array: finiteness.Array) -> Spread:
    """Return the magnitudes of one array."""
    integer = array.dtype.kind in "iu"
    wide = finiteness.widen(array).astype(np.float64, copy=False)
    finite = wide[np.isfinite(wide)]
    if not finite.size:
        return Spread(name, 0.0, 0.0, 0.0, integer=integer)
    constant = 0
    outliers: tuple[int, ...] = ()
    if wide.ndim >= 1 and wide.shape[0] > 1:
        flat = wide.reshape(wide.shape[0], -1)
        constant = int((flat == flat[:1]).all(axis=0).sum())
        outliers = _outliers(flat)
    with np.errstate(all="ignore"):
        return Spread(
            name,
            float(np.abs(finite).max()),
            float(finite.mean()),
            float(finite.std()),
            constant,
            outliers,
            integer,
        )


def _outliers(flat: finiteness.Array) -> tuple[int, ...]:
    magnitudes = np.abs(np.where(np.isfinite(flat), flat, 0.0))
    largest = magnitudes.max(axis=1, initial=0.0)
    if not largest.any():
        return ()
    # Most rows of sparse data may hold nothing at all.
    typical = float(np.median(largest[largest > 0.0]))
    rows = np.flatnonzero(largest > OUTLIER * typical)
    return tuple(int(i) for i in rows[np.argsort(-largest[rows])])


# Batches in memory


def takes_iterator(args: Any) -> bool:
    """Whether one of the arguments of a step is an iterator, or a function that reads one: then the
    same arguments are another batch.
    """
    return any(
        is_iterator(leaf) or (isinstance(leaf, FUNCTIONS) and reads_iterator(leaf))
        for _, leaf in leaves("", args)
    )


def held(args: Any) -> Any:
    """Return arguments that later steps cannot change: writable NumPy arrays are copied."""
    return with_arrays(owned, args)


def with_arrays(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure with the result of a function for each leaf. Runs in every step."""
    if value is None or hasattr(value, "shape"):
        return function(value)
    kind = type(value)  # one of these, nearly always; `keras.tree` takes ten times as long
    if kind is tuple or kind is list:
        return kind([with_arrays(function, part) for part in value])
    if kind is dict:
        return {key: with_arrays(function, part) for key, part in value.items()}
    return keras.tree.map_structure(function, value)


def owned(value: Any) -> Any:
    """Return a value, or a copy of a writable NumPy array."""
    return value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value


# Outputs


def scalars(outputs: Any) -> list[Any]:
    """Return the scalars among the outputs of a loop's step, each of which counts as its loss."""
    leaves = keras.tree.flatten(outputs)
    return [keras.ops.convert_to_tensor(leaf) for leaf in leaves if _is_scalar(leaf)]


def losses_in_logs(logs: Any) -> list[Any]:
    """Return the losses among the logs of a Keras train step: `loss`, else all `*loss`."""
    known = logs if isinstance(logs, dict) else {}
    named = {name: value for name, value in known.items() if str(name).endswith("loss")}
    return scalars(named.get("loss", named))


def _is_scalar(leaf: Any) -> bool:
    if isinstance(leaf, (float, np.floating)):
        return True
    is_tensor = keras.ops.is_tensor(leaf) and getattr(leaf, "ndim", None) == 0
    return is_tensor and finiteness.is_real(leaf.dtype)
