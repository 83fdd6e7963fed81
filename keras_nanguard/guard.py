"""`NanGuard`: the one line that a user adds."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_nanguard._backends import processes
from keras_nanguard._backends.current import attachment
from keras_nanguard._backends.interface import Attachment
from keras_nanguard._backends.shared.attach import attached_to
from keras_nanguard._core.errors import GuardInUseError
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._core.literals import Preset
from keras_nanguard._diagnose.guarded_run import NoExplainer
from keras_nanguard._fit import arguments, results
from keras_nanguard._fit.checkpoint_firewall import Firewall, shielded
from keras_nanguard._fit.copies import CopyMixin
from keras_nanguard._fit.epoch_logs import hide_from_progress_bar
from keras_nanguard._fit.flight import FlightMixin
from keras_nanguard._fit.lagging_statistics import Lagging
from keras_nanguard._fit.loops import LoopMixin
from keras_nanguard._fit.policy_lines import policy_lines
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.resuming import ResumeMixin
from keras_nanguard._fit.running_fit import Fit, callbacks_deferred, outside, surrounding
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._policy.policy import Policy, Sections, Unpack
from keras_nanguard._policy.warnings import GuardOptions
from keras_nanguard._report import console, files

__all__ = ["NanGuard"]


class NanGuard(ResumeMixin, LoopMixin, FlightMixin, CopyMixin, keras.callbacks.Callback):
    """Guards training against NaN, Inf and finite explosions.

    With `callbacks=[NanGuard()]` every train step is a transaction over the whole train state: it commits whole, or it
    is refused inside the compiled step and leaves everything as it was. The policy then decides what to change.

    Args:
        policy: name of a preset (`"recover"`, `"stop"`, `"raise"`, `"observe"`, ...), path of a `.toml`, `.yaml` or
            `.json` file, a dict of the same shape, or a `Policy`.
        directory: folder for everything that is written to disk; `None` writes nothing. One for each run.
        verbose: 0 or False prints nothing; 1 or True a line for each kind of trouble and for each incident at which something is
            changed, and a table at the end where something has happened; 2 a line for every incident and every epoch with refused
            steps. Lines count steps, epochs and batches from 1, as the progress bar of Keras does.
        functions: functions by name for the action `call`, each called with the `Incident`.
        diagnose: find out why a step was refused. Costs nothing until one is.
        resume: go on from the newest good snapshot in `directory`, where there is one: with the state of the model, the
            position in the data, and everything that the policy remembers. Snapshots are kept on disk then.
        logs: add `nanguard/refused`, `nanguard/grad_norm`, `nanguard/rate_factor`, `nanguard/loss_scale` and `nanguard/rollbacks`
            to the epoch logs.
        sample_ids: what bad rows are called: one name for each row of `x`, or the key of the batch that holds them. By default their
            place in `x`.
        **sections: sections of a policy, merged over it: `snapshot={"every": 50}`.

    Attributes:
        incidents: list of `Incident`, in the order in which they happened.

    A copy of a guard (`copy.deepcopy`) is a fresh one with the same settings; a pickle has the incidents so far, too. Neither guards
    anything before a fit of its own.

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
    """Keras may call callbacks for a batch in another thread: all is done right after the step."""

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
        self._reporter, self.functions = Reporter(arguments.verbosity(verbose)), arguments.functions(functions)
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

    def _unused(self) -> NanGuard:
        """Return a guard with the same policy that has seen nothing."""
        return NanGuard(self.policy, directory=self.directory, verbose=self.verbose, logs=self.logs, sample_ids=self.sample_ids)

    @property
    def verbose(self) -> int:
        """How much is printed: 0, 1 or 2."""
        return self._reporter.verbose

    @verbose.setter
    def verbose(self, verbose: int) -> None:
        self._reporter.verbose = verbose

    # Installing and uninstalling

    def set_model(self, model: Any = None) -> None:
        """Called by Keras before anything else; puts the transaction in place.

        Raises:
            GuardError: if the class itself is among the callbacks (Keras gives it the model), or the model is one of `tf_keras`.
        """
        arguments.require_instance(self, NanGuard, model)
        if model is None:
            return
        if self._fit is not None and self._fit.runs:
            raise GuardInUseError(
                f"Expected a guard that is not at work. Received: one that guards a running fit of "
                f"{getattr(self.model, 'name', None)!r}. Make a NanGuard of its own for each fit that runs at a time."
            )
        self._detach()
        super().set_model(model)
        self._fit = self._surrounding_fit()
        self._attach(model)

    def _surrounding_fit(self) -> Fit:
        return Fit.around(self._detach, self._around_epoch_end, self._settle_start)

    def _attach(self, model: Any) -> None:
        other = attached_to(model)
        if other is not None:
            if other.in_use(strictly=True):
                text = "Two NanGuards in one fit: the first one guards, this one does nothing. Give callbacks=[...] one of them."
                warnings.warn(text, stacklevel=outside())
                return
            other.detach()
        self.session = self._session(model)
        self._attachment = attachment(model, self.session)
        self._attachment.in_use = self._at_work
        self._attachment.attach()
        self._reporter.begin(self.session.directory)
        self._firewall = Firewall(self.session, self._fit.callbacks if self._fit is not None else ())

    def _at_work(self, strictly: bool = False) -> bool:
        """Whether the fit still runs; a loop of the user's own counts unless asked `strictly`.

        Such a loop may have ended in an exception that nobody has seen.
        """
        if self._fit is None:
            return False
        return self._fit.runs or not self._fit.known or (self._fit.by_hand and not strictly)

    def _session(self, model: Any, optimizers: Any = None) -> Session:
        from keras_nanguard._diagnose.explain_step import Explainer

        directory, self._scratch = processes.folder(self.directory)
        session = Session(
            model,
            self.policy,
            self._announce,
            Explainer(bool(self.verbose)) if self.diagnose else NoExplainer(),
            optimizers=optimizers,
            functions=self.functions,
            directory=None if directory is None else str(directory),
            say=self._reporter.line,
            recorder=self._recorder,
            bad_rows=self._bad_rows,
        )
        if self.session is not None and self.session.model is model:
            session.follow(self.session)
        self._counts = self._counted()
        return session

    def _detach(self) -> None:
        """Give the model its own methods back, whatever happened."""
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
        """Start counting; a `CallbackList` that is used for a second fit is put in place again."""
        self._training, self._lagging = True, Lagging()
        if self._attachment is None and self.session is not None:
            self._fit = self._surrounding_fit()
            self._attach(self.model)
            self.model.make_train_function(force=True)
        if self._fit is not None:
            self._fit.begin()
        self._begin_fit()

    def _begin_fit(self) -> None:
        self._note_callbacks()
        self._note_fit(self.params)
        self._print_policy_warnings()
        self._resume((self.params or {}).get("steps"))
        resuming = self.session.resuming if self.session is not None else None
        if resuming is not None and resuming.leaves_nothing_of(self._epochs()):
            self._settle_start()  # no step is to come: other callbacks see the state at once

    def start_counting(self, model: Any, params: Any) -> None:
        """Begin a fit of a model that is guarded without this callback standing in its list."""
        keras.callbacks.Callback.set_model(self, model)
        self.set_params(params)
        self._training = True
        self._reporter.begin(None)
        self._begin_fit()

    def _print_policy_warnings(self) -> None:
        """Print a line for each rule and setting of the policy that can do nothing in this run, each once.

        A model that is built by its first step (a subclassed one on TensorFlow) is compared with after the first epoch.
        """
        if self.session is None or not self.verbose:
            return
        self._unnamed = not getattr(self.session.model, "built", True)
        options = GuardOptions(self.directory is not None, self.functions, self.diagnose)
        for line in policy_lines(self.policy, options, self.session.model, self.session.state.optimizers):
            self._reporter.once(line)

    def _note_callbacks(self) -> None:
        if self.session is not None:
            callbacks = surrounding()
            self.session.callbacks_deferred = callbacks_deferred(callbacks)
            hide_from_progress_bar(callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where the epoch starts."""
        if self.session is not None:
            self.session.begin_epoch(epoch)
            if not self._start_settled:
                self._settle_start(epoch)
            if self.session.resuming is not None:
                self.session.counts.resume_epoch(self.session.resuming.batch)
                keras_fitting.begin_at(self.model, None)

    def before_epoch_end(self, logs: Any) -> None:
        """Let no callback take the metrics of an epoch for real that has no step in it, whatever its place in the list."""
        if self.session is None:
            return
        self.session.resolve_pending()
        self.session.note_rate()
        if self.session.counts.idle and isinstance(logs, dict):
            logs.update({k: v for k, v in (self.session.logs.shown or {}).items() if k in logs})
        if self.session.failed and isinstance(logs, dict):
            self.session.logs.fail(logs)
        self._add_logs(logs)

    @contextlib.contextmanager
    def _around_epoch_end(self, logs: Any) -> Iterator[None]:
        self.before_epoch_end(logs)
        callbacks = self._fit.callbacks if self._fit is not None and self.policy.refuse else ()
        with shielded(callbacks, logs, self.session.logs.no_best if self.session is not None else ()):
            yield

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Say how many steps were left out, which stands beside the means of the epoch."""
        if self.session is None:
            return
        if self._unnamed:
            self._print_policy_warnings()
        self._warn_unless_begun()
        self._add_counts(logs)
        self._reporter.epoch(self.session.counts, epoch, self.session.logs.unmeasured, self.session.logs.known is not None)
        self._record_epoch(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Take the transaction off."""
        self._restore_at_once()
        self._warn_unless_begun()
        if self.session is not None:
            self.session.finished = True
            self._reporter.end(self.session.counts, self.session.directory)
        self._detach()

    def _warn_unless_begun(self) -> None:
        """Warn if a loop of the user's own makes its steps where the guard cannot see them."""
        by_hand = self._fit is not None and self._fit.by_hand
        if by_hand and self.session is not None and not self.session.began:
            self._reporter.once(
                "NanGuard: no step was guarded: this loop uses neither fit nor train_on_batch. "
                "Use guard.watch(model) and guard.step(train_step)."
            )

    def on_test_begin(self, logs: Any = None) -> None:
        """Know of all steps before a validation shows what they made."""
        if self.session is not None:
            self.session.resolve_pending()

    def on_test_end(self, logs: Any = None) -> None:
        """See a validation or evaluation that is not finite, and a validation that only lagging BatchNorm statistics spoil."""
        bad = results.bad_metrics(logs)
        self._announce_results(bad)
        if self._training and not bad:
            self._look_for_lag(logs)
        self._leave()

    def _look_for_lag(self, logs: Any) -> None:
        if self.session is None or not self.diagnose:
            return
        found = self._lagging.look(self.session, logs, results.one_batch, self.params or {})
        if found is not None:
            self.session.seen_outside(*found)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Find predictions that are not finite; the first ones are reported when the call ends."""
        self._predicted = self._predicted or results.bad_arrays(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Report what was found, and take the transaction off."""
        found, self._predicted = self._predicted, []
        self._announce_results(found)
        self._leave()

    def _announce_results(self, findings: list[Finding]) -> None:
        """Report results that are not finite; outside of training nothing is done about them."""
        if findings and self.session is not None:
            diagnosis = results.diagnosed(self.model, bool(self.verbose)) if self.diagnose else None
            self.session.seen_outside(findings, diagnosis, act=self._training)

    def _leave(self) -> None:
        if not self._training:
            self._detach()

    # What the user reads

    def __repr__(self) -> str:
        incidents = "1 incident" if len(self.incidents) == 1 else f"{len(self.incidents)} incidents"
        return f"NanGuard({self.policy.preset!r}, {incidents})"

    def __str__(self) -> str:
        return self.summary()

    def _announce(self, incident: Incident) -> None:
        if incident.bundle is not None:  # a new one can have taken the place of the oldest
            self.incidents[:] = files.without_removed_bundles(self.incidents, incident.bundle)
        self.incidents.append(incident)
        directory = self.session.directory if self.session is not None else None
        self._reporter.attempt("record an incident", lambda: self._record_incident(incident))
        self._reporter.incident(incident, directory, self._samples_of(incident))

    def summary(self) -> str:
        """Return what was seen and done, in all fits so far, in a few lines of text."""
        return console.summary(self.incidents, *self._counted())

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write what has happened so far to a file and return its path.

        `.html` is one page that needs nothing else: curves, incidents, layers, bad rows. `.md` is text, `.json` one object with a
        format number, `.jsonl` one incident a line. The file is never half there. Of several processes the first one writes it.

        Raises:
            GuardError: for another ending.
        """
        if processes.index() != 0:
            return Path(path)
        return files.write(self.incidents, self.summary(), path, self.recording, self.directory)
