"""Element-wise parts of Keras' updates as single TensorFlow kernels: fewer passes over memory, the
same bits.

Keras writes an update as one operation after the other, each of which reads and writes whole
arrays; Adam's takes some thirty passes over memory. Two kernels compute parts of it element by
element, in the same order of the same operations:

- ``ResourceApplyGradientDescent``: ``var -= alpha * delta``;
- ``ResourceApplyAdagradV2`` without its slots: ``var -= grad * lr / (sqrt(accum) + epsilon)``.

Once in a process it is tested whether they give the same bits on this processor. If they do not, if
an optimizer overrides assignments, or on another device than a CPU, the update runs as Keras wrote
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.overrides import Overrides

_NAMES = ("assign_add", "assign_sub")

_REORDERED = ("Mul", "RealDiv")
"""Operations that TensorFlow's graph optimizer may combine with another product, giving other bits:
a * 2 * 3.
"""


def use_in(optimizer: Any, overrides: Overrides) -> None:
    """Let an optimizer assign by kernels if these give the same bits.

    Args:
        optimizer: one that updates weights, not a `LossScaleOptimizer`.
        overrides: undoes it.
    """
    if not _assigns_as_keras(optimizer) or not same_bits():
        return
    divides = type(optimizer).update_step is keras.optimizers.Adam.update_step
    for name in _NAMES:
        real, adds = getattr(optimizer, name), name == "assign_add"
        overrides.set(optimizer, name, _assigning(real, adds, divides))


def _assigns_as_keras(optimizer: Any) -> bool:
    kind, plain, own = type(optimizer), keras.optimizers.Optimizer, vars(optimizer)
    return all(getattr(kind, n) is getattr(plain, n) and n not in own for n in _NAMES)


def _assigning(
    real: Callable[[Any, Any], Any], add: bool, divides: bool
) -> Callable[[Any, Any], None]:
    """Return the replacement of `assign_add` or `assign_sub`.

    `divides`: a moment is not written between being read for a quotient and the assignment, so the
    kernel may read it then.
    """

    def assign(variable: Any, value: Any) -> None:
        if not _by_kernel(keras_variables.native(variable), value, add, divides):
            real(variable, value)

    return assign


def _by_kernel(variable: Any, value: Any, add: bool, divides: bool) -> bool:
    """Compute `variable += value`, or `-=`, with a kernel that also computes the last part of
    `value`.

    Return whether there is such a kernel.
    """
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor):
        return False
    whole = value.shape == variable.shape and value.shape.is_fully_defined()
    float32 = value.dtype == variable.dtype == tf.float32
    if not whole or not float32 or "CPU" not in variable.device:
        return False
    if value.op.type == "Mul":
        for rate, delta in (tuple(value.op.inputs), tuple(value.op.inputs)[::-1]):
            fits = rate.shape.rank == 0 and delta.shape == value.shape
            if fits and origin(delta).op.type not in _REORDERED:
                _descend(variable.handle, tf.negative(rate) if add else rate, delta)
                return True
    found = _quotient(value) if divides and not add else None
    if found is not None:
        _divide(variable.handle, *found)
    return found is not None


def origin(tensor: Any) -> Any:
    """Return the tensor that reaches this one through identity operations."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _quotient(value: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return `accum`'s handle, `lr`, `epsilon`, `grad` of `grad * lr / (sqrt(accum) + epsilon)`.

    If `epsilon` is 0 the graph optimizer may multiply by a reciprocal square root instead.
    """
    if value.op.type != "RealDiv":
        return None
    product, divisor = (tensor.op for tensor in value.op.inputs)
    if product.type != "Mul" or divisor.type != "AddV2":
        return None
    grad, rate = product.inputs
    root, epsilon = divisor.inputs
    read = root.op.inputs[0].op if root.op.type == "Sqrt" else root.op
    scalars = rate.shape.rank == epsilon.shape.rank == 0
    same_shape = grad.shape == root.shape == value.shape
    if read.type != "ReadVariableOp" or not scalars or not same_shape:
        return None
    if not tf.get_static_value(epsilon):
        return None
    return read.inputs[0], rate, epsilon, grad


def _descend(handle: Any, rate: Any, delta: Any) -> None:
    """Compute `var -= rate * delta`."""
    tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=rate, delta=delta)


def _divide(handle: Any, accumulator: Any, rate: Any, epsilon: Any, gradient: Any) -> None:
    """Compute `var -= gradient * rate / (sqrt(accumulator) + epsilon)`."""
    numbers = {"lr": rate, "epsilon": epsilon, "grad": gradient}
    tf.raw_ops.ResourceApplyAdagradV2(var=handle, accum=accumulator, **numbers, update_slots=False)


@functools.cache
def same_bits() -> bool:
    """Whether both kernels give the same bits as the separate operations.

    Tested with numbers of all sizes, NaN and infinity; `False` if
    `tf.debugging.enable_check_numerics` forbids those.
    """
    try:
        return _tried()
    except tf.errors.InvalidArgumentError:
        return False


def _tried() -> bool:
    rng = np.random.default_rng(0)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3e38]
    sizes = 10.0 ** rng.integers(-6, 4, (3, 2049))
    numbers: Any = (rng.standard_normal((3, 2049)) * sizes).astype("float32")
    first, delta, squares = numbers
    delta[:8] = first[4:12] = squares[2:10] = special
    rate, epsilon = np.float32(1.0 - 0.9), np.float32(1e-7)
    with tf.init_scope(), tf.device("CPU:0"):
        named: Sequence[Any] = ((first, "one"), (first, "other"), (squares, "third"))
        one, other, accumulator = found = [_resource(n, name) for n, name in named]
        try:
            d, r, e = tf.constant(delta), tf.constant(rate), tf.constant(epsilon)
            tf.raw_ops.AssignAddVariableOp(resource=one, value=d * r)
            _descend(other, -r, d)
            same = _equal(one, other)
            quotient = (d * r) / (tf.sqrt(tf.constant(squares)) + e)
            tf.raw_ops.AssignSubVariableOp(resource=one, value=quotient)
            _divide(other, accumulator, r, e, d)
            return same and _equal(one, other)
        finally:
            for resource in found:
                tf.raw_ops.DestroyResourceOp(resource=resource)


def _resource(numbers: Any, name: str) -> Any:
    """Return a variable that strategies and variable scopes ignore."""
    name, dtype = f"keras_nanguard/{name}", tf.float32
    resource = tf.raw_ops.VarHandleOp(dtype=dtype, shape=numbers.shape, shared_name=name)
    tf.raw_ops.AssignVariableOp(resource=resource, value=tf.constant(numbers))
    return resource


def _equal(one: Any, other: Any) -> bool:
    read = tf.raw_ops.ReadVariableOp
    a, b = (read(resource=resource, dtype=tf.float32).numpy() for resource in (one, other))
    nan = np.isnan(a)
    same_bits_elsewhere = np.array_equal(a[~nan].view(np.int32), b[~nan].view(np.int32))
    return bool(np.array_equal(nan, np.isnan(b)) and same_bits_elsewhere)
