"""The interface between a backend and the rest of the library.

A backend is a package with these modules, each with what a class here or in `shared` declares:

| module | content | declared by |
|---|---|---|
| `attach` | `ModelAttachment`, `LoopStep` | `Attachment`, `LoopStep` of `shared/attach.py` |
| `step` | `Transaction` | `Transaction` |
| `replay` | replay of a step, for a diagnosis | `Replay` |
| `faults` | fault injection: `Hook` | `FaultHook` of `shared/faults.py` |
| `host` | functions for the process as a whole | `Host` |

A method that raises `NotImplementedError` has to be overridden; the others have a default for a
backend that does not need them.

The other direction is `Session`: what a backend calls around each step, as the one argument of
`ModelAttachment` and `LoopStep`. Its `run` has the facts that a backend reads.

Other modules of the same name have the same task in each backend; see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, NamedTuple, Protocol

import numpy as np

from keras_nanguard._core.incident import Finding
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras.train_state import TrainState


@dataclass(frozen=True)
class Learned:
    """What the steps of a run, or their traces, have shown about their body.

    Attributes:
        untracked: the variables that it writes and Keras does not track, by key.
        tolerated: keys of the variables that may be infinite or NaN.
        updates_first: whether updates run before the verdict, and are undone on a refusal.
        changes_outside: whether they change something outside of the train state, such as a
            learning rate scheduler. Snapshots do not have it, so replays would change it twice.
        has_hidden_state: whether the compiled step changes more than variables: an operation has a
            random generator of its own (`tf.random.normal`), or calls the host (`tf.print`).
    """

    untracked: Mapping[int, Any] = field(default_factory=dict)
    tolerated: frozenset[int] = frozenset()
    updates_first: bool = False
    changes_outside: bool = False
    has_hidden_state: bool = False


class Executed(NamedTuple):
    """What a guarded step has returned.

    Attributes:
        outputs: its outputs; logs, if a Keras trainer runs it.
        verdict: its verdict, or that of the last of several steps in one execution.
        arguments: its arguments, as `Transaction.batch` takes them; `None` if the host does not
            have them.
    """

    outputs: Any
    verdict: Verdict
    arguments: Any


class Transaction:
    """A train step that commits completely or is refused, as the host uses it between two
    executions. This class itself stands for the step of a run before it is created.
    """

    # Every backend has these.

    run: Run
    """The facts of the run that it belongs to."""

    replayed: Callable[..., Any]
    """The step for replays: a function of its batch that reads and writes the variables, and
    returns the outputs.
    """

    losses: Callable[[Any], list[Any]]
    """Returns the losses among the outputs, for a step that never calls `compute_loss`."""

    jit = False
    """Whether the step is compiled by XLA, or by the backend's own compiler."""

    learned = Learned()
    """What earlier steps have shown."""

    reused = False
    """Whether it was traced for an earlier run."""

    def take_reports(self, arguments: Any = None) -> list[Report]:
        """Return and remove the reports of bad steps, in the order of the steps. Never waits.

        Args:
            arguments: those of the last step, as it has returned them.
        """
        raise NotImplementedError

    def results(self, executed: Executed) -> list[tuple[Verdict, Report | None]]:
        """Return the verdict of each step since the last call, in their order; with its report if
        it is bad and has one.

        Args:
            executed: what the last step has returned.
        """
        verdict = executed.verdict
        bad = verdict.refused or not verdict.finite
        reports = self.take_reports(executed.arguments) if bad else []
        return [(verdict, reports[-1] if reports else None)]

    def drop_results(self) -> None:
        """Drop the results of steps that the host does not count."""
        self.take_reports()

    def keys_of(self, variable: Any) -> Iterable[int]:
        """Return the keys of a variable in `learned`."""
        return (id(variable),)

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Allow these variables to be infinite or NaN."""
        keys = {key for variable in variables for key in self.keys_of(variable)}
        self.learned = replace(self.learned, tolerated=self.learned.tolerated | keys)

    def inherit(self, other: Transaction) -> None:
        """Start with what another transaction for the same body has learned."""
        self.learned = other.learned

    # Backends that keep a step for the next run on the same model

    def rebind(self, run: Run) -> None:
        """Use the transaction for another run."""
        self.run, self.reused = run, True

    def release_run(self) -> None:
        """Release everything that belongs to the finished run."""
        raise NotImplementedError

    # Backends that compile a step

    judged: Callable[..., Verdict] | None = None
    """Runs the compiled step again without side effects; returns its verdict. `None` if that would
    need a new trace.
    """

    # Backends on which several steps may run before the host reads their verdicts

    counted = False
    """Whether they may here, so that the steps count themselves. After one that committed a bad
    state all are refused until the host takes the results.
    """

    # Backends on which an update may be judged with the next step

    def has_left_bad(self) -> bool:
        """Judge the last update, if that is left to the next step; return whether it is bad."""
        return False

    def follow(self, previous: Transaction) -> None:
        """Continue after a step of the transaction of another function of the loop."""

    # Backends whose batches may be written over after the step

    def batch(self, arguments: Any) -> Any:
        """Return the arguments of an earlier step as they were given; `None` if they are gone.

        Args:
            arguments: those that the step has returned.
        """
        return arguments


class StateAccess:
    """Host access to the train state between two executions.

    By default the variables always have the state, and every verdict is read at once.
    """

    session: Session
    """What a step that exists calls."""

    def __init__(self) -> None:
        self.transaction = Transaction()

    def sync_variables(self) -> None:
        """Write the current state into the variables."""

    def variables_readable(self) -> AbstractContextManager[None]:
        """Return a context in which the variables read as the current state."""
        self.sync_variables()
        return nullcontext()

    def resolve_pending(self) -> None:
        """Read what is not known yet of the last started step, and act on it."""
        if self.transaction.has_left_bad():
            self.session.seen_outside(left_by_step=True)

    def rebuild(self) -> None:
        """Compile the step again, after something that is built into it has changed."""

    def prepare(self) -> bool:
        """Create every variable that the first step would create, which Keras does before training
        on all backends but TensorFlow; return whether all of them exist.
        """
        return True

    can_run_again = False
    """Whether `run_again` can be called."""

    skips_batches = False
    """Whether it can leave out batches: a step of a loop does not choose its own."""

    @property
    def reads_iterator(self) -> bool:
        """Whether the step refers to an iterator, so that it would read another batch from it."""
        return False

    def loop_state_restorer(self) -> Callable[[], None]:
        """Return a function that restores the current state outside of the variables."""
        return lambda: None

    def run_again(self, args: Sequence[Any]) -> Executed:
        """Run the compiled step on the arguments of an earlier one."""
        raise NotImplementedError


class Replay:
    """Replays a step and records its operations. The class `Replay` of the module `replay`."""

    MODES: tuple[str, ...] = ("eager", "graph", "xla")
    """The modes in which a step can be run again: `"eager"`, `"graph"`, `"xla"`."""

    Origins: Any
    """`Origins(batch, variables, tolerated, rows)`, a `shared.origins.OriginTracker`."""

    Instrument: Any
    """`Instrument(model, ended, origins)`, a `shared.instrument.Instrument`."""

    def body_of(self, model: Any) -> Callable[..., Any]:
        """Return the train step of a model as a function of its batch that writes the variables."""
        step: Callable[..., Any] = model.train_step
        return step

    def intercepted(
        self, model: Any, optimizers: Iterable[Any], immediate: bool
    ) -> AbstractContextManager[Any]:
        """Return a context that records what a step shows that runs in it.

        Args:
            immediate: whether its updates run at once.

        Returns:
            A context with `losses`: scalars, or arrays that are summed; `outputs`: those of the
                model, `(name, tensor)`; and `records` of its updates, each with `pairs`: gradients
                with their variables, and `run()`, which runs it if it was deferred.
        """
        raise NotImplementedError

    def preserved(
        self, variables: Sequence[Any], model: Any, optimizers: Iterable[Any]
    ) -> AbstractContextManager[None]:
        """Restore these variables, the random generators, and what optimizers keep outside of
        Keras, at the end.

        Args:
            model: the model of the step, or `None`; its layers may have further optimizers.
            optimizers: those of the step.

        Raises:
            StateLostError: if one of them could not be restored; all others are.
        """
        raise NotImplementedError

    def restoring_side_effects(
        self, variables: Sequence[Any], model: Any, optimizers: Iterable[Any]
    ) -> AbstractContextManager[None]:
        """Restore at the end what steps write outside of these variables: the backend's random
        generators, and gradients, buffers, modes, optimizers, schedulers and scalers of torch.
        Arguments as in `preserved`.
        """
        return nullcontext()

    def without_rows(self, value: Any, kept: Any) -> Any:
        """Return the given rows of a tensor or an array; other values are returned unchanged."""
        raise NotImplementedError

    def twin(self, variable: Any) -> Any:
        """Return a backend variable with the same values in float32, or `None`."""
        raise NotImplementedError

    def compiled(
        self, function: Callable[..., Any], step: Any, args: Sequence[Any], jit: bool
    ) -> Any:
        """Compile a function that runs a step, and return its result. Only called for `MODES`
        other than `"eager"`, so the default compiles nothing.

        Args:
            function: the function, of the list of arguments of the step.
            step: the `shared.replay.ReplayableStep` that it runs.
            args: these arguments.
            jit: whether to compile with XLA.
        """
        return function(args)


class Host:
    """Functions for the process as a whole. The defaults are those of a process that trains alone,
    with all of its random state in variables.
    """

    SPREADS_ARRAYS = False
    """Whether one array may be spread over several processes, so that none of them can compute with
    it alone.
    """

    def place(self) -> tuple[int, int]:
        """Return the rank of this process, from 0, and how many processes train together."""
        return 0, 1

    def trains_together(self, model: Any, loop: bool) -> bool:
        """Whether this process trains the model with others; `loop`: in a hand-written loop."""
        return False

    def is_sharded(self, model: Any) -> bool:
        """Whether each process has another part of the model, so that none can save it alone."""
        return False

    def gathered(self, payload: bytes, what: str) -> list[bytes]:
        """Return the values of all processes by rank, or raise `GuardError` with the missing rank.

        Args:
            payload: the value of this process.
            what: a description of it.
        """
        return [payload]

    def generator_state(self) -> np.ndarray[Any, Any] | None:
        """Return the state of the generators that belong to no variable, or `None`."""
        return None

    def set_generator_state(self, state: np.ndarray[Any, Any]) -> None:
        """Restore this state. A state of another backend is ignored."""

    def advance_generator(self) -> None:
        """Advance these generators, if there are any."""

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return a context without recording for a backward pass."""
        return nullcontext()


class Recovery(Protocol):
    """The changes that the policy has made to learning rates and settings."""

    @property
    def is_built_in(self) -> bool:
        """Whether any of them is built into a compiled step."""

    def adjustments(self) -> dict[int, Any]:
        """Return the factors of rates that are not variables, by `id` of what reads them."""

    def with_adjustments(self, numbers: Mapping[int, Any]) -> AbstractContextManager[None]:
        """Replace these factors by others inside the context."""


class Agreement(Protocol):
    """How processes that train together make one decision."""

    count: int
    """Number of processes."""

    def hear(self, news: bool) -> None:
        """Note whether any process has findings between two steps, according to this step."""

    @property
    def has_news(self) -> bool:
        """Whether this process has such findings that the others do not have."""


class Run(Protocol):
    """The facts of a run, as a backend uses them."""

    model: Any

    stopped: bool
    """Whether the policy has ended training."""

    replacements: int
    """Number of times so far that an action has replaced the state."""

    rebuilds: int
    """Number of changes so far of something that is built into the step."""

    access: StateAccess
    """Host access to the train state and to the guarded step, of this backend."""

    @property
    def recovery(self) -> Recovery:
        """The changes to learning rates."""

    @property
    def agreement(self) -> Agreement:
        """The agreement with other processes."""

    @property
    def refuses(self) -> bool:
        """Whether bad steps are refused; otherwise they are only reported."""

    @property
    def step(self) -> int:
        """Number of complete train steps, including refused ones."""

    def read_train_state(self) -> TrainState:
        """Return the current train state, for a trace."""

    def note_created(self, native: Any, value: Any) -> None:
        """Note a variable that the trace of a step has created, and its first value."""

    def first_values(self, ends: bool = False) -> list[tuple[Any, Any]]:
        """Return these variables with their first values; `ends`: for the last time."""

    def tolerate_created(self) -> list[Any]:
        """Tolerate Inf and NaN that these variables had at first; return all tolerated ones."""


class Session(Protocol):
    """The host side of a run, as a backend uses it: what it calls around each step. The rest of the
    host is not for backends.
    """

    start: Any
    """From which state the run starts; `resuming`: what is to be restored, or `None`."""

    @property
    def run(self) -> Run:
        """The facts of the run."""

    logs: Any
    """The logs of the fit: `known`, those of the last committed step, `None` before the first
    one; `shown`, those that callbacks have received last.
    """

    @property
    def pending(self) -> bool:
        """Whether anything is due before the next execution."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether a healthy next step would only have to be counted."""

    def skip_batches(self, iterator: Iterator[Any], most: int, whole: bool = False) -> int:
        """Take the next batches that are to be skipped; return their number.

        Args:
            most: the maximum.
            whole: whether all of these are skipped if one of them is.

        Returns:
            The number, 0 if none are to be skipped, or if the data has ended.
        """

    def before(self, written: bool = True) -> None:
        """Run the tasks before an execution; `written`: variables may have been written since."""

    def after(self, executed: Executed, *, state_is_current: bool = True) -> bool:
        """Act on the verdict of a step; return whether it was healthy.

        Args:
            state_is_current: whether no other step was started since.
        """

    def logs_for_callbacks(self, logs: Any, loss: float = nan, refused: bool = False) -> Any:
        """Return the logs of the last step for callbacks; `refused` if it was refused."""

    def seen_outside(self, findings: Sequence[Finding] = (), *, left_by_step: bool = False) -> None:
        """Raise an incident for these findings, and those in the whole state, between two steps.

        Args:
            left_by_step: whether the last step has left a bad state, not other code.
        """

    def note_error(self, error: BaseException, args: Sequence[Any] | None) -> None:
        """Report an error that has ended an execution, if it is about the data.

        Args:
            args: the arguments of the step that has raised it, if they are known.
        """

    def say_without_effect(self, whose: str) -> None:
        """Print once that a loop continues after the end of training; `whose`: what it has to ask
        whether training has `stopped`.
        """

    def end(self) -> None:
        """End the run, and release what belongs to it."""
