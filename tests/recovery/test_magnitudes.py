"""A finite number alone is never too large: only above a limit of the policy, or in settled
statistics that jump.
"""

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from support import zoo

from keras_nanguard import NanGuard


def build(optimizer=lambda: optimizers.Adam(1e-3), norm=False):
    def made():
        between = [layers.BatchNormalization(name="norm")] if norm else []
        stack = [keras.Input((6,)), *between, layers.Dense(4, "relu"), layers.Dense(1, name="last")]
        model = keras.Sequential(stack)
        model.compile(optimizer(), "mse")
        return model

    return made


def set_entry(model, path, number):
    known = [*model.variables, *model.optimizer.variables]
    variable = next(v for v in known if v.path.endswith(path))
    value = np.array(keras.ops.convert_to_numpy(variable))
    value.flat[0] = number
    variable.assign(value)


def writes(path, number):
    """Return a callback that writes a number into one entry of a variable in the second epoch."""

    return zoo.After(lambda model: set_entry(model, path, number), batch=5, epoch=1)


def actions(guard):
    return {o.action for i in guard.incidents for o in i.outcomes if o.status == "done"}


def test_large_second_moments_and_one_bad_batch():
    """Adam's second moments are above 1e30: a NaN in one batch is skipped, and that is all."""
    data = zoo.regression()
    data.y *= 1e18
    expected = zoo.run(build(), data, epochs=1)
    run = zoo.run(build(), data.with_poison([6]), guard=NanGuard(verbose=0), epochs=1)
    slots = [v for path, v in run.state if path.endswith("velocity")]
    assert max(np.abs(v).max() for v in slots) > 1e30, "the moments are not large"
    assert [i.step for i in run.guard.incidents] == [6] and actions(run.guard) == {"skip"}
    assert {f.site for f in run.guard.incidents[0].findings} >= {"inputs"}
    assert zoo.differences(run, expected, 1e-5) == []


def test_statistics_of_large_inputs():
    """Nanoseconds since 1970 have a variance of 1e33: it is learned, and nothing is reported."""
    data = zoo.regression()
    data.x[:, 0] = 1.7e18 + 3e16 * data.x[:, 0]
    plain = zoo.run(build(norm=True), data)
    run = zoo.run(build(norm=True), data, guard=NanGuard(verbose=0))
    variance = next(v for path, v in run.state if path.endswith("moving_variance"))
    assert variance[0] > 1e30, "the variance is not large"
    assert run.guard.incidents == [] and zoo.differences(run, plain, 1e-5) == []


@pytest.mark.parametrize("statistic", ["moving_mean", "moving_variance"])
def test_settled_statistics_that_leap(statistic):
    """A statistic that jumps from about 1 to 1e36 is restored, and the later steps are replayed."""
    write = writes(f"norm/{statistic}", 1e36)
    run = zoo.run(build(norm=True), zoo.regression(), guard=NanGuard(verbose=0), callbacks=[write])
    (incident,) = run.guard.incidents
    assert {(f.site, f.kind) for f in incident.findings} == {("statistics", "out_of_range")}
    assert "rollback" in actions(run.guard)
    found = next(v for path, v in run.state if path.endswith(statistic))
    assert np.abs(found).max() < 100.0


def test_second_moments_of_an_earlier_fit():
    """Above 1e30 before the first step: accepted, even with small gradients."""
    model, data = build()(), zoo.regression()
    model.fit(data.x, 1e18 * data.y, batch_size=zoo.BATCH, verbose=0)
    assert (
        max(np.abs(keras.ops.convert_to_numpy(v)).max() for v in model.optimizer.variables) > 1e30
    )
    guard = NanGuard(verbose=0)
    model.fit(data.x, data.y, batch_size=zoo.BATCH, epochs=3, verbose=0, callbacks=[guard])
    assert guard.incidents == []


def test_second_moments_of_growing_gradients():
    """Targets that grow from 1 to 1e18 within an epoch make the moments that they explain."""
    data = zoo.regression()
    data.y *= np.geomspace(1, 1e18, len(data.y))[:, None].astype("float32")
    plain = zoo.run(build(), data)
    run = zoo.run(build(), data, guard=NanGuard(verbose=0))
    assert run.guard.incidents == [] and zoo.differences(run, plain, 1e-5) == []


class Marked(optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        moment = self._velocities[self._get_variable_index(variable)]
        self.assign(moment, keras.ops.full(moment.shape, 1e36))


def test_slots_of_an_optimizer_of_the_users_own():
    """The contents of the slots of a custom class are unknown."""
    run = zoo.run(build(lambda: Marked(1e-3)), zoo.regression(), guard=NanGuard(verbose=0))
    assert run.guard.incidents == []


@pytest.mark.parametrize(
    "limits", [(), ({"site": "weights", "max_abs": 1e4},)], ids=["none", "1e4"]
)
def test_a_limit_of_the_policy(limits):
    """A weight of 1e5 is restored if the policy limits weights, and left alone if not."""
    guard = NanGuard(verbose=0, limits=list(limits))
    data = zoo.regression(batches=60)
    data.x[:, 0] = 0.0  # so that the first row of the first kernel has no effect on the loss
    write = writes("dense/kernel", 1e5)
    run = zoo.run(build(lambda: optimizers.SGD(1e-3)), data, guard=guard, callbacks=[write])
    kernel = next(v for path, v in run.state if path.endswith("kernel"))
    if not limits:
        assert guard.incidents == [] and kernel.flat[0] == 1e5
        return
    (incident,) = guard.incidents
    assert [(f.site, f.kind) for f in incident.findings] == [("weights", "out_of_range")]
    assert "rollback" in actions(guard) and np.abs(kernel).max() < 1e4


def test_a_limit_is_reported_for_each_variable_and_again_after_a_good_value():
    """A variable that stays beyond its limit is reported once."""
    guard = NanGuard("observe", verbose=0, limits=[{"site": "weights", "max_abs": 1e4}])
    data = zoo.regression(batches=110)
    data.x[:, :2] = 0.0  # so that the first two rows of the first kernel have no effect on the loss
    writes = {
        15: ("dense/kernel", 1e5),
        40: ("last/bias", 1e5),
        65: ("dense/kernel", 0.0),
        85: ("dense/kernel", 1e5),
    }
    callbacks = [
        zoo.After(lambda model, write=write: set_entry(model, *write), batch=at)
        for at, write in writes.items()
    ]
    zoo.run(build(lambda: optimizers.SGD(1e-9)), data, guard=guard, epochs=1, callbacks=callbacks)
    found = [(i.step, [f.path.split("/", 1)[1] for f in i.findings]) for i in guard.incidents]
    assert found == [(19, ["dense/kernel"]), (44, ["last/bias"]), (99, ["dense/kernel"])]
