"""Finds the origin of NaN and Inf on PyTorch: records every operation of a run, and follows each
bad value.

A `TorchDispatchMode` sees each operation that runs, those of the backward pass included. Values are
identified by their storage, because autograd creates new tensors with the same storage. A storage
that is written in place gets the origin of the new value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.shared.origins import Inputs, OriginTracker, is_finite, operand
from keras_nanguard._backends.torch.reductions import can_be_bad
from keras_nanguard._backends.torch.undo_log import storage, written_by
from keras_nanguard._core.observations import Origin

_CAPITALIZED = (
    *("acos", "acosh", "asin", "atan2", "atanh", "cosh", "tan", "sinh", "cholesky", "digamma"),
    *("erfinv", "exp", "expm1", "lgamma", "log", "log1p", "mul", "pow", "reciprocal", "rsqrt"),
    *("softplus", "sqrt", "xlogy"),
)

NAMES = {
    **{name: name.capitalize() for name in _CAPITALIZED},
    **dict.fromkeys(("log2", "log10", "logit", "binary_cross_entropy"), "Log"),
    **dict.fromkeys(("div", "addcdiv", "binary_cross_entropy_backward"), "RealDiv"),
    **dict.fromkeys(("fmod", "remainder"), "FloorMod"),
    **dict.fromkeys(("acosh_backward", "logit_backward"), "ReciprocalGrad"),
    "_log_softmax": "LogSoftmax",
    "_softmax": "Softmax",
    "_linalg_eigh": "SelfAdjointEig",
    "_linalg_svd": "Svd",
    "_to_copy": "Cast",
    "exp2": "Exp",
    "linalg_cholesky_ex": "Cholesky",
    "linalg_inv_ex": "MatrixInverse",
    "linalg_qr": "Qr",
    "linalg_solve_ex": "MatrixSolve",
    "linalg_vector_norm": "Sqrt",
}
"""Torch's names of operations that `causes` knows by TensorFlow's names. All others keep torch's
name.
"""

UNWRITTEN = ("empty", "resize", "set_")
"""Operations whose result is uninitialized memory."""

FILLING = ("full", "fill", "scalar_tensor", "lift_fresh", "masked_fill", "new_full")


class Origins(OriginTracker, TorchDispatchMode):  # type: ignore[misc]
    """Context that records every operation of this thread. Variables are identified by the address
    of their memory.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        TorchDispatchMode.__init__(self)
        OriginTracker.__init__(self, *args, **kwargs)

    def of(self, tensor: Any) -> Origin | None:
        """Return the origin behind a tensor, or `None` if it is finite or unknown."""
        if not isinstance(tensor, torch.Tensor) or is_finite(tensor):
            return None
        return super().of(tensor)

    @staticmethod
    def number_of(variable: Any) -> int | None:
        """Return the number of a variable, or `None`."""
        return storage(getattr(variable, "value", variable))

    def _key(self, tensor: Any) -> int:
        return storage(tensor) if isinstance(tensor, torch.Tensor) else id(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and record its result."""
        kwargs = kwargs or {}
        given = args, kwargs
        name = func.overloadpacket.__name__
        written = _tensors(written_by(func, args, kwargs))
        # Of inputs that it may overwrite, what is known is read before.
        overwritten = [(own, self._inputs(inputs)) for own, inputs in _groups(written, *given)]
        result = func(*args, **kwargs)
        self.count += 1
        if not name.startswith(UNWRITTEN):
            views = {storage(t) for t in _tensors(given) if not written}
            name = name.removeprefix("_foreach_").rstrip("_")
            for own, inputs in overwritten or _groups(_tensors(result), *given):
                self._see(name, own, inputs, views, given)
        return result

    def _see(
        self,
        name: str,
        outputs: Sequence[Any],
        inputs: Sequence[Any] | Inputs,
        views: set[int],
        given: Any,
    ) -> None:
        for output in outputs:
            number = storage(output)
            if is_finite(output):
                if number not in views:
                    self._lineage.pop(number, None)
            elif number not in views or number not in self._lineage:
                known = inputs if isinstance(inputs, Inputs) else self._inputs(inputs)
                self._keep(output, self._origin(name, known, output, given))

    def _origin(self, name: str, inputs: Inputs, bad: Any, given: Any) -> Origin:
        """Return the origin behind the bad result of an operation with these arguments."""
        filled = name.startswith(FILLING) and any(map(_is_bad_number, keras.tree.flatten(given)))
        numbers = [a for a in given[0] if isinstance(a, float) and not np.isfinite(a)]
        as_tensors = (torch.as_tensor(a, dtype=bad.dtype) for a in numbers)
        operands = *inputs.operands, *map(operand, as_tensors)
        constant = not inputs.parents or filled
        known = inputs._replace(operands=operands)
        return self._inherited(NAMES.get(name, name), known, [bad], constant)


def _tensors(values: Any) -> list[Any]:
    """Return the float tensors in nested arguments or results."""
    found = [value for value in keras.tree.flatten(values) if isinstance(value, torch.Tensor)]
    strided = [t for t in found if t.layout == torch.strided and not t.is_meta]
    return list(filter(can_be_bad, strided))


def _groups(
    outputs: Sequence[Any], args: Any, kwargs: Any
) -> list[tuple[Sequence[Any], Sequence[Any]]]:
    """Return outputs and the inputs they depend on: element by element if the operation takes lists
    of as many tensors.
    """
    if not outputs:
        return []
    values = (*args, *kwargs.values())
    lists = [a for a in values if isinstance(a, (list, tuple)) and a and _all_tensors(a)]
    if not lists or {len(a) for a in lists} != {len(outputs)}:
        return [(outputs, _tensors(values))]
    alone = [a for a in values if isinstance(a, torch.Tensor)]
    inputs = [_tensors([*together, *alone]) for together in zip(*lists)]
    return list(zip([[output] for output in outputs], inputs))


def _all_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _is_bad_number(value: Any) -> bool:
    """Whether this is a plain number, or a tensor of no dimension, that is not finite."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not is_finite(value)
    return isinstance(value, float) and not np.isfinite(value)
