"""Kernels that compute a part of an update on a CPU in one pass, with the bits of Keras' own step.

Keras writes an update as one operation after the other, each of which reads and writes whole
arrays; Adam's takes some thirty passes over memory. Two kernels compute parts of it element by
element, in the same order: ``ResourceApplyGradientDescent`` (``var -= alpha * delta``), and
``ResourceApplyAdagradV2`` without its slots (``var -= grad * lr / (sqrt(accum) + epsilon)``). A
trace of an update replaces an assignment by one of them if the graph of its value has this form.
They are used for optimizers that assign as Keras does, and if a test, once in a process, shows that
they give the same bits on this processor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_nanguard._keras import variables as keras_variables

_NAMES = ("assign_add", "assign_sub")

_REORDERED = ("Mul", "RealDiv")
"""Operations that TensorFlow's graph optimizer may combine with another product, giving other bits:
a * 2 * 3.
"""


def fused(optimizer: Any) -> dict[str, Callable[[Any, Any], None]]:
    """Return the replacements of the methods of an optimizer by which it assigns; none if it does
    not assign as Keras does.
    """
    if not (_assigns_as_keras(optimizer) and same_bits()):
        return {}
    divides = type(optimizer).update_step is keras.optimizers.Adam.update_step
    return {name: _assigning(getattr(optimizer, name), name, divides) for name in _NAMES}


def source_of(tensor: Any) -> Any:
    """Return the tensor that reaches this one through identity operations."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _assigns_as_keras(optimizer: Any) -> bool:
    kind, plain, own = type(optimizer), keras.optimizers.Optimizer, vars(optimizer)
    return all(getattr(kind, n) is getattr(plain, n) and n not in own for n in _NAMES)


def _assigning(
    real: Callable[[Any, Any], Any], name: str, divides: bool
) -> Callable[[Any, Any], None]:
    """Return the replacement of `assign_add` or `assign_sub`: by a kernel that also computes the
    last part of the value, if there is one.

    `divides`: a moment is not written between being read for a quotient and the assignment, so the
    kernel may read it then.
    """

    def assign(variable: Any, value: Any) -> None:
        native, add = keras_variables.native(variable), name == "assign_add"
        if _fits(native, value):
            factors = _product(value)
            quotient = _quotient(value) if divides and not add else None
            if factors is not None:
                rate, delta = factors
                return _descend(native.handle, tf.negative(rate) if add else rate, delta)
            if quotient is not None:
                return _divide(native.handle, *quotient)
        real(variable, value)
        return None

    return assign


def _fits(variable: Any, value: Any) -> bool:
    if not isinstance(value, tf.Tensor):
        return False
    whole = value.shape == variable.shape and value.shape.is_fully_defined()
    return whole and value.dtype == variable.dtype == tf.float32 and "CPU" in variable.device


def _product(value: Any) -> tuple[Any, Any] | None:
    """Return both factors of `rate * delta`, in either order, if no optimizer changes it."""
    if value.op.type == "Mul":
        for rate, delta in (tuple(value.op.inputs), tuple(value.op.inputs)[::-1]):
            fits = rate.shape.rank == 0 and delta.shape == value.shape
            if fits and source_of(delta).op.type not in _REORDERED:
                return rate, delta
    return None


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
    if root.op.type != "Sqrt":
        return None
    read = root.op.inputs[0].op
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
    `tf.debugging.enable_check_numerics` forbids those, or a strategy copies the variables.
    """
    rng = np.random.default_rng(0)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3e38]
    sizes = 10.0 ** rng.integers(-6, 4, (3, 2049))
    first, delta, squares = (rng.standard_normal((3, 2049)) * sizes).astype("float32")
    delta[:8] = first[4:12] = squares[2:10] = special
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            one, other, sums = [tf.Variable(n, trainable=False) for n in (first, first, squares)]
            d, r, e = tf.constant(delta), tf.constant(np.float32(1.0 - 0.9)), tf.constant(1e-7)
            one.assign_add(d * r)
            one.assign_sub((d * r) / (tf.sqrt(sums) + e))
            _descend(other.handle, -r, d)
            _divide(other.handle, sums.handle, r, e, d)
            a, b = one.numpy(), other.numpy()
    except (tf.errors.InvalidArgumentError, ValueError):
        return False
    nan = np.isnan(a)  # of which any bits do
    return np.array_equal(nan, np.isnan(b)) and a[~nan].tobytes() == b[~nan].tobytes()
