"""How the deferred updates of a step run: in order, with few passes over memory, and with the bits
of Keras' own step.

Three things differ if an update runs in a conditional, after the verdict, and not as soon as its
gradient is there:

- TensorFlow would begin the updates of all weights at once, and Adam's holds several arrays of the
  size of the weight. So the updates of large weights run one after another.
- TensorFlow's graph optimizer turns `rate * (a * b)` into `(rate * a) * b` if nothing but the
  update reads the gradient `a * b` (MinimizeBroadcasts,
  tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc). The last bit may then differ, for
  example in the scale of a BatchNormalization under SGD. Here the guard reads the gradient as well.
  So each of the two has its own product: a deferred update multiplies the factors again, inside the
  conditional; for an update that runs immediately the guard does.
- Keras writes an update as one operation after the other, each of which reads and writes whole
  arrays; Adam's takes some thirty passes over memory. Two kernels compute parts of it element by
  element, in the same order: ``ResourceApplyGradientDescent`` (``var -= alpha * delta``), and
  ``ResourceApplyAdagradV2`` without its slots (``var -= grad * lr / (sqrt(accum) + epsilon)``).
  They are used on a CPU, for optimizers that assign as Keras does, and if a test, once in a
  process, shows that they give the same bits on this processor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_nanguard._backends.tensorflow.intercept import Update, mark
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import Overrides

LARGE = 1 << 20
"""Entries above which one update keeps all cores busy, so that it may wait for the previous one."""

_NAMES = ("assign_add", "assign_sub")

_REORDERED = ("Mul", "RealDiv")
"""Operations that TensorFlow's graph optimizer may combine with another product, giving other bits:
a * 2 * 3.
"""


class Updates:
    """The updates of one run of the body.

    Args:
        adapted: whether updates are ordered and fused, and keep the bits of Keras' own; not if XLA
            compiles the step, and not in eager execution.
    """

    def __init__(self, records: Sequence[Update], optimizers: Iterable[Any], adapted: bool):
        self.records, self.optimizers, self.adapted = records, optimizers, adapted
        self._products: set[int] = set()
        """The `id` of each gradient that a deferred update multiplies again."""
        self._last: list[Any] = []
        """The operations that have written the last large weight."""

    def gradients(self, immediate: bool) -> list[tuple[Any, Any]]:
        """Return each gradient for the guard to read, with its variable.

        Args:
            immediate: whether the updates have run already.
        """
        pairs = [pair for record in self.records for pair in record.pairs]
        if not self.adapted:
            return pairs
        if immediate:
            return [(_multiplied_apart(g) if _is_product(g) else g, v) for g, v in pairs]
        self._products = {id(g) for g, _ in pairs if _is_product(g) and not g.consumers()}
        return pairs

    def run(self) -> None:
        """Run deferred updates."""
        with Overrides() as overrides:
            for optimizer in map(keras_optimizers.inner, self.optimizers if self.adapted else ()):
                overrides.set(optimizer, "update_step", self._in_turn(optimizer.update_step))
                if _assigns_as_keras(optimizer) and same_bits():
                    divides = type(optimizer).update_step is keras.optimizers.Adam.update_step
                    for name in _NAMES:
                        real = getattr(optimizer, name)
                        overrides.set(optimizer, name, _assigning(real, name, divides))
            for record in self.records:
                # If some are multiplied again, all gradients have to be of one graph.
                if self._products:
                    record.run([g if g is None else self._own(g) for g in record.grads])
                else:
                    record.run()

    def _own(self, gradient: Any) -> Any:
        """Return a gradient as a tensor of the graph that is being built."""
        if id(gradient) in self._products:
            return _multiplied(gradient)
        return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)

    def _in_turn(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of `update_step`.

        Keras first sums gradients over replicas. With one replica this is an operation that passes
        on all of them. The graph optimizer removes it from a step, but not from a conditional.
        """

        def update_step(gradient: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(gradient, tf.Tensor):
                gradient = _origin(gradient)
            if (variable.shape.num_elements() or 0) < LARGE:
                return real(gradient, variable, *args, **kwargs)
            traced = tf.compat.v1.get_default_graph()
            start = mark(traced)
            with tf.control_dependencies([op for op in self._last if op.graph is traced]):
                result = real(gradient, variable, *args, **kwargs)
            made = traced.get_operations()[start:]
            self._last = [op for op in made if op.type.startswith(("Assign", "ResourceApply"))]
            return result

        return update_step


def _origin(tensor: Any) -> Any:
    """Return the tensor that reaches this one through identity operations."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


# Gradients that are products


def _is_product(tensor: Any) -> bool:
    in_graph = isinstance(tensor, tf.Tensor) and hasattr(tensor, "graph")
    return in_graph and tensor.op.type == "Mul" and bool(tensor.dtype.is_floating)


def _multiplied(product: Any, leaf: Callable[[Any], Any] = lambda factor: factor) -> Any:
    """Multiply the factors of a product, and theirs, unless something else reads those."""

    def factor(f: Any) -> Any:
        inner = _is_product(f) and len(set(map(id, f.consumers()))) == 1
        return _multiplied(f, leaf) if inner else leaf(f)

    x, y = map(factor, product.op.inputs)
    return tf.raw_ops.Mul(x=x, y=y)


def _multiplied_apart(product: Any) -> Any:
    """Multiply again for the guard, hidden from the graph optimizer."""
    hidden = tf.raw_ops.PlaceholderWithDefault
    return _multiplied(product, lambda factor: hidden(input=factor, shape=factor.shape))


# Kernels


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
            if fits and _origin(delta).op.type not in _REORDERED:
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
