"""Fault injection on TensorFlow: `keras_nanguard.testing.inject` inside the compiled program.

The hook wraps the step that Keras is about to compile, including the transaction. So a refusal
restores neither the step counter of the hook nor its writes to the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_nanguard._backends.shared.faults import FaultHook
from keras_nanguard._keras import (
    fitting as keras_fitting,
    optimizers as keras_optimizers,
    overrides,
)

__all__ = ["Hook", "in_batches", "repeated", "with_faults"]

_installed: list[Hook] = []


@contextlib.contextmanager
def in_batches(model: Any, batches: list[Any]) -> Iterator[list[Any]]:
    """Inject the faults of this model into the batches on the host instead of into its steps."""
    hooks = [h for h in _installed if h.model is model and h.fault.site in ("inputs", "targets")]
    for hook in hooks:
        batches, hook.beforehand = [hook.spoiled(batch) for batch in batches], True
    try:
        yield batches
    finally:
        for hook in hooks:
            hook.beforehand = False


def with_faults(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a train step of this model with its installed faults, unless they are in it
    already.
    """
    for hook in reversed(
        [h for h in _installed if h.model is model and h not in getattr(step, "hooks", ())]
    ):
        step = hook.around(step)
    return step


def repeated(model: Any) -> Callable[[], None]:
    """Return what sets the step counters of installed faults back by one step, from those of
    now.
    """
    counters = [(hook.counter, hook.counter.numpy()) for hook in _installed if hook.model is model]

    def again() -> None:
        for counter, number in counters:
            counter.assign(number - 1)

    return again


class Hook(FaultHook):
    """One fault, injected into every train step of one model.

    Attributes:
        beforehand: whether the batch of the running (or traced) step already has the fault.
    """

    beforehand = False

    def __init__(self, model: Any, fault: Any):
        super().__init__(model, fault)
        with tf.init_scope():
            self.counter = tf.Variable(-1, dtype=tf.int64, trainable=False)

    @property
    def seen(self) -> int:
        """Number of steps so far."""
        return int(self.counter.numpy()) + 1

    def install(self) -> None:
        """Install the fault, on the instance only."""
        if not keras_fitting.on_making(self.model, self._making, self._overrides):
            self._override(
                "make_train_function", self._making_train(self.model.make_train_function)
            )
        if self.fault.site in ("loss", "gradients"):
            self._override("compute_loss", self._computing(self.model.compute_loss))
        self.model.train_function = None
        _installed.append(self)

    def remove(self) -> None:
        if self in _installed:
            _installed.remove(self)
        if getattr(vars(self.model).get("train_step"), "hooks", ()):
            overrides.unset_instance(self.model, "train_step")
        super().remove()

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(step_function: Callable[..., Any]) -> Any:
            if step_function == self.model.test_step:
                return real(step_function)
            if self.fault.site in ("slots", "loss_scale"):
                _build(self.model)
            return real(self.around(step_function))

        return make

    def _making_train(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(force: bool = False) -> Any:
            if self.model.train_function is not None and not force:
                return self.model.train_function
            if self.fault.site in ("slots", "loss_scale"):
                _build(self.model)
            step = self.model.train_step
            around = step if self in getattr(step, "hooks", ()) else self.around(step)
            overrides.set_instance(self.model, "train_step", around)
            return real(force=True)

        make.hooks = (self,)  # type: ignore[attr-defined]
        return make

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a train step with the fault."""

        def train_step(data: Any) -> Any:
            if self.beforehand:
                return step(data)
            self.counter.assign_add(1)
            if self.fault.site in ("inputs", "targets"):
                data = self._spoiled(data, self._now())
            elif self.fault.site not in ("loss", "gradients"):
                self._write(self._now())
            self._inside += 1
            try:
                return step(data)
            finally:
                self._inside -= 1

        train_step.hooks = (self, *getattr(step, "hooks", ()))  # type: ignore[attr-defined]
        return train_step

    def _now(self) -> Any:
        """Return whether the fault is due in the running step."""
        return tf.reduce_any(
            tf.equal(self.counter.read_value(), tf.constant(self.fault.steps, tf.int64))
        )

    # The batch

    def spoiled(self, data: Any) -> Any:
        """Return the batch of the next step with the fault."""
        self.counter.assign_add(1)
        data = keras.tree.map_structure(
            lambda value: tf.convert_to_tensor(value) if hasattr(value, "__array__") else value,
            data,
        )
        return self._spoiled(data, self._now())

    def _spoiled(self, data: Any, now: Any) -> Any:
        def bad(value: Any) -> Any:
            return self._bad(value, now & _some(value, self.fault.rows, self.fault.entries))

        return self._in_batch(data, _is_float, bad)

    def _bad(self, value: Any, mask: Any) -> Any:
        wanted = self.fault.value(value.dtype)
        if wanted is None:
            factor = tf.cast(self.fault.magnitude, value.dtype)
            bad = tf.where(tf.equal(value, 0), tf.ones_like(value) * factor, value * factor)
        else:
            bad = tf.fill(tf.shape(value), tf.cast(tf.constant(wanted, tf.float64), value.dtype))
        return tf.where(mask, bad, value)

    # The state

    def _write(self, now: Any) -> None:
        """Write to the state before the step."""
        chosen = self._in_state()

        def write() -> Any:
            for variable in chosen:
                old = variable.value.read_value()
                variable.value.assign(self._bad(old, _first(old, self.fault.entries)))
            return tf.constant(True)

        tf.cond(now, write, lambda: tf.constant(False))

    # Loss and gradients

    def _factor(self, loss: Any) -> Any:
        return tf.where(
            self._now(), tf.cast(self.fault.factor(loss.dtype), loss.dtype), tf.ones((), loss.dtype)
        )

    def _with_gradient(self, loss: Any, factor: Any) -> Any:
        return _with_gradient(loss, factor)

    def _with_some(self, loss: Any, factor: Any) -> Any:
        for variable in self._trained():
            mask = _first(variable.value, self.fault.entries)
            loss += tf.cast(_zero(tf.convert_to_tensor(variable.value), factor, mask), loss.dtype)
        return loss


def _is_float(value: Any) -> bool:
    return bool(tf.is_tensor(value) and hasattr(value, "shape") and value.dtype.is_floating)


def _build(model: Any) -> None:
    """Build the model's only optimizer, as its first step would, so that its slots exist."""
    optimizers = keras_optimizers.find_optimizers(model)
    if len(optimizers) == 1 and not optimizers[0].built and model.trainable_variables:
        with tf.init_scope(), keras.name_scope(optimizers[0].name, caller=optimizers[0]):
            optimizers[0].build(model.trainable_variables)


def _some(value: Any, rows: tuple[int, ...] | None, entries: int | None) -> Any:
    """Return a mask of the first entries of the chosen rows of a batch."""
    shape = tf.shape(value, tf.int64)
    row = tf.range(shape[0]) if value.shape.rank else tf.zeros((), tf.int64)
    in_rows = tf.ones_like(row, tf.bool) if rows is None else _any_of(row, rows)
    size = tf.reduce_prod(shape[1:])
    of_row = tf.reshape(tf.range(size), shape[1:]) if value.shape.rank else tf.zeros((), tf.int64)
    in_entries = tf.ones_like(of_row, tf.bool) if entries is None else of_row < entries
    if not value.shape.rank:
        return in_rows & in_entries
    return (
        tf.reshape(in_rows, tf.concat([shape[:1], tf.ones_like(shape[1:])], 0))
        & in_entries[tf.newaxis]
    )


def _any_of(row: Any, rows: tuple[int, ...]) -> Any:
    return tf.reduce_any(tf.equal(row[..., tf.newaxis], tf.constant(rows, tf.int64)), axis=-1)


def _first(value: Any, entries: int | None) -> Any:
    """Return a mask of the first entries of a variable."""
    flat = tf.range(tf.size(value, tf.int64)) < (tf.int64.max if entries is None else entries)
    return tf.reshape(flat, tf.shape(value))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _with_gradient(loss: Any, factor: Any) -> Any:
    return tf.identity(loss), lambda upstream: (upstream * factor, tf.zeros_like(factor))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _zero(value: Any, factor: Any, mask: Any) -> Any:
    """Return 0 with a gradient by the masked entries of `value`: `factor` if that is not 1,
    else 0.
    """

    def gradient(upstream: Any) -> Any:
        bad = tf.cast(upstream * factor, value.dtype)
        by_value = tf.where(mask & tf.not_equal(factor, 1), bad, tf.zeros_like(value))
        return by_value, tf.zeros_like(factor), None

    return tf.zeros((), value.dtype), gradient
