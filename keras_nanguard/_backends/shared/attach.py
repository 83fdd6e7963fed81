"""How the transaction is attached to a train step, and detached from it: common code of all
backends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

import keras

from keras_nanguard._backends.interface import Executed, Session, StateAccess, Transaction
from keras_nanguard._backends.shared.iterators import reads_iterator
from keras_nanguard._backends.shared.step_cache import StepCache
from keras_nanguard._backends.shared.undone import undone
from keras_nanguard._core.errors import GuardError
from keras_nanguard._keras import (
    compiled as keras_compiled,
    optimizers as keras_optimizers,
    overrides,
)

Use = Literal["call", "loop", "none"]
"""What uses a guarded model: a running call of Keras; a hand-written loop, which may have ended in
an exception; nothing any more.
"""


def attached_to(model: Any) -> Attachment | None:
    """Return the attachment to the train function of this model, or `None`."""
    owner = getattr(vars(model).get("make_train_function"), "__self__", None)
    return owner if isinstance(owner, Attachment) else None


def _plain_step(model: Any) -> Any:
    """Return the model's own train step, without a left-over transaction."""
    if isinstance(vars(model).get("train_step"), Transaction):
        overrides.unset_instance(model, "train_step")
    return model.train_step


def _require_compiled(model: Any, stock: bool) -> None:
    """Raise `GuardError` if the model is not compiled, or if its step is `stock`, Keras' own, and
    it lacks an optimizer.
    """
    if not getattr(model, "compiled", False):
        raise GuardError(
            f"Expected a compiled model. Received: model={getattr(model, 'name', model)!r}, which"
            " is not compiled. Call model.compile(optimizer, loss) before fit."
        )
    if stock and not keras_optimizers.find_optimizers(model):
        raise GuardError(
            f"Expected a model with an optimizer. Received: model={model.name!r} with"
            f" optimizer={getattr(model, 'optimizer', None)!r}. Pass an optimizer to compile, or"
            " use guard.watch(model, *optimizers)."
        )


class Attachment(StateAccess):
    """The transaction of one session, attached to one model's `fit` and `train_on_batch`.

    Keras reads `train_step` from the instance when it creates its train function, and calls the
    train function once per execution, on the main thread. Both are replaced on the instance only,
    so saving, cloning or pickling the model does not include them.

    A backend implements how the train function is built and how one execution runs.

    Args:
        model: a compiled model.
        session: the host side, which is `_fit.session.Session`.

    Attributes:
        state: `"attached"` during a call of Keras, `"lasting"` for a model that is always guarded,
            else `"free"`.
        body: the train step of the model, without the transaction.
        use: returns what uses the model; see `Use`.
        cache: keeps the step for the next fit.
    """

    skips_batches = True

    END_OF_DATA: tuple[type[BaseException], ...] = (StopIteration,)
    """What an execution raises if there is no batch."""

    LOGS_RESTORED = False
    """Whether a refused step returns the logs of the restored metrics, not those that it
    computed.
    """

    def __init__(self, model: Any, session: Session):
        super().__init__()
        self.model, self.session, self.run = model, session, session.run
        self.state: Literal["free", "attached", "lasting"] = "free"
        self.use: Callable[[], Use] = lambda: "call"
        self.body: Any = None
        self.cache = StepCache(model)
        self.trace_key: tuple[Any, ...] | None = None
        """How the step was traced, once it is built so that the next fit may use it."""
        self._running: Sequence[Any] | None = None
        """The arguments of the running step, for an exception that it raises: `_execute` sets them
        if the host has them.
        """
        self._make: Any = None
        self._overrides = overrides.Overrides()
        self._cached: tuple[Any, Any] = None, None

    @property
    def _stock(self) -> bool:
        """Whether the train step is Keras' own."""
        return getattr(self.body, "__func__", None) is keras.Model.train_step

    @property
    def _takes_fewer(self) -> bool:
        """Whether an execution can run on a list of fewer batches than it has steps."""
        return True

    def attach(self, use: Callable[[], Use]) -> None:
        """Replace the model's train function until `detach`.

        Args:
            use: returns what uses the model.
        """
        self.state, self.use = "attached", use
        self.body = _plain_step(self.model)
        if {"make_train_function", "train_step"} & vars(self.model).keys():
            self.cache.usable = False  # changed by other code, which may end before the next fit
        self._make = self.model.make_train_function
        self._cached = self.model.train_function, keras_compiled.compiled_as(self.model)
        self._overrides.set(self.model, "make_train_function", self.make)
        self.model.train_function = None

    def detach(self) -> None:
        """Restore the model's own methods; may be called any number of times."""
        if self.state != "attached":
            return
        self.state = "free"
        with contextlib.ExitStack() as ending:  # the last one first, even if another one raises
            ending.callback(self.session.end)
            ending.callback(self._give_back)
            self._keep()

    def _give_back(self) -> None:
        self._overrides.give_back()
        function, compiled = self._cached
        self.model.train_function = (
            function if compiled is keras_compiled.compiled_as(self.model) else None
        )

    def make_with(self, make: Callable[..., Any]) -> None:
        """Create the train function once with `make`, for a model that is always guarded."""
        self.body, self._make, self.state = _plain_step(self.model), make, "lasting"
        _require_compiled(self.model, self._stock)
        self._build()

    def make(self, force: bool = False) -> Any:
        """Replace `make_train_function`; detach if the fit never started or cannot be guarded."""
        if self.use() == "none":
            self.detach()
            self.model.make_train_function(force=force)
            return self.model.train_function
        try:
            _require_compiled(self.model, self._stock)
            if self.model.train_function is None or force:
                self._build()
        except BaseException:
            self.cache.usable = False  # an incomplete step
            self.detach()
            raise
        return self.model.train_function

    def _key(self) -> tuple[Any, ...]:
        """Return everything that is built into a trace of the step."""
        return (
            self.body,
            self.run.refuses,
            *(self.trace_key or ()),
            *keras_compiled.built_in(self.model, self.run.read_train_state()),
        )

    def _take_kept(self) -> Any:
        """Take the step of an earlier fit from the model; `None` if it does not fit this one."""
        return None if self.run.recovery.is_built_in else self.cache.take(self._key)

    def _keep(self) -> None:
        """Keep the step for the next fit, unless it was changed for this one."""
        if self.trace_key is None or not self.cache.usable:
            return
        if not (self.run.recovery.is_built_in or self.transaction.learned.tolerated):
            self.transaction.release_run()
            self.cache.keep(self._key(), self._made())

    def _made(self) -> Any:
        """Return the parts of this fit's step that the next fit needs."""
        return self.transaction

    def rebuild(self) -> None:
        """Compile the step again, after a change of something that is built into it. If that fails,
        the previous step is used.
        """
        self.cache.usable, model = False, self.model
        if self.state == "free" or model.train_function is None:
            return
        transaction, function = self.transaction, model.train_function
        step = vars(model).get("train_step")
        try:
            self._build()
        except BaseException:
            self.transaction, model.train_function = transaction, function
            if step is not None:
                overrides.set_instance(model, "train_step", step)
            raise

    def _build(self) -> None:
        """Create the train function with the transaction, and set it on the model."""
        raise NotImplementedError

    def _made_by_keras(self, jit_compile: bool) -> Any:
        """Return the train function that Keras creates from the current train step."""
        model = self.model
        compile_with, model.jit_compile = model.jit_compile, jit_compile
        try:
            self._make(force=True)
        finally:
            model.jit_compile = compile_with
        return model.train_function

    # One execution

    def run_execution(self, *args: Any) -> Any:
        """Replacement for the train function: one execution, including its exceptions."""
        try:
            return self._call(*args)
        except self.END_OF_DATA:
            self._running = None
            raise
        except BaseException as error:
            self.cache.usable = False
            running, self._running = self._running, None
            for release in (
                self._rescue,
                # A name for this would keep the exception, and with it the frames of the step.
                partial(self.session.note_error, error, running),
                self.detach,
            ):
                with contextlib.suppress(Exception):  # which must not replace the first one
                    release()
            raise

    def _call(self, *args: Any) -> Any:
        """Run guarded steps, with the arguments and results of Keras' train function."""
        return self.run_guarded(*args)

    def run_guarded(self, data: Any) -> Any:
        """Run the step with the tasks of the host before and after it; return the logs."""
        session = self.session
        if session.pending:
            self._before_step(data)
            data = self._without_skipped(data)
            if data is None:
                return self._shown()
            if self.run.stopped:
                self._say_without_effect()
                return self._without_effect(data)
        executed = self._execute(data)
        self._running = None
        session.after(executed)
        logs, verdict, _ = executed
        return session.logs_for_callbacks(
            logs, verdict.loss, verdict.refused and not self.LOGS_RESTORED
        )

    def _before_step(self, data: Any) -> None:
        """Run the tasks of the host that are due before a step on this data."""
        self.session.before()

    def _without_skipped(self, data: Any) -> Any:
        """Take the batches from this data that are to be skipped in this execution; return the data
        of the rest of it, `None` if no step is left.
        """
        size, iterator = self.model.steps_per_execution, iter(data)
        skipped = self.session.skip_batches(iterator, size, whole=not self._takes_fewer)
        if not skipped:
            return data
        return list(islice(iterator, size - skipped)) or None

    def _execute(self, data: Any) -> Executed:
        """Run the step on this data, with its arguments in `_running` if the host has them."""
        raise NotImplementedError

    def _shown(self) -> Any:
        """Return the logs of the last step, or those of fresh metrics."""
        if self.session.logs.shown is None:
            self.sync_variables()
            self.session.logs_for_callbacks(self.model.get_metrics_result())
        return self.session.logs.shown

    def _say_without_effect(self) -> None:
        """Tell a loop that continues after the end of training. Keras ends its own."""
        if self.state == "lasting":
            self.session.say_without_effect("model.nanguard")
        elif self.use() != "call":
            self.session.say_without_effect("guard")

    def _without_effect(self, data: Any) -> Any:
        """Run the step and undo it: Keras needs logs before it stops, those of the last step."""
        with undone(self.run):
            self._execute(data)
        self._running = None
        return self._shown()

    def _rescue(self) -> None:
        """Write the last available state into the variables, after a step has raised."""


class LoopStep(StateAccess):
    """One hand-written step with its transaction. A backend implements the transaction and its
    call.

    Args:
        session: the host side, which is `_fit.session.Session`.
    """

    STATE_PASSES_THROUGH_STEP = False
    """Whether a step takes and returns the state of its optimizers."""

    can_run_again = True

    @staticmethod
    def adapted(model: Any, optimizers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return model and optimizers in Keras' form; those of Keras are returned unchanged."""
        return model, optimizers

    @staticmethod
    def watching() -> contextlib.AbstractContextManager[Any]:
        """Return a context around all steps of a loop."""
        return contextlib.nullcontext()

    def __init__(self, function: Any, session: Session):
        super().__init__()
        self.function, self.session, self.run = function, session, session.run
        self.rebuild()

    def rebuild(self) -> None:
        """Create the step again."""
        transaction = self._transaction()
        transaction.inherit(self.run.access.transaction)
        self.transaction, self._rebuilds = transaction, self.run.rebuilds

    def follow(self, previous: StateAccess) -> None:
        """Continue after a step of another function of the loop; create the step again if that was
        done for the other one.
        """
        if self._rebuilds < self.run.rebuilds:
            self.rebuild()
        self.transaction.follow(previous.transaction)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, pass its verdict to the host, and return its outputs."""
        self.session.before()
        return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one step; return its outputs. After the end of training it has no effect."""
        if self.run.stopped:
            self.session.say_without_effect("guard")
            with undone(self.run):
                return self._execute(args, kwargs).outputs
        executed = self._execute(args, kwargs)
        self.session.after(executed)
        return executed.outputs

    @property
    def reads_iterator(self) -> bool:
        return reads_iterator(self.function)

    def run_again(self, args: Sequence[Any]) -> Executed:
        return self._execute(*args)

    def _transaction(self) -> Transaction:
        """Return a transaction around the function."""
        raise NotImplementedError

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Executed:
        """Run one step."""
        raise NotImplementedError
