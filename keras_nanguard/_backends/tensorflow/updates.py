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
  arrays. See `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.tensorflow.intercept import Update, mark
from keras_nanguard._backends.tensorflow.kernels import fused, source_of
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides

LARGE = 1 << 20
"""Entries above which one update keeps all cores busy, so that it may wait for the previous one."""


class Updates:
    """The updates of one run of the body.

    Args:
        adapted: whether updates are ordered and fused, and keep the bits of Keras' own; not if XLA
            compiles the step, and not in eager execution.
        immediate: whether they have run already.

    Attributes:
        gradients: each gradient for the guard to read, with its variable.
    """

    def __init__(
        self, records: Sequence[Update], optimizers: Iterable[Any], adapted: bool, immediate: bool
    ):
        self.records, self.optimizers, self.adapted = records, optimizers, adapted
        pairs = [pair for record in records for pair in record.pairs]
        products = [g for g, _ in pairs if adapted and _is_product(g)]
        apart = {id(g): _multiplied_apart(g) for g in products if immediate}
        self.gradients = [(apart.get(id(g), g), v) for g, v in pairs]
        self._products = {id(g) for g in products if not immediate and not g.consumers()}
        """The `id` of each gradient that a deferred update multiplies again."""
        self._last: list[Any] = []
        """The operations that have written the last large weight."""

    def run(self) -> None:
        """Run deferred updates."""
        with Overrides() as overrides:
            for optimizer in map(keras_optimizers.inner, self.optimizers if self.adapted else ()):
                overrides.set(optimizer, "update_step", self._in_turn(optimizer.update_step))
                for name, assign in fused(optimizer).items():
                    overrides.set(optimizer, name, assign)
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
                gradient = source_of(gradient)
            if (variable.shape.num_elements() or 0) < LARGE:
                return real(gradient, variable, *args, **kwargs)
            graph = tf.compat.v1.get_default_graph()
            start = mark(graph)
            with tf.control_dependencies([op for op in self._last if op.graph is graph]):
                result = real(gradient, variable, *args, **kwargs)
            made = graph.get_operations()[start:]
            self._last = [op for op in made if op.type.startswith(("Assign", "ResourceApply"))]
            return result

        return update_step


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
