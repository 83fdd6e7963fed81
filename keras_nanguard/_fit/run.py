"""The facts of one guarded run on the host, each with one owner.

`Run` has them; `Session` changes them step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._backends.shared.replay import rate_if_known
from keras_nanguard._core import memory
from keras_nanguard._core.errors import GuardError, StateLostError, expected
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._fit.log import GuardLog
from keras_nanguard._fit.recovery import GuardState, Recovery
from keras_nanguard._fit.snapshot_files import SnapshotFolder
from keras_nanguard._fit.snapshots import Ring, Snapshot, compact
from keras_nanguard._fit.state_check import StateCheck
from keras_nanguard._fit.steps import Counts, Due, RecentBatches
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.database import NAME
from keras_nanguard._recording.recording import EventKind


class Run:
    """The facts of one guarded run.

    Args:
        optimizers: the optimizers of a loop without a trainer; `None` for those of the model.
        directory: folder for files; `None` writes nothing.
        shown: this folder as the user wrote it, for messages and for the paths of bundles.
        fit: number of earlier fits of the guard.

    Attributes:
        log: what the guard prints, and its incidents, in all of its fits.
        access: host access to the train state and to the guarded step, from the backend.
        recorder: records all fits of the guard.
        push: records the measurements of one step; see `Recorder.push`.
        history, recent, ring: measurements, batches and snapshots of the steps so far.
        agreement: how several processes that train together make one decision.
        due: when the tasks between two steps are due.
        began: whether the first step has begun.
        stopped: whether the policy has ended training.
        logs_worst_metrics: whether the epoch is to log the worst metrics, as an action `stop` has
            asked for.
        replacements: number of times so far that an action has replaced the state.
        rebuilds: number of changes so far of something that is built into the step.
        created: the first values of the variables that were created while tracing, by `id`; `None`
            after the first step of a trace.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        log: GuardLog,
        optimizers: Any,
        functions: Mapping[str, Callable[..., Any]],
        directory: Path | None,
        shown: str | None,
        fit: int = 0,
    ):
        self.model, self.optimizers, self.policy = model, optimizers, policy
        self.functions, self.log, self._said = functions, log, set[str]()
        folder, self._scratch = processes.folder(directory)
        self.directory = None if folder is None else str(folder)
        self.shown = shown if self._scratch is None else self.directory
        self.attach(StateAccess())
        self.state_check = StateCheck(policy)
        self.counts, self.recovery = Counts(), Recovery()
        self.recorder, self.push = log.recorder, log.recorder.push
        self._factor = self.recovery.rate_factor  # the last recorded one, or that of a resumed run
        self.history = History()
        together = current.host().trains_together(model, optimizers is not None)
        self.agreement = Agreement(together)
        self._folder = self._snapshot_folder(fit)
        kept = policy.snapshot
        self.ring = Ring(kept.keep, kept.good_steps, self.agreement.any_of, self._folder)
        self.due = Due()
        self.began = self.stopped = self.logs_worst_metrics = False
        self.replacements = self.rebuilds = 0
        self.created: dict[int, Any] | None = {}
        self._traced: TrainState | None = None

    def _snapshot_folder(self, fit: int) -> SnapshotFolder | None:
        if self.directory is None or self.policy.snapshot.storage != "disk":
            return None
        if current.host().is_sharded(self.model):
            remedy = 'Use storage = "memory", no resume=True, and torch.distributed.checkpoint.'
            received = 'storage = "disk" for a module that fully_shard has split'
            raise GuardError(expected("a model that one process can save", received, remedy))
        return SnapshotFolder(self.directory, fit, self.say_once)

    @property
    def step(self) -> int:
        """Number of complete train steps, including refused ones."""
        return self.counts.step

    @property
    def tolerated(self) -> frozenset[int]:
        """The `id` of each variable that may have Inf, or NaN as well, on purpose."""
        return self.state_check.tolerated

    @property
    def refuses(self) -> bool:
        """Whether bad steps are refused; otherwise they are only reported."""
        return self.policy.refuse

    def attach(self, access: StateAccess) -> None:
        """Run the steps from now on through this access. A replay would run the earlier batches
        through it, too, so they are forgotten.
        """
        self.access, self.recent = access, RecentBatches(access)

    def begin(self, resumed: int | None) -> None:
        """Begin to record the run before its first step; `resumed` is the step of the snapshot from
        which its state was restored, if any.
        """
        self.began = True
        self.log.count_anew()
        meta = {
            "model": str(getattr(self.model, "name", type(self.model).__name__)),
            "backend": current.name(),
            "versions": current.versions(),
            "policy": self.policy.to_toml(),
        }
        own = self.directory if processes.index() == 0 else None
        self.recorder.begin(
            meta,
            scaled=any(map(keras_optimizers.is_loss_scaled, self.train_state().optimizers)),
            path=None if own is None else Path(own) / NAME,
            resumed=resumed,
            epoch=self.counts.epoch.number,
        )
        self._factor = self.recovery.rate_factor

    def stop(self, log_worst_metrics: bool) -> None:
        """End training; the epoch may have to log the worst metrics."""
        self.stopped = True
        self.logs_worst_metrics |= log_worst_metrics

    def count_replacement(self) -> None:
        """Note that an action has replaced the state."""
        self.replacements += 1

    def plan_changes(self) -> None:
        """Continue the changes of the policy after the next step, if any lasts for several."""
        if self.recovery.active:
            self.due.plan("changes", self.step + 1)

    @property
    def can_run_again(self) -> bool:
        """Whether a step can run again on the same batch."""
        return self.access.can_run_again and not self.access.reads_iterator

    @property
    def can_replay(self) -> bool:
        """Whether steps can run again, without a change of something that snapshots do not have."""
        return self.can_run_again and not self.access.transaction.learned.changes_outside

    def replayable(self, arguments: Any) -> Any:
        """Return what `RecentBatches.as_given` does; `None` if the step cannot be replayed."""
        gone = processes.count() > 1 or not self.can_run_again
        return None if gone else self.recent.as_given(arguments)

    # The train state

    def train_state(self) -> TrainState:
        """Return the train state of the last trace, whose variables read as the current values."""
        self.access.sync_variables()
        return self._traced or self.read_train_state()

    def rebuild(self) -> None:
        """Compile the step again, because something has changed that is built into it."""
        self.rebuilds += 1
        self.access.rebuild()

    def read_train_state(self) -> TrainState:
        """Return the current train state of the model."""
        train_state = TrainState.of(self.model, self.optimizers)
        self._traced = train_state if self.created is None else None
        return train_state

    def note_created(self, native: Any, value: Any) -> None:
        """Store the first value of a backend variable that was created while tracing."""
        if self.created is None:
            self.created = {}
        self.created[id(native)] = compact(value) if isinstance(value, np.ndarray) else value
        self._traced = None  # a state that was read before misses it

    def first_values(self, ends: bool = False) -> list[tuple[Any, Any]]:
        """Return the variables that were created while tracing, each with its first value; empty
        after the first step of a trace, which `ends` it.
        """
        created, variables = self.created or {}, list[Any]()
        if created:
            state = self.train_state()
            variables = [*state.everything, *state.metrics]
        self.created = None if ends else self.created
        return [(v, created[id(v.value)]) for v in variables if id(v.value) in created]

    def tolerate_created(self) -> list[Any]:
        """Tolerate Inf or NaN that variables had when tracing created them; return all variables
        that may have them, none if no variable was created.
        """
        first = {id(variable): value for variable, value in self.first_values()}
        return self.state_check.tolerate(self.train_state(), self.model, first) if first else []

    def scan(self, before: bool = False) -> list[Finding]:
        """Read the whole state and return its bad variables; for `before` see `StateCheck.scan`."""
        train_state = self.train_state()
        if not self.began:
            self.state_check.tolerate(train_state, self.model)
        return self.state_check.scan(train_state, before)

    @contextmanager
    def optional(self, what: str = "") -> Iterator[None]:
        """Return a context for a check that training does not need. If it raises, the context ends:
        the user's model may not run this way.

        Args:
            what: what the check does, for a line "cannot ..." that is printed once; `""` for none.

        Raises:
            StateLostError: if the state could not be restored after the check.
        """
        try:
            yield
        except StateLostError:
            raise
        except Exception as error:  # noqa: BLE001
            if what:
                self.say_once(what, f"NanGuard: cannot {what}: {type(error).__name__}: {error}")

    def say_once(self, subject: str, line: str) -> None:
        """Print a line, unless one about this subject was printed in this run."""
        if subject not in self._said:
            self._said.add(subject)
            self.log.line(line)

    def say_lacks_memory(self, what: str, size: float) -> None:
        """Print once that a copy of this many bytes does not fit, and the consequence."""
        needed, free = memory.readable(size), memory.readable(memory.room())
        reason = f"a copy takes {needed} and leaves too little of the {free} of memory"
        self.say_once(what, f"NanGuard: {what}: {reason} free at the peak of the process.")

    # What is recorded

    def record_epoch(self) -> None:
        """Record the epoch of the steps from the current one on."""
        epoch = self.counts.epoch
        self.recorder.place(self.step, epoch.number, epoch.start)

    def record_event(self, kind: EventKind, text: str = "", data: Any = None) -> None:
        """Record an event at the current step."""
        self.recorder.event(kind, self.step, self.counts.epoch.number, text, data)

    def record_rate(self, ahead: bool = False) -> None:
        """Record the learning rate of the first optimizer, for the last step or for the next one
        (`ahead`). A rate that is a custom function is not read.
        """
        optimizers = self.train_state().optimizers
        for optimizer in filter(keras_optimizers.rate_is_readable, optimizers[:1]):
            rate = rate_if_known(keras_optimizers.learning_rate, optimizer)
            if rate is None:
                return
            plain = keras_optimizers.rate_variable(optimizer) is not None
            before = self.recorder.rate(rate, ahead or not plain)
            if ahead:
                return
            if self._factor != self.recovery.rate_factor:
                self._record_change()
            elif before is not None and plain:
                data = {"before": before, "after": rate, "by": "callback"}
                text = f"{optimizer.name}: {before:.3g} -> {rate:.3g}"
                self.record_event("learning_rate", text, data)

    def record_factor(self, change: str = "") -> None:
        """Record the factor of the guard on learning rates if it has changed, as by a `change`."""
        if change or self._factor != self.recovery.rate_factor:
            self._record_change(change)
            self.record_rate(ahead=True)

    def _record_change(self, text: str = "") -> None:
        before, after = self._factor, self.recovery.rate_factor
        self._factor = after
        text = text or f"The learning rate is {after:.3g} times the configured rate."
        data = {"factor_before": before, "factor": after, "by": "guard"}
        self.record_event("learning_rate", text, data)

    # The changes of the policy, for the next fit and for another process

    def passed_optimizers(self) -> list[tuple[Any, Any]]:
        """Return each optimizer and its learning rate as they were passed."""
        return [keras_optimizers.passed(optimizer) for optimizer in self.train_state().optimizers]

    def changes(self) -> GuardState:
        """Return the current changes of the policy."""
        counts, optimizers = self.counts, self.train_state().optimizers
        return self.recovery.saved(optimizers, counts.step, counts.committed, counts.rollbacks)

    def save_changes(self) -> None:
        """Save the changes of the policy for another process, if snapshots are on disk."""
        if self._folder is not None:
            self._folder.save_changes(self.changes)

    def end_epoch(self) -> None:
        """Note on disk that the epoch has ended with all callbacks, so that a resumed run does not
        end it again.
        """
        if self._folder is not None:
            self._folder.end_epoch(self.counts.epoch.number, self.counts.now.batch)

    def rewrite(self, restored: Snapshot, passed: int) -> None:
        """Write the current state, which was restored, to disk if it is finite.

        Args:
            passed: number of batches that are complete, but not counted yet.
        """
        if self._folder is not None and not self.scan():
            now = self.counts.now
            time = now._replace(step=now.step + passed, batch=now.batch + passed)
            self.ring.rewrite(restored, self.train_state(), time)

    def adopt(self, changes: GuardState, write: bool) -> None:
        """Apply changes before the first step; for `write` see `Recovery.resume`."""
        self.counts.follow(changes.rollbacks)
        self.recovery.resume(changes, self.train_state().optimizers, write)
        self.plan_changes()
