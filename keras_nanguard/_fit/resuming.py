"""The part of `NanGuard` that resumes a run, after all callbacks have restored their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keras_nanguard._backends import processes
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.resume import find
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import fitting as keras_fitting

__all__ = ["ResumeMixin"]


class ResumeMixin:
    """The part of `NanGuard` for `resume=True`."""

    session: Session | None
    resume: bool
    directory: Path | None
    model: Any
    params: Any
    _attachment: Any
    _reporter: Reporter
    _resumed: bool
    _training: bool
    _start_settled = True
    """Whether it is decided from which state the run begins."""

    def _settle_start(self, epoch: int | None = None) -> None:
        """Choose the state to resume from, after all callbacks have run `on_train_begin`.

        `BackupAndRestore` may have restored a later one. `epoch` is the first epoch, if
        `on_train_begin` was missed.
        """
        session, self._start_settled = self.session, True
        if session is None or session.resuming is None:
            return
        theirs = keras_fitting.restored_epoch(self.model) if epoch is None else epoch
        session.resuming = resuming = session.resuming.after(theirs)
        self._reporter.line(resuming.sentence(self._epochs()))
        if resuming.with_state:
            keras_fitting.begin_at(self.model, resuming.epoch)
            if resuming.leaves_nothing_of(self._epochs()):
                self._restore_at_once()

    def _resume(self, steps: int | None = None) -> None:
        """Resume from the newest snapshot on disk, in the first fit only: a later fit is another
        run.
        """
        if (
            self.resume
            and not self._resumed
            and self.session is not None
            and self.directory is not None
        ):
            self._resumed, self._start_settled = True, False
            self.session.resuming = found = find(self.directory, steps)
            what = "snapshot to resume from (its step, -1 for none)"
            processes.agreed(-1 if found is None else found.record.step, what)

    def _epochs(self) -> int | None:
        """Return the number of epochs of the running fit, or `None` if unknown."""
        return (self.params or {}).get("epochs") if self._training else None

    def _restore_at_once(self) -> None:
        """Restore the state to resume from if no step follows."""
        if self.session is not None and self.session.resuming is not None:
            if self._attachment is not None:
                self._attachment.prepare()
            self.session.restore()
