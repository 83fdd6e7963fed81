"""The order of events in one execution of a guarded train function: common code of all backends."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.interface import Run, Session, StateAccess
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import attributes as keras_attributes, variables as keras_variables


class GuardedExecution(StateAccess):
    """Runs a model's train function with the tasks of the host around it. A backend implements how
    its steps run.

    Args:
        model: a compiled model.
        session: the host side, which is `_fit.session.Session`.

    Attributes:
        state: `"attached"` during a call of Keras, `"lasting"` for a model that is always guarded,
            else `"free"`.
        body: the train step of the model, without the transaction.
        in_use: whether the call of Keras is still running.
    """

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
        self.in_use: Callable[..., bool] = lambda strictly=False: True
        self.body: Any = None
        self._keepable = True
        """Whether the next fit may use the step: nothing that is built into it was changed."""

    def detach(self) -> None:
        """Restore the model's own methods; may be called any number of times."""
        raise NotImplementedError

    @property
    def _stock(self) -> bool:
        """Whether the train step is Keras' own."""
        return getattr(self.body, "__func__", None) is keras.Model.train_step

    @property
    def _takes_fewer(self) -> bool:
        """Whether an execution can run on a list of fewer batches than it has steps."""
        return True

    def run_execution(self, *args: Any) -> Any:
        """Replacement for the train function: one execution, including its exceptions."""
        try:
            return self._call(*args)
        except self.END_OF_DATA:
            raise
        except BaseException as error:
            self._keepable = False
            for release in (self._rescue, partial(self.session.note_error, error), self.detach):
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
        logs, verdict = self._execute(data)
        session.after(verdict)
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
        """Tell a loop that continues after the end of training. Keras ends its own."""
        if self.state == "lasting":
            self.session.say_without_effect("model.nanguard")
        elif not self.in_use(strictly=True):
            self.session.say_without_effect("guard")

    def _without_effect(self, data: Any) -> Any:
        """Run the step and undo it: Keras needs logs before it stops, those of the last step."""
        with undone(self.run):
            self._execute(data)
        return self._shown()

    def _rescue(self) -> None:
        """Write the last available state into the variables, after a step has raised."""


@contextlib.contextmanager
def python_state_restored(
    called: Sequence[Any], held: Iterable[Callable[[], None]]
) -> Iterator[None]:
    """Restore at the end, also after an exception, what steps may write outside of variables: the
    random generators of Python and NumPy, and the attributes of what they call.

    Args:
        called: the objects, from `attributes.called_by_step`.
        held: further functions that restore something; they run first.
    """
    with contextlib.ExitStack() as ending:  # the last one first, even if another one raises
        ending.callback(random.setstate, random.getstate())
        ending.callback(np.random.set_state, np.random.get_state())
        for restore in (keras_attributes.restorer(called), *held):
            ending.callback(restore)
        yield


@contextlib.contextmanager
def undone(run: Run) -> Iterator[None]:
    """Restore at the end, also after an exception, everything that steps may write, and drop their
    reports: variables, learning rates, random generators, numbers and tensors in attributes of
    layers, gradients and schedulers of torch.

    Raises:
        StateLostError: if a variable could not be restored.
    """
    access = run.access
    access.sync_variables()
    state, called = run.read_train_state(), keras_attributes.called_by_step(run.model)
    untracked = access.transaction.learned.untracked.values()
    others = [*untracked, *keras_attributes.variables_of(called)]
    variables = keras_variables.unique([*state.written_by_calls, *others])
    restores = list(map(keras_variables.restorer, variables))

    def restore_variables() -> None:
        created = [partial(keras_variables.write, *pair) for pair in run.first_values()]
        keras_variables.finish([*restores, *created])

    replay = current.replay()
    with contextlib.ExitStack() as ending:
        ending.callback(access.loop_state_restorer())
        held = replay.optimizer_restorers(run.model, state.optimizers)
        ending.enter_context(python_state_restored(called, held))
        ending.callback(restore_variables)
        ending.callback(access.sync_variables)
        ending.callback(lambda: access.transaction.take_reports())  # perhaps of a new trace
        ending.enter_context(replay.restoring_side_effects(variables))
        yield
