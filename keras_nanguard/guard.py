"""`NanGuard`: the callback that guards `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
from typing_extensions import Unpack

from keras_nanguard._backends import processes
from keras_nanguard._backends.current import attachment
from keras_nanguard._backends.shared.attach import Attachment, attached_to
from keras_nanguard._core.errors import GuardInUseError
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._core.literals import Preset
from keras_nanguard._fit import arguments, results
from keras_nanguard._fit.callbacks import (
    Firewall,
    Fit,
    callbacks_deferred,
    hide_from_progress_bar,
    outside,
    shielded,
    surrounding,
)
from keras_nanguard._fit.loops import LoopMixin
from keras_nanguard._fit.reports import Reporter, ReportMixin
from keras_nanguard._fit.results import Lagging
from keras_nanguard._fit.resume import find
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy, Sections
from keras_nanguard._policy.warnings import warnings_about

__all__ = ["NanGuard"]


class NanGuard(LoopMixin, ReportMixin, keras.callbacks.Callback):
    """Guards training against NaN and Inf, and against runs that are proven to have diverged.

    With `callbacks=[NanGuard()]` every train step is a transaction over the whole train state. It
    either commits completely, or it is refused inside the compiled step and changes nothing. The
    policy then decides what to do.

    Args:
        policy: name of a preset (`"recover"`, `"stop"`, `"raise"`, `"observe"`, ...), path of a
            `.toml`, `.yaml` or `.json` file, a dict of the same shape, or a `Policy`.
        directory: folder for files of this run; `None` writes no files. Use one folder per run.
        verbose: 0 or False prints nothing. 1 or True prints a line for each new kind of incident
            and each change of the run, such as a rollback, and a table at the end if there were
            incidents. 2 prints a line for every incident and every epoch with refused steps.
            Printed steps, epochs and batches count from 1, like the progress bar of Keras.
        functions: functions by name for the action `call`, each called with the `Incident`.
        diagnose: whether to find the cause of a refused step. It costs nothing until a step is
            refused.
        resume: whether to resume from the newest good snapshot in `directory`, if there is one. It
            restores the state of the model, the position in the data, and the state of the policy.
            Snapshots are then stored on disk.
        logs: whether to add `nanguard/grad_norm`, `nanguard/rate_factor`, `nanguard/loss_scale` and
            `nanguard/rollbacks` to the epoch logs. `refused_steps` is always there.
        sample_ids: names of the rows: one name for each row of `x`, or the key of the batch that
            has them. By default rows are named by their index in `x`.
        **sections: sections of a policy, merged over it: `snapshot={"every": 50}`.

    Attributes:
        incidents: list of `Incident`, in order of time.

    A copy of a guard (`copy.deepcopy`) is a new guard with the same settings. A pickle also has the
    incidents so far. Neither is attached to a fit.

    Raises:
        PolicyError: if the policy is not valid; every problem is reported at once.
        GuardError: if an argument is of the wrong type.

    Example:

    ```python
    guard = NanGuard()
    model.fit(x, y, epochs=10, callbacks=[guard])
    print(guard.summary())
    ```
    """

    async_safe = True
    """Keras may call the batch methods in another thread: the guard acts right after the step."""

    def __init__(
        self,
        policy: Preset | str | os.PathLike[str] | Mapping[str, Any] | Policy = "recover",
        *,
        directory: str | os.PathLike[str] | None = None,
        verbose: int = 1,
        functions: Mapping[str, Callable[[Incident], Any]] | None = None,
        diagnose: bool = True,
        resume: bool = False,
        logs: bool = True,
        sample_ids: Sequence[Any] | str | None = None,
        **sections: Unpack[Sections],
    ):
        super().__init__()
        self._begin_recording(arguments.flag("logs", logs), arguments.sample_ids(sample_ids))
        self._reporter = Reporter(arguments.verbosity(verbose))
        self.functions = arguments.functions(functions)
        self.directory, self.resume = arguments.folder(directory), arguments.flag("resume", resume)
        self.diagnose = arguments.flag("diagnose", diagnose)
        self.policy = arguments.policy(policy, sections, self.directory, self.resume)
        self.incidents: list[Incident] = []
        self._unnamed = self._resumed = False
        self.session: Session | None = None
        self._attachment: Attachment | None = None
        self._scratch: Any = None
        self._fit: Fit | None = None
        self._firewall: Firewall | None = None
        self._training, self._lagging = False, Lagging()
        self._predicted: list[Finding] = []

    # Copies: tuners copy callbacks for each trial, other processes get pickles

    def _unused(self) -> NanGuard:
        """Return a new guard with the same settings."""
        settings = ("directory", "verbose", "functions", "diagnose", "resume", "logs", "sample_ids")
        return NanGuard(self.policy, **{name: getattr(self, name) for name in settings})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle: settings, incidents and counts."""
        unused = vars(self._unused())
        own = {name: value for name, value in vars(self).items() if name not in unused}
        return {**unused, **own, **self._copied(), "_watching": False}

    def __copy__(self) -> Any:
        """Return a new guard with the same settings."""
        return self._fresh(lambda value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a new guard with the same settings and functions, and copies of the attributes of
        a subclass.
        """
        return self._fresh(lambda value: copy.deepcopy(value, memo), memo)

    def _fresh(self, copied: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> Any:
        """Return a new guard. It does not resume, because the snapshots in the directory belong to
        the original.
        """
        made, unused = type(self).__new__(type(self)), self._unused()
        if memo is not None:
            memo[id(self)] = made
        made.__dict__.update({**vars(unused), "_resumed": True})
        for name, value in vars(self).items():
            if name not in vars(unused) and not hasattr(unused, name):
                setattr(made, name, copied(value))
        return made

    @property
    def verbose(self) -> int:
        """How much is printed: 0, 1 or 2."""
        return self._reporter.verbose

    @verbose.setter
    def verbose(self, verbose: int) -> None:
        self._reporter.verbose = verbose

    # Installing and uninstalling

    def set_model(self, model: Any = None) -> None:
        """Attach to the model. Keras calls this before anything else.

        Raises:
            GuardError: if the class is passed instead of an instance, or the model is a `tf_keras`
                model.
        """
        arguments.require_instance(self, NanGuard, model)
        if model is None:
            return
        if self._fit is not None and self._fit.runs:
            raise GuardInUseError(
                "Expected a guard that is not in use. Received: a guard of a running fit of"
                f" {getattr(self.model, 'name', None)!r}. Create a separate NanGuard for each fit"
                " that runs at the same time."
            )
        self._detach()
        super().set_model(model)
        self._attach(model)

    def _attach(self, model: Any) -> None:
        """Attach to the fit that is calling this code."""
        self._fit, other = None, attached_to(model)
        if other is not None:
            if other.in_use(strictly=True):
                text = (
                    "Two NanGuards in one fit: only the first one is used. Pass only one in"
                    " callbacks=[...]."
                )
                warnings.warn(text, stacklevel=outside())
                return
            other.detach()
        around: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
            "on_train_begin": self._around_train_begin,
            "on_epoch_begin": self._around_epoch_begin,
            "on_epoch_end": self._around_epoch_end,
        }
        self._fit = Fit(surrounding(), self._detach, around)
        self.session = self._session(model)
        self._attachment = attachment(model, self.session)
        self._attachment.in_use = self._at_work
        self._attachment.attach()
        self._reporter.begin()
        self._firewall = Firewall(self.session, self._fit.callbacks)

    def _at_work(self, strictly: bool = False) -> bool:
        """Whether the fit is still running.

        A loop of the user's own counts as running unless `strictly`: it may have ended in an
        exception.
        """
        if self._fit is None:
            return False
        return self._fit.runs or not self._fit.known or (self._fit.by_hand and not strictly)

    def _session(self, model: Any, optimizers: Any = None) -> Session:
        from keras_nanguard._diagnose.explain_step import Explainer

        directory, self._scratch = processes.folder(self.directory)
        run = Run(
            model,
            self.policy,
            self._recorder,
            optimizers=optimizers,
            functions=self.functions,
            directory=None if directory is None else str(directory),
            say=self._reporter.line,
        )
        explain = Explainer(bool(self.verbose)) if self.diagnose else None
        session = Session(run, self._announce, explain, self._bad_rows)
        if self.session is not None and self.session.run.model is model:
            session.follow(self.session)
        self._counts = self._counted()
        return session

    def _detach(self) -> None:
        """Restore the model's own methods."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.detach()
            keras_fitting.begin_at(attachment.model, None)
        if self._firewall is not None:
            self._firewall.close()
        self._end_trackers()
        if self._fit is not None:
            self._fit.close()
        self._training = False

    # What Keras calls

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a fit. If a `CallbackList` is used for a second fit, attach again."""
        self._training, self._lagging = True, Lagging()
        if self._attachment is None and self.session is not None:
            self._attach(self.model)
            self.model.make_train_function(force=True)
        if self._fit is not None:
            self._fit.begin()
        callbacks = surrounding()
        if self.session is not None:
            self.session.callbacks_deferred = callbacks_deferred(callbacks)
            hide_from_progress_bar(callbacks)
        self._note_fit(self.params, getattr(callbacks, "callbacks", ()))
        self._print_policy_warnings()
        self._resume((self.params or {}).get("steps"))
        resuming = self.session.resuming if self.session is not None else None
        if resuming is not None and resuming.leaves_nothing_of(self._epochs()):
            self._settle_start()  # no step will run: other callbacks receive the state now

    def _print_policy_warnings(self) -> None:
        """Print a line for each rule and setting of the policy without effect in this run, each
        once.

        If the first step builds the model (a subclassed one on TensorFlow), the check is repeated
        after the first epoch.
        """
        if self.session is None or not self.verbose:
            return
        model, paths = self.session.run.model, None
        self._unnamed = not getattr(model, "built", True)
        if getattr(model, "built", False):
            state = TrainState.of(model, self.session.run.optimizers)
            variables = (*state.trainable, *state.statistics, *state.slots)
            paths = tuple(str(variable.path) for variable in variables)
        name = str(getattr(model, "name", "")) or type(model).__name__
        for line in warnings_about(self.policy, name, paths, self):
            self._reporter.once(f"NanGuard: {line}")

    # Resuming: the state is chosen after all callbacks have restored theirs

    def _resume(self, steps: int | None = None) -> None:
        """Resume from the newest snapshot on disk, in the first fit only: a later fit is another
        run.
        """
        session, directory = self.session, self.directory
        if session is None or directory is None or not self.resume or self._resumed:
            return
        self._resumed = True
        session.resuming = found = find(directory, steps)
        what = "snapshot to resume from (its step, -1 for none)"
        processes.agreed(-1 if found is None else found.record.step, what)

    def _settle_start(self, epoch: int | None = None) -> None:
        """Choose the state to resume from, after all callbacks have run `on_train_begin`.

        `BackupAndRestore` may have restored a later one. `epoch` is the first epoch, if
        `on_train_begin` was missed.
        """
        session = self.session
        if session is None or session.resuming is None or session.resuming.settled:
            return
        theirs = keras_fitting.restored_epoch(self.model) if epoch is None else epoch
        session.resuming = resuming = session.resuming.after(theirs)
        self._reporter.line(resuming.sentence(self._epochs()))
        if resuming.with_state:
            keras_fitting.begin_at(self.model, resuming.epoch)
            if resuming.leaves_nothing_of(self._epochs()):
                self._restore_at_once()

    def _epochs(self) -> int | None:
        """Return the number of epochs of the running fit, or `None` if unknown."""
        return (self.params or {}).get("epochs") if self._training else None

    def _restore_at_once(self) -> None:
        """Restore the state to resume from if no step follows."""
        if self.session is not None and self.session.resuming is not None:
            if self._attachment is not None:
                self._attachment.prepare()
            self.session.restore()

    # The epochs

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch, unless the `CallbackList` has begun it already."""
        if self._fit is None or not self._fit.known:
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        """Begin an epoch before other callbacks do, and restore the state to resume from, if its
        variables exist.

        A snapshot between two epochs has the rate of the earlier one, and other callbacks may set
        that of the next.
        """
        session = self.session
        if session is None:
            return
        session.begin_epoch(epoch)
        self._settle_start(epoch)
        if session.resuming is not None:
            session.run.counts.resume_epoch(session.resuming.batch)
            keras_fitting.begin_at(self.model, None)
            placed = self._attachment if session.resuming.with_state else None
            if placed is not None and placed.prepare():
                session.begin_early()

    @contextlib.contextmanager
    def _around_train_begin(self, logs: Any = None) -> Iterator[None]:
        yield
        self._settle_start()

    @contextlib.contextmanager
    def _around_epoch_begin(self, epoch: int, logs: Any = None) -> Iterator[None]:
        self._begin_epoch(epoch)
        yield

    @contextlib.contextmanager
    def _around_epoch_end(self, epoch: int, logs: Any = None) -> Iterator[None]:
        """Replace the logs of an epoch without committed steps, before any callback receives them,
        and hide values that are not finite from callbacks that compare.
        """
        session = self.session
        callbacks: Iterable[Any] = ()
        if session is not None:
            session.run.access.resolve_pending()
            session.tasks.read_rate()
            if session.run.counts.idle and isinstance(logs, dict):
                logs.update({k: v for k, v in (session.logs.shown or {}).items() if k in logs})
            if session.run.failed and isinstance(logs, dict):
                session.logs.fail(logs)
            self._add_logs(logs)
        if self._fit is not None and self.policy.refuse:
            callbacks = self._fit.callbacks
        with shielded(callbacks, logs, session.logs.no_best if session is not None else ()):
            yield

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the skipped steps of the epoch, and record it."""
        if self.session is None:
            return
        if self._unnamed:
            self._print_policy_warnings()
        self._warn_unless_begun()
        self._add_counts(logs)
        counts, seen = self.session.run.counts, self.session.logs
        self._reporter.epoch(counts, epoch, seen.unmeasured, seen.known is not None)
        self._record_epoch(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """End the fit: print the table and detach."""
        self._restore_at_once()
        self._warn_unless_begun()
        if self.session is not None:
            self.session.finished = True
            self._reporter.end(self.session.run.counts, self.session.run.directory)
        self._detach()

    def _warn_unless_begun(self) -> None:
        """Warn if the steps of a loop of the user's own were not guarded."""
        by_hand = self._fit is not None and self._fit.by_hand
        if by_hand and self.session is not None and not self.session.run.began:
            self._reporter.once(
                "NanGuard: no step was guarded: this loop uses neither fit nor train_on_batch. "
                "Use guard.watch(model) and guard.step(train_step)."
            )

    def on_test_begin(self, logs: Any = None) -> None:
        """Handle the results of all steps so far before a validation."""
        if self.session is not None:
            self.session.run.access.resolve_pending()

    def on_test_end(self, logs: Any = None) -> None:
        """Report NaN and Inf in results, and outdated BatchNormalization statistics."""
        bad, session = results.bad_metrics(logs), self.session
        self._announce_results(bad)
        if self._training and not bad and session is not None and self.diagnose:
            found = self._lagging.look(session.run, logs, results.one_batch, self.params or {})
            if found is not None:
                session.seen_outside(*found)
        self._leave()

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Find predictions that are not finite. The first ones are reported at the end of the
        call.
        """
        self._predicted = self._predicted or results.bad_arrays(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Report predictions that are not finite, and detach."""
        found, self._predicted = self._predicted, []
        self._announce_results(found)
        self._leave()

    def _announce_results(self, findings: list[Finding]) -> None:
        """Report results that are not finite. Outside of training no action is taken."""
        if findings and self.session is not None:
            diagnosis = results.diagnosed(self.model, bool(self.verbose)) if self.diagnose else None
            self.session.seen_outside(findings, diagnosis, act=self._training)

    def _leave(self) -> None:
        if not self._training:
            self._detach()
