"""Finite trouble that no single step shows: looked for now and then between two steps, on the host.

A look reads a few small variables. Weights are read only where the loss has jumped before, to see whether they still
move. Every test here is one that a healthy run cannot meet, whatever its noise: values that stay *bit for bit* where
they are although they have to move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.history import JUMP, RISE
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.divergence import Divergence
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.sightings import HUGE, out_of_range
from keras_nanguard._keras import layers as keras_layers, optimizers as keras_optimizers, variables as keras_variables

__all__ = ["Monitors"]

LOOKS = (1, 10, 20, 30, 45, 60, 80, 100)
"""Steps of the first looks after the start, and after a rollback; then one every `LOOK_INTERVAL` steps."""

LOOK_INTERVAL = 50

MIN_COMMITTED = 50
"""Good steps after which statistics that stand where they were initialised never move at all."""

LEAP = 1e3
"""Factor between two looks by which a settled moving variance has been ruined."""

SETTLED = 10
"""Good steps after which a moving variance is no more than a factor of 20 below its place, at the usual momentum."""

ZEROS = 30
"""Steps in a row without any gradient, although there is a loss, after which nothing is learned."""


class Monitors:
    """What is looked at between two steps of one fit.

    Args:
        checks: the `checks` section of the policy.

    Attributes:
        due: step of the next look.
        statistics: the sum over the moving statistics that the last step measured (see `Verdict`).
        weights: the sum over weights and slots that it measured.
        ceiling: a sum of statistics from which the next look does not wait.
        summit: the same for weights and slots.
    """

    def __init__(self, checks: Any):
        self.checks = checks
        self.due: float = LOOKS[0]
        self.statistics, self.ceiling = 0.0, HUGE
        self.weights, self.summit = 0.0, HUGE
        self._reported: set[str] = set()
        self._weights: Mapping[int, np.ndarray[Any, Any]] = {}  # fingerprints of kernels
        self._weights_of = self._still = 0
        self._variances: dict[int, float] = {}
        self._rollbacks = self._since = 0
        self._divergence = Divergence(checks.divergence)

    @np.errstate(all="ignore")  # what is looked at is not finite
    def look(self, run: Run) -> list[Finding]:
        """Return what is wrong with the state between two steps, each trouble once."""
        step = run.step
        self.ceiling = max(abs(self.statistics), 1.0 if run.counts.committed >= SETTLED else HUGE / LEAP) * LEAP
        self.summit = max(abs(self.weights), HUGE / LEAP) * LEAP
        if run.counts.rollbacks != self._rollbacks:
            self._rollbacks, self._weights, self._variances = run.counts.rollbacks, {}, {}
            self._since = run.progress.since
            self._reported.clear()
            self._divergence.start_over()
        self.due = next((self._since + at for at in LOOKS if self._since + at > step), step + LOOK_INTERVAL)
        found = self._divergence.look(run)
        if found:
            return found
        watches = {"range": self._range, "dead": self._dead, "zero": self._zero, "stuck": self._stuck, "leap": self._leap}
        watches["scale"] = self._scale
        for name, watch in watches.items():
            findings = list(watch(run))
            if findings and name not in self._reported:
                self._reported.add(name)
                found += findings
        return found

    def measured(self, statistics: float, weights: float) -> bool:
        """Note what the last step has measured; returns whether the next look does not wait. This runs in every step."""
        self.statistics, self.weights = statistics, weights
        return abs(statistics) > self.ceiling or abs(weights) > self.summit

    @property
    def doubtful(self) -> bool:
        """Whether the state may be doomed, although every number of it is finite."""
        return self._divergence.doubtful

    def explained(self, run: Run, findings: Sequence[Finding], loss: float) -> Sequence[Finding]:
        """Return the findings of a step of this loss, where numbers have exploded with what explains that."""
        exploded = any(f.kind in ("explosion", "nonfinite") for f in findings)
        of_data = any(f.site in ("inputs", "targets", "state") for f in findings)
        return self._divergence.explained(run, findings, loss) if exploded and not of_data else findings

    def tried(self, run: Run) -> list[Finding]:
        """Return what a trial shows that the last look has asked for; the variables hold the state."""
        return self._divergence.tried(run)

    def _dead(self, run: Run) -> Iterator[Finding]:
        """Kernels that stand still after the loss has jumped: every unit above them is dead."""
        rise = run.history.jump(run.step)[0] if self.checks.gradients.enabled else 1.0
        if rise < RISE:
            self._weights, self._still = {}, 0
            return
        train_state = run.train_state()
        before, since = self._weights, self._weights_of
        kernels = [v for v in train_state.trainable if len(v.shape) > 1]
        self._weights, self._weights_of = {id(v): finiteness.fingerprint(keras_variables.view(v)) for v in kernels}, run.counts.committed
        compared = [v for v in kernels if id(v) in before]
        few = run.counts.committed - since < 5 * _accumulated(train_state.optimizers)
        if few or len(compared) < 2 or not _learns(train_state.optimizers):
            return
        frozen = [v for v in compared if np.array_equal(before[id(v)], self._weights[id(v)])]
        if len(frozen) <= len(compared) / 2 or not run.history.moving(run.step):
            self._still = 0
            return
        self._still += 1
        alive = _have_moved(frozen, run.ring.oldest())
        if (rise >= JUMP and alive is not False) or (self._still > 1 and alive):
            yield from (Finding("gradients", "stuck", v.path, 0, 0, int(np.prod(v.shape)), 0.0) for v in frozen)

    def _range(self, run: Run) -> Iterator[Finding]:
        """Numbers that no update of a run that learns has made: read where a sum over them shows that there are some."""
        if max(abs(self.statistics), abs(self.weights)) > HUGE:
            found = out_of_range(run.train_state(), run.policy)
            yield from (f for f in found if f.site != "statistics" or self.checks.statistics.enabled)

    def _zero(self, run: Run) -> Iterator[Finding]:
        """Gradients that are exactly zero, step after step, in a model that computes in float16."""
        if not self.checks.gradients.enabled or not run.history.zeros(run.step, ZEROS):
            return
        if any(str(getattr(layer, "compute_dtype", "")) == "float16" for layer in keras_layers.layers_of(run.model)):
            yield Finding("gradients", "stuck", "", 0, 0, None, 0.0)

    def _stuck(self, run: Run) -> Iterator[Finding]:
        """BatchNorm statistics that stand where they were initialised, although the layer learns."""
        patience = self.checks.statistics.stuck_after
        if not self.checks.statistics.enabled or not patience or run.counts.committed < min(MIN_COMMITTED, patience):
            return
        first = run.ring.oldest()
        for layer in _learning(run.model):
            if first is not None and _never_moved(layer, first):
                path = layer.moving_mean.path
                yield Finding("statistics", "stuck", path, 0, 0, int(layer.moving_mean.shape[0]), 0.0)

    def _leap(self, run: Run) -> Iterator[Finding]:
        """A settled moving variance that has grown by orders of magnitude since the last look."""
        if not self.checks.statistics.enabled:
            return
        for layer in _learning(run.model):
            now = float(np.max(finiteness.widen(keras_variables.view(layer.moving_variance)), initial=0.0))
            before = self._variances.get(id(layer))
            if run.counts.committed >= SETTLED and math.isfinite(now):
                self._variances[id(layer)] = now
            if before is not None and now > LEAP * max(before, 1e-3):
                yield Finding("statistics", "spike", layer.moving_variance.path, value=now)

    def _scale(self, run: Run) -> Iterator[Finding]:
        """A loss scale outside of its range."""
        check = self.checks.loss_scale
        for scale, _ in run.train_state().scales if check.enabled else ():
            value = float(keras_variables.read(scale))
            if value < check.min_value:
                yield Finding("loss_scale", "collapse", str(scale.path), value=value)
            elif value > check.max_value:
                yield Finding("loss_scale", "out_of_range", str(scale.path), value=value)


def _learning(model: Any) -> list[Any]:
    """Return the BatchNorm layers whose statistics move."""
    return [layer for layer in keras_layers.batchnorms(model) if layer.built and layer.trainable]


def _have_moved(kernels: Sequence[Any], then: Any) -> bool | None:
    """Whether most of these kernels have moved since a snapshot; `None` where nobody knows.

    Under a rate that is too low, or behind vanishing gradients, most updates round to nothing from the first step on.
    """
    before = [(then.value(v), v) for v in kernels] if then is not None else []
    moved = [not np.array_equal(value, keras_variables.view(v)) for value, v in before if value is not None]
    return 2 * sum(moved) > len(moved) if moved else None


def _learns(optimizers: Any) -> bool:
    """Whether the learning rates are so high that an update of their size can move a weight of float32."""
    return all(keras_optimizers.learning_rate(o) > 1e-8 for o in optimizers)


def _accumulated(optimizers: Any) -> int:
    """Return over how many steps gradients are accumulated for one update."""
    return max((getattr(keras_optimizers.inner(o), "gradient_accumulation_steps", None) or 1 for o in optimizers), default=1)


def _never_moved(layer: Any, first: Any) -> bool:
    """Whether the statistics hold 0 and 1 as at the start, while gamma or beta have moved."""
    mean, variance = keras_variables.view(layer.moving_mean), keras_variables.view(layer.moving_variance)
    if np.any(mean != 0) or np.any(variance != 1):
        return False
    for variable in (layer.gamma, layer.beta):
        start = first.value(variable) if variable is not None else None
        if start is not None and not np.array_equal(start, keras_variables.view(variable)):
            return True
    return False
