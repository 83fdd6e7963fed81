"""In `fit` the next step starts before the host reads the verdict of the previous one."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard._backends.jax.step import Transaction
from keras_nanguard._fit.session import Session
from keras_nanguard.testing import inject

BATCHES = zoo.regression().batches
PATIENT = {"snapshot": {"every": 4, "verify_after": 1}, "max_consecutive_refused": 99}


@pytest.fixture
def order(monkeypatch):
    """The started steps, and the read verdicts, by step number, in order."""
    found, kept = [], []
    start, finish = Transaction.start, Transaction.finish

    def started(self, *args, **more):
        kept.append(start(self, *args, **more))
        found.append(("start", len(kept) - 1))
        return kept[-1]

    def finished(self, result):
        found.append(("read", next(n for n, step in enumerate(kept) if step is result)))
        return finish(self, result)

    monkeypatch.setattr(Transaction, "start", started)
    monkeypatch.setattr(Transaction, "finish", finished)
    return found


def ahead(order):
    """Return the steps whose verdict was read after a later one had started."""
    return [n for place, (what, n) in enumerate(order) if what == "read" and ("start", n + 1) in order[:place]]


def test_no_step_waits(order):
    """A verdict is read late, except at the end of an epoch and before the state is read."""
    guard = NanGuard(verbose=0, snapshot={"every": 8, "verify_after": 3})
    zoo.run(zoo.plain, zoo.regression(), guard=guard)
    assert [n for what, n in order if what == "read"] == list(range(2 * BATCHES))
    ends, kept, proven, monitored = {0, 11, 12, 23}, {7, 15}, {10, 18}, {9, 19}
    assert set(range(2 * BATCHES)) - set(ahead(order)) == ends | kept | proven | monitored
    assert guard.session.run.access.transaction._program._cache_size() <= 1, "steps are compiled once"


def with_own_logs(**mode):
    class Logs(keras.Sequential):
        def train_step(self, *args):
            logs, state = super().train_step(*args)
            return {**logs, "more": logs["loss"] * 2}, state

    model = Logs([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **mode)
    return model


@pytest.mark.parametrize("how", ["a callback looks", "eager", "own logs"])
def test_waited_for(order, how):
    """If anything acts between two steps, or shows results, the verdict is read first."""
    callbacks = [zoo.After(lambda model: None)] if how == "a callback looks" else []
    build = functools.partial(with_own_logs, run_eagerly=how == "eager")
    guard = NanGuard(verbose=0)
    zoo.run(zoo.plain if callbacks else build, zoo.regression(), guard=guard, callbacks=callbacks)
    assert guard.session.run.step == 2 * BATCHES and ahead(order) == []


def test_train_on_batch_waits(order):
    """The verdict of a batch is read before it returns, also after a fit."""
    data, inputs = zoo.regression(), keras.Input((6,))
    model = NanGuardModel(inputs, keras.layers.Dense(1)(inputs))
    model.nanguard_verbose = 0
    model.compile("adam", "mse")
    for _ in range(2):
        for step in range(4):
            rows = slice(step * zoo.BATCH, (step + 1) * zoo.BATCH)
            model.train_on_batch(data.x[rows], data.y[rows])
            assert model.nanguard.session.run.step == step + 1
        zoo.fit(model, data)
    assert ahead(order)


BAD = {
    "one": (5,),
    "two in a row": (5, 6),
    "the first ones": (0, 1, 2),
    "the last one": (12,),
    "all about": (0, 1, 3, 4, 6, 9, 10, 13),
    "before a snapshot": (7, 8),
}


@pytest.mark.daily("*-3")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("where", BAD)
def test_the_same_without_the_bad_batches(where, steps):
    """An early start of the next step leaves no trace in state, logs or counts either."""
    bad = BAD[where]
    build = lambda: zoo.plain(keras.optimizers.Adam(0.01), steps_per_execution=steps)  # noqa: E731
    rule = {"name": "on", "do": "skip"}
    guard = lambda: NanGuard({**PATIENT, "rules": [rule]}, verbose=0, diagnose=False)  # noqa: E731
    clean = zoo.run(build, zoo.regression(), guard=guard())
    run = zoo.run(build, zoo.regression().with_poison(bad), guard=guard())
    assert zoo.differences(run, clean) == []
    whole = BATCHES + len(bad)
    assert run.steps == [*bad, *(whole + n for n in bad)]
    assert [(i.epoch, i.batch) for i in run.guard.incidents] == [(e, n) for e in (0, 1) for n in bad]
    assert run.guard.session.run.step == 2 * whole and run.guard.session.run.counts.refused == 2 * len(bad)
    assert run.guard.session.run.access.transaction._program._cache_size() <= 1


ACTIONS = {
    "rollback": ["rollback", {"lower_lr": {"factor": 0.5}}],
    "lower the rate": {"lower_lr": {"factor": 0.5}},
    "rollback past more": {"rollback": {"skip_batches": 2}},
    "reset slots": "reset_slots",
    "stop": "stop",
}


def both(order, policy, data, inside=lambda model: contextlib.nullcontext()):
    """Return a run with deferred verdicts, one that waits, and the steps made in vain."""
    runs, starts = [], []
    for callbacks in ([], [zoo.After(lambda model: None)]):
        keras.utils.set_random_seed(0)
        model = zoo.plain(keras.optimizers.Adam(0.01), rounded=True)
        with inside(model):
            guard = NanGuard(policy, verbose=0, diagnose=False)
            runs.append(zoo.run(lambda model=model: model, data, guard=guard, callbacks=callbacks))
            starts.append(sum(what == "start" for what, _ in order))
    one, other = runs
    assert list(map(_all, one.guard.incidents)) == list(map(_all, other.guard.incidents)) != []
    again = len([i for i in other.guard.incidents for o in i.outcomes if "run again" in o.detail])
    assert again or starts[1] - starts[0] >= other.guard.session.run.step  # with the replays of a test of the noise
    return one, other, starts[0] - one.guard.session.run.step


def _all(incident):
    return incident.step, incident.epoch, incident.batch, incident.sites, [(o.action, o.status) for o in incident.outcomes]


@pytest.mark.parametrize(("action", "site"), [*((a, "x") for a in ACTIONS), ("rollback", "y"), ("reset slots", "weights")])
def test_the_same_as_with_waiting(order, action, site):
    """The policy acts between the bad step and the next one, although that had already started."""
    policy = {**PATIENT, "rules": [{"name": "do", "do": ACTIONS[action]}]}
    data, inside = zoo.regression(), lambda model: contextlib.nullcontext()
    if site == "weights":
        inside = lambda model: inject(model, site=site, step=5, count=2)  # noqa: E731
    else:
        data = data.with_poison((5, 6), where=site)
    one, other, in_vain = both(order, policy, data, inside)
    assert zoo.differences(one, other, 1e-5) == []
    assert one.guard.session.run.step == other.guard.session.run.step
    assert in_vain or site == "weights", "who spoils weights hands the step another state"


def test_an_epoch_of_bad_steps(order):
    """Its logs are the same as with waiting."""
    policy = {**PATIENT, "rules": [{"name": "on", "do": "skip"}]}
    data = zoo.regression()
    data.x[:] = np.nan
    one, other, _ = both(order, policy, data)
    assert zoo.differences(one, other, 1e-5) == []
    assert np.isfinite(one.history["loss"]).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_overflows_in_a_row(count):
    """Each halves the loss scale once, although the next step had started, and was refused."""
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
    model, guard, data = zoo.plain(optimizer, dropout=False), NanGuard(verbose=0), zoo.regression()
    data.y[5 * zoo.BATCH : (5 + count) * zoo.BATCH] = 6e4  # finite, and so is the loss
    zoo.fit(model, data, guard)
    overflows = guard.session.run.counts.overflows
    assert overflows >= count and guard.session.run.step == BATCHES
    assert float(np.asarray(optimizer.dynamic_scale.value)) == 64.0 / 2**overflows


class First(keras.callbacks.Callback):
    """Runs before the guard, and records the known steps at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.guard, self.known = None, []

    def on_test_begin(self, logs=None):
        self.known.append(self.guard().session.run.counts.refused)

    def on_epoch_end(self, epoch, logs=None):
        self.known.append(self.guard().session.run.counts.refused)


@pytest.mark.parametrize("for_good", [False, True], ids=["callback", "model"])
def test_an_epoch_ends_with_all_of_its_steps(order, for_good):
    """Its last batch is known at its end, for any reader, and when a validation runs."""
    data, first = zoo.poison(zoo.regression(), BATCHES - 1), First()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    model = (NanGuardModel if for_good else keras.Model)(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse")
    guard = NanGuard(verbose=0)
    first.guard = lambda: model.nanguard if for_good else guard
    if for_good:
        model.nanguard_verbose = 0
    model.fit(
        *data.all, batch_size=zoo.BATCH, epochs=2, shuffle=False, verbose=0, validation_data=zoo.regression(seed=3).all,
        callbacks=[first, *([] if for_good else [guard])],
    )  # fmt: skip
    assert first.known[1::2] == [1, 2], "at the end of an epoch"
    assert ahead(order)
    assert first.guard().session.run.step == 2 * BATCHES and [i.batch for i in first.guard().incidents] == [BATCHES - 1] * 2


def ends(data, batch):
    """Yield batches until this one, and then fail."""
    for n in range(batch):
        rows = slice(n * zoo.BATCH, (n + 1) * zoo.BATCH)
        yield data.x[rows], data.y[rows]
    raise np.linalg.LinAlgError("the matrix is singular")


def test_an_interrupted_fit_reports_its_last_step():
    """It was bad and not yet read; it is reported before the exception, which is explained, too."""
    guard = NanGuard(verbose=0)
    with pytest.raises(Exception, match="singular"):
        zoo.run(zoo.plain, lambda: ends(zoo.poison(zoo.regression(), 7), 8), guard=guard)
    assert [i.step for i in guard.incidents] == [7, 8] and guard.session.run.step == 8


def test_state_checks_use_the_state_of_their_step(order, monkeypatch):
    """The host waits for the step that has already started."""

    class Wary(NanGuard):
        def on_epoch_begin(self, epoch, logs=None):
            super().on_epoch_begin(epoch, logs)
            self.session.tasks.monitors.ceiling = -np.inf
            self.session.run.due = type(self.session.run.due)()

    due = []
    real = Session._run_due

    def tasks(self):
        if self.run.step >= self.run.due.next:
            due.append((self.run.step, sum(what == "start" for what, _ in order)))
        real(self)

    monkeypatch.setattr(Session, "_run_due", tasks)
    zoo.run(zoo.plain, zoo.regression(), guard=Wary(verbose=0), epochs=1)
    assert due and all(step == started for step, started in due)


def printing(calls):
    jax.debug.callback(lambda: calls.append(1))


def asking(calls):
    return jax.pure_callback(lambda: calls.append(1) or np.ones((), "float32"), jax.ShapeDtypeStruct((), "float32"))


def asking_within(calls):
    return jax.lax.cond(jnp.ones(()) > 0, lambda: asking(calls), lambda: 1.0)


@pytest.mark.parametrize("call", [printing, asking, asking_within])
def test_calls_of_the_host(call, order):
    """A step that prints, or calls the host, does so as often as without a guard."""
    calls = []

    class Model(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            factor = call(calls)
            loss = super().compute_loss(*args, **kwargs)
            return loss if factor is None else loss * factor

    def called(data, *callbacks):
        calls.clear()
        model = Model([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(*data.all, batch_size=zoo.BATCH, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
        jax.effects_barrier()
        return len(calls)

    guard = lambda: NanGuard(verbose=0, diagnose=False)  # noqa: E731
    plain = called(zoo.regression())
    assert called(zoo.regression(), guard()) == plain == 2 * BATCHES
    assert called(zoo.poison(zoo.regression(), 5), guard()) == plain, "one bad batch in each of two epochs"
    assert ahead(order) == []


def test_logs_of_a_refused_step(order, monkeypatch):
    """They cannot be replaced any more, so they are those of the restored metrics."""
    seen, real = [], Session.logs_for_callbacks

    def logs_for_callbacks(self, logs, *more):
        seen.append(float(logs["loss"]))
        return real(self, logs, *more)

    monkeypatch.setattr(Session, "logs_for_callbacks", logs_for_callbacks)
    guard = NanGuard(verbose=0)
    zoo.run(zoo.plain, zoo.regression().with_poison([5]), guard=guard)
    assert 5 in ahead(order) and guard.session.run.counts.refused == 2
    assert len(seen) >= 2 * BATCHES and np.isfinite(seen).all()
