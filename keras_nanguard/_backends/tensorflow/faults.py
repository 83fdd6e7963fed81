"""Fault injection on TensorFlow: inside of the compiled program, whose steps it counts there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.shared.faults import FaultHook
from keras_nanguard._backends.tensorflow.intercept import build
from keras_nanguard._backends.tensorflow.step import Transaction
from keras_nanguard._keras import compiled as keras_compiled, optimizers as keras_optimizers


class Hook(FaultHook):
    """One fault, injected into every train step of one model."""

    def __init__(self, model: Any, fault: Any):
        super().__init__(model, fault)
        with tf.init_scope():
            self.counter = tf.Variable(-1, dtype=tf.int64, trainable=False)
            self._misses = tf.Variable([False] * len(fault.steps), trainable=False)

    @property
    def seen(self) -> int:  # type: ignore[override]
        return int(self.counter.numpy()) + 1

    @seen.setter
    def seen(self, number: int) -> None:
        self.counter.assign(number - 1)

    @property
    def _now(self) -> Any:
        return tf.reduce_any(self._due)

    @property
    def _due(self) -> Any:
        """Which of the fault's steps this one is."""
        return tf.equal(self.counter.read_value(), tf.constant(self.fault.steps, tf.int64))

    @property
    def missed(self) -> set[int]:
        pairs = zip(self.fault.steps, self._misses.numpy(), strict=True)
        return {step for step, missed in pairs if missed}

    def _count_hit(self, hit: Any) -> None:
        self._misses.assign(self._misses | (self._due & ~tf.convert_to_tensor(hit)))

    def _wrap(self) -> None:
        if not keras_compiled.on_making(self.model, self._making, self):
            made = self._making_train(self.model.make_train_function)
            self.set(self.model, "make_train_function", made)

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(step_function: Callable[..., Any]) -> Any:
            is_test = step_function == self.model.test_step
            return real(step_function if is_test else self._into(step_function))

        return make

    def _making_train(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `make_train_function` of Keras 3.6, which takes the step from the model."""
        wrapped: list[Any] = []

        def make(force: bool = False) -> Any:
            step = self.model.train_step
            is_new = step not in wrapped
            if is_new and (self.model.train_function is None or force):
                wrapped[:] = [self._into(step)]
                if wrapped[0] is not step:
                    self.set(self.model, "train_step", wrapped[0])
            return real(force=force)

        return make

    def _into(self, step: Any) -> Any:
        """Return a train step with the fault: the same one if it is a transaction."""
        if self.fault.site in ("slots", "loss_scale"):
            _build(self.model)
        if not isinstance(step, Transaction):
            return self._around(step)
        if step.take is not None and self.fault.site in ("inputs", "targets"):
            self.set(step, "take", self._taking(step.take))
        else:
            self.set(step, "execute", self._around(step.execute))
        return step

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(data: Any) -> Any:
            self.counter.assign_add(1)
            data = self._spoiled(data, self._now)
            self._write(self._now)
            with self._inside():
                return step(data)

        return train_step

    def _taking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Transaction.take` with the fault in the batch, before the host keeps it."""

        def take(data: Any) -> Any:
            batch = real(data)
            self.counter.assign_add(1)
            return self._spoiled(batch, self._now)

        return take


def _build(model: Any) -> None:
    """Build the model's only optimizer, as its first step would, so that its slots exist."""
    optimizers = keras_optimizers.find_optimizers(model)
    if len(optimizers) == 1 and not optimizers[0].built and model.trainable_variables:
        build(optimizers[0], model.trainable_variables, eagerly=True)
