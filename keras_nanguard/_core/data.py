"""The arrays of a batch: their names for the user, and the places of their rows in the data of
`fit`, which are found by their values. Imports no backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.finiteness import Array

GENERATED_PREFIXES = ("keras_tensor", "input_layer")
"""Prefixes of the names that Keras generates for inputs without a name."""

ROLES = {"inputs": "x", "targets": "y"}
"""Arguments of `fit`, by the role of their arrays."""

ARGUMENTS = ("inputs", "targets", "sample_weight")
"""The roles of the arguments of a step, in their order."""


def arguments(args: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield role, path and value of each array of a batch, given the arguments of the step:
    `(data,)` in Keras, anything in a loop."""
    args, kwargs = tuple(args) if isinstance(args, (list, tuple)) else (args,), {}
    if len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
        args, kwargs = args  # of a step of a loop
    data = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    for role, value in zip(ARGUMENTS, data[: len(ARGUMENTS)]):
        yield from ((role, path, v) for path, v in leaves(role, value))
    for value in (*data[len(ARGUMENTS) :], kwargs):
        yield from (("inputs", path, v) for path, v in leaves("inputs", value))


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of an argument of a step, or of `fit`, with their paths in incidents."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from leaves(f"{path}/{key}" if len(value) > 1 else path, item)
    elif value is not None:
        yield path, value


def input_names(model: Any) -> tuple[str, ...]:
    """Return the name of each `keras.Input` of a functional model, `""` if it is generated; `()`
    for other models."""
    names = [str(getattr(tensor, "name", "")) for tensor in getattr(model, "inputs", None) or ()]
    return tuple("" if name.startswith(GENERATED_PREFIXES) else name for name in names)


def named(path: str, names: tuple[str, ...]) -> str:
    """Return the path of an array of the inputs (`inputs/1`, `x`) with the name of its
    `keras.Input` in place of its number."""
    role, _, rest = path.partition("/")
    number = int(rest) if rest.isdecimal() else 0 if not rest and len(names) == 1 else len(names)
    known = role in ("inputs", "x") and number < len(names) and names[number]
    return f"{role}/{names[number]}" if known else path


def argument_path(path: str) -> str:
    """Return the path of an array of the batch by the arguments of `fit`: `x`, `x/age`, `y`."""
    role, slash, rest = path.partition("/")
    return ROLES.get(role, role) + slash + rest


MAX_COPIED = 1 << 28
"""Maximum size of an array that is copied because it is not a NumPy array in host memory."""

_CHUNK = 1 << 22
"""Numbers of the training data that are compared at a time."""

_PROBES = 8
"""Entries of a row that are compared first."""


def indices(
    arrays: Mapping[tuple[str, str], Array],
    rows: Sequence[int],
    x: Any,
    y: Any,
    seconds: float,
    as_array: Callable[[Any], Array],
) -> list[tuple[int, ...]]:
    """Return the indices of each of these rows of a batch in the training arrays.

    A few distinguishing entries of a row are compared first, one after the other. They leave few
    candidates, and these are compared completely.

    Args:
        arrays: those of the batch, by role and path.
        rows: the rows to search for.
        x, y: the data of `fit`; `None` if they are not arrays.
        seconds: the time limit.
        as_array: returns a tensor as an array.

    Returns:
        For each row the indices of all rows with the same inputs; if there are several, only of
        those with the same targets, if any. Empty if no row is equal, if the arrays are too large
        to be copied, or if the time limit is reached.
    """
    end, found = time.perf_counter() + seconds, []
    inputs, targets = dict(leaves("inputs", x)), dict(leaves("targets", y))
    paths = sorted(path for role, path in arrays if role == "inputs")
    if x is None or not paths or not {*paths} <= inputs.keys():
        return [()] * len(rows)
    whole = {path: _flat(inputs[path], as_array) for path in paths}
    first = whole[paths[0]]
    for row in rows:
        places = np.arange(0 if first is None else len(first))
        for path in paths:
            places = _equal(whole[path], arrays["inputs", path][row], places, end)
        for (role, path), array in arrays.items():
            if len(places) > 1 and role == "targets" and path in targets:
                narrowed = _equal(_flat(targets[path], as_array), array[row], places, end)
                places = narrowed if len(narrowed) else places
        found.append(tuple(int(place) for place in places))
    return found


def _flat(whole: Any, as_array: Callable[[Any], Array]) -> Array | None:
    """Return an array on the host as one row of numbers for each of its rows; `None` if it is too
    large to copy.
    """
    stays = isinstance(whole, np.ndarray) and (whole.ndim <= 2 or whole.flags.c_contiguous)
    shape = (int(size) for size in getattr(whole, "shape", ()) if size is not None)
    if not stays and math.prod(shape) > MAX_COPIED:
        return None
    found: Array = whole if isinstance(whole, np.ndarray) else as_array(whole)
    return found.reshape(len(found), -1) if found.size else found.reshape(len(found), 0)


def _equal(whole: Array | None, one: Array, rows: Array, end: float) -> Array:
    """Return the candidate rows of an array that equal this row; none after the time `end`."""
    flat = np.asarray(one).reshape(-1)
    if whole is None or whole.shape[1] != flat.size:
        return rows[:0]
    rows = rows[rows < len(whole)]
    for columns in (*_telling(flat)[:, None], np.arange(flat.size)):
        chunk = max(_CHUNK // max(len(columns), 1), 1)
        kept = [rows[:0]]
        for start in range(0, len(rows), chunk):
            if time.perf_counter() > end:
                return rows[:0]
            part = rows[start : start + chunk]
            kept.append(part[_same(whole[np.ix_(part, columns)], flat[columns])])
        rows = np.concatenate(kept)
    return rows


def _telling(flat: Array) -> Array:
    """Return the positions of a few entries that distinguish a row from others: those not finite,
    then the largest.
    """
    size = np.abs(finiteness.widen(flat)) if flat.dtype.kind not in "bUSO" else flat != flat[:1]
    if size.dtype.kind == "f":
        size = np.where(np.isfinite(size), size, np.inf)
    return np.argsort(size, kind="stable")[::-1][:_PROBES]


def _same(found: Array, wanted: Array) -> Array:
    """Return which rows equal the given one, in its dtype, with NaN equal to NaN."""
    cast = found.astype(wanted.dtype, copy=False)
    same = cast == wanted
    if wanted.dtype.kind in "fcV":
        same |= (cast != cast) & (wanted != wanted)
    return np.asarray(same.all(axis=1))
