"""What one fit records: its steps, its learning rates, and the changes of the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_nanguard._backends import current, processes
from keras_nanguard._core.incident import Outcome
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._fit.callbacks import OWN
from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._policy.actions import ACTIONS
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.state import BUDGET_WINDOW
from keras_nanguard._recording import database
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.records import COMMITTED


class FitRecording:
    """Records one fit.

    Args:
        recorder: stores it; a guard has one for all of its fits.
        counts: the counters of the fit.
        recovery: the changes of the policy in it.
        policy: the policy.
        optimizers: returns the optimizers, whose variables have or read as the current values.
    """

    def __init__(
        self,
        recorder: Recorder,
        counts: Counts,
        recovery: Recovery,
        policy: Policy,
        optimizers: Callable[[], Sequence[Any]],
    ):
        self.recorder, self._counts, self._recovery = recorder, counts, recovery
        self._policy, self._optimizers = policy, optimizers
        self._factor = 1.0  # the last recorded factor of the guard on learning rates
        self._norm = 0.0  # the last known mean gradient norm of an epoch

    def begin(self, model: Any, directory: str | None, resumed: int | None) -> None:
        """Begin the recording of a fit.

        Args:
            model: its model.
            directory: folder for files; `None` writes nothing.
            resumed: the step of the snapshot that it resumes from, if any.
        """
        writes = directory is not None and processes.index() == 0
        meta = {
            "model": str(getattr(model, "name", type(model).__name__)),
            "backend": current.name(),
            "versions": current.versions(),
            "policy": self._policy.to_toml(),
            "budgets": self._budgets(),
        }
        self.recorder.begin(
            meta,
            scaled=any(map(keras_optimizers.is_loss_scaled, self._optimizers())),
            path=Path(directory or "") / database.NAME if writes else None,
            resumed=resumed,
            epoch=self._counts.epoch,
        )
        self._factor = self._recovery.rate_factor

    def of_epoch(self) -> dict[str, float]:
        """Return the guard's own numbers of the current epoch, by their names in the logs."""
        counts = self._counts
        norm, scale = self.recorder.epoch_means(counts.epoch)
        self._norm = norm if math.isfinite(norm) else self._norm
        return {
            f"{OWN}grad_norm": self._norm,
            f"{OWN}rate_factor": self._recovery.rate_factor,
            f"{OWN}loss_scale": scale,
            f"{OWN}rollbacks": counts.rollbacks - counts.epoch_rollbacks,
        }

    def event(self, kind: str, text: str = "", data: Any = None, step: int | None = None) -> None:
        """Record an event at the current step, or at another one."""
        at = self._counts.step if step is None else step
        self.recorder.event(kind, at, self._counts.epoch, text, data)

    def step(self, verdict: Verdict, status: int = COMMITTED) -> None:
        """Record the current step, with its verdict."""
        measured = (verdict.loss, verdict.gradients, verdict.scale)
        self.recorder.push(self._counts.step, *measured, status)

    def rate(self, ahead: bool = False) -> None:
        """Record the learning rate of the first optimizer, for the last step or for the next one
        (`ahead`). A rate that is a custom function is not read.
        """
        for optimizer in filter(keras_optimizers.rate_is_pure, self._optimizers()[:1]):
            try:
                rate = keras_optimizers.learning_rate(optimizer)
            except Exception:  # noqa: BLE001  a custom schedule may raise outside of a step
                return
            plain = keras_optimizers.rate_variable(optimizer) is not None
            before = self.recorder.rate(rate, ahead or not plain)
            if not ahead and self._factor != self._recovery.rate_factor:
                self._record_factor()
            elif before is not None and plain and not ahead:
                data = {"before": before, "after": rate, "by": "callback"}
                self.event("learning_rate", f"{optimizer.name}: {before:.3g} -> {rate:.3g}", data)

    def actions(self, outcomes: tuple[Outcome, ...]) -> None:
        """Record the budgets after an incident, and a learning rate that its actions have
        changed.
        """
        self.recorder.note(budgets=self._budgets())
        lowered = [o.detail for o in outcomes if o.action == "lower_lr" and o.status == "done"]
        if self._recovery.rate_factor != self._factor or lowered:
            self._record_factor("; ".join(lowered))
            self.rate(ahead=True)

    def returned_rate(self) -> None:
        """Record that a lowered rate has returned, and at intervals the factor on its way there."""
        changed = self._recovery.rate_factor != self._factor
        if changed and (self._recovery.lowering.returns is None or self.recorder.wants_rate):
            self._record_factor()
            self.rate(ahead=True)

    def _record_factor(self, text: str = "") -> None:
        """Record the current factor of the guard on learning rates."""
        before, after = self._factor, self._recovery.rate_factor
        self._factor = after
        text = text or f"The learning rate is {after:.3g} times the configured rate."
        data = {"factor_before": before, "factor": after, "by": "guard"}
        self.event("learning_rate", text, data)

    def _budgets(self) -> list[dict[str, Any]]:
        """Return how often each change was made, and how often the policy allows it within a window
        of steps.
        """
        state, times = self._recovery.policy_state, self._policy.action_budget
        used = {name: state.times(name) for name in state.action_steps if name in ACTIONS}
        return [
            {"rule": name, "do": [name], "used": n, "times": times, "per_steps": BUDGET_WINDOW}
            for name, n in used.items()
        ]
