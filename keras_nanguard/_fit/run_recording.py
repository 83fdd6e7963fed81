"""What is recorded of a run besides its steps: its description, events, learning rates, budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_nanguard._backends import current
from keras_nanguard._core.incident import Outcome
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._fit.steps import Counts
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.state import BUDGET_WINDOW
from keras_nanguard._recording.database import COMMITTED, NAME
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import EventKind


class RunRecording:
    """Records the events of one run.

    Args:
        recorder: stores them.
        counts: the counters of the run.
        recovery: the changes of the policy.
        policy: the policy.
        train_state: returns the train state, whose variables have the current values.
    """

    def __init__(
        self,
        recorder: Recorder,
        counts: Counts,
        recovery: Recovery,
        policy: Policy,
        train_state: Callable[[], TrainState],
    ):
        self._recorder, self._counts, self._recovery = recorder, counts, recovery
        self._policy, self._train_state = policy, train_state
        self._factor = 1.0  # the last recorded factor of the guard on learning rates

    def begin(self, model: Any, directory: str | None, resumed: int | None) -> None:
        """Begin the recording of the fit.

        Args:
            model: the model.
            directory: the folder that this process writes to; `None` writes nothing.
            resumed: the step of the snapshot from which the fit resumes, if any.
        """
        meta = {
            "model": str(getattr(model, "name", type(model).__name__)),
            "backend": current.name(),
            "versions": current.versions(),
            "policy": self._policy.to_toml(),
            "budgets": self._budgets(),
        }
        self._recorder.begin(
            meta,
            scaled=any(map(keras_optimizers.is_loss_scaled, self._train_state().optimizers)),
            path=None if directory is None else Path(directory) / NAME,
            resumed=resumed,
            epoch=self._counts.epoch,
        )
        self._factor = self._recovery.rate_factor

    def step(self, verdict: Verdict, status: int = COMMITTED) -> None:
        """Record the current step, with its verdict."""
        measured = (verdict.loss, verdict.gradients, verdict.scale)
        self._recorder.push(self._counts.step, *measured, status)

    def event(self, kind: EventKind, text: str = "", data: Any = None) -> None:
        """Record an event at the current step."""
        self._recorder.event(kind, self._counts.step, self._counts.epoch, text, data)

    def actions(self, outcomes: Sequence[Outcome]) -> None:
        """Record the budgets after an incident, and a learning rate that it has changed."""
        self._recorder.note(budgets=self._budgets())
        lowered = [o.detail for o in outcomes if o.action == "lower_lr" and o.status == "done"]
        self.factor("; ".join(lowered))

    # Learning rates

    def rate(self, ahead: bool = False) -> None:
        """Record the learning rate of the first optimizer, for the last step or for the next one
        (`ahead`). A rate that is a custom function is not read.
        """
        for optimizer in filter(keras_optimizers.rate_is_pure, self._train_state().optimizers[:1]):
            rate = keras_optimizers.rate_if_known(keras_optimizers.learning_rate, optimizer)
            if rate is None:
                return
            plain = keras_optimizers.rate_variable(optimizer) is not None
            before = self._recorder.rate(rate, ahead or not plain)
            if ahead:
                return
            if self._factor != self._recovery.rate_factor:
                self._record_factor()
            elif before is not None and plain:
                data = {"before": before, "after": rate, "by": "callback"}
                self.event("learning_rate", f"{optimizer.name}: {before:.3g} -> {rate:.3g}", data)

    def factor(self, change: str = "") -> None:
        """Record the factor of the guard on learning rates if it has changed, as by a `change`."""
        if change or self._factor != self._recovery.rate_factor:
            self._record_factor(change)
            self.rate(ahead=True)

    def _record_factor(self, text: str = "") -> None:
        before, after = self._factor, self._recovery.rate_factor
        self._factor = after
        text = text or f"The learning rate is {after:.3g} times the configured rate."
        data = {"factor_before": before, "factor": after, "by": "guard"}
        self.event("learning_rate", text, data)

    def _budgets(self) -> list[dict[str, Any]]:
        """Return how often each change was made, and how often it may be within a window."""
        state, times = self._recovery.policy_state, self._policy.action_budget
        table = {"times": times, "per_steps": BUDGET_WINDOW}
        return [
            {"rule": name, "do": [name], "used": state.times(name), **table}
            for name in state.action_steps
        ]
