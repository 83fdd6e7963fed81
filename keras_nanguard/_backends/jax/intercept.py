"""Intercepts the optimizer calls, the loss and the metrics of a JAX step while its body is traced.

Every train step ends in `Optimizer.stateless_apply`. Overriding it on the instance gives the
gradients of any train step, without changes to the optimizer's class, config and variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_nanguard._core.finiteness import is_inexact
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.layers import named_outputs
from keras_nanguard._keras.losses import is_loss, predicted
from keras_nanguard._keras.overrides import Overrides

_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")
"""Methods with which an optimizer of Keras writes its variables."""


class Update:
    """One call of `Optimizer.stateless_apply`.

    Attributes:
        slots, grads, weights: its arguments.
    """

    def __init__(
        self, optimizer: Any, real: Callable[..., Any], slots: Any, grads: Any, weights: Any
    ):
        self.optimizer, self.real = optimizer, real
        self.slots, self.grads, self.weights = list(slots), list(grads), list(weights)

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Each gradient with its variable."""
        return list(zip(self.grads, keras_optimizers.trained_by(self.optimizer)))

    def run(self) -> None:
        """Run the update, and write its results into the variables."""
        weights, slots = self.real(self.slots, self.grads, self.weights)
        trained = keras_optimizers.trained_by(self.optimizer)
        for variable, value in zip((*trained, *self.optimizer.variables), (*weights, *slots)):
            variable.assign(value)


class Gate(Overrides):
    """Context in which the writes of an optimizer take effect only if the step commits.

    The old or the new value is selected at each assignment to a variable, and later reads of the
    optimizer get the selected array. So each update is one pass over memory and in place, as
    without a guard. Selecting after all updates would need the old and the new arrays at the same
    time.

    A `LossScaleOptimizer` already has a conditional around its update, which uses the verdict as
    its condition.
    """

    def __init__(self, record: Update, may_commit: Any):
        super().__init__()
        optimizer, self._may_commit = record.optimizer, may_commit
        self._trained, self._variables = keras_optimizers.trained_by(optimizer), optimizer.variables
        self._assigned: dict[int, Any] = {}
        self._scales = {id(v) for v in keras_optimizers.scales_of(optimizer)}
        if self._scales:
            self.set(optimizer, "check_finite", lambda grads: may_commit)
            return
        variables, values = (*self._trained, *self._variables), (*record.weights, *record.slots)
        self._old = {id(variable): value for variable, value in zip(variables, values)}
        stock, own = keras.optimizers.Optimizer, type(optimizer)
        if any(getattr(own, name) is not getattr(stock, name) for name in _ASSIGNMENTS):
            return  # it overrides assignments: all is selected at the end
        self.set(optimizer, "assign", self._assign)
        self.set(optimizer, "assign_add", lambda v, value: self._assign(v, v + value))
        self.set(optimizer, "assign_sub", lambda v, value: self._assign(v, v - value))

    def __enter__(self) -> Gate:
        return self

    def selected(self, weights: Sequence[Any], slots: Sequence[Any]) -> set[int]:
        """Return the `id` of each result that is the old value if the step is refused."""
        if not self._scales:
            return {id(array) for array in (*weights, *slots) if id(array) in self._assigned}
        others = (a for v, a in zip(self._variables, slots) if id(v) not in self._scales)
        return {id(array) for array in (*weights, *others)}

    def _assign(self, variable: Any, value: Any) -> None:
        old = self._old.get(id(variable))
        if old is not None:
            new = keras.ops.convert_to_tensor(value, dtype=variable.dtype)
            value = jnp.where(self._may_commit, new, old)
            self._assigned[id(value)] = value
        variable.assign(value)


class Intercept(Overrides):
    """Context that records the calls of optimizers, the model's loss, and the results of metrics.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        may_commit: whether their updates take effect: `True`, `False` (they do not even run), or a
            truth value of the step.
        metrics: the metrics whose results are to be recognized among the outputs.

    Attributes:
        records: the calls of `stateless_apply`, in order.
        outputs: `(name, array)` of the model's outputs that `compute_loss` received.
        updated: the results of gated updates, by `id`.
        selected: the `id` of those that are the old value if the step is refused.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Iterable[Any],
        may_commit: Any = True,
        metrics: Iterable[Any] = (),
    ):
        super().__init__()
        self.model, self.optimizers = model, list(optimizers)
        self.may_commit, self.metrics = may_commit, metrics
        self.records: list[Update] = []
        self.losses: list[Any] = []
        self.outputs: list[tuple[str, Any]] = []
        self.updated: dict[int, Any] = {}
        self.selected: set[int] = set()
        self._results: dict[int, tuple[Any, Any, int]] = {}

    def __enter__(self) -> Intercept:
        self.trace = running_trace()
        for optimizer in self.optimizers:
            self.set(optimizer, "stateless_apply", self._applier(optimizer))
        if hasattr(self.model, "compute_loss"):
            self.set(self.model, "compute_loss", self._noting(self.model.compute_loss))
        for metric in self.metrics:
            self.set(metric, "result", self._watching(metric, metric.result))
        return self

    def _applier(self, optimizer: Any) -> Callable[..., Any]:
        real = optimizer.stateless_apply

        def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            record = Update(optimizer, real, optimizer_variables, grads, trainable_variables)
            arrays = [a for a in (*record.grads, *record.weights) if a is not None]
            if not all(primal(array, self.trace) is array for array in arrays):
                return real(optimizer_variables, grads, trainable_variables)  # within a `grad`
            self.records.append(record)
            if self.may_commit is False:
                return record.weights, record.slots
            if self.may_commit is True:
                return real(optimizer_variables, grads, trainable_variables)
            with Gate(record, self.may_commit) as gate:
                weights, slots = real(optimizer_variables, grads, trainable_variables)
            self.updated.update({id(array): array for array in (*weights, *slots)})
            self.selected |= gate.selected(weights, slots)
            return weights, slots

        return stateless_apply

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            value = primal(loss, self.trace) if is_loss(loss) else None
            if value is not None:
                self.losses.append(value)
                leaves = jax.tree_util.tree_leaves(predicted(args, kwargs))
                named = named_outputs(self.model, [primal(leaf, self.trace) for leaf in leaves])
                self.outputs += [pair for pair in named if is_inexact(pair[1])]
            return loss

        return compute_loss

    def _watching(self, metric: Any, real: Callable[[], Any]) -> Callable[[], Any]:
        def result() -> Any:
            value = real()
            for index, leaf in enumerate(jax.tree_util.tree_leaves(value)):
                self._results[id(leaf)] = leaf, metric, index
            return value

        return result

    def sources(self, outputs: Any) -> list[tuple[Any, int] | None]:
        """Return for each output the metric, and the leaf of its result, that it is."""
        results = (self._results.get(id(leaf)) for leaf in jax.tree_util.tree_leaves(outputs))
        return [None if result is None else result[1:] for result in results]


def with_metrics(outputs: Any, sources: Sequence[tuple[Any, int] | None], values: Any) -> Any:
    """Return the outputs, with results of metrics computed from other values of their variables.

    Args:
        sources: those of `Intercept`.
        values: `(variable, value)` of the metrics.
    """
    leaves, tree = jax.tree_util.tree_flatten(outputs)
    metrics = {id(source[0]): source[0] for source in sources if source is not None}
    with keras.StatelessScope(state_mapping=values):
        results = {key: jax.tree_util.tree_leaves(m.result()) for key, m in metrics.items()}
    for place, source in enumerate(sources):
        if source is not None:
            leaves[place] = results[id(source[0])][source[1]]
    return jax.tree_util.tree_unflatten(tree, leaves)


def running_trace() -> Any:
    """Return the trace in which code runs; `None` in eager execution."""
    return getattr(jnp.zeros(()), "_trace", None)


def primal(value: Any, trace: Any) -> Any:
    """Return the value below all transformations between it and this trace, or `None`.

    Within `jax.grad` every value is a pair of itself and its derivative; JAX stores the first of
    the two as `primal`.
    """
    while isinstance(value, jax.core.Tracer):
        if trace is not None and getattr(value, "_trace", None) is trace:
            return value
        value = getattr(value, "primal", None)
    return value
