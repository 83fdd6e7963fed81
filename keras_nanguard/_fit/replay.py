"""Replays the steps that a rollback has undone.

If the batch of a step is remembered, the step can run again from a snapshot with the same compiled
function, batch and seeds. It gives the same numbers unless something was changed in between, such
as the learning rate. So a rollback loses no steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from keras_nanguard._core.verdict import Verdict
from keras_nanguard._fit.poles import Poles
from keras_nanguard._fit.recent_batches import Rerun
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import variables as keras_variables


class Replay:
    """The replays of one run.

    Args:
        run: the run.
        poles: iterations that are passed over.
        after: handles the verdict of a replayed step. This may lead to another rollback, whose
            steps are then replayed first.

    Attributes:
        rollbacks: number of rollbacks since the first of these replays began; 0 outside.
        pending: the steps since the last rollback, until their replay begins.
    """

    def __init__(self, run: Run, poles: Poles, after: Callable[[Verdict], object]):
        self._run, self._poles, self._after = run, poles, after
        self._batches: deque[Any] = deque()
        self._metrics: list[tuple[Any, Any]] = []
        self.rollbacks = 0
        self.pending: Rerun | None = None

    def run(self, rerun: Rerun) -> None:
        """Replay the undone steps, with all handling after each. Afterwards the counters are the
        same as before.
        """
        run, step, stopped = self._run, self._run.step, self._run.stopped
        self.pending = rerun
        try:
            while self._batches or self.pending is not None:
                if self.pending is not None:
                    self._go_back()
                    continue
                self._step(self._batches.popleft())
                if run.stopped and not stopped and self.pending is None:
                    break  # in the state that the policy has restored
        finally:
            self.rollbacks, self.pending, run.counts.step = 0, None, step
            self._batches.clear()
        run.access.sync_variables()
        for variable, value in self._metrics:
            keras_variables.write(variable, value)

    def _go_back(self) -> None:
        """Continue with the pending steps, from their snapshot."""
        run, rerun, self.pending = self._run, self.pending, None
        assert rerun is not None
        self.rollbacks += 1
        self._metrics = self._metrics_from(rerun)
        at, every = rerun.snapshot.step, run.policy.snapshot.every
        run.counts.return_to(at, rerun.snapshot.good, rerun.refused)
        run.recovery.return_to(at, run.counts.committed)
        for task in ("checks", "proof"):  # they are due again
            run.plan(task, at + 1)
        run.plan("snapshot", at + every if every else math.inf)
        self._batches.extendleft(reversed(rerun.batches))

    def _step(self, args: Any) -> None:
        """Replay one step; without arguments it is passed over."""
        run = self._run
        if run.step == run.counts.epoch_start and not self._metrics:
            self._begin_metrics()
        self._poles.pass_over()
        if args is not None:
            self._after(run.access.run_again(args))
        else:
            run.recent.push(run.step, None, refused=True)
            run.counts.step += 1

    def _metrics_from(self, rerun: Rerun) -> list[tuple[Any, Any]]:
        """Restore the metrics of a snapshot. If they are unknown, return the values to write back
        afterwards.
        """
        run, known = self._run, rerun.snapshot.metrics
        metrics = run.train_state().metrics
        if rerun.snapshot.step <= run.counts.epoch_start and hasattr(run.model, "reset_metrics"):
            self._begin_metrics()
            return []
        if not all(id(variable) in known for variable in metrics):
            return [(variable, keras_variables.read(variable)) for variable in metrics]
        for variable in metrics:
            keras_variables.write(variable, known[id(variable)])
        return []

    def _begin_metrics(self) -> None:
        """Reset the metrics, as at the start of an epoch. A torch module has none."""
        if hasattr(self._run.model, "reset_metrics"):
            self._run.access.sync_variables()
            self._run.model.reset_metrics()
