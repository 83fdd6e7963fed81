"""A run skips the iteration at which its schedule gives no usable learning rate."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo

from keras_nanguard import NanGuard

POLE, STEPS, BATCH = 21, 40, 8


class Pole(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate=np.inf, lasting=False):
        super().__init__()
        self.rate, self.at = rate, ops.greater_equal if lasting else ops.equal

    def __call__(self, step):
        return ops.where(self.at(step, POLE), self.rate, 0.01)


def run(
    schedule, *callbacks, optimizer=keras.optimizers.Adam, options=None, guard=None, **compiled
):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(1)])
    model.compile(optimizer(schedule, **options or {}), "mse", **compiled)
    guard = guard or NanGuard(verbose=0)
    fitting = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, x[:, :1], **fitting, callbacks=[guard, *callbacks])
    return model, guard


CASES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "without a diagnosis": {"guard": {"diagnose": False}},
    "NaN": {"rate": np.nan},
    "accumulated": {"options": {"gradient_accumulation_steps": 2}},
    "without remembered batches": {"guard": {"snapshot": {"every": 8}}, "forget": True},
}


@pytest.mark.parametrize("name", CASES)
def test_pole_is_passed_over(name, set_limit):
    """One step is skipped, the rate is unchanged, and the incident names the iteration."""
    case = dict(CASES[name])
    if case.pop("forget", False):
        set_limit("remembered batches", 0)
    guard = NanGuard(verbose=0, **case.pop("guard", {}))
    model, guard = run(Pole(case.pop("rate", np.inf)), guard=guard, **case)
    (incident,) = guard.incidents
    assert incident.step == POLE and incident.values["pole"] == POLE
    assert (
        not np.isfinite(incident.values["learning_rate"]) or incident.values["learning_rate"] > 1e30
    )
    assert zoo.bad_entries(model) == [] and not model.stop_training
    done = {o.action for o in incident.outcomes if o.status == "done"}
    assert "lower_lr" not in done and guard.session.run.recovery.rates == {}
    iterations = int(model.optimizer._iterations)
    assert iterations == STEPS + (name == "accumulated")
    assert guard.session.run.counts.committed == STEPS - 1
    if incident.diagnosis is not None and incident.diagnosis.cause != "unknown":
        assert incident.diagnosis.cause == "optimizer_domain"
        assert f"at iteration {POLE}." in " ".join(incident.diagnosis.evidence)


def test_rate_after_which_weights_are_finite_and_huge():
    """If it is detected in the next step, both are replayed, at the rates of later iterations."""
    model, guard = run(Pole(3e38), optimizer=keras.optimizers.SGD)
    (incident,) = guard.incidents
    assert (incident.step, incident.sites[0]) in ((POLE, "weights"), (POLE + 1, "state"))
    assert incident.refused == (incident.step > POLE)
    assert incident.diagnosis.cause == "optimizer_domain" and incident.values["pole"] == POLE
    assert zoo.bad_entries(model) == [] and not model.stop_training
    assert int(model.optimizer._iterations) == STEPS + incident.refused


def test_replay_after_a_later_rollback_passes_over_it(capsys):
    """A later rollback to an earlier state replays its steps without the pole."""

    def spoil(model):
        kernel = model.layers[-1].kernel
        kernel.assign(np.full(kernel.shape, np.nan, "float32"))

    spoils = zoo.Before(spoil, POLE + 4)
    model, guard = run(Pole(), spoils, optimizer=keras.optimizers.SGD, guard=NanGuard())
    assert [incident.step for incident in guard.incidents] == [POLE, POLE + 4]
    assert zoo.bad_entries(model) == []
    assert "the learning rate was inf at iteration 21" in capsys.readouterr().out


def test_schedule_without_any_usable_rate_ends_the_run():
    """If each rate from some iteration on is NaN, training ends soon, in a good state."""
    model, guard = run(Pole(np.nan, lasting=True))
    assert model.stop_training and zoo.bad_entries(model) == []
    assert guard.session.run.step <= POLE + 13
    assert guard.incidents[-1].diagnosis.cause == "optimizer_domain"


@pytest.mark.requires_backend("tensorflow", "jax", reason="PyTorch runs one step in an execution")
def test_pole_within_an_execution_of_several_steps():
    """On TensorFlow there is no batch for a replay: the counter still passes the pole."""
    model, guard = run(Pole(), steps_per_execution=4)
    assert [incident.values["pole"] for incident in guard.incidents] == [POLE]
    assert zoo.bad_entries(model) == [] and not model.stop_training


class Noisy(keras.optimizers.schedules.LearningRateSchedule):
    """Rates that change with each call, by a seed generator, NumPy's generator, or a counter."""

    def __init__(self, source):
        super().__init__()
        self.source, self.seed, self.calls = source, keras.random.SeedGenerator(3), 0

    def __call__(self, step):
        if self.source == "seed generator":
            return 0.05 * (1.0 + 0.5 * keras.random.uniform((), seed=self.seed))
        self.calls += 1
        return 0.05 * (np.random.uniform() if self.source == "NumPy" else 1.0 / self.calls)


@pytest.mark.parametrize("source", ["seed generator", "NumPy", "counter"])
def test_schedule_that_changes_with_each_call(source):
    """The guard's own readings of the rate leave no trace, and the rate is recorded."""

    def weights(*callbacks):
        keras.utils.set_random_seed(0)
        x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        eager = source != "seed generator" and keras.backend.backend() != "jax"
        model.compile(keras.optimizers.SGD(Noisy(source)), "mse", run_eagerly=eager)
        model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    guard = NanGuard(verbose=0)
    assert all(map(np.array_equal, weights(), weights(guard)))
    assert np.isfinite(guard.recording.steps["learning_rate"]).any()
