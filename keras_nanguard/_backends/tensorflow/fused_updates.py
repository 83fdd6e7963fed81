"""The element-wise updates of Keras' optimizers by kernels of TensorFlow's own: fewer passes over memory, the same bits.

Keras writes an update as one operation after the other, and each of them reads and writes whole arrays: Adam's takes some
thirty passes over memory, which on a CPU is most of the time of a model that memory bounds. Two kernels of TensorFlow's
compute parts of it element by element, in the same order of the same operations:

- ``ResourceApplyGradientDescent``: ``var -= alpha * delta``;
- ``ResourceApplyAdagradV2`` without its slots: ``var -= grad * lr / (sqrt(accum) + epsilon)``.

Whether they come to the same bits here, too, and not to those of a fused multiplication and addition, is found out by
trying, once in a process. Where they do not, where an optimizer has a way of its own to assign, and on any device but a CPU
the update runs as Keras wrote it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_nanguard._backends.tensorflow.exact_products import origin
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import Overrides

__all__ = ["fused", "same_bits"]

_NAMES = ("assign_add", "assign_sub")

_REORDERED = ("Mul", "RealDiv")
"""What TensorFlow's graph optimizer may join with another product, for other bits: (a * 2) * 3 becomes a * 6."""


@contextmanager
def fused(optimizers: Iterable[Any]) -> Iterator[None]:
    """While an update of these optimizers is traced, let it assign by fused kernels where one fits."""
    stock = [optimizer for optimizer in map(keras_optimizers.inner, optimizers) if _assigns_as_keras(optimizer)]
    with Overrides() as overrides:
        for optimizer in stock if same_bits() else ():
            divides = type(optimizer).update_step is keras.optimizers.Adam.update_step
            for name in _NAMES:
                overrides.set(optimizer, name, _assigning(getattr(optimizer, name), name == "assign_add", divides))
        yield


def _assigns_as_keras(optimizer: Any) -> bool:
    kind, plain = type(optimizer), keras.optimizers.Optimizer
    return all(getattr(kind, name) is getattr(plain, name) and name not in vars(optimizer) for name in _NAMES)


def _assigning(real: Callable[[Any, Any], Any], add: bool, divides: bool) -> Callable[[Any, Any], None]:
    """Return what stands in for `assign_add` or `assign_sub`.

    `divides` says that a moment is not written between being read for a quotient and the assignment: the kernel reads it then.
    """

    def assign(variable: Any, value: Any) -> None:
        if not _by_kernel(keras_variables.native(variable), value, add, divides):
            real(variable, value)

    return assign


def _by_kernel(variable: Any, value: Any, add: bool, divides: bool) -> bool:
    """Make `variable += value`, or `-=`, with a kernel that computes the last part of `value`, too; returns whether one does."""
    if tf.executing_eagerly() or not isinstance(value, tf.Tensor):
        return False
    whole = value.shape == variable.shape and value.shape.is_fully_defined()
    if not whole or value.dtype != tf.float32 or variable.dtype != tf.float32 or "CPU" not in variable.device:
        return False
    if value.op.type == "Mul":
        for rate, delta in (tuple(value.op.inputs), tuple(value.op.inputs)[::-1]):
            if rate.shape.rank == 0 and delta.shape == value.shape and origin(delta).op.type not in _REORDERED:
                descend(variable.handle, tf.negative(rate) if add else rate, delta)
                return True
    found = _quotient(value) if divides and not add else None
    if found is not None:
        divide(variable.handle, *found)
    return found is not None


def _quotient(value: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return `accum`'s handle, `lr`, `epsilon` and `grad` of a value `grad * lr / (sqrt(accum) + epsilon)`.

    Where `epsilon` is 0 the graph optimizer may multiply by a reciprocal square root in the place of all that.
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
    if read.type != "ReadVariableOp" or not scalars or not grad.shape == root.shape == value.shape:
        return None
    if not tf.get_static_value(epsilon):
        return None
    return read.inputs[0], rate, epsilon, grad


def descend(handle: Any, rate: Any, delta: Any) -> None:
    """Make `var -= rate * delta`."""
    tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=rate, delta=delta)


def divide(handle: Any, accumulator: Any, rate: Any, epsilon: Any, gradient: Any) -> None:
    """Make `var -= gradient * rate / (sqrt(accumulator) + epsilon)`."""
    tf.raw_ops.ResourceApplyAdagradV2(
        var=handle, accum=accumulator, lr=rate, epsilon=epsilon, grad=gradient, update_slots=False
    )


@functools.cache
def same_bits() -> bool:
    """Whether both kernels come to the bits of the operations one by one, on numbers of all sizes, NaN and infinity.

    Not found out where `tf.debugging.enable_check_numerics` forbids numbers like these.
    """
    try:
        return _tried()
    except tf.errors.InvalidArgumentError:
        return False


def _tried() -> bool:
    rng, special = np.random.default_rng(0), [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3e38]
    sizes = 10.0 ** rng.integers(-6, 4, (3, 2049))
    numbers: Any = (rng.standard_normal((3, 2049)) * sizes).astype("float32")
    first, delta, squares = numbers
    delta[:8] = first[4:12] = squares[2:10] = special
    rate, epsilon = np.float32(1.0 - 0.9), np.float32(1e-7)
    with tf.init_scope(), tf.device("CPU:0"):
        one, other, accumulator = found = [_resource(n, name) for n, name in ((first, "one"), (first, "other"), (squares, "third"))]
        try:
            d, r, e = tf.constant(delta), tf.constant(rate), tf.constant(epsilon)
            tf.raw_ops.AssignAddVariableOp(resource=one, value=d * r)
            descend(other, -r, d)
            same = _equal(one, other)
            tf.raw_ops.AssignSubVariableOp(resource=one, value=(d * r) / (tf.sqrt(tf.constant(squares)) + e))
            divide(other, accumulator, r, e, d)
            return same and _equal(one, other)
        finally:
            for resource in found:
                tf.raw_ops.DestroyResourceOp(resource=resource)


def _resource(numbers: Any, name: str) -> Any:
    """Return a variable that no strategy and no scope around variables takes notice of."""
    resource = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=numbers.shape, shared_name=f"keras_nanguard/{name}")
    tf.raw_ops.AssignVariableOp(resource=resource, value=tf.constant(numbers))
    return resource


def _equal(one: Any, other: Any) -> bool:
    a, b = (tf.raw_ops.ReadVariableOp(resource=resource, dtype=tf.float32).numpy() for resource in (one, other))
    nan = np.isnan(a)
    return bool(np.array_equal(nan, np.isnan(b)) and np.array_equal(a[~nan].view(np.int32), b[~nan].view(np.int32)))
