"""What a backend has to provide, and what it is given: the whole seam between the backends and the rest of the library.

A backend is a package. The rest of the library asks for these modules of it, and each holds what a protocol here declares:

| module | what it holds | protocol |
|---|---|---|
| `attach` | `ModelAttachment`, `LoopStep`, `adapted` | `Attachment`, `LoopStep`, `Attaching` |
| `step` | `Transaction` | `Transaction` (`CountingTransaction` where several steps run between two looks of the host) |
| `reports` | `ReportQueue` | `ReportQueue` |
| `outputs` | `LogOutputs`, `PlainOutputs` | `Outputs` |
| `replay`, `compiled_replay` | a step run again, for a diagnosis | `Replay`, `CompiledReplay` |
| `faults` | fault injection | `Faults`, `FaultHook` |
| `host` | what belongs to the process | `Host` |

Modules of these names do the same in each backend: `intercept` (losses and updates of a step that runs), `execution` (one run, or one
trace, of the transaction), `reductions` (the sums that a verdict is made of) and `origins` (where a number first went bad). A module
of any other name is about something that only this backend has.

`tests/backends/test_interface.py` holds each backend to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras.train_state import TrainState

__all__ = [
    "Attaching",
    "Attachment",
    "CompiledReplay",
    "CountingTransaction",
    "FaultHook",
    "Faults",
    "GuardedSession",
    "Host",
    "LoopStep",
    "Outputs",
    "Replay",
    "ReportQueue",
    "StateAccess",
    "Transaction",
]


class ReportQueue(Protocol):
    """The reports of refused steps, from the step that files them to the host that takes them."""

    def take(self) -> list[Report]:
        """Return and forget what was filed, in the order of the steps. Never waits."""


class Outputs(Protocol):
    """What a step returns."""

    def losses(self, outputs: Any) -> list[Any]:
        """Return the losses among the outputs, for a step that never calls `compute_loss`."""


class Transaction(Protocol):
    """A train step that commits whole or is refused, as the host sees it between two executions."""

    body: Callable[..., Any]
    """The step as the user wrote it, in the form that this backend takes."""

    replayed: Callable[..., Any]
    """The step as it can be run again: a function of its batch that reads and writes the variables, and returns the outputs."""

    judged: Callable[..., Verdict] | None
    """The step as training has compiled it, run again and forgotten; returns its verdict. `None` where that takes a new trace."""

    jit: bool
    """Whether the step is compiled by XLA, or by what the backend has instead."""

    model: Any
    outputs: Outputs
    report_queue: ReportQueue

    given: Any
    """What the last execution was given."""

    counted: int
    """How many steps run between two looks of the host, where they count themselves, else 0."""

    keeps_undo: bool
    """Whether updates are made at once and undone on a refusal."""

    reused: bool
    """Whether it was traced for an earlier run."""

    untracked: Mapping[int, Any]
    """The variables that the step writes and Keras lists nowhere."""

    tolerated: set[int]
    """Keys of the variables that may be infinite or NaN."""

    def batch(self, step: int, given: Any) -> Any:
        """Return the arguments of an earlier step, given what its execution was given; `None` where they are gone."""

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Let these variables be infinite or NaN."""

    def resume(self) -> None:
        """Go on after the host has healed the state."""

    def recount(self, step: int) -> None:
        """Let the next step be this number."""

    def release_run(self) -> None:
        """Release what belongs to the run that is over."""


class CountingTransaction(Transaction, Protocol):
    """A transaction of which several steps may run between two looks of the host."""

    def verdicts(self, start: int, end: int) -> list[Verdict]:
        """Return the verdicts of the steps from `start` up to `end`, of those that ran since the last look."""


class StateAccess:
    """How the host comes to the train state between two executions.

    Here the variables hold it at any time, and every verdict is read at once; a backend where that is not so overrides this.
    """

    def sync_variables(self) -> None:
        """Make the variables hold the state of this moment."""

    def variables_readable(self) -> AbstractContextManager[None]:
        """Return a context in which the variables read as the state of this moment."""
        return nullcontext()

    def resolve_pending(self) -> None:
        """Read the verdict on a step that was started, if it was not read yet, and act on it."""

    def rebuild(self) -> None:
        """Compile the step anew, after something was changed that it has built in."""

    can_run_again = False
    """Whether `run_again` can be called."""

    def held(self) -> Callable[[], None]:
        """Return what puts the state that no variable holds back as it is now, once the variables are as they are now."""
        return lambda: None

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one, as compiled, from the state of this moment; return the verdict."""
        raise NotImplementedError


class GuardedSession(Protocol):
    """The host's side of a run, as the attachment of a backend sees it."""

    policy: Any
    agreement: Any
    stopped: bool
    began: bool
    healed: bool
    resuming: Any
    logs: Any
    transaction: Any

    @property
    def model(self) -> Any:
        """The guarded model."""

    @property
    def step(self) -> int:
        """How many train steps are complete."""

    @property
    def say(self) -> Callable[[str], None]:
        """Prints a line."""

    def attach(self, access: StateAccess, transaction: Any = None) -> None:
        """Take over the guarded step, and the way to the state that it trains."""

    def sync_variables(self) -> None:
        """Make the variables hold the state of this moment."""

    @property
    def nothing_pending(self) -> bool:
        """Whether nothing is to be done before the next execution."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether nothing will be due after the next step but to count it, if it is healthy."""

    def needs_variables(self, written: bool) -> bool:
        """Whether `before` needs the state in the variables; `written`: whether someone else may have written to them."""

    def adjustments(self) -> dict[int, Any]:
        """Return the numbers that the guard changes and a step reads, and that are no variables, by `id` of what reads them."""

    def with_adjustments(self, numbers: Mapping[int, Any]) -> AbstractContextManager[None]:
        """Return a context in which they are read from what is given, which a compiled step takes as an argument."""

    def before(self) -> None:
        """Run before each execution."""

    def after(self, verdict: Verdict, *, last: bool = True) -> bool:
        """Read the verdict on the last step and act on it."""

    def logs_for_callbacks(self, logs: Any, loss: float = ..., refused: bool = False) -> Any:
        """Return the logs of the last step as callbacks may see them."""

    def skips_batches(self, iterator: Any, batches: int) -> bool:
        """Skip the batches of one execution, if some are to be skipped."""

    def train_state(self) -> TrainState:
        """Return the train state of the last trace."""

    def read_train_state(self) -> TrainState:
        """Return the train state of the model as it is now."""

    def note_created(self, native: Any, value: Any) -> None:
        """Note the first value of a variable that was created while the step was traced."""

    def first_values(self) -> list[tuple[Any, Any]]:
        """Return the variables that were created while the step was traced, each with its first value."""

    def raised(self, error: BaseException) -> None:
        """Report an exception inside of a step that is about its data."""

    def end(self) -> None:
        """Take off the optimizers what the guard has put on them."""


class Attachment(Protocol):
    """The transaction of one session around one model's `fit` and `train_on_batch`."""

    model: Any
    session: GuardedSession
    in_use: Callable[..., bool]

    def attach(self) -> None:
        """Stand in for the model's own train function until `detach`."""

    def detach(self) -> None:
        """Give the model its own methods back; may be called any number of times."""

    def prepare(self) -> None:
        """Have every variable that the first step would make."""

    def make(self, force: bool = False) -> Any:
        """Stand in for `Model.make_train_function`."""

    def make_with(self, make: Callable[..., Any]) -> None:
        """Make the train function once with `make`, for a model that is always guarded."""

    def rebuild(self) -> None:
        """Compile the step anew, after something was changed that it has built in."""


class LoopStep(Protocol):
    """A hand-written step with its transaction."""

    function: Any
    session: GuardedSession

    def rebuild(self) -> None:
        """Make the step anew, after something was changed that it has built in."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; returns its outputs."""


class Attaching(Protocol):
    """What puts the transaction around a step. The module `attach` of a backend."""

    ModelAttachment: Any
    """`ModelAttachment(model, session)`, an `Attachment`."""

    LoopStep: Any
    """`LoopStep(function, session)`."""

    STATE_PASSES_THROUGH_STEP: bool
    """Whether a hand-written step takes and returns the state of its optimizers, whatever those are."""

    def adapted(self, model: Any, optimizers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return a model and the optimizers of a loop as the library takes them, where the backend has others than Keras'."""


class Replay(Protocol):
    """A step run again under observation, and tensors in the terms of the backend. The module `replay` of a backend."""

    Origins: Any
    Instrument: Any

    def body_of(self, model: Any) -> Callable[..., Any]:
        """Return the train step of a model as a function of its batch."""

    def losses_of(self, model: Any) -> Callable[[Any], list[Any]]:
        """Return what finds the losses in the logs of a train step that never calls `compute_loss`."""

    def intercepted(self, model: Any, optimizers: Iterable[Any], immediate: bool) -> AbstractContextManager[Any]:
        """Return a context that notes losses and updates; `immediate` lets the updates be made at once."""

    def preserved(self, variables: Sequence[Any]) -> AbstractContextManager[None]:
        """Put these variables, and generators of random numbers, back at the end."""

    def key(self, variable: Any) -> int | None:
        """Return by which number a variable is known to `Origins`, `None` where it is not."""

    def is_tensor(self, value: Any) -> bool:
        """Whether it is a dense tensor."""

    def slope(self, origin: Any) -> Any:
        """Return what first went bad behind a bad gradient."""

    def tensor(self, value: Any) -> Any:
        """Return an array as a tensor."""

    def like(self, array: Any, value: Any) -> Any:
        """Return an array as a tensor of the dtype of another one."""

    def without_rows(self, value: Any, kept: Any) -> Any:
        """Return the rows of a tensor that are kept."""

    def twin(self, variable: Any) -> Any:
        """Return a variable of the backend's own with the same values in float32, `None` where there is none behind it."""


class CompiledReplay(Protocol):
    """A step run again in the mode it was compiled in. The module `compiled_replay` of a backend."""

    MODES: tuple[str, ...]
    """The modes in which a step can be run again: `"eager"`, `"graph"`, `"xla"`."""

    def run_compiled(self, step: Any, args: Sequence[Any], jit: bool) -> Any:
        """Run a step once, compiled, and forget it; see what it came to."""


class Faults(Protocol):
    """Fault injection. The module `faults` of a backend."""

    Hook: Any
    """`Hook(model, fault)`, a `FaultHook`."""


class FaultHook(Protocol):
    """One fault, put around every train step of one model."""

    reached: bool
    """Whether a step that was traced (or run) has a place for the fault."""

    seen: int
    """Train steps that ran since it was installed."""

    def install(self) -> None:
        """Put the fault in place."""

    def remove(self) -> None:
        """Leave the model as it was."""


class Host(Protocol):
    """What belongs to the process and not to a step. The module `host` of a backend."""

    SPREADS_ARRAYS: bool
    """Whether one array may be spread over several processes, so that none of them can compute with it alone."""

    def place(self) -> tuple[int, int]:
        """Return the number of this process among those that train together, from 0, and how many there are."""

    def trains_together(self, model: Any, loop: bool) -> bool:
        """Return whether this process trains the model together with others; `loop` for a loop of the user's own, else `fit`."""

    def gathered(self, payload: bytes, what: str) -> list[bytes]:
        """Return what each process hands in, by rank, or raise a `GuardError` that names the one that does not answer."""

    def generator_state(self) -> np.ndarray[Any, Any] | None:
        """Return the state of the generator that belongs to no variable, `None` where there is none."""

    def set_generator_state(self, state: np.ndarray[Any, Any]) -> None:
        """Put it back."""

    def advance_generator(self) -> None:
        """Move the generator on, so that what is drawn next differs; nothing if there is none."""

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is kept for a backward pass."""
