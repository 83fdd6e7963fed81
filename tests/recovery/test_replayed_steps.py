"""What is counted, remembered and reported of steps that are replayed or undone."""

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, NonFiniteError
from keras_nanguard.testing import corrupt, inject


def corrupts(batch, epoch=0):
    """Return a callback that writes NaN into a kernel after this batch."""
    return zoo.After(lambda model: corrupt(model.layers[0].kernel), batch, epoch)


def scaled():
    """Return a model in float16 whose gradients overflow for targets near 100 at its first loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-4), initial_scale=2.0**13)
    model = zoo.plain(optimizer, dropout=False)
    keras.config.set_dtype_policy("float32")
    return model


def overflowing(batch, count=12):
    """Return data of which one batch overflows, at the first loss scale only."""
    data = zoo.regression(batches=count)
    data.y[batch * zoo.BATCH : (batch + 1) * zoo.BATCH] = 100.0
    return data


class TestCounts:
    def test_an_overflow_that_is_replayed_counts_once(self, capsys):
        """The epoch of an overflow, of a bad batch and of a rollback has a line."""
        guard = NanGuard(diagnose=False)
        run = zoo.run(scaled, zoo.poison(overflowing(5), 7), guard=guard, epochs=1, callbacks=[corrupts(9)])
        counts = guard.session.run.counts
        assert counts.restored == 0 and counts.run_again == 2, "the overflow and the step that found NaN"
        assert counts.overflows == counts.epoch_overflows == 1 and counts.refused == 2
        assert run.history["refused_steps"] == [counts.refused]
        assert f"epoch 1 metrics exclude {counts.refused} skipped steps of 12" in capsys.readouterr().out

    def test_a_replayed_step_counts_for_its_epoch(self):
        """A step of the first epoch that is refused again in the second one is none of its steps."""
        guard = NanGuard(verbose=0, diagnose=False)
        run = zoo.run(scaled, overflowing(5, count=8), guard=guard, epochs=2, callbacks=[corrupts(1, epoch=1)])
        counts = guard.session.run.counts
        assert counts.restored == 0 and counts.run_again == 2, "the overflow and the step that found NaN"
        assert run.history["refused_steps"] == [1, 1] and counts.refused == counts.overflows == 2
        assert counts.epoch_committed == 7 and counts.epoch_overflows == 1


class TestRefused:
    @pytest.mark.parametrize("corrupted", [[9], []])
    def test_the_last_step_is_not_one_of_a_replay(self, corrupted):
        """`guard.refused` is about the step whose result the caller has, after any replay."""
        guard, seen = NanGuard(verbose=0, diagnose=False), []
        read = zoo.After(lambda model: seen.append(guard.refused))
        data = zoo.regression(batches=12)
        zoo.run(zoo.plain, data, guard=guard, epochs=1, callbacks=[*map(corrupts, corrupted), read])
        assert [batch for batch, refused in enumerate(seen) if refused] == [n + 1 for n in corrupted]


@pytest.mark.requires_backend("torch", reason="only there a step learns late that the one before has left NaN")
def test_a_second_rollback_past_a_step_that_was_refused_for_the_one_before(away):
    """Both rollbacks replay all good steps: no batch is missing among the remembered ones."""
    guard, rates = NanGuard(verbose=0, diagnose=False), [0.01] * 16
    rates[5] = 3e38  # a plain rate, which the callback sets as a scheduler would
    set_rate = zoo.Before(lambda model: model.optimizer.learning_rate.assign(rates.pop(0)))
    callbacks = [set_rate, corrupts(10)]
    data = zoo.regression(batches=16)
    run = zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.01)), data, guard=guard, epochs=1, callbacks=callbacks)
    details = [o.detail for i in guard.incidents for o in i.outcomes if o.action == "rollback"]
    assert len(details) == 2 and all("replayed" in detail for detail in details)
    assert int(run.model.optimizer.iterations.numpy()) == 14


def test_a_step_that_is_undone_leaves_nothing_in_the_metrics():
    """Keras needs one step after a stop before the first commits: only its slots are bad."""
    model, data, guard = zoo.plain(), zoo.regression(), NanGuard(verbose=0)
    model.optimizer.build(model.trainable_variables)
    corrupt(model.optimizer.variables[2])
    model.fit(data.x, data.y, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
    assert guard.session.run.step == 0 and guard.stopped
    assert not any(np.any(keras.ops.convert_to_numpy(variable)) for variable in model.metrics_variables)


def test_an_interrupted_replay_is_reported_with_the_lowered_rate(capsys, monkeypatch):
    """Ctrl-C during the replay of the undone steps."""
    rule = {"name": "bad data", "cause": "input_nonfinite", "do": [{"rollback": {"replay_steps": True}}, "lower_lr"]}
    guard = NanGuard({"rules": [rule]})

    def interrupt(model):
        monkeypatch.setattr(guard.session.run.access, "run_again", zoo.raising(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        zoo.run(zoo.plain, zoo.poison(zoo.regression(), 5), guard=guard, callbacks=[zoo.Before(interrupt, 5)])
    (incident,) = guard.incidents
    assert incident.changes == ("rollback", "lower_lr")
    assert "; learning rate 0.001 -> 0.0001." in capsys.readouterr().out


def test_a_step_that_was_refused_without_a_reason_is_not_replayed():
    """The rollback after step 9 replays the others: the run is one without batch 5."""
    data = zoo.regression(batches=12)
    rows = np.delete(np.arange(len(data.x)), np.arange(5 * zoo.BATCH, 6 * zoo.BATCH))
    keras.utils.set_random_seed(0)
    without = zoo.plain(dropout=False)
    without.fit(data.x[rows], data.y[rows], batch_size=zoo.BATCH, shuffle=False, verbose=0)
    keras.utils.set_random_seed(0)
    model, guard = zoo.plain(dropout=False), NanGuard(verbose=0)
    with inject(model, site="loss", step=5):
        callbacks = [guard, corrupts(9)]
        model.fit(data.x, data.y, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert [incident.diagnosis.cause for incident in guard.incidents] == ["transient", "state_nonfinite"]
    assert "replayed" in guard.incidents[1].outcomes[0].detail
    assert all(map(np.array_equal, model.get_weights(), without.get_weights()))


@pytest.mark.requires_backend("tensorflow", "torch", reason="writes a weight between two replayed steps")
def test_a_rollback_within_a_replay_leaves_no_snapshot_of_another_step():
    """A check of the replay restores an older state when a snapshot is due, which then waits for its step."""
    limits, snapshot = [{"site": "weights", "max_abs": 1e4}], {"every": 11, "verify_after": 5}
    guard, kept, ran = NanGuard(limits=limits, snapshot=snapshot, verbose=0, diagnose=False), set(), []

    def spoil_the_replay(model):
        access = guard.session.run.access
        again = access.run_again

        def run_again(args):
            step = guard.session.run.step
            snapshots = guard.session.run.ring.snapshots
            kept.update((s.step, s.time.good, int(s.value(model.optimizer.iterations))) for s in snapshots)
            verdict = again(args)
            if step == 21 and step not in ran:
                corrupt(model.layers[0].kernel, "spike", magnitude=1e8)
            ran.append(step)
            return verdict

        access.run_again = run_again

    callbacks = [zoo.Before(spoil_the_replay, 0), corrupts(23)]
    zoo.run(zoo.plain, zoo.regression(batches=30), guard=guard, epochs=1, callbacks=callbacks)
    assert [i.changes[0] for i in guard.incidents] == ["rollback"] * 2 and ran[:11] == [*range(11, 22)]
    assert {step for step, _, _ in kept} == {0, 11, 23}, "step 21 is left out, so the task waits for the next one"
    assert all(good == done for _, good, done in kept)


def test_a_limit_that_the_restored_state_breaks():
    """The check comes again at its intervals, not at once until the budget of the action ends the run."""
    policy = {"escalation": ["rollback"], "action_budget": 50, "limits": [{"site": "weights", "max_abs": 0.5}]}
    guard = NanGuard(policy, verbose=0, diagnose=False)
    zoo.run(zoo.plain, zoo.regression(batches=30), guard=guard, epochs=1)
    assert not guard.stopped and guard.session.run.counts.step == 30
    assert [incident.step for incident in guard.incidents].count(0) <= 2


@pytest.mark.parametrize("end", ["stop", "raise_error"])
def test_two_actions_that_restore_a_state(end):
    """The second one keeps the state of the first one, and replays nothing."""
    policy = {"escalation": [[{"rollback": {"replay_steps": False}}, end]]}
    guard = NanGuard(policy, verbose=0, diagnose=False)
    model = zoo.plain(dropout=False)
    try:
        with inject(model, site="gradients", kind="nan", step=5):
            zoo.fit(model, zoo.regression(batches=8), guard)
    except NonFiniteError:
        assert end == "raise_error"
    (incident,) = guard.incidents
    rollback, ending = incident.outcomes
    assert "5 committed steps undone" in rollback.detail and "keeps the state that was restored" in ending.detail
    assert int(model.optimizer.iterations.numpy()) == 0 and guard.session.run.counts.refused == 1


def test_a_guard_that_has_seen_no_step_counts_none():
    assert NanGuard(verbose=0).summary().startswith("NanGuard: 0 steps, 0 skipped")


@pytest.mark.parametrize(("epoch", "validated"), [(0, True), (1, False)])
def test_a_write_between_two_steps_costs_no_step(epoch, validated):
    """Found in the validation of the first epoch, or at the end of the fit: the step before it runs again."""
    data, guard = zoo.regression(), NanGuard(verbose=0, diagnose=False)
    given = {"validation_data": (data.x[:8], data.y[:8])} if validated else {}
    ends = []
    for callbacks in ([], [corrupts(len(data.x) // zoo.BATCH - 1, epoch), guard]):
        keras.utils.set_random_seed(0)
        model = zoo.plain(dropout=False)
        model.fit(data.x, data.y, batch_size=zoo.BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks, **given)
        ends.append(zoo.state_of(model))
    assert [o.detail for i in guard.incidents for o in i.outcomes] != []
    zoo.assert_same(*([array for _, array in end] for end in ends), tolerance=1e-6)
    steps = (epoch + 1) * (len(data.x) // zoo.BATCH)
    (outcome,) = guard.incidents[0].outcomes
    assert f"; {steps} later steps replayed" in outcome.detail


class Counted(keras.layers.Layer):
    """Scales by a count of its calls in training, in a variable of the backend that Keras does not list."""

    def __init__(self):
        super().__init__()
        if zoo.BACKEND == "tensorflow":
            import tensorflow as tf

            self.count = tf.Variable(0.0, trainable=False)
        else:
            import torch

            self.count = torch.zeros(())

    def call(self, x, training=False):
        if not training:
            return x
        (self.count.assign_add if zoo.BACKEND == "tensorflow" else self.count.add_)(1.0)
        return x * (1.0 + 0.05 * self.count)


def counted():
    layers = [keras.Input((6,)), keras.layers.Dense(4), Counted(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model


def nadam():
    """Within another optimizer Keras does not list the product of Nadam's momenta."""
    return zoo.plain(keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(), initial_scale=2.0**10), dropout=False)


@pytest.mark.parametrize("build", [counted, nadam])
def test_a_replay_restores_what_keras_does_not_list(build):
    """The run equals the one in which no other code writes NaN."""
    if build is counted and zoo.BACKEND == "jax":
        pytest.skip("JAX has no variables of its own")
    runs = [zoo.run(build, zoo.regression(), guard=NanGuard(verbose=0), epochs=2, callbacks=c) for c in ([], [corrupts(4)])]
    assert zoo.differences(*runs, tolerance=1e-6) == []


REPLAY = {"rollback": {"replay_steps": True}}


def test_a_replay_leaves_out_the_batch_that_was_refused():
    """The rollback of a rule costs the bad batch alone, and no further rollback."""
    guard = NanGuard(rules=[{"name": "back", "do": REPLAY}], verbose=0, diagnose=False)
    run = zoo.run(zoo.plain, zoo.poison(zoo.regression(), 5), guard=guard, epochs=1)
    assert [incident.changes for incident in guard.incidents] == [("rollback",)]
    assert int(run.model.optimizer.iterations.numpy()) == guard.session.run.step - 1


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX a fault counts no replayed steps")
def test_a_step_that_is_refused_again_in_a_replay_is_left_out():
    """Its batch is good, so it runs once more: as step 11 of those that are counted here."""
    guard = NanGuard(rules=[{"name": "back", "do": REPLAY}], verbose=0, diagnose=False)
    model = zoo.plain(dropout=False)
    with inject(model, site="loss", step=(5, 11)):
        zoo.fit(model, zoo.regression(batches=12), guard)
    details = [outcome.detail for incident in guard.incidents for outcome in incident.outcomes]
    assert [detail.rpartition("; ")[2] for detail in details] == ["6 later steps replayed", "5 later steps replayed"]
    assert int(model.optimizer.iterations.numpy()) == 11


@pytest.mark.parametrize("do", ["stop", REPLAY])
def test_a_bad_result_between_two_steps_costs_no_step(do):
    """The batch of a validation is bad, not the last one of the epoch."""
    data, bad = zoo.regression(), zoo.poison(zoo.regression(), 0)
    guard = NanGuard(rules=[{"name": "validation", "site": "validation", "do": do}], verbose=0, diagnose=False)
    model = zoo.plain(dropout=False)
    sizes = {"batch_size": zoo.BATCH, "verbose": 0}
    model.fit(data.x, data.y, validation_data=(bad.x, bad.y), callbacks=[guard], **sizes)
    assert len(guard.incidents) == 1 and int(model.optimizer.iterations.numpy()) == guard.session.run.step


def test_an_epoch_whose_only_step_is_left_out_of_a_replay_has_no_metrics():
    """Its loss in the History is the last known one, not that of empty metrics, which is 0."""
    guard, rates = NanGuard("stop", verbose=0, diagnose=False), [0.01, 3e38]
    set_rate = zoo.Before(lambda model: model.optimizer.learning_rate.assign(rates.pop(0)))
    build = lambda: zoo.plain(keras.optimizers.SGD(0.01), dropout=False)  # noqa: E731
    run = zoo.run(build, zoo.regression(batches=1), guard=guard, epochs=3, callbacks=[set_rate])
    assert guard.stopped and not guard.incidents[0].refused
    assert run.history["loss"] == [run.history["loss"][0]] * 2 and run.history["loss"][0] > 0
