"""Running steps again that a rollback has undone.

A step of which the batch is remembered can be run again from a snapshot: the same compiled step, the same batch, the same seeds, and so
the same numbers, unless something was changed in between, as the learning rate. So a rollback loses no step, and a run whose rate was too
high goes on as if it had begun with a lower one.
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
    """A run that can run steps again. What follows a step, and what is due between two, is filled in by the session."""

    def run_again(self) -> None:
        """Run the steps again that a rollback has undone, each with all that follows a step; another rollback may come of it.

        Afterwards the run stands where it stood before.
        """
        if self.rerun is None or self.running_again:
            return
        access, step, metrics, stopped = self.state.access, self.counts.step, list[tuple[Any, Any]](), self.stopped
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
        """Do what follows a step."""
        raise NotImplementedError

    def _return_to(self, plan: Rerun) -> None:
        """Count from a snapshot on again."""
        step, good = plan.snapshot.step, plan.snapshot.good
        self.counts.return_to(step, good, plan.refused)
        self.recovery.pending.return_to(step, good)
        self.recovery.policy_state = self.recovery.policy_state.rewound()

    def _metrics_from(self, plan: Rerun) -> list[tuple[Any, Any]]:
        """Let the metrics hold what they held at a snapshot; where that is not known, return what to write back afterwards."""
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
        """Let the metrics begin anew, as where an epoch begins; a module of torch has none."""
        if hasattr(self.model, "reset_metrics"):
            self.state.access.sync_variables()
            self.model.reset_metrics()
