"""The state of one guarded run on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np

from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.agreement import agreement
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.recent_batches import Recent, Rerun
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._fit.sightings import bad_state
from keras_nanguard._fit.snapshots import Ring, compact
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.recorder import Recorder

__all__ = ["Run"]


class Run:
    """The state of one guarded run.

    Args:
        model: the guarded model.
        policy: the policy.
        optimizers: the optimizers of a loop without a trainer; by default those of the model.
        functions: the functions that the policy may call, by name.
        directory: folder for files; `None` writes nothing.
        say: prints a line.
        recorder: stores measurements and events.
        bad_rows: the bad rows of the data so far.

    Attributes:
        access: host access to the train state, from the backend.
        transaction: the guarded step; `None` before it is created.
        tolerated: the `id` of each variable that may be infinite, because it was at first.
        nan_markers: the `id` of each of those that may be NaN as well.
        counts: the counters.
        recovery: the changes of the policy.
        history, recent, ring: measurements, batches and snapshots of the steps so far.
        agreement: how several processes that train together make one decision.
        poles: the iterations at which a schedule gives no usable rate, by `id` of the optimizer.
        due: the step at which each task between two steps is due, by its name.
        next_due: the earliest of them.
        rerun: the undone steps that are to be replayed.
        reruns: how often steps were replayed since the first of these replays began; 0 outside.
        began: whether the state before the first step was checked.
        stopped: whether the policy has ended training.
        failed: whether the epoch is to log the worst metrics (`stop = { log_worst_metrics = true
            }`).
        healed: whether the state was replaced since this was last set to `False`.
        checks_fully: whether the next step is checked more closely than a healthy one needs.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        *,
        optimizers: Any = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        directory: str | None = None,
        say: Callable[[str], None] = lambda line: None,
        recorder: Recorder | None = None,
        bad_rows: BadRows | None = None,
    ):
        self.model, self.optimizers, self.policy = model, optimizers, policy
        self.functions, self.directory, self.say = functions or {}, directory, say
        self.recorder = Recorder() if recorder is None else recorder
        self.bad_rows = BadRows(self.recorder, None) if bad_rows is None else bad_rows
        self.access = StateAccess()
        self.transaction: Any = None
        self.tolerated, self.nan_markers = set[int](), set[int]()
        self.counts, self.recovery = Counts(), Recovery()
        self.history, self.recent = History(), Recent()
        self.agreement = agreement(model, loop=optimizers is not None)
        kept = policy.snapshot
        self.ring = Ring(kept.keep, kept.good_steps, self.agreement.room)
        self.poles: dict[int, set[int]] = {}
        self.due: dict[str, float] = {}
        self.next_due = inf
        self.rerun: Rerun | None = None
        self.reruns = 0
        self.began = self.stopped = self.failed = self.healed = False
        self.checks_fully = True
        self.short_of_memory = set[str]()
        self._created: dict[int, Any] | None = {}
        self._traced: TrainState | None = None

    @property
    def step(self) -> int:
        """Number of complete train steps, including refused ones."""
        return self.counts.step

    @property
    def refused(self) -> int:
        """Number of refused steps."""
        return self.counts.refused

    @property
    def overflows(self) -> int:
        """Number of refused steps that were ordinary float16 overflows, which are not incidents."""
        return self.counts.overflows

    @property
    def running_again(self) -> bool:
        """Whether undone steps are being replayed."""
        return self.reruns > 0

    def plan(self, task: str, step: float) -> None:
        """Set the step at which a task between two steps is due."""
        self.due[task] = step
        self.next_due = min(self.due.values())

    # The train state

    def train_state(self) -> TrainState:
        """Return the train state of the last trace. Its variables have or read as the present
        values.
        """
        self.access.sync_variables()
        return self._traced or self.read_train_state()

    def read_train_state(self) -> TrainState:
        """Return the present train state of the model."""
        train_state = TrainState.of(self.model, self.optimizers)
        self._traced = train_state if self._created is None else None
        return train_state

    def note_created(self, native: Any, value: Any) -> None:
        """Store the first value of a backend variable that was created while tracing."""
        if self._created is None:
            self._created, self.checks_fully = {}, True
        self._created[id(native)] = compact(value) if isinstance(value, np.ndarray) else value

    def first_values(self) -> list[tuple[Any, Any]]:
        """Return the variables that were created while tracing, each with its first value."""
        created = self._created or {}
        return [
            (v, created[id(v.value)])
            for v in self.train_state().everything
            if id(v.value) in created
        ]

    def end_trace(self) -> list[tuple[Any, Any]]:
        """Return and forget the same, after the first step of a trace."""
        created = self.first_values() if self._created is not None else []
        self._created = None
        return created

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
        """Read the whole state; see `sightings.bad_state`."""
        train_state = self.train_state()
        if not self.began:
            self.tolerate(train_state)
        return bad_state(train_state, site, self.tolerated, self.nan_markers, self.policy)

    def lacks_memory(self, what: str, size: float) -> None:
        """Print once that a copy of this many bytes does not fit, and what there is without it."""
        if what not in self.short_of_memory:
            self.short_of_memory.add(what)
            needed, free = memory.readable(size), memory.readable(memory.room())
            self.say(f"NanGuard: {what}: a copy takes {needed}, and {free} of memory are free.")
