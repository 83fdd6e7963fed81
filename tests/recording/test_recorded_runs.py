"""The recording of a run agrees with an observer of Keras, on every backend and in every mode."""


import keras
import numpy as np
import pytest
from support import zoo
from support.programs import differentiated
from support.recordings import COMMITTED, OVERFLOW, REFUSED, flushed, run_of

from keras_nanguard import NanGuard, NanGuardModel, NonFiniteError, Recording
from keras_nanguard.testing import inject

QUIET = {"verbose": 0, "diagnose": False}
ONCE = pytest.mark.requires_backend("torch", reason="independent of the backend: runs once")


def acting(action):
    policy = {"rules": [{"name": "act", "do": [action]}], "rollback": {"further_back": False}}
    return NanGuard(policy, snapshot={"every": 4, "verify_after": 1}, **QUIET)


def counted(guard):
    """Check the counts of a recording against the session's: complete, without duplicates."""
    steps, session = guard.recording.steps, guard.session
    assert run_of(guard.recording).totals == session.run.counts.totals
    assert sorted(set(steps["step"].tolist())) == list(range(session.run.step))
    return steps


@pytest.mark.daily("graph", "eager", "steps4")
@pytest.mark.parametrize("mode", zoo.MODES)
def test_each_step(mode):
    """Each is recorded once, with its place and result, for any steps per execution."""
    zoo.supported(zoo.MODES[mode], even=False)
    data = zoo.poison(zoo.poison(zoo.regression(), 3), 10)
    guard = NanGuard(**QUIET)
    run = zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.01), **zoo.MODES[mode]), data, guard=guard, epochs=2)
    steps = counted(guard)
    assert steps["step"].tolist() == list(range(24)) and steps["epoch"].tolist() == [0] * 12 + [1] * 12
    assert steps["batch"].tolist() == [*range(12), *range(12)]
    assert np.flatnonzero(steps["status"]).tolist() == run.steps == [3, 10, 15, 22] and not steps["undone"].any()
    good = steps["status"] == COMMITTED
    assert np.isfinite(steps["loss"][good]).all() and (steps["gradient_norm"][good] > 0).all()
    np.testing.assert_allclose(steps["learning_rate"], 0.01, rtol=1e-6)
    assert np.isnan(steps["loss_scale"]).all() and np.all(np.diff(steps["time"]) >= 0)
    means = {name: [steps[name][good & (steps["epoch"] == e)].mean() for e in (0, 1)] for name in ("loss", "gradient_norm")}
    assert run.history["loss"] == pytest.approx(means["loss"], rel=1e-5)
    assert run.history["nanguard/grad_norm"] == pytest.approx(means["gradient_norm"]) and run.history["refused_steps"] == [2, 2]
    kinds = [event.kind for event in guard.recording.events]
    assert kinds == ["begin", "incident", "incident", "epoch", "incident", "incident", "epoch", "end"]
    assert guard.recording.events[1].data == guard.incidents[0].to_dict() and guard.recording.meta["status"] == "finished"


def test_gradient_norm_is_that_of_the_gradient():
    x, y = zoo.regression(batches=1).all
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    guard = NanGuard(**QUIET)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[guard])
    error = -2.0 * y / len(y)
    expected = np.sqrt(np.square(x.T @ error).sum() + np.square(error.sum()))
    assert guard.recording.steps["gradient_norm"] == pytest.approx([expected], rel=1e-5)
    assert guard.recording.steps["loss"] == pytest.approx([np.square(y).mean()], rel=1e-5)


@pytest.mark.parametrize("rate", ["number", "schedule"])
def test_learning_rate_is_true_or_unknown(rate):
    """Recorded is the rate a step used; all are known if it changes only between epochs."""
    given = 0.02 if rate == "number" else keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.9)
    lower = keras.callbacks.LearningRateScheduler(lambda epoch, now: 0.02 / (epoch + 1))
    observer = zoo.Before(lambda model: float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))
    guard = NanGuard(**QUIET)
    callbacks = [lower, observer] if rate == "number" else []
    build = lambda: zoo.plain(keras.optimizers.SGD(given))  # noqa: E731
    zoo.run(build, zoo.regression(), guard=guard, epochs=3, callbacks=callbacks)
    found = guard.recording.steps["learning_rate"]
    expected = observer.seen if rate == "number" else [0.02 * 0.9**step for step in range(36)]
    known = np.isfinite(found)
    np.testing.assert_allclose(found[known], np.array(expected)[known], rtol=1e-5)
    assert known.all() if rate == "number" else known.sum() >= 2
    events = [event for event in guard.recording.events if event.kind == "learning_rate"]
    assert [(e.step, e.data["by"]) for e in events] == ([(13, "callback"), (25, "callback")] if rate == "number" else [])


def test_rates_that_the_guard_lowers():
    """A rate that a rule lowers is an event, and the later steps and the epoch log have it."""
    guard = acting({"lower_lr": {"factor": 0.5}})
    run = zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.02)), zoo.poison(zoo.regression(), 5), guard=guard, epochs=1)
    steps = counted(guard)
    known = np.isfinite(steps["learning_rate"])
    assert known.all() and steps["learning_rate"].tolist() == pytest.approx([0.02] * 6 + [0.01] * 6)
    (event,) = (e for e in guard.recording.events if e.kind == "learning_rate")
    assert event.step == 5 and event.data["factor"] == 0.5 and "0.02 -> 0.01" in event.text
    assert run.history["nanguard/rate_factor"] == [0.5] and run.history["nanguard/rollbacks"] == [0]


def test_rollback():
    guard = acting("rollback")
    run = zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.02)), zoo.poison(zoo.regression(), 10), guard=guard, epochs=2)
    steps, kinds = counted(guard), [event.kind for event in guard.recording.events]
    events = [event for event in guard.recording.events if event.kind == "rollback"]
    assert [event.step for event in events] == [10, 22] and events[0].data == {"to": 8, "undone": 2, "run_again": 0}
    assert steps["step"].tolist() == list(range(24)) and np.flatnonzero(steps["undone"][:12]).tolist() == [8, 9]
    assert run.history["nanguard/rollbacks"] == [1, 1] and kinds.index("snapshot") < kinds.index("rollback")


def test_steps_that_are_run_again():
    """Replayed steps are recorded twice: undone, and then with their final values."""
    damages = zoo.Before(lambda model: model.layers[0].bias.assign(np.full(8, np.nan, "float32")), 10)
    guard = NanGuard(snapshot={"every": 4, "verify_after": 1}, **QUIET)
    build = lambda: zoo.plain(keras.optimizers.SGD(0.02))  # noqa: E731
    zoo.run(build, zoo.regression(), guard=guard, epochs=1, callbacks=[damages])
    steps = counted(guard)
    (event,) = (event for event in guard.recording.events if event.kind == "rollback")
    assert event.data == {"to": 8, "undone": 2, "run_again": 3} and guard.session.run.counts.refused == 0
    assert steps["step"].tolist() == [*range(11), 8, 9, 10, 11] and np.flatnonzero(steps["undone"]).tolist() == [8, 9, 10]
    assert np.flatnonzero(steps["status"]).tolist() == [10] and steps["batch"].tolist() == steps["step"].tolist()
    np.testing.assert_array_equal(steps["loss"][8:10], steps["loss"][11:13])


@pytest.mark.parametrize(
    ("steps", "batches", "bad", "skip"),
    [(1, 12, 5, 2), (4, 12, 5, 2), (4, 14, 1, 7), (4, 14, 1, 11)],
    ids=["one step", "part of an execution", "several executions", "the end of an epoch and more"],
)
def test_skipped_batches(steps, batches, bad, skip):
    """Batches that are skipped are no steps; the later ones keep their place in the epoch, also
    within an execution. On TensorFlow the first one is that of the next execution.
    """
    zoo.supported({"steps_per_execution": steps}, even=False)
    guard = acting({"rollback": {"skip_batches": skip}})
    model = zoo.plain(keras.optimizers.SGD(0.02), steps_per_execution=steps)
    with inject(model, site="gradients", step=bad):
        zoo.trained(model, zoo.regression(batches), guard=guard, epochs=2)
    first = bad // steps * steps + steps if zoo.BACKEND == "tensorflow" else bad + 1
    trained = [divmod(n, batches) for n in range(2 * batches) if not first <= n < first + skip]
    recorded = counted(guard)
    assert list(zip(recorded["epoch"].tolist(), recorded["batch"].tolist())) == trained
    assert recorded["step"].tolist() == list(range(len(trained))) and guard.session.run.counts.skip_batches == 0
    kept = (recorded["status"] == 0) & ~recorded["undone"].astype(bool)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == kept.sum()


def test_overflows_of_a_loss_scale():
    """An overflow that loss scaling handles is recorded as one, with the lowered scale."""
    keras.utils.set_random_seed(0)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**15)
    model = zoo.plain(scaled, metrics=())
    guard = NanGuard(**QUIET)
    with inject(model, site="gradients", kind="inf", step=4):
        history = model.fit(*zoo.regression().all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard]).history
    steps = counted(guard)
    assert steps["status"].tolist() == [OVERFLOW if step == 4 else COMMITTED for step in range(12)] and guard.incidents == []
    assert steps["loss_scale"].tolist() == [2.0**15] * 5 + [2.0**14] * 7
    assert history["nanguard/loss_scale"] == [2.0**14] and history["refused_steps"] == [1]


class Own(NanGuardModel):
    nanguard_verbose = 0

    @classmethod
    def small(cls):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        model = cls(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model


def test_model_that_guards_itself_and_fails():
    """A fit that ends with any exception has failed; the next one is another."""

    dies = zoo.Before(zoo.raising(KeyboardInterrupt), 6)
    model = Own.small()
    data = zoo.poison(zoo.regression(), 3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0, callbacks=[dies])
    recording = model.nanguard.recording
    assert recording.meta["status"] == "failed" and len(recording) == 6 and recording.events[-1].data == {"status": "failed"}
    model.nanguard.policy = NanGuard("raise").policy
    with pytest.raises(NonFiniteError):
        model.fit(*data.all, batch_size=zoo.BATCH, shuffle=False, verbose=0)
    assert model.nanguard.recording.meta["status"] == "failed"
    model.fit(*zoo.regression().all, batch_size=zoo.BATCH, shuffle=False, verbose=0)
    recording = model.nanguard.recording
    assert recording.meta["status"] == "finished"
    assert [event.kind for event in recording.events if event.kind in ("begin", "end")] == ["begin", "end"] * 3


def test_model_that_guards_itself_without_a_fit():
    """Steps of `train_on_batch` finish before what follows; they fail if one has raised."""
    model, data = Own.small(), zoo.regression()
    recorder = model.nanguard._log.recorder

    def train(data=data):
        model.train_on_batch(data.x[: zoo.BATCH], data.y[: zoo.BATCH])

    train()
    model.compile("sgd", "mse")
    train()
    assert [event.data["status"] for event in model.nanguard.recording.events if event.kind == "end"] == ["finished"]
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0)
    train()
    recorder.end_with_process()
    model.nanguard.policy = NanGuard("raise").policy
    model.compile("sgd", "mse")
    with pytest.raises(NonFiniteError):
        train(zoo.poison(zoo.regression(), 0))
    model.compile("sgd", "mse")
    train()
    ends = [event.data["status"] for event in model.nanguard.recording.events if event.kind == "end"]
    assert ends == ["finished"] * 4 + ["failed"]


@ONCE
@pytest.mark.daily("epoch")
@pytest.mark.parametrize("when", ["epoch", "end"])
def test_a_later_write_error_is_reported_once(tmp_path, capsys, when):
    """If a file can no longer be written, at the end of the epoch or fit, and only once."""
    guard = NanGuard(directory=tmp_path)

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if when == "epoch" and epoch == 1:
                guard._log.recorder._writer.problem = "recording.sqlite is not written: disk full"
            if when == "epoch" and epoch == 2:
                assert "recording.sqlite is not written: disk full" in capsys.readouterr().out

        def on_epoch_end(self, epoch, logs=None):  # after the guard
            if when == "end" and epoch == 3:
                guard._log.recorder._writer.problem = "recording.sqlite is not written: disk full"

    zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=4, callbacks=[Breaks()])
    assert capsys.readouterr().out.count("disk full") == (when == "end")


def test_resumed(tmp_path):
    """An interrupted and resumed run is one recording, in which the lost steps are undone."""
    data, dies = zoo.regression(), zoo.Before(zoo.raising(KeyboardInterrupt), 6, epoch=1)

    def guard():
        return NanGuard(directory=tmp_path, resume=True, snapshot={"every": 5, "verify_after": 1}, **QUIET)

    with pytest.raises(KeyboardInterrupt):
        zoo.run(zoo.plain, data, guard=guard(), epochs=3, callbacks=[dies])
    before = Recording.read(tmp_path)
    assert before.meta["status"] == "failed" and len(before) == 18
    last = guard()
    resumed = zoo.run(zoo.plain, data, guard=last, epochs=3).history
    whole = zoo.run(zoo.plain, data, guard=NanGuard(**QUIET), epochs=3).history
    assert all(values == whole[name][-len(values) :] for name, values in resumed.items()), "those of the epoch that was cut short, too"
    found = Recording.read(tmp_path)
    standing = ~found.steps["undone"]
    assert found.steps["step"][standing].tolist() == list(range(36)) and len(found) > 36
    assert found.steps["batch"][standing].tolist() == [*range(12)] * 3
    assert found.steps["epoch"][standing].tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert [e.kind for e in found.events if e.kind in ("begin", "resume", "end")] == ["begin", "end", "resume", "end"]
    np.testing.assert_array_equal(found.steps["loss"], last.recording.steps["loss"])


@ONCE
def test_a_refused_step_before_and_after_a_restart_is_one_step(tmp_path):
    """The step of an epoch that is refused, lost, and refused again counts once, like the others."""
    data, dies = zoo.poison(zoo.regression(), 4), zoo.Before(zoo.raising(KeyboardInterrupt), 6, epoch=1)

    def guard():
        return NanGuard(directory=tmp_path, resume=True, snapshot={"every": 5, "verify_after": 1}, **QUIET)

    with pytest.raises(KeyboardInterrupt):
        zoo.run(zoo.plain, data, guard=guard(), epochs=3, callbacks=[dies])
    assert run_of(Recording.read(tmp_path)).totals == (18, 2, 0, 0)
    last = guard()
    zoo.run(zoo.plain, data, guard=last, epochs=3)
    found = Recording.read(tmp_path)
    assert run_of(found).totals == (36, 3, 0, 1)
    assert last.summary().startswith("NanGuard: 36 steps, 3 skipped, 1 skipped step undone and run again, ")
    refused = found.steps["status"] == REFUSED
    assert found.steps["step"][refused].tolist() == [4, 16, 16, 28]
    assert found.steps["undone"][refused].tolist() == [False, True, False, False]


@ONCE
def test_rollbacks_of_an_epoch_that_resumes(tmp_path):
    """Those before the process ended are not of this epoch."""
    data, dies = zoo.poison(zoo.regression(), 2), zoo.Before(zoo.raising(KeyboardInterrupt), 8, epoch=0)
    rule = {"name": "r", "cause": "input_nonfinite", "do": "rollback"}
    policy = {"rules": [rule], "snapshot": {"every": 5, "verify_after": 1}}

    def guard():
        return NanGuard(policy, directory=tmp_path, resume=True, verbose=0)

    with pytest.raises(KeyboardInterrupt):
        zoo.run(zoo.plain, data, guard=guard(), callbacks=[dies])
    run = zoo.run(zoo.plain, data, guard=guard())
    assert run.history["nanguard/rollbacks"] == [0, 1]


def test_incidents_of_another_run_stay(tmp_path):
    """Two fits of a guard with a directory are one file, readable while the second runs."""
    seen = []

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert flushed(guard._log.recorder)
            seen.append(Recording.read(tmp_path).meta["status"])

    guard = NanGuard(directory=tmp_path, **QUIET)
    data = zoo.poison(zoo.regression(), 3)
    for _ in (1, 2):
        zoo.run(zoo.plain, data, guard=guard, epochs=1, callbacks=[Reads()])
    found = Recording.read(tmp_path)
    assert seen == ["running"] * 2 and len(found) == 24 and [e.step for e in found.events if e.kind == "incident"] == [3, 15]
    assert found.meta["backend"] == zoo.BACKEND and "sequential" in found.meta["model"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_in_the_directory_of_an_earlier_one(tmp_path, capsys, resume):
    """A healthy one says nothing about the earlier run, and counts only its own steps and rows, unless it resumes."""
    data = zoo.poison(zoo.regression(), 3)
    zoo.run(zoo.plain, data, guard=NanGuard(directory=tmp_path, resume=True, **QUIET), epochs=1)
    zoo.run(zoo.plain, data, guard=NanGuard(directory=tmp_path, verbose=0), epochs=1)
    capsys.readouterr()
    guard = NanGuard(directory=tmp_path, resume=resume)
    zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=1 + resume)
    assert ("36 steps, 1 skipped" if resume else "12 steps, 0 skipped") in guard.summary()
    assert ("1 distinct bad row" in capsys.readouterr().out) == resume
    again = NanGuard(directory=tmp_path)
    zoo.run(zoo.plain, data, guard=again, epochs=1)
    assert "12 steps, 1 skipped" in again.summary() and "1 distinct bad row so far: x[26]" in capsys.readouterr().out


def looped(guard, data):
    keras.utils.set_random_seed(0)
    model, optimizer = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    batches = [(data.x[n : n + zoo.BATCH], data.y[n : n + zoo.BATCH]) for n in range(0, len(data.x), zoo.BATCH)]

    def in_place(x, y):
        loss, gradients = differentiated(lambda: keras.ops.mean(keras.ops.square(y - model(x))), lambda: model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def on_jax(state, x, y):
        import jax

        trainable, others, slots = state

        def loss_of(weights):
            return keras.ops.mean(keras.ops.square(y - model.stateless_call(weights, others, x)[0]))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return loss, (trainable, others, slots)

    state = [[v.value for v in part] for part in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)]
    with guard.watch(model, optimizer):
        step = guard.step(on_jax if zoo.BACKEND == "jax" else in_place)
        for x, y in batches:
            x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
            if zoo.BACKEND == "jax":
                _, state = step(tuple(state), x, y)
            else:
                step(x, y)


def test_hand_written_loop(tmp_path):
    """Like a fit, also in its file; bad rows are identified by fingerprints."""
    guard = NanGuard(verbose=0, directory=tmp_path)
    looped(guard, zoo.poison(zoo.regression(), 5))
    steps = counted(guard)
    assert steps["step"].tolist() == list(range(12)) and np.flatnonzero(steps["status"]).tolist() == [5]
    assert np.isfinite(steps["loss"][:5]).all() and set(steps["epoch"].tolist()) == {0}
    (sample,) = guard.bad_samples()
    assert sample.index is None and sample.steps == (5,) and sample.reason == "1 NaN of 6 in x"
    found = Recording.read(tmp_path)
    assert found.meta["status"] == "finished" and found.samples == guard.bad_samples() and len(found) == 12
    assert [event.kind for event in found.events] == ["begin", "incident", "end"]


# Rates and loss scales


def test_rate_that_returns():
    """The return of a rate is an event of the first step with it; a change by the guard is not attributed
    to a callback."""
    guard = acting({"lower_lr": {"factor": 1e-4, "recover_after": 32}})
    moments = iter(range(10**6))
    guard._log.recorder._now = lambda: 0.02 * next(moments)
    data = zoo.poison(zoo.regression(batches=60), 5)
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.02)), data, guard=guard, epochs=1)
    first, *events = (e for e in guard.recording.events if e.kind == "learning_rate")
    assert first.data == {"factor_before": 1.0, "factor": 1e-4, "by": "guard"} and {e.data["by"] for e in events} == {"guard"}
    assert [(e.step, e.data["factor_before"], e.data["factor"]) for e in events] == [(38, 1e-4, 1.0)]


def test_first_epoch_is_another_one():
    """A fit that begins with a later epoch is recorded with that epoch, and so are its means."""
    data = zoo.regression()
    guard = NanGuard(**QUIET)
    model = zoo.plain(keras.optimizers.SGD(0.01))
    history = model.fit(*data.all, batch_size=zoo.BATCH, initial_epoch=2, epochs=4, verbose=0, callbacks=[guard]).history
    steps = guard.recording.steps
    assert steps["epoch"].tolist() == [2] * 12 + [3] * 12 and steps["batch"].tolist() == [*range(12)] * 2
    norms = [steps["gradient_norm"][steps["epoch"] == epoch].mean() for epoch in (2, 3)]
    assert history["nanguard/grad_norm"] == pytest.approx(norms)
    assert [event.epoch for event in guard.recording.events] == [2, 2, 3, 3]


class Stepping(keras.optimizers.SGD):
    """Its class knows whether a step reads the rate now, or the guard."""

    now = False

    def apply(self, *args, **kwargs):
        Stepping.now = True
        try:
            return super().apply(*args, **kwargs)
        finally:
            Stepping.now = False


def train(rate, guard):
    data = zoo.poison(zoo.regression(), zoo.BATCHES - 1)
    eager = keras.backend.backend() != "jax"
    zoo.run(lambda: zoo.plain(Stepping(rate), run_eagerly=eager), data, guard=guard, epochs=1)


def test_a_schedule_that_raises_outside_of_a_step():
    """It does not end training, and the incident has no rate."""

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            if not Stepping.now:
                raise RuntimeError("no rate")
            return 0.01

    guard = NanGuard(**QUIET)
    train(Schedule(), guard)
    (incident,) = guard.incidents
    assert incident.refused and "learning_rate" not in incident.values
