"""A fault of any site and kind, in any mode and precision, is found in the step in which it occurs.

All faults of one mode and precision are in one run, far enough apart that the policy of this file,
which restores a bad state at once, has repaired each before the next.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard.testing import SITES, corrupt, inject

SPACE = 8
WARMUP = 32
NONFINITE = ("nan", "inf", "-inf")

BACK = {"rollback": {"further_back": False, "replay_steps": False}}
POLICY = {
    "escalation": ["skip"],
    "action_budget": 200,
    "snapshot": {"every": 4, "verify_after": 2},
    "loss_scale": {"streak": 0, "action": {"fix_loss_scale": {"reset_to": 64.0}}},
    "rules": [
        {"name": "heal", "site": ["state", "weights", "statistics", "slots"], "do": BACK},
    ],
}
"""Restores at once, so one fault is repaired before the next; an overflow is an incident."""


class Case(NamedTuple):
    site: str
    kind: str
    step: int


def _plan(precision: str) -> list[Case]:
    pairs = [(site, kind) for site in SITES for kind in NONFINITE]
    # A loss or a gradient at the end of its range is finite, and its step commits if the update is.
    pairs += [(site, "overflow") for site in ("inputs", "targets", "weights", "statistics")]
    if precision == "mixed_float16":
        pairs += [("loss_scale", kind) for kind in ("overflow", "zero")]
    else:
        pairs = [pair for pair in pairs if pair[0] != "loss_scale"]
    return [Case(site, kind, WARMUP + SPACE * i + 2) for i, (site, kind) in enumerate(pairs)]


def _level(mode: str, precision: str, batches: int) -> tuple[keras.Model, zoo.Data]:
    """Return a model, and the same four batches repeated, so that the loss is level."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(precision)
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    if precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    model = zoo.plain(optimizer, dropout=False, **zoo.MODES[mode])
    keras.config.set_dtype_policy("float32")
    data = zoo.regression(batches=batches)
    data.x = np.tile(data.x[: 4 * zoo.BATCH], (data.batches // 4, 1))
    data.y = np.tile(data.y[: 4 * zoo.BATCH], (len(data.x) // zoo.BATCH // 4, 1))
    return model, data


FIRST = {
    "weights": ("state", "weights"),
    "statistics": ("state", "statistics"),
    "slots": ("state", "slots", "weights"),
}
"""The names in the incident of a fault of the state that is not finite, or was before the step."""


NORMAL = {("steps4", "mixed_float16")}
if zoo.BACKEND != "tensorflow":  # for which backends/test_faults.py has the faults one by one
    NORMAL |= {("graph", "float32")}
RUNS = [
    pytest.param(mode, precision, marks=() if (mode, precision) in NORMAL else pytest.mark.slow)
    for mode in zoo.MODES
    for precision in ("float32", "mixed_float16")
]


@pytest.mark.parametrize(("mode", "precision"), RUNS)
def test_found_where_it_happened(mode, precision):
    """A fault at any site is an incident of its step that names the site, and nothing else is one.

    Finite statistics are read between executions: their incident is one of a step of that
    execution. After all of these faults the state is good, and training has not ended.
    """
    plan = _plan(precision)
    model, data = _level(mode, precision, WARMUP + SPACE * len(plan))
    guard, first = NanGuard(POLICY, verbose=0, diagnose=False), {}
    with contextlib.ExitStack() as stack:
        for site, kind, step in plan:
            fault = inject(model, site=site, kind=kind, step=step, require_fired=False)
            stack.enter_context(fault)
        zoo.fit(model, data, guard)
    for incident in guard.incidents:
        first.setdefault(incident.step, incident)
    execution = 4 if mode == "steps4" else 1
    near = {case.step + i for case in plan for i in range(execution)}
    assert [(i.step, i.findings) for i in guard.incidents if i.step not in near] == []
    for case in plan:
        late = (case.site, case.kind) == ("statistics", "overflow")
        steps = range(case.step, case.step + (execution if late else 1))
        assert not first.keys().isdisjoint(steps), case
        if case.kind in NONFINITE:
            assert set(first[case.step].sites) & set(FIRST.get(case.site, (case.site,))), case
    assert zoo.bad_entries(model) == [] and not guard.session.run.stopped


def test_overflow_of_a_slot():
    """The weights become finite and huge: reported in the next step, and restored."""
    model, data, guard = *_level("graph", "float32", 24), NanGuard(verbose=0, diagnose=False)
    with inject(model, site="slots", kind="overflow", step=14):
        zoo.fit(model, data, guard)
    assert guard.incidents[0].step in (14, 15)
    assert max(np.abs(weight).max() for weight in model.get_weights()) < 1e3


class TestOutsideWrites:
    """Faults written by the host between two steps."""

    @pytest.mark.daily("nan")
    @pytest.mark.parametrize("kind", ["nan", "inf"])
    def test_detected_and_restored(self, kind):
        """What another callback makes bad is reported in the next step."""
        model, data = zoo.plain(dropout=False, metrics=()), zoo.regression()
        for what in ("kernel", "gamma", "moving_mean", "moving_variance", "momentum", "velocity"):

            def spoil(model, what=what):
                known = [*model.variables, *model.optimizer.variables]
                corrupt(next(v for v in known if v.path.endswith(what)), kind)

            guard = NanGuard(verbose=0, diagnose=False)
            how = {"batch_size": zoo.BATCH, "shuffle": False, "verbose": 0}
            model.fit(*data.all, **how, callbacks=[guard, zoo.After(spoil, 5)])
            assert guard.incidents[0].step == 6, what
            assert zoo.bad_entries(model) == [], what

    def test_an_infinite_second_moment_of_a_large_network(self):
        """Found in the next step, also if PyTorch does not count the write."""
        model, data = keras.Sequential([keras.Input((6,)), keras.layers.Dense(200_000), keras.layers.Dense(1)]), zoo.regression()
        model.compile("adam", "mse")

        def spoil(model):
            velocity = next(v for v in model.optimizer.variables if "dense" in v.path and v.path.endswith("kernel_velocity"))
            if keras.backend.backend() == "torch":
                velocity.value.detach().numpy()[0, 0] = np.inf
            else:
                corrupt(velocity, "inf")

        guard = NanGuard(verbose=0, diagnose=False)
        zoo.fit(model, data, guard, zoo.After(spoil, 5))
        assert guard.incidents[0].step == 6 and zoo.bad_entries(model) == []

    def test_huge_behind_an_overflow(self):
        """It is no ordinary overflow: no step is left to the loss scale."""
        keras.config.set_dtype_policy("mixed_float16")
        layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2, dtype="float32", name="last")]
        model, guard, data = keras.Sequential([keras.Input((6,)), *layers]), NanGuard(verbose=0), zoo.regression()
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
        model.compile(scaled, keras.losses.CategoricalCrossentropy(from_logits=True))
        with inject(model, site="weights", kind="spike", step=6, magnitude=1e37, path="last/kernel", entries=None):
            model.fit(data.x, np.eye(2)[(data.x[:, 0] > 0) * 1], batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
        (incident,) = guard.incidents
        assert (incident.step, incident.refused, incident.diagnosis.cause) == (6, True, "state_nonfinite")
        assert guard.session.run.counts.overflows == 0 and float(keras.ops.convert_to_numpy(scaled.dynamic_scale)) == 64.0
        assert max(np.abs(weight).max() for weight in model.get_weights()) < 1e3

    def test_one_cure_for_one_execution(self):
        """Steps on a bad state before the host can restore it are one incident."""
        data = zoo.regression(batches=48)
        guard = NanGuard(verbose=0, diagnose=False)
        model = zoo.plain(dropout=False, metrics=(), steps_per_execution=16)
        with inject(model, site="weights", step=20):
            zoo.fit(model, data, guard)
        assert not guard.session.run.stopped
        assert guard.session.run.step == 48
        assert zoo.bad_entries(model) == []
        assert guard.session.run.counts.refused <= 12

    @pytest.mark.shared
    def test_runaway_loss_scale(self):
        """A loss scale above all bounds is reported in that step, and reset."""
        keras.config.set_dtype_policy("mixed_float16")
        model, guard = zoo.plain(dropout=False), NanGuard(verbose=0, diagnose=False)
        data = zoo.regression()
        with inject(model, site="loss_scale", kind="overflow", step=6):
            model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
        assert [i.step for i in guard.incidents if "loss_scale" in i.sites] == [6]
        assert float(model.optimizer.dynamic_scale.numpy()) <= 2.0**16

    @pytest.mark.daily("False" if zoo.BACKEND == "jax" else "*")
    @pytest.mark.parametrize("eager", [False, True])
    def test_a_rate_is_no_statistic(self, eager):
        """A bad one is found by what it does to the weights, in each mode of each backend."""
        model, data, guard = zoo.plain(), zoo.regression(batches=8), NanGuard(verbose=0)
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eager)
        spoil = zoo.Before(lambda model: model.optimizer.learning_rate.assign(np.nan), 3)
        model.fit(data.x, data.y, batch_size=zoo.BATCH, verbose=0, callbacks=[guard, spoil])
        found = [finding for incident in guard.incidents for finding in incident.findings]
        assert "weights" in {finding.site for finding in found}
        assert not [f for f in found if f.site == "statistics" and "rate" in f.path]
