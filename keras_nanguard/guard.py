"""`NanGuard`: the callback that guards `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from typing_extensions import Unpack

from keras_nanguard._backends import processes
from keras_nanguard._backends.shared.attach import attached_to
from keras_nanguard._core.errors import GuardInUseError
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.literals import Preset
from keras_nanguard._fit import arguments
from keras_nanguard._fit.attached import Attached
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.loops import LoopMixin
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.reports import ReportMixin
from keras_nanguard._fit.resume import find
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.session import Session
from keras_nanguard._keras.running_fit import outside
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy, Sections
from keras_nanguard._policy.warnings import warnings_about
from keras_nanguard._recording.recorder import Recorder

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
        self.directory, self.resume = arguments.folder(directory), arguments.flag("resume", resume)
        self.policy = arguments.policy(policy, sections, self.directory, self.resume)
        self.functions = arguments.functions(functions)
        self.diagnose, self.logs = (
            arguments.flag("diagnose", diagnose),
            arguments.flag("logs", logs),
        )
        self.sample_ids = arguments.sample_ids(sample_ids)
        self.incidents: list[Incident] = []
        self.session: Session | None = None
        self._attached: Attached | None = None
        self._reporter, self._recorder = Reporter(arguments.verbosity(verbose)), Recorder()
        self._bad_rows = BadRows(self._recorder, self.sample_ids)
        self._unnamed = self._resumed = False

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
        if self._attached is not None and self._attached.fit.runs:
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
        other = attached_to(model)
        if other is not None:
            if other.in_use(strictly=True):
                text = (
                    "Two NanGuards in one fit: only the first one is used. Pass only one in"
                    " callbacks=[...]."
                )
                warnings.warn(text, stacklevel=outside())
                return
            other.detach()
        self.session = self._session(model)
        self._attached = Attached(self.session, self._reporter, self.logs, self._detach)
        self._reporter.begin()

    def _session(self, model: Any, optimizers: Any = None) -> Session:
        from keras_nanguard._diagnose.explain_step import Explainer

        run = Run(
            model,
            self.policy,
            self._recorder,
            optimizers=optimizers,
            functions=self.functions,
            directory=self.directory,
            say=self._reporter.line,
        )
        explain = Explainer(bool(self.verbose)) if self.diagnose else None
        session = Session(run, self._announce, explain, self._bad_rows)
        if self.session is not None and self.session.run.model is model:
            session.follow(self.session)
        self._counts = self._counted()
        return session

    def _detach(self) -> None:
        """Restore the model's own methods, and send the report to the trackers of the fit."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()
            if attached.trackers is not None:
                attached.trackers.end(self._page)

    # What Keras calls

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a fit. If a `CallbackList` is used for a second fit, attach again."""
        if self._attached is None and self.session is not None:
            self._attach(self.model)
            self.model.make_train_function(force=True)
        if self._attached is None:
            return
        self._attached.begin(self.params or {})
        self._print_policy_warnings()
        self._resume((self.params or {}).get("steps"))
        self._attached.settle_start_if_nothing_is_left()

    def _print_policy_warnings(self) -> None:
        """Print one line, once, for each rule or setting of the policy without effect in this run.

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

    # The epochs and the results

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch, unless the `CallbackList` has begun it already."""
        if self._attached is not None and not self._attached.fit.known:
            self._attached.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the skipped steps of the epoch, and record it."""
        if self._attached is None:
            return
        if self._unnamed:
            self._print_policy_warnings()
        self._attached.warn_unless_begun()
        self._attached.end_epoch(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """End the fit: print the table and detach."""
        if self._attached is not None and self.session is not None:
            self._attached.restore_at_once()
            self._attached.warn_unless_begun()
            self.session.finished = True
            self._reporter.end(self.session.run.counts, self.session.run.directory)
        self._detach()

    def on_test_begin(self, logs: Any = None) -> None:
        """Handle the results of all steps so far before a validation."""
        if self._attached is not None:
            self._attached.session.run.access.resolve_pending()

    def on_test_end(self, logs: Any = None) -> None:
        """Report NaN and Inf in results, and outdated BatchNormalization statistics."""
        if self._attached is not None:
            self._attached.end_test(logs, self.diagnose)
        self._leave()

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Find predictions that are not finite. The first ones are reported at the end of the
        call.
        """
        if self._attached is not None:
            self._attached.predicted(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Report predictions that are not finite, and detach."""
        if self._attached is not None:
            self._attached.end_predict(self.diagnose)
        self._leave()

    def _leave(self) -> None:
        """Detach after an `evaluate` or `predict` that is not part of a fit."""
        if self._attached is not None and not self._attached.training:
            self._detach()
