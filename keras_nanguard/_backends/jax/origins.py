"""Where NaN and Inf are born, on JAX: watches every primitive of an eager run, and follows what comes of each bad value.

The same as `origins` does on TensorFlow. With compilation turned off, every primitive runs by itself on arrays, those of
the backward pass included, also below `jax.grad`. Values are known by the array object that holds them.

JAX evaluates a primitive in `jax._src.core.EvalTrace.process_primitive`. It has no public name. Where it is gone the
layer table alone has to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_nanguard._backends.shared.origins import CONSTANT, MAX_ORIGINS, Casts, bad_rows, operand, users_line
from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import Origin

try:
    from jax._src.core import EvalTrace
except ImportError:
    EvalTrace = None

__all__ = ["Origins"]

NAMES = {
    "acos": "Acos",
    "acosh": "Acosh",
    "asin": "Asin",
    "atan2": "Atan2",
    "atanh": "Atanh",
    "cholesky": "Cholesky",
    "convert_element_type": "Cast",
    "cosh": "Cosh",
    "digamma": "Digamma",
    "div": "RealDiv",
    "erf_inv": "Erfinv",
    "exp": "Exp",
    "exp2": "Exp",
    "expm1": "Expm1",
    "integer_pow": "Pow",
    "lgamma": "Lgamma",
    "log": "Log",
    "log1p": "Log1p",
    "pow": "Pow",
    "rem": "FloorMod",
    "rsqrt": "Rsqrt",
    "sinh": "Sinh",
    "sqrt": "Sqrt",
    "tan": "Tan",
}
"""Words of JAX for operations that `causes` knows by TensorFlow's; any other is called as JAX calls it."""

FILLING = ("broadcast_in_dim", "full", "copy")


class Origins:
    """Context in which every primitive that runs eagerly is watched; arguments and attributes as in `origins.Origins`."""

    available = EvalTrace is not None

    def __init__(
        self,
        batch: Iterable[tuple[str, Any]] = (),
        variables: dict[int, str] | None = None,
        tolerated: Iterable[int] = (),
        rows: int = 0,
    ):
        self.phase, self.rows, self.count = "forward", rows, 0
        self.frames: list[tuple[str, str]] = []
        self.origins: list[Origin] = []
        self._variables, self._tolerated = variables or {}, set(tolerated)
        self._lineage: dict[int, Origin] = {}
        self._held: list[Any] = []
        self._casts = Casts()
        self._batch: list[tuple[Any, Origin]] = []
        for place, (name, tensor) in enumerate(batch):
            if not _is_finite(tensor):
                self._batch.append((np.asarray(tensor), Origin(place - MAX_ORIGINS, "batch", name, "forward")))
                self._keep(tensor, self._batch[-1][1])

    def __enter__(self) -> Origins:
        self._still = jax.disable_jit()
        self._still.__enter__()
        if self.available:
            self._real = real = EvalTrace.process_primitive

            def process_primitive(trace: Any, primitive: Any, args: Any, params: Any) -> Any:
                result = real(trace, primitive, args, params)
                self._seen(primitive.name, args, result if primitive.multiple_results else (result,))
                return result

            EvalTrace.process_primitive = process_primitive
        return self

    def __exit__(self, *details: Any) -> None:
        if self.available:
            EvalTrace.process_primitive = self._real
        self._still.__exit__(*details)

    def of(self, tensor: Any) -> Origin | None:
        """Return the birth behind an array, `None` where it is finite or nothing is known of it."""
        found = self._lineage.get(id(tensor))
        if found is None and id(tensor) in self._variables and not _is_finite(tensor):
            found = self._stored(tensor)
        return None if found is None else self._casts.complete(found)

    def written(self, variable: Any) -> Origin | None:
        """Return the birth behind the bad value that was last written into this variable, if any was."""
        return self.of(variable.value)

    def entered(self, tensors: Iterable[Any]) -> None:
        """Note that a layer whose frame is on top now takes these arrays in."""
        self._casts.entered(self.frames, [self._lineage.get(id(t)) for t in tensors])

    def _keep(self, tensor: Any, origin: Origin) -> None:
        self._held.append(tensor)  # so that no other array gets its number
        self._lineage[id(tensor)] = origin

    def _seen(self, primitive: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.count += 1
        bad = [t for t in outputs if not _is_finite(t)]
        if bad:
            origin = self._inherited(NAMES.get(primitive, primitive), inputs, bad)
            for tensor in bad:
                self._keep(tensor, origin)
        elif primitive in ("convert_element_type", "copy") and inputs and id(inputs[0]) in self._variables:
            self._held.append(outputs[0])
            self._variables[id(outputs[0])] = self._variables[id(inputs[0])]

    def _inherited(self, name: str, inputs: Sequence[Any], bad: list[Any]) -> Origin:
        """Return the earliest birth behind a primitive's inputs, or its own."""
        if name == "device_put" and (found := self._of_batch(bad[0])) is not None:
            return found
        parents = [self._parent(t) for t in inputs]
        known = [p for p in parents if p is not None and p is not CONSTANT]
        if known:
            return min(known, key=lambda origin: origin.order)
        if CONSTANT in parents and not any(_has_nan(t) for t in bad):
            return CONSTANT
        if name in FILLING and not any(map(_is_float, inputs)):
            return CONSTANT
        return self._note_created(name, inputs, bad[0])

    def _of_batch(self, tensor: Any) -> Origin | None:
        """Return the birth of the array of the batch that has just been brought to the device, maybe in another dtype."""
        array = np.asarray(tensor)
        for other, origin in self._batch:
            if other.shape == array.shape and np.array_equal(other.astype(array.dtype), array, equal_nan=True):
                return origin
        return None

    def _parent(self, tensor: Any) -> Origin | None:
        found = self._lineage.get(id(tensor))
        if found is not None or not _is_float(tensor) or _is_finite(tensor):
            return found
        if id(tensor) in self._variables and id(tensor) not in self._tolerated:
            return self._stored(tensor)
        return CONSTANT

    def _stored(self, tensor: Any) -> Origin:
        """Return the birth of what a variable held from the start."""
        origin = self._note_created("", (), tensor, self._variables[id(tensor)])
        self._keep(tensor, origin)
        return origin

    def _note_created(self, name: str, inputs: Sequence[Any], result: Any, stored: str = "") -> Origin:
        array = np.asarray(result)
        rows, every = bad_rows(array, self.rows)
        nan, inf, size = finiteness.counts(array)
        top = self.frames[-1] if self.frames else ("", "")
        origin = Origin(
            order=self.count,
            source="variable" if stored else "operation",
            op=stored or name,
            phase=self.phase,
            frames=tuple(frame for frame, _ in self.frames),
            culprit=top[0],
            layer_class=top[1],
            nan=nan,
            inf=inf,
            size=size,
            operands=tuple(operand(np.asarray(t), np.asarray(t).dtype.name) for t in inputs if _is_float(t)),
            dtype=array.dtype.name,
            rows=rows,
            all_rows=every,
            variables=tuple(self._variables[id(t)] for t in inputs if id(t) in self._variables),
            line=users_line() if self.phase != "backward" else "",
        )
        if len(self.origins) < MAX_ORIGINS:
            self.origins.append(origin)
        return origin


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def _is_finite(value: Any) -> bool:
    return not _is_float(value) or finiteness.is_finite(np.asarray(value))


def _has_nan(value: Any) -> bool:
    return bool(np.isnan(finiteness.widen(np.asarray(value))).any())
