"""`NanGuard`: the callback that guards `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import keras
from typing_extensions import Unpack

from keras_nanguard._backends import processes
from keras_nanguard._backends.current import attachment
from keras_nanguard._backends.shared.attach import attached_to
from keras_nanguard._core.errors import GuardError, GuardInUseError, require_path
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.literals import Preset
from keras_nanguard._core.plain_values import times
from keras_nanguard._fit import arguments, loop
from keras_nanguard._fit.attached import Attached
from keras_nanguard._fit.log import GuardLog
from keras_nanguard._fit.resume import Resumed, find
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.session import Session
from keras_nanguard._fit.state_check import checked
from keras_nanguard._keras.fitting import current_callback_list, evaluates, model_of, outside
from keras_nanguard._keras.layers import data_paths
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy, Sections
from keras_nanguard._policy.warnings import warnings_about
from keras_nanguard._recording.recording import BadSample, Recording, Totals
from keras_nanguard._report import files
from keras_nanguard._report.console import summary
from keras_nanguard._report.figure import curves
from keras_nanguard._report.reported_run import ReportedRun

__all__ = ["NanGuard"]

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class NanGuard(keras.callbacks.Callback):
    """Guards training against NaN and Inf, and against runs that are proven to have diverged.

    With `callbacks=[NanGuard()]` every train step is a transaction over the whole train state. It
    either commits completely, or it is refused inside the compiled step and changes nothing. The
    policy then decides what to do.

    Args:
        policy: name of a preset (`"recover"`, `"stop"`, `"raise"`, `"observe"`, ...), path of a
            `.toml`, `.yaml` or `.json` file, a dict of the same shape, or a `Policy`.
        directory: folder for files of this run; `None` writes no files. Use one folder per run.
        verbose: 0 or False prints nothing, except that no step was guarded. 1 or True prints a line
            for each new kind of incident and each change of the run, such as a rollback, and a
            table at the end if there were incidents. 2 prints a line for every incident and every
            epoch with refused steps. Printed steps, epochs and batches count from 1, like the
            progress bar of Keras.
        functions: functions by name for the action `call`, each called with the `Incident`.
        diagnose: whether to find the cause of a refused step. It costs nothing until a step is
            refused.
        resume: whether to resume from the newest good snapshot in `directory`, if there is one. It
            restores the state of the model, the position in the data, and the state of the policy.
            Snapshots are then stored on disk. The first `fit` resumes, later ones are new. If the
            snapshot is of a later `fit` of this guard, an earlier one raises a `GuardError`: give
            each its own guard and directory, or pass `epochs=0` to those before it.
        logs: whether to add `nanguard/grad_norm`, `nanguard/rate_factor`, `nanguard/loss_scale` and
            `nanguard/rollbacks` to the epoch logs. `refused_steps` is always there.
        sample_ids: names of the rows: one name for each row of `x`, or the key of the batch that
            has them. By default rows are named by their index in `x`.
        **sections: sections of a policy, merged over it: `snapshot={"every": 50}`.

    Attributes:
        incidents: list of `Incident`, in order of time.

    A copy of a guard (`copy.deepcopy`) or a pickle has the settings and the incidents so far. It is
    not attached to a fit.

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
        self.directory = arguments.folder(directory)
        self._directory_shown = None if directory is None else str(Path(directory))
        self.resume = arguments.flag("resume", resume)
        self.policy = arguments.policy(policy, sections, self.directory, self.resume)
        self.functions = arguments.functions(functions)
        self.diagnose = arguments.flag("diagnose", diagnose)
        self.logs = arguments.flag("logs", logs)
        self.sample_ids = arguments.sample_ids(sample_ids)
        self.session: Session | None = None
        self._training: Session | None = None  # the last one that is no evaluate or predict
        self._attached: Attached | None = None
        self._loop: Session | None = None
        self._log = GuardLog(arguments.verbosity(verbose), self.sample_ids)
        self._may_resume, self._names_missing = True, False
        self._fits = 0  # begun before the current one

    # What a user reads

    @property
    def incidents(self) -> list[Incident]:
        """The incidents so far, in order of time."""
        return self._log.incidents

    @incidents.setter
    def incidents(self, incidents: list[Incident]) -> None:
        self._log.incidents = incidents

    @property
    def verbose(self) -> int:
        """How much is printed: 0, 1 or 2."""
        return self._log.verbose

    @verbose.setter
    def verbose(self, verbose: int) -> None:
        self._log.verbose = arguments.verbosity(verbose)

    @property
    def recording(self) -> Recording:
        """The `Recording` of all steps and events so far. It is a copy from memory."""
        return self._log.recorder.recording

    def bad_samples(self, path: str | os.PathLike[str] | None = None) -> tuple[BadSample, ...]:
        """Return the rows of the data that caused bad steps, each once, in the order in which they
        were found.

        A row is identified by its values, so shuffling does not matter. If `fit` trains on arrays,
        `index` is its index in `x`. Otherwise `index` is `None`, and the label is the beginning of
        its fingerprint, or its name from `sample_ids`. An augmented row is a new row in each epoch.

        Args:
            path: a `.csv` file to write the rows to, or `None`. If there are several processes, the
                first one writes it.

        Raises:
            GuardError: if the suffix is another one, or `path` is not a path.
            OSError: if it cannot be written, such as `FileNotFoundError` if its folder is missing.
        """
        found = tuple(self._log.recorder.samples.values())
        if path is not None:
            require_path(path, 'Write guard.bad_samples("bad.csv").')
        if path is not None and processes.index() == 0:
            files.write_samples(found, path)
        return found

    def __repr__(self) -> str:
        return f"NanGuard({self.policy.preset!r}, {times(len(self.incidents), 'incident')})"

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Return a summary of all fits so far: numbers of steps, incidents by cause, and
        actions.
        """
        return summary(self.incidents, self._counted())

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a report of all fits so far to a file, and return its path.

        The suffix of the path selects the format. `.html` is a self-contained page with curves,
        incidents, layers and bad rows, `.json` one object with a format number, and `.jsonl` one
        incident per line. The file is written atomically. If there are several
        processes, the first one writes it.

        Raises:
            GuardError: if the suffix is another one, or `path` is not a path.
            OSError: if it cannot be written, such as `FileNotFoundError` if its folder is missing.
        """
        require_path(path, 'Write guard.report("run.html").')
        if processes.index() != 0:
            return Path(path)
        return files.write(self._reported, path)

    def plot(self) -> Any:
        """Return a matplotlib figure of loss, gradient norm, learning rate and loss scale, with
        marks for all actions.

        Needs the extra `plot`. The figure is not shown: `guard.plot().savefig("run.png")`.

        Raises:
            GuardError: if matplotlib is not installed.
        """
        return curves(self.recording)

    @property
    def _reported(self) -> ReportedRun:
        """All fits so far, as reports show them."""
        return ReportedRun(self.incidents, self.recording, self.directory)

    def _counted(self) -> Totals:
        """Return the numbers of steps of all fits so far, without those of earlier runs in the same
        directory.
        """
        totals, earlier = self._reported.totals, self._log.recorder.earlier
        return Totals(*((count or 0) - (before or 0) for count, before in zip(totals, earlier)))

    # Loops without `fit`

    @contextlib.contextmanager
    def watch(self, model: Any, *optimizers: Any) -> Iterator[None]:
        """Return a context in which the steps that `step` returns are guarded.

        Args:
            model: a `keras.Model` or `keras.Layer` with the weights, compiled or not; on PyTorch
                also a `torch.nn.Module`.
            *optimizers: the Keras optimizers of the loop; by default those of the model. On PyTorch
                also those of `torch.optim`. On JAX omit an optimizer of optax, because its state is
                part of the state of the step.

        Raises:
            GuardError: if there is no optimizer, if one of them is not an optimizer (but a list,
                for example), or if the model or an optimizer is one of `tf_keras`.
            GuardInUseError: if this guard already watches a loop, or a fit is running with it.

        Example:

        ```python
        with guard.watch(model, optimizer):
            step = guard.step(train_step)
            for x, y in batches:
                loss = step(x, y)
                if guard.stopped:
                    break
        ```
        """
        self._require_free()
        model, optimizers = loop.guardable(model, optimizers)
        self._loop = self._begin_steps(model, optimizers)
        try:
            with loop.watching(self._loop):
                yield
        finally:
            self._loop = None

    def step(self, function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        """Return the train step as a transaction.

        Args:
            function: a train step that computes a loss and gradients, and calls `optimizer.apply`.
                A Python function runs eagerly. A `tf.function` is compiled with its own settings,
                including XLA. Its losses are the results of the model's `compute_loss`; if it does
                not call that, every scalar that it returns. On PyTorch they are then the scalars
                whose backward pass it runs, if it runs any.

        Returns:
            A callable with the same arguments and results. A refused step returns its computed
            values, including NaN. Check `guard.refused` after each call.

        Raises:
            GuardError: when called outside of `watch`.
        """
        return loop.guarded(function, self._watched)

    @property
    def refused(self) -> bool:
        """Whether the last step was refused."""
        return self._training is not None and self._training.run.counts.last_refused

    @property
    def stopped(self) -> bool:
        """Whether the policy has ended training. Your own loop has to check this after each step:
        later ones have no effect.
        """
        return self._training is not None and self._training.run.stopped

    def _watched(self) -> Session:
        """Return the session of the running loop."""
        if self._loop is None:
            raise GuardError(
                "Expected a call inside of `with guard.watch(model, optimizer):`. Received: one"
                " outside. Move the loop into the with block."
            )
        return self._loop

    # What Keras calls

    def set_model(self, model: Any = None) -> None:
        """Attach to the model. Keras calls this before anything else.

        An `evaluate` or `predict` during training with this guard, such as by another callback,
        belongs to the training.

        Raises:
            GuardError: if the class is passed instead of an instance, or the model is a `tf_keras`
                model.
            GuardInUseError: if another fit, or a loop, is running with this guard.
        """
        arguments.require_instance(self, NanGuard, model)
        if model is None:
            return
        fit = None if self._attached is None else self._attached.fit
        if (self._loop is not None or (fit is not None and fit.encloses)) and evaluates():
            return
        self._require_free()
        super().set_model(model)
        self._attach(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a fit. If a `CallbackList` is used for a second fit, attach again."""
        if self._attached is None and self.session is not None:
            other = attached_to(self.model)
            if other is None or other.use() != "call":
                self._attach(self.model)
                self.model.make_train_function(force=True)
        if self._attached is None:
            return
        plan = self.params or {}
        self._attached.begin(plan)
        self._warn_about_policy()
        resumed = self._resumed_from(plan.get("steps"), plan.get("epochs"))
        self._attached.session.start.begin(resumed, plan.get("epochs"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch, unless the `CallbackList` has begun it already."""
        if self._attached is not None and not self._attached.fit.known:
            self._attached.session.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the skipped steps of the epoch, and record it."""
        if self._attached is None:
            return
        if self._names_missing:
            self._warn_about_policy()
        self._attached.warn_unless_begun()
        self._attached.end_epoch(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """End the fit: print the table and detach."""
        try:
            if self._attached is not None and self.session is not None:
                self.session.start.restore_at_once()
                self._attached.warn_unless_begun()
                self.session.check_end()
                self.session.finish()
                self._log.end(self.session.run.counts, self.session.run.recovery.rate_factor)
        finally:
            self._detach()

    def on_test_begin(self, logs: Any = None) -> None:
        """Handle the results of all steps so far before a validation."""
        if self._attached is not None:
            self._attached.session.run.access.resolve_pending()

    def on_test_end(self, logs: Any = None) -> None:
        """Report NaN and Inf in results, and outdated BatchNormalization statistics."""
        if (attached := self._concerned()) is not None:
            attached.end_test(logs)
        self._leave()

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Find predictions that are not finite. The first ones are reported at the end of the
        call.
        """
        if (attached := self._concerned()) is not None:
            attached.predicted(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Report predictions that are not finite, and detach."""
        if (attached := self._concerned()) is not None:
            attached.end_predict()
        self._leave()

    def _concerned(self) -> Attached | None:
        """Return the attachment, `None` if the results of another model are reported."""
        attached, callbacks = self._attached, current_callback_list()
        model = model_of(callbacks)
        own = attached is not None and model in (None, attached.session.run.model)
        return attached if own else None

    def _leave(self) -> None:
        """Detach after an `evaluate` or `predict` that is not part of a fit or another one."""
        attached = self._attached
        if attached is not None and not attached.training and attached.fit.calls:
            self._detach()

    # Attaching to a model, and detaching

    def _require_free(self) -> None:
        """Detach from a fit that has ended; raise `GuardInUseError` if another, or a loop, runs."""
        in_loop = self._loop is not None
        if in_loop or (self._attached is not None and self._attached.fit.runs):
            running = "loop" if in_loop else f"fit of {getattr(self.model, 'name', None)!r}"
            raise GuardInUseError(
                f"Expected a guard that is not in use. Received: a guard of a running {running}."
                " Create a separate NanGuard for each fit or loop that runs at the same time."
            )
        self._detach()

    def _attach(self, model: Any) -> None:
        """Attach to the fit that is calling this code."""
        other = attached_to(model)
        if other is not None:
            if other.use() == "call":
                text = (
                    "Two NanGuards in one fit: only the first one is used. Pass only one in"
                    " callbacks=[...]."
                )
                warnings.warn(text, stacklevel=outside())
                return
            other.detach()
        self._attached = Attached(self._session(model), self.logs, self.diagnose, self._detach)

    def _session(self, model: Any, optimizers: Any = None) -> Session:
        """Begin the host side of the steps of a model, which continues that of its last fit.

        Args:
            model: the model.
            optimizers: the optimizers of a loop without `fit`; by default those of the model.
        """
        from keras_nanguard._diagnose.explainer import Explainer

        if (last := self.session) is not None:
            unresumed = last.start.resuming is not None  # an error came before
            self._may_resume |= unresumed
            self._fits += not unresumed and (last.run.began or last.finished)
        own = (self.functions, self.directory, self._directory_shown, self._fits)
        run = Run(model, self.policy, self._log, optimizers, *own)
        explain = Explainer(run, self._log.line) if self.diagnose else None
        session = Session(run, explain)
        if last is not None and last.run.model is model:
            session.follow(last)
        self.session = session
        self._training = self._training if evaluates() else session
        self._log.begin(run.directory, run.shown)
        return session

    def _begin_steps(self, model: Any, optimizers: Any = None) -> Session:
        """Begin steps without a fit, which may resume; for the arguments see `_session`."""
        session = self._session(model, optimizers)
        self._warn_about_policy()
        resumed = self._resumed_from()
        session.start.begin(resumed)
        if resumed is not None:
            self._log.line(resumed.sentence())
        return session

    def _detach(self) -> None:
        """Restore the model's own methods."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()

    # The begin of a run: the policy is checked, and a snapshot to resume from is found

    def _warn_about_policy(self) -> None:
        """Print one line, once, for each rule or setting of the policy without effect in this run.

        If the first step builds the model (a subclassed one on TensorFlow), the check is repeated
        after the first epoch.
        """
        with self._log.attempt("look for rules without effect"):
            if self.session is None or not self.verbose:
                return
            model, paths = self.session.run.model, None
            self._names_missing = not getattr(model, "built", True)
            if getattr(model, "built", False):
                variables = checked(TrainState.of(model, self.session.run.optimizers))
                paths = (*(str(v.path) for _, v in variables), *data_paths(model))
            name = str(getattr(model, "name", "")) or type(model).__name__
            for line in warnings_about(self.policy, name, paths, self.functions, self.diagnose):
                self._log.once(f"NanGuard: {line}")

    def _resumed_from(self, steps: int | None = None, epochs: int | None = None) -> Resumed | None:
        """Return the newest snapshot on disk until one was restored, or there was none: a later fit
        is another run.

        Raises:
            GuardError: if it is of a later fit, unless this one has no epochs.
        """
        if self.directory is None or not (self.resume and self._may_resume):
            return None
        found = find(self.directory, steps)
        what = "snapshot to resume from (its step, -1 for none)"
        processes.require_agreement(-1 if found is None else found.record.step, what)
        if found is not None and found.record.fit > self._fits:
            if epochs == 0:
                return None
            raise found.of_later_fit(self._fits)
        self._may_resume = False
        return found

    # Copies: tuners copy callbacks for each trial, other processes get pickles

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: everything except the fit."""
        of_fit = dict.fromkeys(("session", "_training", "_attached", "_loop", "_model", "params"))
        begins = {"_may_resume": True, "_names_missing": False, "_fits": 0}
        return {**vars(self), **of_fit, **begins}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickle. A relative directory is one of the process that reads it."""
        self.__dict__.update(state)
        self.directory = arguments.folder(self._directory_shown)

    def __copy__(self) -> Any:
        """Return the same as `copy.deepcopy`."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with the same functions and names of rows. It does not resume, because the
        snapshots in the directory belong to the original.
        """
        made = memo[id(self)] = type(self).__new__(type(self))
        memo |= {id(shared): shared for shared in (self.functions, self.sample_ids)}
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo), _may_resume=False)
        return made


def guard_every_step(guard: NanGuard, model: Any, make: Callable[..., Any]) -> None:
    """Guard every step of a `NanGuardModel`, within a fit or not: create its train function.

    Args:
        guard: the guard of the model.
        model: the model, which must be compiled.
        make: creates the train function of Keras. The transaction is around its train step.
    """
    guard._require_free()
    if guard.session is not None:  # of an earlier fit, or of another compile()
        guard.session.end()
    session = guard._begin_steps(model)
    session.finish()  # unless a step raises: the end of its loop is unknown
    made = attachment(model, session)
    session.run.attach(made)
    made.make_with(make)
