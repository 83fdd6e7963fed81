"""Measures each layer at intervals between two steps: norms of weights and gradients, update ratio,
statistics.

A measurement copies the weights, and the optimizer slots from which their gradients follow (see
`gradient_slots`). The next one, after the following execution, compares them. The compiled step is
not involved. The interval is chosen so that all measurements take only a small share of the
training time.
"""

from __future__ import annotations

import time
from math import inf
from typing import Any

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.history import sizes
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import FIRST_STEP, size_of
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.slot_gradients import GradientSlot, gradient_slots

__all__ = ["LayerLooks"]

SHARE = 0.005
"""Maximum share of the training time."""

MAX_COPIED = 256 << 20
"""Maximum bytes of copied weights and slots. For other weights only the norm is measured."""

COMPARING = 3
"""Memory of a comparison in multiples of the copies: a copy, the new value and their difference."""

MIN_STEPS = 50
"""Minimum number of steps between two measurements, except for the first."""

TOGETHER = 1000
"""Steps between two measurements if several processes train together: all of them have to read at
the same step.
"""


class LayerLooks:
    """The measurements of one fit.

    Attributes:
        next_step: the step from which the next measurement may begin.
    """

    def __init__(self) -> None:
        self.next_step: float = 1
        self._next_time, self._cost = 0.0, 0.0
        self._copies: dict[int, np.ndarray[Any, Any]] = {}
        self._slots: dict[int, tuple[GradientSlot, np.ndarray[Any, Any]]] = {}
        self._updates: dict[int, int] = {}
        self._at: tuple[int, int, int] = (0, 0, 0)
        self._half = False  # whether copied weights are still to be compared

    def look(self, run: Run) -> float:
        """Copy the weights, or compare them with the copies.

        Returns:
            The step at which to compare them, infinity if a measurement is complete, or would take
            too large a share of the time.
        """
        began, alone = time.monotonic(), processes.count() == 1
        if alone and not self._half and began < self._next_time:
            return inf
        try:
            with run.access.variables_readable():
                self._compare(run) if self._half else self._copy(run)
        except Exception:  # noqa: BLE001  a variable of a kind that cannot be read ends the looks; training needs none
            self._copies, self._slots, self.next_step = {}, {}, inf
            return inf
        self._cost += time.monotonic() - began
        if self._half:
            return run.step + 1
        self._copies, self._slots = {}, {}
        self._next_time, self._cost = time.monotonic() + self._cost / SHARE, 0.0
        self.next_step = run.step + (MIN_STEPS if alone else TOGETHER)
        return inf

    def release(self) -> None:
        """Release the copies of a measurement that is not complete."""
        self._copies, self._slots, self._updates, self._half = {}, {}, {}, False

    def _copy(self, run: Run) -> None:
        train_state = run.train_state()
        most = min(MAX_COPIED, 2 * train_state.gradient_bytes)
        left = most if run.agreement.fits(self._fits(run, most)) else 0
        slots = gradient_slots(train_state.optimizers)
        for variable in sorted(train_state.trainable, key=lambda v: int(np.prod(v.shape))):
            value, slot = keras_variables.view(variable), slots.get(id(variable))
            left -= 2 * value.nbytes
            if left < 0:
                break
            copied = self._copies[id(variable)] = np.array(value)
            if slot is not None:
                same = slot.variable is variable
                own = copied if same else keras_variables.read(slot.variable)
                self._slots[id(variable)] = slot, own
        self._updates = self._counted()
        self._at = run.counts.step, run.counts.committed, run.counts.rollbacks
        self._half = True

    def _fits(self, run: Run, size: int) -> bool:
        """Whether copies, the memory to compare them and, before the peak is known, a step fit into
        memory.
        """
        needed = COMPARING * size
        if run.step < MIN_STEPS and needed > memory.SMALL:
            needed += FIRST_STEP * size_of(run.train_state().restorable)
        return memory.room_for(needed)

    @np.errstate(all="ignore")  # the values may not be finite
    def _compare(self, run: Run) -> None:
        self._half = False
        step, committed, rollbacks = self._at
        steps = run.counts.step - step
        undisturbed = run.counts.committed - committed == steps
        if steps < 1 or not undisturbed or run.counts.rollbacks != rollbacks:
            return  # a step in between was refused or undone
        counted = self._counted()
        once = {
            counter for counter, count in counted.items() if count == self._updates[counter] + 1
        }
        variables, values = [], []
        for variable in run.train_state().trainable:
            value, before = keras_variables.view(variable), self._copies.get(id(variable))
            norm, moved = sizes(value)[0], np.nan
            if before is not None:
                moved = sizes(finiteness.widen(value) - finiteness.widen(before))[0] / steps
            variables.append((str(getattr(variable, "path", "")), "trainable"))
            gradient = self._gradient_norm(variable, once)
            values.append((gradient, norm, moved / norm if norm else np.nan))
        for layer in keras_layers.batchnorms(run.model):
            for variable in (layer.moving_mean, layer.moving_variance) if layer.built else ():
                value = finiteness.widen(keras_variables.view(variable))
                variables.append((str(variable.path), "statistics"))
                values.append((float(value.min()), float(value.max()), np.nan))
        run.recorder.layers(run.step - 1, tuple(variables), np.array(values).reshape(-1, 3))

    def _counted(self) -> dict[int, int]:
        """Return the counts of updates of the copied slots, by `id` of the counter."""
        counters = {id(slot.updates): slot.updates for slot, _ in self._slots.values()}
        return {number: int(keras_variables.read(v)) for number, v in counters.items()}

    def _gradient_norm(self, variable: Any, once: set[int]) -> float:
        """Return the norm of the gradient that follows from the slots of a weight, NaN if it is
        unknown: `once` has the counters of those that were updated exactly once since the copy.
        """
        slot, before = self._slots.get(id(variable), (None, None))
        if slot is None or before is None or id(slot.updates) not in once:
            return np.nan
        return float(slot.norm(before, keras_variables.view(slot.variable)))
