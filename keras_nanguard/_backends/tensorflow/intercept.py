"""Intercepts the optimizer calls and the loss of a step while its body runs.

Every train step, including the user's own, ends in `Optimizer.apply`. Overriding it on the instance
gives the gradients of any train step, without changes to the optimizer's class, config and
variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_nanguard._backends.tensorflow import graph
from keras_nanguard._core.verdict import named_outputs, predicted
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.variables import as_keras


class Update:
    """One call of `Optimizer.apply`."""

    def __init__(
        self,
        optimizer: Any,
        real: Callable[..., Any],
        grads: list[Any],
        variables: Sequence[Any] | None,
    ):
        self.optimizer, self.real, self.grads = optimizer, real, grads
        self.given = variables
        known = variables if variables is not None else keras_optimizers.trained_by(optimizer)
        self.pairs = list(zip(grads, map(as_keras, known)))
        self.variables = [v for g, v in self.pairs if g is not None]

    def run(self) -> None:
        """Run the deferred call."""
        self.real(self.grads) if self.given is None else self.real(self.grads, self.given)


@dataclass(slots=True)
class Seen:
    """The recorded actions of one run of the body.

    Attributes:
        records: the calls of `apply`, in order.
        losses: the results of `compute_loss`.
        outputs: `(name, tensor)` of the model's outputs that `compute_loss` received.
        boundary: mark of the graph at the first update, or `None`.
    """

    records: list[Update] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    boundary: int | None = None


class Intercept:
    """Context that records the calls of optimizers instead of (or besides) updating, and the
    model's loss.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        optimizers: the intercepted optimizers.
        immediate: whether each update runs at once (its effect can be undone) instead of being
            deferred.
        note_created: called with each variable that is created while the body runs, before its
            first write.
        asked: called with each record, before its update runs.
        seen: returns the records of the calling replica, to which calls are appended.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Iterable[Any],
        immediate: bool,
        note_created: Callable[[Any], None],
        seen: Callable[[], Seen],
        asked: Callable[[Update], None] = lambda record: None,
    ):
        self.model, self.optimizers, self.immediate = model, list(optimizers), immediate
        self.note_created, self.seen, self.asked = note_created, seen, asked
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._creating = False
        self._overrides = Overrides()

    def __enter__(self) -> Intercept:
        for optimizer in self.optimizers:
            self._overrides.set(optimizer, "apply", self._applier(optimizer, optimizer.apply))
        if hasattr(self.model, "compute_loss"):
            self._overrides.set(self.model, "compute_loss", self._noting(self.model.compute_loss))
        return self

    def creating(self) -> Any:
        """Return a context in which variables are created outside of the graph; each replica's
        thread enters its own.
        """
        return tf.variable_creator_scope(self._create)

    def __exit__(self, *details: Any) -> None:
        self._overrides.give_back()
        # `seen` refers to it, and would keep the gradients until the garbage collector runs.
        vars(self).clear()

    def _applier(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = None if trainable_variables is None else list(trainable_variables)
            if not optimizer.built and variables is not None:
                build(optimizer, variables, tf.executing_eagerly())
            if not self._here():
                return real(grads, variables) if variables is not None else real(grads)
            seen = self.seen()
            record = Update(optimizer, real, grads, variables)
            seen.records.append(record)
            self.asked(record)
            if seen.boundary is None:  # what is read until here is not read after it
                seen.boundary = graph.mark(self.graph)
            if self.immediate:
                record.run()
            return None

        return apply

    def _here(self) -> bool:
        """Whether this is the graph of the step, not of a function or conditional within it."""
        return self.graph is None or tf.compat.v1.get_default_graph() is self.graph

    def _create(self, create: Callable[..., Any], **kwargs: Any) -> Any:
        """Create a variable of the step (metrics, lazily built layers) outside of its graph.

        Its first value is then available before anything writes it, and `tf.function` need not
        trace twice.
        """
        if self._creating:  # the scope follows into `init_scope`
            return create(**kwargs)
        self._creating = True
        try:
            with tf.init_scope():
                variable = tf.Variable(**kwargs)
        finally:
            self._creating = False
        with contextlib.nullcontext() if self.graph is None else self.graph.as_default():
            self.note_created(variable)
        return variable

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            if loss is not None and self._here():
                seen, outputs = self.seen(), tf.nest.flatten(predicted(args, kwargs))
                seen.losses.append(tf.convert_to_tensor(loss))
                seen.outputs += filter(_is_float, named_outputs(self.model, outputs))
            return loss

        return compute_loss


def build(optimizer: Any, variables: Sequence[Any], eagerly: bool) -> None:
    """Build an optimizer as Keras' own step does: variables outside of every graph, with Keras'
    names.

    The values that it writes to them are part of the graph. `tf.function` discards the first trace
    of a step, in which variables are created. So in graph mode stock `ScheduleFreeAdamW` starts
    with momenta of 0 and not with the weights, as it does in eager execution, and a guarded one has
    to do the same.
    """

    def built() -> None:
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)

    if eagerly:
        built()
    else:
        with tf.init_scope():
            tf.function(built, autograph=False).get_concrete_function()
    optimizer.built = True


def _is_float(named: tuple[str, Any]) -> bool:
    _, value = named
    return bool(tf.is_tensor(value) and (value.dtype.is_floating or value.dtype.is_complex))
