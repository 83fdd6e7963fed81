"""How the deferred updates of a step run: in order, by fused kernels, and with the bits of Keras'
own step.

The updates of large weights run one after another. In a plain step an update runs as soon as its
gradient is there; those of a guarded step wait for the verdict, and TensorFlow would begin all of
them at once. Adam's holds several arrays of the size of the weight.

A gradient that is a product is multiplied once more for its update. TensorFlow's graph optimizer
turns `rate * (a * b)` into `(rate * a) * b` if nothing but the update reads the gradient `a * b`
(MinimizeBroadcasts, tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc), which may differ
in the last bit, for example in the scale of a BatchNormalization under SGD. The guard also reads
each gradient, and an update in a conditional cannot see which operation produced its gradient. So a
deferred update multiplies the factors again, inside the conditional; an update that runs
immediately keeps the product, and the guard reads a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.tensorflow import graph, kernels
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides

LARGE = 1 << 20
"""Entries above which one update keeps all cores busy, so that it may wait for the previous one."""


def run(
    records: Iterable[Any], optimizers: Iterable[Any], products: Mapping[int, Any] | None = None
) -> None:
    """Run deferred updates.

    Args:
        records: the updates.
        optimizers: those whose updates are ordered and fused; none if XLA compiles the step.
        products: gradients to multiply again, from `unread_products`.
    """
    last: list[Any] = []
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, optimizers):
            overrides.set(optimizer, "update_step", _update_step(optimizer.update_step, last))
            kernels.use_in(optimizer, overrides)
        for record in records:
            if products:
                record.grads = [g if g is None else _own(g, products) for g in record.grads]
            record.run()


def _update_step(real: Callable[..., Any], last: list[Any]) -> Callable[..., Any]:
    """Return the replacement of `update_step`; `last` has the value that the previous update wrote.

    Keras first sums gradients over replicas. With one replica this is an operation that passes on
    all of them. The graph optimizer removes it from a step, but not from a conditional.
    """

    def update_step(gradient: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        size = variable.shape.num_elements()
        if isinstance(gradient, tf.Tensor) and not tf.executing_eagerly():
            gradient = kernels.origin(gradient)
        if tf.executing_eagerly() or size is None or size < LARGE:
            return real(gradient, variable, *args, **kwargs)
        traced = tf.compat.v1.get_default_graph()
        start = graph.mark(traced)
        with tf.control_dependencies([op for op in last if op.graph is traced]):
            result = real(gradient, variable, *args, **kwargs)
        made = traced.get_operations()[start:]
        last[:] = [op for op in made if op.type.startswith(("Assign", "ResourceApply"))]
        return result

    return update_step


# Gradients that are products


def unread_products(gradients: Iterable[Any]) -> dict[int, Any]:
    """Return the gradients, by `id`, that are products and have not been read yet."""
    return {id(g): g for g in gradients if _is_product(g) and not g.consumers()}


def read_apart(gradient: Any) -> Any:
    """Return a gradient for the guard to read besides an update.

    A product is multiplied again, hidden from the graph optimizer.
    """
    if not _is_product(gradient):
        return gradient
    hidden = tf.raw_ops.PlaceholderWithDefault
    return _multiplied(gradient, lambda factor: hidden(input=factor, shape=factor.shape))


def _own(gradient: Any, products: Mapping[int, Any]) -> Any:
    """Return a gradient as a tensor of the graph that is being built."""
    if id(gradient) in products:
        return _multiplied(gradient, lambda factor: factor)
    return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)


def _multiplied(product: Any, leaf: Callable[[Any], Any]) -> Any:
    """Multiply the factors of a product, and theirs, unless something else reads those."""

    def factor(f: Any) -> Any:
        inner = _is_product(f) and len(set(map(id, f.consumers()))) == 1
        return _multiplied(f, leaf) if inner else leaf(f)

    x, y = map(factor, product.op.inputs)
    return tf.raw_ops.Mul(x=x, y=y)


def _is_product(tensor: Any) -> bool:
    in_graph = isinstance(tensor, tf.Tensor) and hasattr(tensor, "graph")
    return in_graph and tensor.op.type == "Mul" and bool(tensor.dtype.is_floating)
