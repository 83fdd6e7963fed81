"""Common code of the attachments of all backends, and the order of events in one execution."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal, TypeVar

import keras

from keras_nanguard._backends.interface import Run, Session, StateAccess
from keras_nanguard._core.errors import GuardError
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import (
    compiled as keras_compiled,
    optimizers as keras_optimizers,
    overrides,
    variables as keras_variables,
)

Result = TypeVar("Result")

_KEPT = "_nanguard_kept_step"
"""The attribute of a model with the compiled step of its last guarded fit, so that the next one
need not trace it again. It is released with the model. Keras keeps its train function as long.
"""


def attached_to(model: Any) -> Attachment | None:
    """Return the attachment to the train function of this model, or `None`."""
    owner = getattr(vars(model).get("make_train_function"), "__self__", None)
    return owner if isinstance(owner, Attachment) else None


class _CachedStep:
    """Hides the step from code that searches the attributes of a model for variables."""

    __slots__ = ("key", "step")

    def __init__(self, key: tuple[Any, ...], step: Any):
        self.key, self.step = key, step

    def fits(self, key: tuple[Any, ...]) -> bool:
        """Whether a key has the same objects, the same numbers and equal bound methods."""
        return len(self.key) == len(key) and all(
            one is other
            or (type(one) is type(other) and isinstance(one, (int, MethodType)) and one == other)
            for one, other in zip(self.key, key)
        )


def forget_step(model: Any) -> None:
    """Remove the compiled step that was kept for the next fit of a model."""
    overrides.unset_instance(model, _KEPT)


def _plain_step(model: Any) -> Any:
    """Return the model's own train step, without a left-over transaction."""
    if getattr(vars(model).get("train_step"), "is_transaction", False):
        overrides.unset_instance(model, "train_step")
    return model.train_step


def _require_compiled(model: Any, stock: bool) -> None:
    """Check that the model can be trained.

    Args:
        model: the model.
        stock: whether its train step is Keras' own, which needs an optimizer.

    Raises:
        GuardError: if the model is not compiled, or lacks an optimizer.
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
    """

    END_OF_DATA: tuple[type[BaseException], ...] = (StopIteration,)
    """What an execution raises if there is no batch."""

    LOGS_RESTORED = False
    """Whether a refused step returns the logs of the restored metrics, not those that it
    computed.
    """

    def __init__(self, model: Any, session: Session):
        self.model, self.session, self.run = model, session, session.run
        self.state: Literal["free", "attached", "lasting"] = "free"
        # How the step was traced, by which the next fit may find it; `None` if it may not.
        self._modes: tuple[Any, ...] | None = ()
        self._overrides = overrides.Overrides()
        self._cached: tuple[Any, Any] = None, None
        self._ignored = 0  # steps since the policy has ended training
        self.run.access = self

    def attach(self, in_use: Callable[..., bool]) -> None:
        """Replace the model's train function until `detach`.

        Args:
            in_use: whether the call of Keras is still running. With `strictly=True`, a hand-written
                loop does not count.
        """
        self.state, self.in_use = "attached", in_use
        self.body = _plain_step(self.model)
        if {"make_train_function", "train_step"} & vars(self.model).keys():
            self._modes = None  # changed by other code, which may end before the next fit
        self._make = self.model.make_train_function
        self._cached = self.model.train_function, keras_compiled.compiled_as(self.model)
        self._overrides.set(self.model, "make_train_function", self.make)
        self.model.train_function = None

    def detach(self) -> None:
        """Restore the model's own methods; may be called any number of times."""
        if self.state != "attached":
            return
        self.state = "free"
        self._keep()
        self._overrides.give_back()
        function, compiled = self._cached
        self.model.train_function = (
            function if compiled is keras_compiled.compiled_as(self.model) else None
        )
        self.session.end()

    def make_with(self, make: Callable[..., Any]) -> None:
        """Create the train function once with `make`, for a model that is always guarded."""
        self.body, self._make, self.state = _plain_step(self.model), make, "lasting"
        _require_compiled(self.model, self._stock)
        self._build()

    def make(self, force: bool = False) -> Any:
        """Replacement for `Model.make_train_function`. It detaches if the fit never started or
        cannot be guarded.
        """
        if not self.in_use():
            self.detach()
            self.model.make_train_function(force=force)
            return self.model.train_function
        try:
            _require_compiled(self.model, self._stock)
            if self.model.train_function is None or force:
                self._build()
        except BaseException:
            self._modes = None  # an incomplete step is not kept for the next fit
            self.detach()
            raise
        return self.model.train_function

    @property
    def _stock(self) -> bool:
        """Whether the train step is Keras' own."""
        return getattr(self.body, "__func__", None) is keras.Model.train_step

    def _key(self) -> tuple[Any, ...]:
        """Return everything that is built into a trace of the step."""
        return (
            self.body,
            self.run.refuses,
            *(self._modes or ()),
            *keras_compiled.built_in(self.model, self.run.read_train_state()),
        )

    def _cached_step(self, *modes: Any) -> Any:
        """Return the step of an earlier fit, traced in these modes, if it fits this one; else
        `None`.
        """
        before = self._modes
        self._modes = None if before is None else modes
        if before != () or self.run.recovery.adjustments():  # changes of the policy are built in
            return None
        kept = vars(self.model).get(_KEPT)
        forget_step(self.model)
        return kept.step if kept is not None and kept.fits(self._key()) else None

    def _keep(self) -> None:
        """Keep the step for the next fit, unless it was changed for this one."""
        transaction = self.run.transaction
        if self._modes and not (self.run.recovery.adjustments() or transaction.learned.tolerated):
            transaction.release_run()
            overrides.set_instance(self.model, _KEPT, _CachedStep(self._key(), self._made()))

    def _made(self) -> Any:
        """Return the parts of this fit's step that the next fit needs."""
        return self.run.transaction

    def rebuild(self) -> None:
        """Compile the step again, after a change of something that is built into it."""
        self._modes = None
        if self.state != "free" and self.model.train_function is not None:
            self._build()

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

    def run_execution(self, *args: Any) -> Any:
        """Replacement for the train function: one execution, including its exceptions."""
        try:
            return self._call(*args)
        except self.END_OF_DATA:
            raise
        except BaseException as error:
            self._modes = None
            self._clean_up(error)
            raise

    def _clean_up(self, error: BaseException) -> None:
        """Release the model after an error. Errors in this do not replace the first one."""
        with contextlib.suppress(Exception):
            self._rescue()
        with contextlib.suppress(Exception):
            self.session.note_error(error)
        with contextlib.suppress(Exception):
            self.detach()

    def _call(self, *args: Any) -> Any:
        """Run guarded steps, with the arguments and results of Keras' train function."""
        return self.run_guarded(*args)

    def run_guarded(self, data: Any) -> Any:
        """Run the step with the tasks of the host before and after it; return the logs."""
        session = self.session
        if not session.nothing_pending:
            self._before_step(data)
            if self._skips(data):
                return self._shown()
            if self.run.stopped:
                self._say_without_effect()
                return self._without_effect(data)
        logs, verdict = self._execute(data)
        session.after(verdict)
        return session.logs_for_callbacks(
            logs, verdict.loss, verdict.refused and not self.LOGS_RESTORED
        )

    def _before_step(self, data: Any) -> None:
        """Run the tasks of the host that are due before a step on this data."""
        self.session.before()

    def _skips(self, data: Any) -> bool:
        """Skip the batches of this data, if batches are to be skipped."""
        return bool(self.session.skips_batches(iter(data), self.model.steps_per_execution))

    def _execute(self, data: Any) -> tuple[Any, Verdict]:
        """Run the step; return its logs and its verdict, or that of the last of several."""
        raise NotImplementedError

    def _shown(self) -> Any:
        """Return the logs of the last step, or those of fresh metrics."""
        if self.session.logs.shown is None:
            self.sync_variables()
            self.session.logs_for_callbacks(self.model.get_metrics_result())
        return self.session.logs.shown

    def _say_without_effect(self) -> None:
        """Count a step after the end of training, and tell a loop that does not end."""
        self._ignored += 1
        lasting = self.state == "lasting"
        if lasting or not self.in_use(strictly=True):  # else Keras ends its own loop
            _say_without_effect(self.run, self._ignored, "model.nanguard" if lasting else "guard")

    def _without_effect(self, data: Any) -> Any:
        """Run the step and undo it: training has ended, but Keras needs logs before it stops. They
        are those of the last step before, if there was one.
        """
        _undone(self.run, lambda: self._execute(data))
        return self._shown()

    def _rescue(self) -> None:
        """Write the last available state into the variables, after a step has raised."""


def _say_without_effect(run: Run, steps: int, whose: str) -> None:
    """Print the number of steps without effect in a loop that does not end: 1, 10, 100, ..."""
    if str(steps).strip("0") == "1":
        words = "1 step" if steps == 1 else f"{steps} steps"
        run.say(
            f"NanGuard: training has ended, so {words} since then had no effect. End the loop"
            f" if {whose}.stopped is true."
        )


def _undone(run: Run, execute: Callable[[], Result]) -> Result:
    """Run a step, restore every variable that it may write, drop the reports of it, and return its
    result.
    """
    variables = run.train_state().written_by_calls
    restores = [keras_variables.restorer(variable) for variable in variables]
    result = execute()
    created = [partial(keras_variables.write, *pair) for pair in run.first_values()]
    keras_variables.finish([*restores, *created])
    run.transaction.take_reports()
    return result


class LoopStep(StateAccess):
    """One hand-written step with its transaction. A backend implements the transaction and its
    call.

    Args:
        function: the step.
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
    def watching() -> contextlib.AbstractContextManager[None]:
        """Return a context around all steps of a loop."""
        return contextlib.nullcontext()

    def __init__(self, function: Any, session: Session):
        self.function, self.session, self.run = function, session, session.run
        self._ignored = 0  # steps since the policy has ended training
        self.rebuild()

    def rebuild(self) -> None:
        """Create the step again."""
        old, transaction = self.run.transaction, self._transaction()
        if isinstance(old, type(transaction)):
            transaction.inherit(old)
        self.run.access, self.run.transaction = self, transaction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, pass its verdict to the host, and return its outputs."""
        self.session.before()
        return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one step; return its outputs. After the end of training it has no effect."""
        if self.run.stopped:
            self._ignored += 1
            _say_without_effect(self.run, self._ignored, "guard")
            restore = self.held()
            outputs, _ = _undone(self.run, lambda: self._execute(args, kwargs))
            restore()
        else:
            outputs, verdict = self._execute(args, kwargs)
            self.session.after(verdict)
        return outputs

    def run_again(self, args: Sequence[Any]) -> Verdict:
        return self._execute(*args)[1]

    def _transaction(self) -> Any:
        """Return a transaction around the function."""
        raise NotImplementedError

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Verdict]:
        """Run one step; returns its outputs and its verdict."""
        raise NotImplementedError
