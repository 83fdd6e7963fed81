"""One step for each batch that the host reads agrees with Keras, for all data."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard.testing import corrupt, inject


class Traced(keras.Model):
    """A model that counts the traces of its step, and records its inputs."""

    def __init__(self):
        super().__init__()
        self.dense, self.traces, self.batches = keras.layers.Dense(1), 0, []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.traces += 1
        self.batches.append(keras.tree.map_structure(lambda t: getattr(t, "shape", t), data))
        return super().train_step(data)


def traced():
    keras.utils.set_random_seed(1)
    model = Traced()
    model.compile("adam", "mse")
    model.build((None, 4))
    return model


def numbers(count):
    rng = np.random.default_rng(2)
    return rng.standard_normal((count, 4)).astype("float32"), rng.standard_normal((count, 1)).astype("float32")


def both(run):
    """Return the two models trained by `run(model, callbacks)`, without and with a guard."""
    models = []
    for callbacks in ([], [NanGuard(verbose=0)]):
        models.append(traced())
        run(models[-1], callbacks)
    zoo.assert_same(models[0].get_weights(), models[1].get_weights())
    return models


def test_batches_are_those_of_keras():
    """With their nesting, whole and short ones, with sample weights or without."""
    x, y = numbers(20)

    def run(model, callbacks):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
        model.fit(x, y, sample_weight=np.linspace(0, 1, 20), batch_size=8, verbose=0, callbacks=callbacks)
        model.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0, callbacks=callbacks)

    plain, guarded = both(run)
    assert {str(b) for b in plain.batches} == {str(b) for b in guarded.batches}


@pytest.mark.skipif(zoo.OLD, reason="this version of Keras takes no None from a generator")
def test_omitted_parts_of_a_generator_are_none():
    def run(model, callbacks):
        def batches():
            for _ in range(6):
                yield (*numbers(8), None)

        model.fit(batches(), epochs=2, steps_per_epoch=3, verbose=0, callbacks=callbacks)

    _, guarded = both(run)
    assert all(batch[2] is None for batch in guarded.batches)


@pytest.mark.skipif(zoo.OLD, reason="this version of Keras takes no None from a generator")
def test_a_fit_with_omitted_parts_resumes(tmp_path):
    def batches(*more):
        for number in range(6):
            x, y = numbers(8)
            yield (x + number, y, *more)

    ended = []
    for more in ((), (None,)):
        for _ in range(2):
            model, every = traced(), {"snapshot": {"every": 2, "verify_after": 1}}
            guard = NanGuard(every, directory=tmp_path / str(len(more)), resume=True, verbose=0)
            model.fit(batches(*more), epochs=2, steps_per_epoch=3, verbose=0, callbacks=[guard])
        assert guard.session.run.counts.committed < 6
        ended.append(model.get_weights())
    zoo.assert_same(*ended)


def test_shapes_that_change_from_fit_to_fit():
    """A trace for one shape of batches is not used for others."""

    def run(model, callbacks):
        for count in (8, 6, 8, 5):
            data = tf.data.Dataset.from_tensor_slices(numbers(count)).batch(count, drop_remainder=True)
            model.fit(data, epochs=2, verbose=0, callbacks=callbacks)

    both(run)


def test_epochs_and_fits_need_no_trace_more():
    """Each epoch has its own iterator; the step is traced no more often than without a guard."""
    x, y = numbers(16)

    def run(model, callbacks):
        for _ in range(3):
            model.fit(x, y, epochs=3, batch_size=8, verbose=0, callbacks=callbacks)

    plain, guarded = both(run)
    assert guarded.traces <= plain.traces


def test_a_train_function_of_any_number_of_steps():
    """A bad step has its number and its row."""

    class Five(Traced):
        def make_train_function(self, force=False):
            if self.train_function is None or force:

                def run(iterator):
                    for _ in range(5):
                        logs = self.train_step(next(iterator))
                    return logs

                self.train_function = tf.function(run, autograph=False)
            return self.train_function

    (x, y), model, guard = numbers(8 * 5), Five(), NanGuard(verbose=0)
    x[8 * 2 + 3] = np.nan
    model.compile("sgd", "mse", jit_compile=False)
    model.build((None, 4))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    model.fit(data.repeat(), steps_per_epoch=1, verbose=0, callbacks=[guard])
    assert [(i.step, i.diagnosis.samples) for i in guard.incidents] == [(2, (3,))]
    counts = guard.session.run.counts
    assert (counts.committed, counts.refused, counts.step) == (4, 1, 5)


@pytest.mark.parametrize("ends", ["in Python", "in the graph"])
def test_a_train_function_whose_data_ends_within_an_execution(ends):
    """Its complete steps count, and the next epoch trains on, as without a guard."""

    class Five(Traced):
        def make_train_function(self, force=False):
            if self.train_function is None or force:
                step = tf.function(self.train_step, autograph=False)

                def run(iterator):
                    for _ in range(5):
                        logs = step(next(iterator))
                    return logs

                self.train_function = tf.function(run, autograph=False) if ends == "in the graph" else run
            return self.train_function

    def train(x, y, callbacks):
        keras.utils.set_random_seed(1)
        model = Five()
        model.compile("adam", "mse", jit_compile=False)
        model.build((None, 4))
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        return model

    (x, y), guard = numbers(8 * 12), NanGuard(verbose=0)
    clean = [part[: 8 * 11] for part in (x, y)]
    x[8 * 11 + 3] = np.nan
    guarded, counts = train(x, y, [guard]), guard.session.run.counts
    if ends == "in Python":  # in a graph the last complete steps may be cut off
        zoo.assert_same(guarded.get_weights(), train(*clean, []).get_weights())
        assert [(i.step, i.epoch, i.diagnosis.samples) for i in guard.incidents] == [(11, 0, (3,)), (23, 1, (3,))]
        assert (counts.committed, counts.refused, counts.step) == (22, 2, 24)
    assert counts.committed == int(guarded.optimizer.iterations) >= 20


@pytest.mark.parametrize("eager", [True, False])
def test_a_train_on_batch_that_fails_is_followed_by_others(eager):
    class Guarded(NanGuardModel):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    x, y = numbers(8)
    model = Guarded()
    model.compile("sgd", "mse", steps_per_execution=4, run_eagerly=eager, jit_compile=False)
    for number in range(5):
        with pytest.raises(Exception, match=r"dense|MatMul") if number == 2 else contextlib.nullcontext():
            model.train_on_batch(x[:, :3] if number == 2 else x, y)
    counts = model.nanguard.session.run.counts
    assert (counts.committed, counts.step) == (4, 4) and int(model.optimizer.iterations) == 4


def test_a_step_that_depends_on_its_update_with_autograph():
    """What the guard raises to trace a step again passes through AutoGraph."""

    class Decays(Traced):
        def train_step(self, data):
            logs = super().train_step(data)
            self.layers[0].kernel.assign(self.layers[0].kernel * 0.5)
            return logs

        def make_train_function(self, force=False):
            if self.train_function is None or force:

                def run(iterator):
                    return self.train_step(next(iterator))

                self.train_function = tf.function(run)
            return self.train_function

    x, y = numbers(16)
    ended = []
    for callbacks in ([], [NanGuard(verbose=0)]):
        keras.utils.set_random_seed(0)
        model = Decays()
        model.compile("sgd", "mse", jit_compile=False)
        model.build((None, 4))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        ended.append(model.get_weights())
    zoo.assert_same(*ended)


def test_functions_that_run_eagerly():
    """The Python code of a step runs in each step, as without a guard."""
    x, y = numbers(16)
    tf.config.run_functions_eagerly(True)
    try:
        plain, guarded = both(lambda model, callbacks: model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks))
        assert guarded.traces == plain.traces >= 2
        data = x.copy()
        data[9] = np.nan
        guard, before = NanGuard(verbose=0), guarded.traces
        guarded.fit(data, y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
        assert guarded.traces >= before + 2
        assert [(i.step, i.diagnosis.samples) for i in guard.incidents] == [(1, (1,))]
    finally:
        tf.config.run_functions_eagerly(False)


class Counts(keras.Model):
    """Counts the calls of its train function."""

    calls = 0

    def make_train_function(self, force=False):
        made = super().make_train_function(force=force)
        keras_own = self.train_function

        def counting(iterator):
            self.calls += 1
            return keras_own(iterator)

        self.train_function = counting
        return made and counting


@pytest.mark.parametrize("bases", [(Counts, Traced), (Counts, NanGuardModel, Traced), (NanGuardModel, Counts, Traced)])
def test_a_train_function_of_the_users_own_is_kept(bases):
    """A model with a custom train function uses it."""
    model, (x, y) = type("Own", bases, {"nanguard_verbose": 0})(), numbers(16)
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[NanGuard(verbose=0)])
    assert model.calls == 8


def in_a_loop(model, guard, batches, corrupted):
    """Train on these batches one by one; NaN may be written into a weight before the last one."""
    calls = keras.callbacks.CallbackList([guard], model=model, epochs=1, steps=len(batches))
    calls.on_train_begin()
    calls.on_epoch_begin(0)
    for number, batch in enumerate(batches):
        calls.on_train_batch_begin(number)
        model.train_on_batch(*batch)
        if corrupted and number == len(batches) - 2:
            corrupt(model.layers[0].kernel)
        calls.on_train_batch_end(number, {})
    calls.on_epoch_end(0, {})
    calls.on_train_end()


@pytest.mark.daily("weights")
@pytest.mark.parametrize("other", ["weights", "size"])
def test_a_replay_of_batches_that_differ_from_those_of_the_fit_before(other):
    """With sample weights, or of another size than a static one: the steps are those of the loop."""
    (x, y), ends = numbers(16), []
    weights = (np.linspace(0, 1, 8, dtype="float32"),) if other == "weights" else ()
    size = 8 if weights else 5
    batches = [(x[n : n + size], y[n : n + size], *weights) for n in range(6)]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    for corrupted in (False, True):
        model, guard = traced(), NanGuard(verbose=0, diagnose=False)
        model.fit(data, verbose=0, callbacks=[guard])
        in_a_loop(model, guard, batches, corrupted)
        ends.append(model.get_weights())
    assert "replayed" in guard.incidents[0].outcomes[0].detail
    zoo.assert_same(*ends)


@pytest.mark.parametrize("fixed", [False, True], ids=["any size", "one size"])
def test_a_replay_needs_no_trace(fixed):
    """The steps run again by the trace of the fit, whose last batch may be short."""
    x, y = numbers(24 if fixed else 20)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=fixed)
    traces = []
    for batch in (9, 2):  # after no batch, or after the last one
        model, guard = traced(), NanGuard(verbose=0, diagnose=False)
        model.fit(data, verbose=0, callbacks=[guard, zoo.After(lambda model: corrupt(model.layers[0].kernel), batch)])
        traces.append(model.traces)
    assert "replayed" in guard.incidents[0].outcomes[0].detail
    assert traces[0] == traces[1]


@pytest.mark.parametrize("of_model", [False, True], ids=["callback", "model"])
def test_single_batches_and_fits_in_turn(of_model):
    """`train_on_batch` and `fit` use the same transaction."""
    inputs = keras.Input((6,))
    model = (NanGuardModel if of_model else keras.Model)(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.Adam(), "mse")
    guards = [] if of_model else [NanGuard(verbose=0, diagnose=False)]
    data = zoo.regression(batches=4)
    x, y = data.x, data.y
    model.nanguard_verbose = 0
    with inject(model, site="gradients", step=1):
        model.fit(x, y, epochs=3, batch_size=32, verbose=0, callbacks=guards)
    assert int(model.optimizer.iterations) == 2
    loss = model.train_on_batch(x, y, return_dict=True)["loss"]
    assert np.isfinite(loss) and int(model.optimizer.iterations) == 3
    model.fit(x, y, verbose=0, callbacks=guards)
    assert not zoo.bad_entries(model)
