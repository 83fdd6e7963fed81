"""Replays the steps that a rollback has undone.

If the batch of a step is remembered, the step can run again from a snapshot with the same compiled
function, batch and seeds. It gives the same numbers unless something was changed in between, such
as the learning rate. So a rollback loses no steps.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from keras_nanguard._fit import schedule_poles
from keras_nanguard._fit.recent_batches import Rerun
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import variables as keras_variables

__all__ = ["RunsAgain"]


class RunsAgain(Run):
    """A run that can replay steps. The session implements the handling after and between steps."""

    def run_again(self) -> None:
        """Replay the undone steps, with all handling after each step. This may lead to another
        rollback.

        Afterwards the counters are the same as before.
        """
        if self.rerun is None or self.running_again:
            return
        access, step, metrics, stopped = (
            self.state.access,
            self.counts.step,
            list[tuple[Any, Any]](),
            self.stopped,
        )
        self.running_again, self.reruns = True, 0
        try:
            batches: deque[Any] = deque()
            while batches or self.rerun is not None:
                if self.rerun is not None:
                    plan, self.rerun = self.rerun, None
                    self.reruns += 1
                    metrics = self._metrics_from(plan)
                    self._return_to(plan)
                    batches.extendleft(reversed(plan.batches))
                    continue
                args = batches.popleft()
                if self.counts.step == self.counts.epoch_start and not metrics:
                    self._begin_metrics()
                schedule_poles.pass_over(self)
                if args is None:
                    self.recent.push_refused(self.counts.step, None)
                    self.counts.step += 1
                else:
                    self.after(access.run_again(args))
                    if self.stopped and not stopped and self.rerun is None:
                        break  # in the state that the policy has restored
        finally:
            self.running_again, self.counts.step = False, step
        access.sync_variables()
        for variable, value in metrics:
            keras_variables.write(variable, value)

    def after(self, verdict: Any) -> Any:
        """Handle the result of a step."""
        raise NotImplementedError

    def _return_to(self, plan: Rerun) -> None:
        """Continue counting from a snapshot."""
        step, good = plan.snapshot.step, plan.snapshot.good
        self.counts.return_to(step, good, plan.refused)
        self.recovery.pending.return_to(step, good)
        self.recovery.policy_state = self.recovery.policy_state.rewound()

    def _metrics_from(self, plan: Rerun) -> list[tuple[Any, Any]]:
        """Restore the metrics of a snapshot. If they are unknown, return the values to write back
        afterwards.
        """
        metrics = self.train_state().metrics
        if plan.snapshot.step <= self.counts.epoch_start and hasattr(self.model, "reset_metrics"):
            self._begin_metrics()
            return []
        if all(id(variable) in plan.snapshot.metrics for variable in metrics):
            for variable in metrics:
                keras_variables.write(variable, plan.snapshot.metrics[id(variable)])
            return []
        return [(variable, keras_variables.read(variable)) for variable in metrics]

    def _begin_metrics(self) -> None:
        """Reset the metrics, as at the start of an epoch. A torch module has none."""
        if hasattr(self.model, "reset_metrics"):
            self.state.access.sync_variables()
            self.model.reset_metrics()
