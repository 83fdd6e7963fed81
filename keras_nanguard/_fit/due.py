"""When the tasks between two steps are due."""

from __future__ import annotations

from math import inf
from typing import Literal

Task = Literal["changes", "rate", "checks", "divergence", "verify_snapshots", "snapshot"]
"""The tasks between two steps, in their order; `tasks.TASKS` has the function of each."""


class Due:
    """The step at which each task is due.

    Attributes:
        next: the earliest of these, infinity if none is due.
    """

    def __init__(self) -> None:
        self._steps: dict[Task, float] = {}
        self.next = inf

    def plan(self, task: Task, step: float) -> None:
        """Set the step at which a task is due, infinity for never."""
        self._steps[task] = step
        self.next = min(self._steps.values())

    def step_of(self, task: Task) -> float:
        """Return the step at which a task is due."""
        return self._steps.get(task, inf)
