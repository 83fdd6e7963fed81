"""Running steps again that a rollback has undone, and trying another learning rate on them.

A step of which the batch is remembered can be run again from a snapshot: the same compiled step, the same batch, the same seeds, and so
the same numbers, unless something was changed in between, as the learning rate. So a rollback loses no step, and a run whose rate was too
high goes on as if it had begun with a lower one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Set
from contextlib import ExitStack
from math import nan
from typing import Any

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import memory
from keras_nanguard._fit.learning_rates import Rate
from keras_nanguard._fit.recent_batches import Rerun
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot, size_of
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._policy.progress import Level, level_of
from keras_nanguard._recording.records import REFUSED

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
            left_out: frozenset[int] = frozenset()
            while batches or self.rerun is not None:
                if self.rerun is not None:
                    plan, self.rerun = self.rerun, None
                    self.reruns += 1
                    metrics = self._metrics_from(plan)
                    self._return_to(plan)
                    batches.extendleft(reversed(plan.batches))
                    left_out = plan.left_out
                    continue
                args = batches.popleft()
                if self.counts.step == self.counts.epoch_start and not metrics:
                    self._begin_metrics()
                self._bound_rates()
                if args is None:
                    self.recent.push_refused(self.counts.step, None)
                    if self.counts.step in left_out:
                        self.recorder.push(self.counts.step, nan, nan, nan, REFUSED)
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

    def _bound_rates(self) -> None:
        """Keep the rate of a schedule below its limit, as before each step."""
        if self.recovery.bounded:
            self.state.access.sync_variables()
            self.recovery.before()

    def after(self, verdict: Any) -> Any:
        """Do what follows a step."""
        raise NotImplementedError

    def _return_to(self, plan: Rerun) -> None:
        """Count from a snapshot on again."""
        step, good = plan.snapshot.step, plan.snapshot.good
        self.counts.return_to(step, good, plan.refused, plan.left_out)
        self.recovery.pending.return_to(step, good)
        self.recovery.ledger = self.recovery.ledger.rewound()

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

    def try_again(self, snapshot: Snapshot, factor: float = 1.0, without: Set[int] = frozenset()) -> Level | None:
        """Return the level of the loss that the steps since a snapshot end at in another way, and change nothing.

        Args:
            snapshot: the state to run them from.
            factor: multiplies the learning rate.
            without: the steps that are left out.

        `None` where they cannot be run again, where the rate is not a number, where there is no room for a copy of the state that undoes
        all of it, or where one of the steps is not finite.
        """
        access, train_state = self.state.access, self.train_state()
        plan = self.recent.rerun(snapshot, self.step - 1, self.transaction.batch, without) if access.can_run_again else None
        rates = list(self.recovery.rates.values())
        if factor != 1.0:
            rates = [self.recovery.rates.get(id(o)) or Rate(o) for o in train_state.optimizers]
        able = factor == 1.0 or all(rate.adjustable for rate in rates)
        if plan is None or not self.policy.refuse or not able or not self._room_to_undo() or not self.ring.at_hand(snapshot):
            return None
        with ExitStack() as ending:
            for restore in (access.held(), *_generators(), *(o.held() for o in train_state.optimizers if hasattr(o, "held"))):
                ending.callback(restore)
            past_keras = (*train_state.unlisted, *self.transaction.untracked.values())
            for variable in keras_variables.unique([*train_state.everything, *train_state.metrics, *past_keras]):
                ending.callback(keras_variables.restorer(variable))
            snapshot.write(train_state.kept)
            snapshot.draw_again()
            for rate in rates:
                if rate.adjustable:
                    ending.enter_context(rate.tried(factor))
            verdicts = []
            for step, args in enumerate(plan.batches, snapshot.step):
                if args is not None:
                    self._bound_rates()
                    verdicts.append((step, access.run_again(args)))
            self.transaction.report_queue.take()
            access.sync_variables()
        committed = [(step, verdict.loss) for step, verdict in verdicts if not verdict.refused]
        return level_of(committed) if all(verdict.finite for _, verdict in verdicts if not verdict.refused) else None

    def _room_to_undo(self) -> bool:
        """Whether there is room for a copy of the state, which a trial gives back; a line says once where there is none."""
        size = size_of(v for v in [*self.train_state().everything, *self.train_state().metrics] if keras_variables.on_host(v))
        if memory.room_for(size):
            return True
        if "trials" not in self.short_of_memory:
            self.short_of_memory.add("trials")
            self.say(f"NanGuard: no other learning rate is tried: that takes {memory.readable(size)} of memory, which are not free.")
        return False


def _generators() -> list[Callable[[], Any]]:
    """Return what puts the generators of the process back, from which a step of the user's own may draw."""
    drawn, ours, numpys = current.host().generator_state(), random.getstate(), np.random.get_state()
    restores: list[Callable[[], Any]] = [lambda: random.setstate(ours), lambda: np.random.set_state(numpys)]
    return restores if drawn is None else [*restores, lambda: current.host().set_generator_state(drawn)]
