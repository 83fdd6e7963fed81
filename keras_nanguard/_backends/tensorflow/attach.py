"""Attaches the transaction to a train step on TensorFlow: of a Keras trainer, and of a loop without
one.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_nanguard._backends.interface import Executed, StateAccess
from keras_nanguard._backends.shared import attach
from keras_nanguard._backends.shared.batches import held
from keras_nanguard._backends.tensorflow.intercept import build
from keras_nanguard._backends.tensorflow.mirrored import MirroredTransaction
from keras_nanguard._backends.tensorflow.replica import Retrace
from keras_nanguard._backends.tensorflow.step import Transaction
from keras_nanguard._core.errors import expected
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import (
    compiled as keras_compiled,
    fitting as keras_fitting,
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    variables as keras_variables,
)


class Mode(NamedTuple):
    """How Keras runs the train step of a model.

    Attributes:
        mirrored: whether each of its replicas has a copy of the variables.
        spread_out: whether it is any strategy but the default one.
        steps: number of steps in one execution.
        host_takes: whether the host takes each batch from the iterator: an execution is one step of
            Keras' own train function.
        eager: whether the step runs eagerly.
        jit: whether it is compiled by XLA.
    """

    strategy: Any
    mirrored: bool
    spread_out: bool
    steps: int
    host_takes: bool
    eager: bool
    jit: bool


class _RetracingAccess(StateAccess):
    """Host access to a step that may have to be traced again."""

    transaction: Transaction

    def _build(self) -> None:
        """Create the transaction, with the findings of the one before."""
        raise NotImplementedError

    def _with_retraces(self, call: Callable[[], Any]) -> Any:
        """Call a function that may trace the step; in another mode if the trace requires it."""
        while True:
            try:
                return call()
            except Retrace as found:
                self.transaction.learned = found.learned
                self._build()

    def _completed(self, inner: Callable[[], Any], args: Sequence[Any] | None) -> Executed:
        """Run a step by a call of `inner`.

        Args:
            args: its arguments, if the host has them.
        """
        outputs, row = self._with_retraces(inner)
        return Executed(outputs, Verdict.of(row.numpy().tolist()), args)


class ModelAttachment(_RetracingAccess, attach.Attachment):
    """Replaces the train function of a Keras trainer."""

    transaction: Transaction

    trace_key: Mode
    """How Keras runs the step that was built last."""

    _freezes = False
    """Whether weights that no optimizer trains are frozen in a trace."""

    END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)
    LOGS_RESTORED = True

    def _build(self) -> None:
        self.trace_key = mode = self._running_mode()
        self.can_run_again = mode.host_takes
        self._freezes |= self._stock
        kept = self._take_kept()
        transaction = self._created(mode) if kept is None else kept[0]
        self._overrides.set(self.model, "train_step", transaction)  # which Keras reads
        if kept is None:
            self.inner = self._function(transaction, mode)
        else:
            self.inner = kept[1]
            transaction.rebind(self.run)
        self.transaction = transaction
        self.model.train_function = self.run_execution

    def _running_mode(self) -> Mode:
        model, strategy = self.model, self.model.distribute_strategy
        mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
        spread_out = strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy()
        steps = model.steps_per_execution
        host_takes = self._makes_as_keras and not spread_out and steps == 1
        eager = bool(model.run_eagerly) or tf.config.functions_run_eagerly()
        jit = bool(model.jit_compile) and not eager and not mirrored
        return Mode(strategy, mirrored, spread_out, steps, host_takes, eager, jit)

    @property
    def _makes_as_keras(self) -> bool:
        """Whether Keras' own code makes the train function."""
        return keras_compiled.makes_as_keras(self.model, self._make)

    @property
    def _takes_fewer(self) -> bool:
        return self._makes_as_keras and keras_compiled.takes_fewer_batches(self.model)

    def _created(self, mode: Mode) -> Transaction:
        """Return a new transaction."""
        transaction = (MirroredTransaction if mode.mirrored else Transaction)(
            self._body(mode.eager),
            self.run,
            of_trainer=True,
            jit=mode.jit,
            counted=mode.steps > 1 or not (mode.host_takes or mode.spread_out),
            # Under other strategies than MirroredStrategy steps are only checked.
            refuse=self.run.refuses and (mode.mirrored or not mode.spread_out),
            host_has_batches=mode.host_takes,
            take=_taken if mode.host_takes else None,
        )
        transaction.inherit(self.transaction)
        return transaction

    def _function(self, transaction: Transaction, mode: Mode) -> Any:
        """Return the function that runs one execution of a new transaction."""
        if not (mode.eager or mode.spread_out):
            self._build_optimizer()
        function = self._made_by_keras(jit_compile=False)
        if not mode.host_takes:
            return function
        model = self.model if self._stock else None
        return OneStepFunction(transaction, mode.eager, model)

    def _body(self, eager: bool) -> Any:
        """Return the step to trace, with the trainable weights with which Keras has traced it."""
        model, body, freezes = self.model, self.body, self._freezes
        if self._cached[0] is None or eager:
            return body

        def as_traced(data: Any) -> Any:
            optimizers = keras_optimizers.find_optimizers(model)
            with keras_compiled.as_built(model, optimizers, freezes):
                return body(data)

        return as_traced

    def _with_retraces(self, call: Callable[[], Any]) -> Any:
        try:
            return super()._with_retraces(call)
        except ValueError as error:
            if self._freezes or not keras_optimizers.rejects_variable(error):
                raise
        self._freezes = True  # a custom step trains all weights that are not frozen
        self._build()
        return super()._with_retraces(call)

    def _build_optimizer(self) -> None:
        """Build the optimizer first: `tf.function` traces a step that builds it twice."""
        model, optimizer = self.model, self.model.optimizer
        if self._stock and model.built and not optimizer.built and model.trainable_weights:
            build(optimizer, model.trainable_weights, eagerly=False)

    def _made(self) -> tuple[Any, Any]:
        return self.transaction, self.inner

    def _before_step(self, data: Any) -> None:
        """Run due tasks; create all variables of the step before a saved state is restored."""
        if self.session.start.resuming is not None:
            self._trace_for(getattr(data, "element_spec", None))
        super()._before_step(data)

    def prepare(self) -> bool:
        spec = keras_fitting.running_spec()
        if spec is None or self.trace_key.spread_out:
            return False
        self._trace_for(spec)
        return True

    def _trace_for(self, spec: Any) -> None:
        """Trace the step for data like this without running it, which creates its variables."""
        if spec is not None:
            present = keras.tree.map_structure(_present, spec)
            self._with_retraces(lambda: self.transaction.trace(present))

    def _execute(self, data: Any) -> Executed:
        take = self.transaction.take
        if take is not None:
            self._running = args = (take(data),)
            return self._run(lambda: self.inner(*args, data), args)
        of_fit = isinstance(data, (tf.data.Iterator, tf.distribute.DistributedIterator))
        # The batch of `train_on_batch` is kept, because a second trace reads it again.
        batches = data if of_fit else list(data)
        return self._run(lambda: self.inner(iter(batches)))

    def resolve_pending(self) -> None:
        """Judge the complete steps of an execution that has raised."""
        super().resolve_pending()
        last = self.transaction.rows.last() if self.transaction.counted else None
        if last is not None:
            self.session.after(Executed(None, last, None))

    def _rescue(self) -> None:
        self.resolve_pending()

    def run_again(self, args: Sequence[Any]) -> Executed:
        return self._run(lambda: self.inner.again(*args), args)

    def _run(self, inner: Callable[[], Any], args: Sequence[Any] | None = None) -> Executed:
        executed = self._completed(inner, args)
        if not executed.verdict.refused:
            return executed
        return executed._replace(outputs=self._restored(executed.outputs))

    def _restored(self, logs: Any) -> Any:
        """Return the logs of the restored metrics; a custom log, and each if they were reset, is
        that of the last good step.
        """
        if not isinstance(logs, dict):
            return logs
        restored = self._stock and _has_measured(self.model)
        now = self.model.get_metrics_result() if restored else {}
        known = {**(self.session.logs.known or {}), **now}
        return {name: known.get(name, value) for name, value in logs.items()}


def _has_measured(model: Any) -> bool:
    """Whether a step has updated the loss of the logs since it was reset, which `train_on_batch`
    does in each call.
    """
    counts = [getattr(metric, "count", None) for metric in model.metrics if metric.name == "loss"]
    return all(keras_variables.read(count).any() for count in counts if count is not None)


class OneStepFunction:
    """The train function of a model, one step in each execution, on a batch that the host takes
    from the iterator.

    Of a step of 0.6 ms Keras 3.15 takes 0.25 ms for work that only several steps per execution need
    (keras/src/backend/tensorflow/trainer.py, `_make_function`), and for looking up the trace by the
    types of all arguments and captured values. Here the host takes the batch, which a diagnosis can
    then use, and looks up the trace once per iterator.

    Args:
        step: the transaction of the train step.
        model: the model, if the step is Keras' own.
    """

    def __init__(self, step: Transaction, eager: bool, model: Any):
        self._step, self._eager, self._model = step, eager, model
        self._function: Any = step
        if not eager:
            written = tf.autograph.experimental.do_not_convert(step)
            self._function = tf.function(written, reduce_retracing=True)
        self._iterator: Callable[[], Any] = lambda: None
        self._concrete: Any = None

    def __call__(self, data: Any, iterator: Any) -> Any:
        """Run the step on the next batch of this iterator."""
        if self._eager or not isinstance(iterator, tf.data.Iterator):
            return self._function(data)
        if self._iterator() is not iterator:
            spec = keras.tree.map_structure(_present, iterator.element_spec)
            if self._model is not None:
                self._build_metrics(self._model, spec)
            self._concrete = self._function.get_concrete_function(spec)
            self._iterator = weakref.ref(iterator)
        return self._concrete(data)

    def again(self, data: Any) -> Any:
        """Run the step on an earlier batch, which may be of other data than the last iterator."""
        return self._function(data)

    def _build_metrics(self, model: Any, spec: Any) -> None:
        """Build the metrics of a model with one output for batches like this, as `_build_optimizer`
        builds the optimizer. Those of several outputs are built in the step, which is traced twice
        then, as without a guard.
        """
        output = keras_layers.symbolic_outputs(model)
        targets = keras.utils.unpack_x_y_sample_weight(spec)[1]
        known = isinstance(targets, tf.TensorSpec) and targets.shape.rank is not None
        if not (known and isinstance(output, keras.KerasTensor)):
            return
        before = set(map(id, model.metrics_variables))
        symbolic = keras.KerasTensor(targets.shape, targets.dtype.name)
        keras_losses.build_metrics(model, symbolic, output)
        for variable in model.metrics_variables:
            if id(variable) not in before:
                self._step.run.note_created(variable.value, keras_variables.read(variable))


def _taken(iterator: Any) -> Any:
    """Take the next batch from the iterator, as Keras passes it to a step; later ones cannot change
    it.

    Raises:
        StopIteration: if there is none.
    """
    batch = keras.tree.map_structure(_present, next(iterator))
    return batch if isinstance(iterator, tf.data.Iterator) else held(batch)


def _present(value: Any) -> Any:
    """Return a component of a batch, or its spec; `None` for one that a generator omitted."""
    return None if isinstance(value, (tf.experimental.Optional, tf.OptionalSpec)) else value


class LoopStep(_RetracingAccess, attach.LoopStep):
    """One hand-written step, compiled or not, with its transaction."""

    @property
    def _compiles(self) -> bool:
        """Whether TensorFlow compiles the step."""
        is_traced = hasattr(self.function, "python_function")
        return is_traced and not tf.config.functions_run_eagerly()

    def rebuild(self) -> None:
        super().rebuild()
        how: dict[str, Any] = {"autograph": False, "reduce_retracing": True}
        self.signature = self.function.input_signature if self._compiles else None
        if self.signature is not None:
            how["input_signature"] = (tuple(self.signature), {})
        self.compiled = tf.function(self.transaction, **how) if self._compiles else self.transaction

    _build = rebuild

    def _transaction(self) -> Transaction:
        written = getattr(self.function, "python_function", None)
        body = written or self.function
        if self._compiles and getattr(self.function, "_autograph", True):
            with contextlib.suppress(Exception):  # as `tf.function` does if there is no source
                body = tf.autograph.to_graph(written)
        return Transaction(
            lambda args, kwargs: body(*args, **kwargs),
            self.run,
            of_trainer=False,
            jit=self._compiles and bool(getattr(self.function, "_jit_compile", None)),
            refuse=self.run.refuses,
        )

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Executed:
        if self.signature is not None:
            args, kwargs = self._cast(tuple(self.signature), args, kwargs), {}
        return self._completed(lambda: self.compiled(args, kwargs), held((args, kwargs)))

    def _cast(
        self, specs: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments for a signature as TensorFlow passes them on. An argument without a
        spec must have its default value, which is part of the function.

        Raises:
            TypeError: if it has another one, or arguments are missing.
        """
        signature = inspect.signature(self.function.python_function)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        parameters = list(signature.parameters.values())
        for parameter in parameters[len(specs) :]:
            given = bound.arguments.get(parameter.name)
            if parameter.default is parameter.empty or given is parameter.default:
                continue
            received = f"{parameter.name}={given!r}"
            what = f"{parameter.name}={parameter.default!r}, which the input_signature leaves out"
            raise TypeError(expected(what, received, "Add it to the input_signature."))
        return tuple(
            keras.tree.map_structure_up_to(specs, _as_given, specs, bound.args[: len(specs)])
        )


def _as_given(spec: Any, value: Any) -> Any:
    """Return an argument of a function with a signature as TensorFlow passes it on."""
    is_plain = isinstance(spec, tf.TensorSpec) and not isinstance(value, (tf.Tensor, tf.Variable))
    return tf.convert_to_tensor(value, spec.dtype) if is_plain else value
