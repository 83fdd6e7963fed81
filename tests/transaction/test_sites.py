"""Every site, every kind of fault, every mode, two precisions: a fault is found in the step in
which it occurs.

All faults of one mode and precision are in one run, far enough apart that the policy of this file,
which restores a bad state at once, has repaired each before the next.
"""

from __future__ import annotations

import contextlib
import functools
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
"""Restores at once, so one fault is repaired before the next one; three overflows are one incident
each.
"""


class Case(NamedTuple):
    site: str
    kind: str
    step: int


def _plan(mode: str, precision: str) -> list[Case]:
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


@functools.cache
def _guarded(mode: str, precision: str) -> NanGuard:
    plan = _plan(mode, precision)
    model, data = _level(mode, precision, WARMUP + SPACE * len(plan))
    guard = NanGuard(POLICY, verbose=0, diagnose=False)
    with contextlib.ExitStack() as stack:
        for case in plan:
            stack.enter_context(inject(model, site=case.site, kind=case.kind, step=case.step, require_fired=False))
        model.fit(data.x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
    guard.bad = zoo.bad_entries(model)
    return guard


FIRST = {
    "inputs": ("inputs",),
    "targets": ("targets",),
    "loss": ("loss",),
    "gradients": ("gradients",),
    "weights": ("state", "weights"),
    "statistics": ("state", "statistics"),
    "slots": ("state", "slots", "weights"),
    "loss_scale": ("loss_scale",),
}
"""The names in the incident of a fault that is not finite."""


NORMAL = {("graph", "float32"), ("steps4", "mixed_float16")}
RUNS = [
    pytest.param(mode, precision, marks=() if (mode, precision) in NORMAL else pytest.mark.slow)
    for mode in zoo.MODES
    for precision in ("float32", "mixed_float16")
]


@pytest.mark.xdist_group("sites")  # the tests of one run share it
@pytest.mark.parametrize(("mode", "precision"), RUNS)
class TestSites:
    def test_found_where_it_happened(self, mode, precision):
        """A fault at any site is an incident of the step in which it occurs.

        Finite statistics are read between executions: their incident is one of a step of that
        execution.
        """
        reported = {incident.step for incident in _guarded(mode, precision).incidents}
        missed = []
        for case in _plan(mode, precision):
            late = mode == "steps4" and (case.site, case.kind) == ("statistics", "overflow")
            if reported.isdisjoint(range(case.step, case.step + (4 if late else 1))):
                missed.append(case)
        assert missed == []

    def test_nothing_else_is_reported(self, mode, precision):
        """Only faulty steps, and later ones of an execution after a bad state."""
        near = {case.step + i for case in _plan(mode, precision) for i in range(4 if mode == "steps4" else 1)}
        assert [(i.step, i.findings) for i in _guarded(mode, precision).incidents if i.step not in near] == []

    def test_names_the_site(self, mode, precision):
        """An incident names the site of its fault, or the state if that was bad before."""
        reported = {}
        for incident in _guarded(mode, precision).incidents:
            reported.setdefault(incident.step, incident)
        wrong = []
        for case in _plan(mode, precision):
            sites = reported[case.step].sites if case.step in reported else ()
            if case.kind in NONFINITE and not set(sites) & set(FIRST[case.site]):
                wrong.append((case, sites))
        assert wrong == []

    def test_heals(self, mode, precision):
        """After all of these faults no entry of the state is bad, and training has not ended."""
        guard = _guarded(mode, precision)
        assert guard.bad == []
        assert not guard.session.run.stopped


class TestSlots:
    def test_overflow_of_a_slot(self):
        """The weights become finite and huge: reported in the next step, and restored."""
        model, data, guard = *_level("graph", "float32", 24), NanGuard(verbose=0, diagnose=False)
        with inject(model, site="slots", kind="overflow", step=14):
            model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
        assert guard.incidents[0].step in (14, 15)
        assert max(np.abs(weight).max() for weight in model.get_weights()) < 1e3


class TestOutsideWrites:
    """Faults written by the host between two steps."""

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
        model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard, zoo.After(spoil, 5)])
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
            model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[guard])
        assert not guard.session.run.stopped
        assert guard.session.run.step == 48
        assert zoo.bad_entries(model) == []
        assert guard.session.run.counts.refused <= 12

    def test_runaway_loss_scale(self):
        """A loss scale above all bounds is reported in that step, and reset."""
        keras.config.set_dtype_policy("mixed_float16")
        model, guard = zoo.plain(dropout=False), NanGuard(verbose=0, diagnose=False)
        data = zoo.regression()
        with inject(model, site="loss_scale", kind="overflow", step=6):
            model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
        assert [i.step for i in guard.incidents if "loss_scale" in i.sites] == [6]
        assert float(model.optimizer.dynamic_scale.numpy()) <= 2.0**16
