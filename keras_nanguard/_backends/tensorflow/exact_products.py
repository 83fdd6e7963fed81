"""Gradients that are products, and how TensorFlow's graph optimizer goes on from them.

A gradient `a * b` that nothing reads but an update `rate * (a * b)` becomes `(rate * a) * b` there (MinimizeBroadcasts, in
tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc), which may differ in the last bit: that of the scale of a
BatchNormalization, say, under SGD. A guard reads each gradient, and an update in a conditional does not see how it came about, so it
would be left as it is. For the bits of stock Keras a deferred update multiplies again, where the graph optimizer sees both
products; and where the update stands in the step the guard reads a product of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides

__all__ = ["again", "beside", "in_sight", "origin", "unread"]


def unread(gradients: Iterable[Any]) -> dict[int, Any]:
    """Return the gradients, by `id`, that are products and that nothing reads so far."""
    return {id(g): g for g in gradients if _is_product(g) and not g.consumers()}


@contextmanager
def in_sight(optimizers: Iterable[Any]) -> Iterator[None]:
    """While an update of these optimizers is traced, hand it each gradient as it was computed.

    Keras sums gradients up over replicas first, which with one replica is an operation that hands on all of them. The graph
    optimizer removes it from a step, but not from a conditional.
    """
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, optimizers):
            overrides.set(optimizer, "update_step", _given_origin(optimizer.update_step))
        yield


def _given_origin(real: Callable[..., Any]) -> Callable[..., Any]:
    def update_step(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        return real(origin(gradient) if isinstance(gradient, tf.Tensor) else gradient, *args, **kwargs)

    return update_step


def origin(tensor: Any) -> Any:
    """Return the tensor of this graph that is handed on as this one."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def again(gradients: Sequence[Any], products: Mapping[int, Any]) -> list[Any]:
    """Return gradients as the graph that is being made has them: those among the products multiplied once more."""

    def own(gradient: Any) -> Any:
        if id(gradient) in products:
            return _multiplied(gradient, lambda factor: factor)
        return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)

    return [own(g) if products and g is not None else g for g in gradients]


def beside(gradient: Any) -> Any:
    """Return a gradient that is a product multiplied once more out of sight of the graph optimizer, any other one as it is."""
    if not _is_product(gradient):
        return gradient
    return _multiplied(gradient, lambda factor: tf.raw_ops.PlaceholderWithDefault(input=factor, shape=factor.shape))


def _multiplied(product: Any, leaf: Any) -> Any:
    """Multiply the factors of a product, and theirs, as far as nothing else reads those."""
    x, y = (
        _multiplied(f, leaf) if _is_product(f) and len(set(map(id, f.consumers()))) == 1 else leaf(f) for f in product.op.inputs
    )
    return tf.raw_ops.Mul(x=x, y=y)


def _is_product(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.op.type == "Mul" and bool(tensor.dtype.is_floating)
