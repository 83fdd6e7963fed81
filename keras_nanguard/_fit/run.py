"""The facts of one guarded run on the host, each with one owner.

`Run` has them; `Session` changes them step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Finding
from keras_nanguard._core.literals import Site
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.recent_batches import RecentBatches
from keras_nanguard._fit.recording import FitRecording
from keras_nanguard._fit.recovery import GuardState, Recovery
from keras_nanguard._fit.snapshots import Ring, SnapshotFolder, compact
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.recorder import Recorder

# Findings in the state


HUGE = 1e30
"""Magnitude above which a value counts as overflowed, unless the policy has another limit."""


def checked(train_state: TrainState) -> Iterator[tuple[Site, Any]]:
    """Yield each checked variable of the state after its site."""
    groups: dict[Site, Any] = {
        "weights": train_state.trainable,
        "statistics": train_state.statistics,
        "slots": train_state.slots,
    }
    for own, variables in groups.items():
        for variable in variables:
            yield own, variable


def beyond(limit: float, site: Site, variable: Any) -> Iterator[Finding]:
    """Yield a finding of `site` if the magnitude of a finite variable is above a limit."""
    value = keras_variables.view(variable)
    largest = finiteness.largest(value)
    if largest > limit:
        yield Finding(site, "out_of_range", variable.path, 0, 0, int(value.size), largest)


# The run


class DueTasks:
    """The step at which each task between two steps is due.

    Attributes:
        next: the earliest of them.
    """

    def __init__(self) -> None:
        self._steps: dict[str, float] = {}
        self.next = inf

    def plan(self, task: str, step: float) -> None:
        """Set the step at which a task is due, infinity for never."""
        self._steps[task] = step
        self.next = min(self._steps.values())

    def is_due(self, task: str, step: int) -> bool:
        """Whether a task is due at a step."""
        return step >= self._steps.get(task, inf)


class Run:
    """The facts of one guarded run.

    Args:
        model: the guarded model.
        policy: the policy.
        recorder: stores measurements and events.
        optimizers: the optimizers of a loop without a trainer; by default those of the model.
        functions: the functions that the policy may call, by name.
        directory: folder for files; `None` writes nothing.
        say: prints a line.

    Attributes:
        access: host access to the train state, from the backend.
        transaction: the guarded step; `None` before it is created.
        tolerated: the `id` of each variable that may be infinite, because it was at first.
        nan_markers: the `id` of each of those that may be NaN as well.
        counts: the counters.
        recovery: the changes of the policy.
        history, recent, ring: measurements, batches and snapshots of the steps so far.
        recording: what is recorded of them.
        agreement: how several processes that train together make one decision.
        due: when the tasks between two steps are due.
        began: whether the state before the first step was checked.
        stopped: whether the policy has ended training.
        failed: whether the epoch is to log the worst metrics (`stop = { log_worst_metrics = true
            }`).
        state_replaced: whether the state was replaced since this was last set to `False`.
        checks_fully: whether the next verdict is handled in full, also of a healthy step: the first
            one of a trace, or one during a change that continues over several.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        recorder: Recorder,
        *,
        optimizers: Any = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        directory: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.model, self.optimizers, self.policy = model, optimizers, policy
        self.functions, self.say = functions or {}, say
        folder, self._scratch = processes.folder(directory)
        self.directory = None if folder is None else str(folder)
        self.access = StateAccess()
        self.transaction: Any = None
        self.tolerated, self.nan_markers = set[int](), set[int]()
        self.counts, self.recovery = Counts(), Recovery()
        self.history = History()
        self.recent = RecentBatches(lambda given: self.transaction.batch(given))
        together = current.host().trains_together(model, optimizers is not None)
        self.agreement = Agreement(together)
        self.ring = self._ring()
        about = (self.counts, self.recovery, policy)
        self.recording = FitRecording(recorder, *about, lambda: self.train_state().optimizers)
        self.due = DueTasks()
        self.began = self.stopped = self.failed = self.state_replaced = False
        self.checks_fully = True
        self._short_of_memory = set[str]()
        self._created: dict[int, Any] | None = {}
        self._traced: TrainState | None = None

    def _ring(self) -> Ring:
        kept = self.policy.snapshot
        limits = (kept.keep, kept.good_steps, self.agreement.any_of)
        if self.directory is None or kept.storage != "disk":
            return Ring(*limits)
        if current.host().is_sharded(self.model):
            remedy = 'Use storage = "memory", no resume=True, and torch.distributed.checkpoint.'
            received = 'storage = "disk" for a module that fully_shard has split'
            raise GuardError(expected("a model that one process can save", received, remedy))
        return Ring(*limits, SnapshotFolder(self.directory, self.say))

    @property
    def step(self) -> int:
        """Number of complete train steps, including refused ones."""
        return self.counts.step

    @property
    def refuses(self) -> bool:
        """Whether bad steps are refused; otherwise they are only reported."""
        return self.policy.refuse

    def attach(self, access: StateAccess, transaction: Any = None) -> None:
        """Store the guarded step, and the access to the state that it trains."""
        self.access, self.transaction = access, transaction

    # The train state

    def train_state(self) -> TrainState:
        """Return the train state of the last trace. Its variables have or read as the current
        values.
        """
        self.access.sync_variables()
        return self._traced or self.read_train_state()

    def read_train_state(self) -> TrainState:
        """Return the current train state of the model."""
        train_state = TrainState.of(self.model, self.optimizers)
        self._traced = train_state if self._created is None else None
        return train_state

    def note_created(self, native: Any, value: Any) -> None:
        """Store the first value of a backend variable that was created while tracing."""
        if self._created is None:
            self._created, self.checks_fully = {}, True
        self._created[id(native)] = compact(value) if isinstance(value, np.ndarray) else value

    def first_values(self, ends: bool = False) -> list[tuple[Any, Any]]:
        """Return the variables that were created while tracing, each with its first value; empty
        after the first step of a trace, which `ends` it.
        """
        created = self._created or {}
        variables = self.train_state().everything if created else ()
        self._created = None if ends else self._created
        return [(v, created[id(v.value)]) for v in variables if id(v.value) in created]

    def tolerate(self, train_state: TrainState) -> list[Any]:
        """Tolerate Inf or NaN in variables that have them on purpose, besides those of an earlier
        fit; return all of them.
        """
        constants = train_state.constants
        bad = [v for v in constants if not finiteness.is_finite(keras_variables.view(v))]
        nan = {id(v) for v in bad if finiteness.counts(keras_variables.view(v))[0]}
        self.nan_markers |= nan & keras_layers.states_of_own_layers(self.model) if nan else set()
        self.tolerated |= self.nan_markers | {id(v) for v in bad} - nan
        return [v for v in constants if id(v) in self.tolerated]

    def scan(self, site: str) -> list[Finding]:
        """Read the whole state and return a finding for each variable with NaN or Inf.

        Args:
            site: `"state"` reports all findings as present before the step, and includes finite
                values so large that sums over them overflow. Any other value reports each finding
                under its own site.
        """
        train_state, before = self.train_state(), site == "state"
        if not self.began:
            self.tolerate(train_state)
        findings = []
        for own, variable in checked(train_state):
            nan, inf, size = finiteness.counts(keras_variables.view(variable))
            place: Site = "state" if before else own
            bad_nan = nan and id(variable) not in self.nan_markers
            if bad_nan or (inf and id(variable) not in self.tolerated):
                findings.append(Finding(place, "nonfinite", variable.path, nan, inf, size))
            elif before and not (nan or inf):
                limit = self.policy.max_abs(variable.path, own) or HUGE
                if own != "statistics" or keras_variables.is_statistic(variable):
                    findings += beyond(limit, place, variable)
        return findings

    def lacks_memory(self, what: str, size: float) -> None:
        """Print once that a copy of this many bytes does not fit, and the consequence."""
        if what not in self._short_of_memory:
            self._short_of_memory.add(what)
            needed, free = memory.readable(size), memory.readable(memory.room())
            self.say(f"NanGuard: {what}: a copy takes {needed}, and {free} of memory are free.")

    # The changes of the policy, for the next fit and for another process

    def changes(self) -> GuardState:
        """Return the current changes of the policy."""
        return self.recovery.saved(self.train_state().optimizers, self.counts)

    def adopt(self, changes: GuardState, write: bool) -> None:
        """Apply changes before the first step; for `write` see `Recovery.resume`."""
        self.counts.rollbacks = changes.rollbacks
        self.recovery.resume(changes, self.train_state().optimizers, self.model, write)
