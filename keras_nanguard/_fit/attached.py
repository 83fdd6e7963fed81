"""The work of a guard in a running `fit`, `evaluate` or `predict`, when Keras calls it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from keras_nanguard._backends import processes
from keras_nanguard._backends.current import attachment
from keras_nanguard._backends.shared.attach import Use
from keras_nanguard._core.incident import Finding
from keras_nanguard._core.literals import Site
from keras_nanguard._core.plain_values import plain
from keras_nanguard._fit.batchnorm import Lagging
from keras_nanguard._fit.firewall import Firewall
from keras_nanguard._fit.fit_logs import OWN, REFUSED, has_finite, hide_from_progress_bar, numbers
from keras_nanguard._fit.results import bad_arrays, bad_metrics, diagnosed
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._keras.fitting import Fit, callbacks_deferred, current_callback_list


class Attached:
    """A guard that is attached to a model, from `set_model` until `close`.

    Args:
        logs: whether to add the guard's own numbers to the epoch logs.
        diagnose: whether to find the cause of results that are not finite.
        cut_short: called when the call of Keras ends by an exception.

    Attributes:
        fit: the call of Keras.
        training: whether it is a fit that has begun.
    """

    def __init__(self, session: Session, logs: bool, diagnose: bool, cut_short: Callable[[], None]):
        self.session, self._log = session, session.run.log
        self._logs, self._diagnose = logs, diagnose
        self._attachment = attachment(session.run.model, session)
        session.run.attach(self._attachment)
        self._attachment.attach(self._use)
        before: dict[str, Callable[..., Any]] = {
            "on_epoch_begin": lambda epoch, logs=None: session.begin_epoch(epoch),
            "on_test_begin": lambda logs=None: self._end_last_steps(),
            "on_epoch_end": self._before_epoch_end,
        }
        after: dict[str, Callable[..., Any]] = {
            "on_train_begin": lambda logs=None: session.start.settle(),
            "on_epoch_end": lambda epoch, logs=None: self._note_end(),
        }
        self.fit = Fit(current_callback_list(), cut_short, before, after)
        self._firewall = Firewall(session, self.fit.callbacks)
        self._plan: Mapping[str, int] = {}
        self._lagging, self._predicted = Lagging(), list[Finding]()
        self._norm = 0.0  # the last known mean gradient norm of an epoch
        self.training = False

    def _use(self) -> Use:
        """Return what uses the model."""
        if self.fit.runs or not self.fit.known:
            return "call"
        return "loop" if self.fit.by_hand else "none"

    def close(self) -> None:
        """Restore the model's own methods."""
        with contextlib.ExitStack() as closing:  # the last one first, even if another one raises
            closing.callback(self.fit.close)
            closing.callback(self._firewall.close)
            closing.callback(keras_fitting.begin_at, self.session.run.model, None)
            self._attachment.detach()

    # A fit

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Begin a fit; `plan` has its numbers of `epochs` and of `steps` per epoch, if known."""
        self.training = True
        names = ("epochs", "steps")
        self._plan = {name: int(plan[name]) for name in names if plan.get(name) is not None}
        self.fit.begin()
        callbacks = current_callback_list()
        self.session.begin_fit(callbacks_deferred(callbacks))
        hide_from_progress_bar(callbacks)
        epochs, steps = self._plan.get("epochs"), self._plan.get("steps")
        self.session.run.recorder.note(epochs=epochs, steps_per_epoch=steps)
        self.session.tasks.divergence.plan((epochs or 0) * (steps or 0))

    def _end_last_steps(self) -> None:
        """Judge the action of a divergence once the last step of the fit is done, before its state
        is validated or saved.
        """
        run = self.session.run
        last = run.counts.epoch.number + 1 >= self._plan.get("epochs", math.inf)
        if self.training and (last or getattr(run.model, "stop_training", False)):
            run.access.resolve_pending()
            if not run.stopped:
                self.session.tasks.divergence.judge(run)

    def _before_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the logs of an epoch without committed steps, before callbacks receive them."""
        session, run = self.session, self.session.run
        run.access.resolve_pending()
        self._end_last_steps()
        session.tasks.read_rate()
        if isinstance(logs, dict):
            if not run.counts.idle:
                bad = [f for f in bad_metrics(logs) if not f.path.startswith("val_")]
                # A bad step of a policy that refuses nothing may have made it so, and was reported.
                self._tell_of_metrics(bad if run.refuses else [])
            else:
                logs.update({k: v for k, v in (session.logs.shown or {}).items() if k in logs})
            if run.logs_worst_metrics:
                session.logs.fail(logs)
            self._add_own(logs)

    def _tell_of_metrics(self, bad: list[Finding], prefix: str = "") -> None:
        """Print a line about each metric that is not finite, once in a fit. The loss is finite, so
        it is no incident.
        """
        run = self.session.run
        at = f" of epoch {run.counts.epoch.number + 1}" if self.training else ""
        for name, value in ((prefix + finding.path, finding.value) for finding in bad):
            line = f"NanGuard: the metric {name}{at} is {value}, although the loss is finite."
            run.say_once(f"the metric {name}", line)

    def end_epoch(self, epoch: int, logs: Any) -> None:
        """Report the skipped steps of an epoch, and record it."""
        session, counts = self.session, self.session.run.counts
        if isinstance(logs, dict):
            if REFUSED not in logs:
                self._add_own(logs)
            counted = (REFUSED, f"{OWN}rollbacks")  # Keras has made them floats
            logs |= {key: int(logs[key]) for key in counted if key in logs}
        seen = session.logs
        self._log.epoch(counts, epoch, seen.unmeasured, seen.known is not None)
        self._log.line(self._log.bad_rows.line())
        data = {"logs": plain(numbers(logs)), "refused": counts.epoch_refused}
        session.run.recorder.event("epoch", max(counts.step - 1, 0), epoch, data=data)
        session.say_problem()

    def _note_end(self) -> None:
        """Note that the epoch has ended with all callbacks, if it was not cut short."""
        run, steps = self.session.run, self._plan.get("steps")
        stopped = run.stopped or getattr(run.model, "stop_training", False)
        whole = not stopped if steps is None else run.counts.now.batch >= steps
        if self.training and whole:
            run.end_epoch()

    def _add_own(self, logs: dict[str, Any]) -> None:
        """Add the guard's own numbers to the logs of an epoch."""
        run, counts = self.session.run, self.session.run.counts
        if self._logs:
            norm, scale = run.recorder.epoch_means(counts.epoch.number)
            self._norm = norm if math.isfinite(norm) else self._norm
            logs |= {
                f"{OWN}grad_norm": self._norm,
                f"{OWN}rate_factor": run.recovery.rate_factor,
                f"{OWN}loss_scale": scale,
                f"{OWN}rollbacks": counts.rollbacks - counts.epoch.rollbacks,
            }
        logs[REFUSED] = counts.epoch_refused

    def warn_unless_begun(self) -> None:
        """Warn if the steps of a hand-written loop were not guarded."""
        if self.fit.by_hand and not self.session.run.began:
            self._log.once(
                "NanGuard: no step was guarded: this loop uses neither fit nor train_on_batch. "
                "Use guard.watch(model) and guard.step(train_step)."
            )

    # Results

    def end_test(self, logs: Any) -> None:
        """Report NaN and Inf in the results of `evaluate` or of a validation, and outdated
        BatchNormalization statistics. A metric beside a finite loss is only mentioned; see
        `fit_logs.has_finite`.
        """
        bad = bad_metrics(logs)
        if has_finite(logs, "loss"):
            self._tell_of_metrics(bad, "val_" if self.training else "")
            bad = []
        self._announce("validation", bad)
        if self.training and not bad and self._diagnose:
            lagging = self._lagging.look(self.session.run, logs, self._plan)
            if lagging is not None:
                self.session.seen_outside(*lagging)

    def predicted(self, logs: Any) -> None:
        """Find predictions that are not finite, of which the first ones are reported."""
        self._predicted = self._predicted or bad_arrays(logs)

    def end_predict(self) -> None:
        """Report predictions that are not finite."""
        findings, self._predicted = self._predicted, []
        self._announce("predictions", findings)

    def _announce(self, site: Site, findings: list[Finding]) -> None:
        """Report results that are not finite. Outside of training no action is taken."""
        if self.training and not findings and processes.count() == 1:  # others may not have it
            recovery = self.session.run.recovery
            recovery.count(recovery.policy_state.with_good_result(site))
        if findings:
            run, diagnosis = self.session.run, None
            if self._diagnose:
                diagnosis = diagnosed(run.model, run.read_train_state().written_by_calls)
            self.session.seen_outside(findings, diagnosis, act=self.training)
