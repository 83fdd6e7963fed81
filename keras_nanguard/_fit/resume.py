"""Resumes in a new process from snapshots on disk: `find` returns the newest good one, and `Start`
decides when it is restored.
"""

from __future__ import annotations

import warnings
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from keras_nanguard._backends import current
from keras_nanguard._core import atomic_files, memory
from keras_nanguard._core.errors import FileFormatError, GuardError, StateLostError, expected
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.limits import PARSE_ERRORS
from keras_nanguard._fit import snapshot_files
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshot_files import SnapshotFile, SnapshotRecord
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.steps import Time
from keras_nanguard._keras import fitting as keras_fitting, layers as keras_layers
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.decide import PolicyState


@dataclass(frozen=True, slots=True)
class Resumed:
    """The place where a run resumes.

    Attributes:
        batch: number of complete batches of this epoch.
        with_state: whether the state of the model is restored. Another callback may have restored a
            later one.
        ends: whether no batch of the epoch is left: the run only ends it, with its validation.
    """

    path: Path
    record: SnapshotRecord
    guard_state: GuardState
    epoch: int
    batch: int
    with_state: bool = True
    ends: bool = False

    def restore(self, run: Run) -> None:
        """Write the state into the model of a run that has not begun, all or none, and restore the
        policy.

        The metrics of an unfinished epoch continue; those of a new epoch are reset. If the process
        ended before its second snapshot, and the first was taken before the model had its
        variables, training begins with the current ones.

        Raises:
            GuardError: if the model differs, or is not built.
            StateLostError: if neither the state nor the previous one could be written completely.
        """
        if self.with_state:
            self._restore_state(run)
        run.adopt(self.guard_state, write=self.with_state)  # a later state has its own rate

    def _restore_state(self, run: Run) -> None:
        before = run.train_state()
        snapshot_files.build_optimizers(run.model, before, self.record.optimizers)
        for optimizer in before.optimizers if self.record.step else ():
            if hasattr(optimizer, "create_state"):  # of PyTorch: made in the first update
                optimizer.create_state()
        train_state = run.train_state()
        # If no optimizer was built, no step can have run. Without optimizers this is unknown.
        built = [weights is not None for weights in self.record.optimizers]
        untrained = bool(built) and not any(built)
        if untrained and self.record.signature != snapshot_files.signature(train_state.everything):
            why = f"{self.path} was written before the model was built"
            warnings.warn(f"NanGuard starts from the current weights: {why}.", stacklevel=2)
        else:
            self._write(train_state)
            keras_layers.use_written_values(run.model)

    def _write(self, train_state: TrainState) -> None:
        variables, metrics = train_state.everything, train_state.metrics
        try:
            with closing(SnapshotFile(self.path, self.record, variables)) as stored:
                drawn = stored.generator()
                continues = self.batch and len(metrics) == self.record.metrics
                measured = [*zip(metrics, stored.metrics())] if continues else []
                time = Time(self.record.step, 0, self.epoch, self.batch)
                Snapshot(time, file=stored).write(variables, measured)
        except StateLostError:
            raise
        except PARSE_ERRORS as error:
            if memory.is_exhausted(cause := error.__cause__ or error):
                raise cause from None
            build = "Build the model as in the previous run (call it on data once)"
            text = expected("the model of the snapshot", error, f"{build}, or omit resume=True.")
            raise GuardError(text) from error
        if drawn is not None:
            try:
                current.host().set_generator_state(drawn)
            except (TypeError, ValueError, RuntimeError) as error:
                what, remedy = "a snapshot with a valid generator state", "Omit resume=True."
                raise GuardError(expected(what, plain_text(error), remedy)) from error

    def of_later_fit(self, fit: int) -> GuardError:
        """Return the error if an earlier fit of the guard, numbered from 0, finds this state."""
        later = self.record.fit + 1
        remedy = f"Pass epochs=0 to the fits before fit {later}, or give each a guard and directory"
        what, found = f"a snapshot of fit {fit + 1} of the guard", f"{self.path} of fit {later}"
        return GuardError(expected(what, found, f"{remedy} of its own."))

    def leaves_nothing_of(self, epochs: int | None) -> bool:
        """Whether a fit of this many epochs has nothing left to train."""
        return epochs is not None and self.epoch >= epochs

    def sentence(self, epochs: int | None = None) -> str:
        """Return the line to print, for a fit of this many epochs."""
        if not self.with_state:
            theirs = f"another callback resumes from epoch {self.epoch + 1}"
            return f"NanGuard: {theirs}, which is later than {self.path}."
        batch = "end" if self.ends else f"batch {self.batch + 1}"
        place = f"{self.path} (epoch {self.epoch + 1}, {batch})"
        if self.leaves_nothing_of(epochs):
            return f"NanGuard: restored {place}. Nothing is left to train: fit has epochs={epochs}."
        return f"NanGuard: resuming from {place}."


class Start:
    """How a run starts: from the current state, or from a snapshot, in this order:

        begin            in `on_train_begin`: a snapshot was found. It is restored now if no step
                         will run.
        settle           after `on_train_begin` of all callbacks, because another one, such as
                         `BackupAndRestore`, may have restored a later state: the choice
        before_epoch     before `on_epoch_begin` of all callbacks, if a state is still to be
                         restored: now, if its variables exist
        restore          else before the first step
        restore_at_once  in `on_train_end`, if there was no step

    Args:
        run: the run, which has not begun.

    Attributes:
        resuming: the place to resume from, until it is restored; `None` for the current state.
    """

    def __init__(self, run: Run):
        self._run = run
        self.resuming: Resumed | None = None
        self._epochs: int | None = None
        self._settled = False

    def begin(self, resuming: Resumed | None, epochs: int | None = None) -> None:
        """Begin a fit of this many epochs, if known, or a loop. If no step will run, the state is
        restored now, so that other callbacks receive it.
        """
        self.resuming, self._epochs = resuming, epochs
        if resuming is not None and resuming.leaves_nothing_of(epochs):
            self.settle()

    def settle(self, epoch: int | None = None) -> None:
        """Choose the later state of the snapshot and of other callbacks; in the same epoch the
        snapshot, which may be from its middle. `epoch` is the first one if it has begun already.
        """
        run, resuming = self._run, self.resuming
        if resuming is None or self._settled:
            return
        theirs = keras_fitting.restored_epoch(run.model) if epoch is None else epoch
        if theirs is not None and theirs > resuming.epoch:
            resuming = replace(resuming, epoch=theirs, batch=0, with_state=False)
        self.resuming, self._settled = resuming, True
        run.log.line(resuming.sentence(self._epochs))
        if resuming.with_state:
            keras_fitting.begin_at(run.model, resuming.epoch)
            if resuming.leaves_nothing_of(self._epochs):
                self.restore_at_once()

    def before_epoch(self, epoch: int) -> bool:
        """Place the steps of an epoch to resume; return whether its state can be restored now."""
        self.settle(epoch)
        if self.resuming is None:
            return False
        self._run.counts.resume_epoch(self.resuming.batch)
        keras_fitting.begin_at(self._run.model, None)
        return self.resuming.with_state and self._run.access.prepare()

    def restore_at_once(self) -> None:
        """Restore the state to resume from, if no step follows."""
        if self.resuming is not None:
            self._run.access.prepare()
            self.restore()

    def restore(self) -> Resumed | None:
        """Restore the state to resume from, once, and return it. After an error it is still due."""
        resuming = self.resuming
        if resuming is not None:
            resuming.restore(self._run)
        self.resuming = None
        return resuming


def find(directory: str | Path, steps: int | None = None) -> Resumed | None:
    """Return the newest verified snapshot that is intact. A broken one is skipped with a warning.

    Args:
        steps: batches per epoch, if known.

    Returns:
        The place to resume from; `None` if there is no snapshot at all.

    Raises:
        GuardError: if there are snapshots and none of them can be used, or if the folder cannot be
            read.
    """
    folder = Path(directory) / snapshot_files.FOLDER
    faults: list[str] = []
    try:
        paths = snapshot_files.written(folder)
    except FileFormatError as error:
        remedy = "Give the guard a directory that it may read and write."
        raise GuardError(expected("a folder of snapshots", error, remedy)) from error
    for path in reversed(paths):
        try:
            record = snapshot_files.read(path)
            if not record.verified:
                continue
            guard_state = _guard_state(folder)
        except FileFormatError as error:
            faults.append(str(error))
            warnings.warn(f"NanGuard resumes from an older snapshot: {error}.", stacklevel=2)
            continue
        # The last batch of an epoch is not its end, after which the record has the next epoch.
        more = (record.batch - 1) // steps if steps and record.batch else 0
        batch = record.batch - more * (steps or 0)
        ends, epoch = batch == steps, record.epoch + more
        return Resumed(path, record, guard_state, epoch, batch, ends=ends)
    if faults:
        remedy = f"Start without resume=True, or remove {folder}."
        raise GuardError(expected("a snapshot that can be used", "; ".join(faults), remedy))
    return None


def _guard_state(folder: Path) -> GuardState:
    """Return the last changes of the policy; none if their file is broken."""
    try:
        return GuardState.from_dict(atomic_files.read_json(folder / snapshot_files.GUARD_STATE))
    except FileFormatError as error:
        text = f"NanGuard resumes without the policy state: {error}."
        warnings.warn(text, stacklevel=3)
        return GuardState(policy_state=PolicyState())
