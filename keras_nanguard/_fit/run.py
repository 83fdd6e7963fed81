"""The state of one guarded run on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from math import inf
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._backends.shared import batches
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.data_names import argument_path, input_names, named
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Finding
from keras_nanguard._core.literals import Site
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.recent_batches import Recent, Rerun
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._fit.snapshots import Ring, compact
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.recorder import Recorder

__all__ = [
    *("HUGE", "Counts", "Run", "Totals", "bad_state", "beyond_limits", "in_batch", "measurements"),
]

# Counters


_MAX_EPOCHS = 256
"""Number of epochs whose first step is remembered, for replays."""


class Totals(NamedTuple):
    """Sums of the counters of one or several fits; the fields are those of `Counts`."""

    steps: int = 0
    refused: int = 0
    overflows: int = 0
    run_again: int = 0

    def plus(self, counts: Counts) -> Totals:
        """Return the totals including another fit."""
        more = (counts.step, counts.refused, counts.overflows, counts.run_again)
        return Totals(*map(sum, zip(self, more)))


class Counts:
    """The counters of one fit.

    Attributes:
        step: complete train steps, including refused ones.
        committed: committed steps.
        refused: refused steps.
        overflows: refused steps that were ordinary float16 overflows, which are not incidents.
        run_again: further steps that were refused, undone by a rollback, and replayed.
        streak: ordinary overflows in a row; under a policy that refuses nothing 1 after a bad step.
        last_refused: whether the last step was refused.
        rollbacks: number of rollbacks.
        restored: the step of the last restored snapshot, `None` before the first rollback.
        epoch, epoch_start: the present epoch, and its first step.
        epoch_refused, epoch_passed: refused steps of this epoch, and its batches without a step.
        epoch_rollbacks: number of rollbacks before this epoch.
        skip_batches: number of batches still to skip.
    """

    def __init__(self) -> None:
        self.step = self.committed = self.refused = self.overflows = self.run_again = 0
        self.streak = self.rollbacks = self.skip_batches = 0
        self.epoch = self.epoch_start = 0
        self.epoch_refused = self.epoch_passed = self.epoch_rollbacks = 0
        self.last_refused = False
        self.restored: int | None = None
        self._began = self._overflows_before = 0
        self._epochs: deque[tuple[int, int, int]] = deque(maxlen=_MAX_EPOCHS)

    def begin_epoch(self, epoch: int) -> None:
        """Begin counting batches and refused steps of an epoch."""
        if self.step > self._began:
            self._epochs.append((self._began, self.epoch, self.epoch_start))
        self._began = self.step
        self.epoch, self.epoch_start, self.epoch_refused, self.epoch_passed = epoch, self.step, 0, 0
        self.epoch_rollbacks, self._overflows_before = self.rollbacks, self.overflows

    def resume_epoch(self, batches: int) -> None:
        """Skip the batches of this epoch that an earlier run has trained on; its metrics
        continue.
        """
        self.skip_batches, self.epoch_passed = batches, -batches

    def refuse(self, steps: int = 1) -> None:
        """Count refused steps."""
        self.refused += steps
        self.epoch_refused += steps

    def return_to(self, step: int, committed: int, again: Set[int] = frozenset()) -> None:
        """Continue counting from an earlier step; the given refused steps since then are
        replayed.
        """
        self.step, self.committed = step, committed
        self.refused -= len(again)
        self.run_again += len(again)
        here = sum(number >= self.epoch_start for number in again)
        self.epoch_refused = max(self.epoch_refused - here, 0)

    def skips_batches(self, iterator: Any, batches: int) -> bool:
        """Skip the batches of one execution, if batches are to be skipped."""
        if self.skip_batches <= 0:
            return False
        for _ in range(batches):
            next(iterator)
            self.skip_batches = max(self.skip_batches - 1, 0)
            self.epoch_start -= 1
            self.epoch_passed += 1
        return True

    def batch(self, step: int) -> int:
        """Return the batch of a step within the epoch, from 0."""
        return max(step - self.epoch_start, 0)

    def place(self, step: int) -> tuple[int, int]:
        """Return epoch and batch of a step, both from 0. A replayed step may belong to an earlier
        epoch.
        """
        for began, epoch, start in reversed(self._epochs) if step < self._began else ():
            if step >= began:
                return epoch, step - start
        return self.epoch, self.batch(step)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the number of its batches that are complete or will be skipped."""
        return self.epoch, self.step - self.epoch_start + self.skip_batches

    @property
    def epoch_committed(self) -> int:
        """Number of committed steps of this epoch."""
        return self.step - self.epoch_start - self.epoch_refused - self.epoch_passed

    @property
    def epoch_overflows(self) -> int:
        """How many steps of this epoch were refused for an ordinary float16 overflow."""
        return self.overflows - self._overflows_before

    @property
    def idle(self) -> bool:
        """Whether no step of this epoch has committed yet, so that its metrics are empty."""
        return self.epoch_committed <= 0


# Findings of the host


HUGE = 1e30
"""Magnitude above which a value counts as overflowed, unless the policy has another limit."""


def bad_state(
    train_state: TrainState,
    site: str,
    tolerated: Container[int],
    marks: Container[int],
    policy: Policy,
) -> list[Finding]:
    """Read the whole state and return a finding for each variable with NaN or Inf.

    Args:
        train_state: the state.
        site: `"state"` reports all findings as present before the step, and includes finite values
            so large that sums over them overflow. Any other value reports each finding under its
            own site.
        tolerated: `id` of variables that may be infinite.
        marks: `id` of variables that may be NaN.
        policy: the policy, for its limits.
    """
    findings = []
    for own, variable in _of_state(train_state):
        nan, inf, size = finiteness.counts(keras_variables.view(variable))
        if (nan and id(variable) not in marks) or (inf and id(variable) not in tolerated):
            place: Site = "state" if site == "state" else own
            findings.append(Finding(place, "nonfinite", variable.path, nan, inf, size))
            continue
        limited = own != "statistics" or keras_variables.is_statistic(variable)
        if site == "state" and limited and not (nan or inf):
            findings += _beyond(policy.max_abs(variable.path, own) or HUGE, "state", variable)
    return findings


def beyond_limits(train_state: TrainState, policy: Policy) -> Iterator[Finding]:
    """Yield a finding for each finite variable of the state beyond its limit in the policy."""
    for site, variable in _of_state(train_state):
        limit = policy.max_abs(variable.path, site)
        if limit is not None and finiteness.is_finite(keras_variables.view(variable)):
            yield from _beyond(limit, site, variable)


def _of_state(train_state: TrainState) -> Iterator[tuple[Site, Any]]:
    """Yield each checked variable of the state after its site."""
    groups: dict[Site, Any] = {
        "weights": train_state.trainable,
        "statistics": train_state.statistics,
        "slots": train_state.slots,
    }
    for own, variables in groups.items():
        for variable in variables:
            yield own, variable


def _beyond(limit: float, site: Site, variable: Any) -> Iterator[Finding]:
    """Yield a finding of `site` if the magnitude of a finite variable is above a limit."""
    value = keras_variables.view(variable)
    largest = finiteness.largest(value)
    if largest > limit:
        yield Finding(site, "out_of_range", variable.path, 0, 0, int(value.size), largest)


def measurements(verdict: Verdict, optimizers: Iterable[Any], committed: bool) -> dict[str, float]:
    """Return the measurements of one step for its incident.

    `committed` is whether the optimizers have counted the step.
    """
    measured = {"loss": verdict.loss, "gradient_norm": verdict.gradient_norm}
    for optimizer in list(optimizers)[:1]:
        rate = keras_optimizers.rate_before if committed else keras_optimizers.learning_rate
        measured["learning_rate"] = rate(optimizer)
    if any(keras_optimizers.is_loss_scaled(o) for o in optimizers):
        measured["loss_scale"] = verdict.scale
    return measured


def in_batch(report: Report | None, model: Any = None) -> list[Finding]:
    """Return findings for the inputs and targets of a refused step, by the user's names: `x`,
    `x/age`, `y`.
    """
    if report is None or report.batch is None:
        return []
    findings, names = [], input_names(model)
    for part in batches.parts(report.batch):
        nan, inf, size = finiteness.counts(keras_variables.dense(part.value))
        if nan or inf:
            site: Site = "inputs" if part.role == "inputs" else "targets"
            place = named(argument_path(part.path), names)
            findings.append(Finding(site, "nonfinite", place, nan, inf, size))
    return findings


# The run


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
        together = current.host().trains_together(model, optimizers is not None)
        self.agreement = Agreement(together)
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
        """Read the whole state; see `bad_state`."""
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
