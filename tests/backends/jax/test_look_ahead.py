"""The next step is started before the verdict on the last one is read; nobody can tell, but by the clock."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from keras_nanguard import NanGuard
from keras_nanguard._backends.jax import strategies
from keras_nanguard._backends.jax.attach import Batches

ROWS, BATCH = 60, 8


class Rate(keras.callbacks.Callback):
    """Reads a weight and sets the learning rate after a few batches, for which Keras' own state has to be written back."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.jax_state_sync()
            self.model.optimizer.learning_rate = 0.03


class Stop(keras.callbacks.Callback):
    """Ends training within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            self.model.stop_training = True


class Reads(keras.callbacks.Callback):
    """Reads the model after each batch, for which Keras writes the state back."""

    def on_train_batch_end(self, batch, logs=None):
        assert np.all(np.isfinite(self.model.trainable_variables[0]))


class Trains(keras.callbacks.Callback):
    """Trains on a batch of its own between two batches of `fit`."""

    def on_train_batch_end(self, batch, logs=None):
        if batch in (2, 3):
            x, y = data()
            self.model.train_on_batch(x[:4] + 1, y[:4])


class Draws(keras.callbacks.Callback):
    """Draws from the generator that `shuffle="batch"` draws from."""

    def __init__(self):
        self.drawn = []

    def on_train_batch_end(self, batch, logs=None):
        self.drawn.append(float(np.random.random()))


def normal():
    """Return a network with statistics and dropout."""
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), *layers])


def data(bad=()):
    """Return rows and targets; in some batches one entry is NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 3)).astype("float32")
    for batch in bad:
        x[batch * BATCH + 1, 0] = np.nan
    return x, x[:, :1] * 2


def trained(callbacks=(), bad=(), execution=1, **arguments):
    """Return what a fit leaves: variables, history, incidents, and what callbacks have drawn."""
    keras.utils.set_random_seed(1)
    model = normal()
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=execution)
    guard, callbacks = NanGuard(verbose=0), [callback() for callback in callbacks]
    x, y = data(bad)
    given = {"x": x, "y": y, "batch_size": BATCH, "epochs": 3} | arguments
    history = model.fit(**given, verbose=0, callbacks=[guard, *callbacks])
    found = [(incident.step, incident.refused, incident.diagnosis.cause) for incident in guard.incidents]
    drawn = [number for callback in callbacks for number in getattr(callback, "drawn", ())]
    return [np.asarray(v.value) for v in model.variables], history.history, found, drawn


@pytest.fixture
def used(monkeypatch):
    """Counts the steps that had been started ahead, and were used."""
    found, real = [], strategies.LooksAhead._started_for
    monkeypatch.setattr(strategies.LooksAhead, "_started_for", lambda *args: found.append(real(*args)) or found[-1])
    return lambda: sum(results is not None for results in found)


@pytest.fixture
def run(monkeypatch):
    """Counts the steps that were run, in vain or not."""
    found, real = [], strategies.HostSelects.compute
    monkeypatch.setattr(strategies.HostSelects, "compute", lambda *args: found.append(1) or real(*args))
    return lambda: len(found)


FITS = {
    "partial last batch": ({}, True),
    "bad batches": ({"bad": (2, 3, 6)}, True),
    "bad first and last batch": ({"bad": (0, 7)}, True),
    "not shuffled": ({"shuffle": False, "bad": (4,)}, True),
    "epochs that end anywhere": ({"steps_per_epoch": 5, "epochs": 4}, True),
    "several steps in one": ({"execution": 3, "bad": (4,), "shuffle": False}, True),
    "validation": ({"validation_split": 0.2}, True),
    "a rate that a callback sets": ({"callbacks": (Rate,)}, True),
    "a callback that trains": ({"callbacks": (Trains,)}, True),
    "stopped": ({"callbacks": (Stop,)}, True),
    "a callback that reads the model": ({"callbacks": (Reads,)}, False),
    "shuffled batches": ({"callbacks": (Draws,), "shuffle": "batch"}, False),
    "draws between batches": ({"callbacks": (Draws,)}, True),
}


@pytest.mark.parametrize("kind", FITS)
def test_nobody_can_tell(kind, used, run, monkeypatch):
    """Variables, history, incidents and random numbers are those of a run that starts each step when it is called."""
    arguments, ahead = FITS[kind]
    found = trained(**arguments)
    assert (used() > 2) == ahead
    ran = run()
    monkeypatch.setattr(strategies.LooksAhead, "results", strategies.HostSelects.results)
    before = used()
    expected = trained(**arguments)
    assert used() == before
    in_vain = 2 * ran - run()
    assert in_vain <= 3 + 2 * len(found[2])  # where an epoch ends, or a callback acts, and where a step is refused
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[1:] == expected[1:]


def test_two_fits(used):
    """A batch that was seen in a fit that was stopped belongs to that fit."""
    keras.utils.set_random_seed(1)
    model = normal()
    model.compile("sgd", "mse")
    (x, y), seen = data(), []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(np.asarray(guard.session.transaction.given[0][0]))

    for fit in range(2):
        guard, part = NanGuard(verbose=0), slice(fit * 30, (fit + 1) * 30)
        model.fit(x[part], y[part], batch_size=5, shuffle=False, verbose=0, callbacks=[guard, Notes(), *[Stop()] * (fit == 0)])
    assert used() > 5
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate([x[:25], x[30:]]))


def test_a_trial_does_not_look_ahead(used, run):
    """A step that is run again, to see what would have become of it, is no step of `fit`: nothing comes after it."""
    model, counts = normal(), []
    model.compile("sgd", "mse")

    class Again(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                model.jax_state_sync()
                before = run()
                guard.session.state.access.run_again(guard.session.transaction.given)
                counts.append(run() - before)

    guard = NanGuard(verbose=0)
    model.fit(*data(), batch_size=BATCH, verbose=0, callbacks=[guard, Again()])
    assert counts == [1] and used() > 2


def printing(calls):
    jax.debug.callback(lambda: calls.append(1))


def asking(calls):
    return jax.pure_callback(lambda: calls.append(1) or np.ones((), "float32"), jax.ShapeDtypeStruct((), "float32"))


def asking_within(calls):
    return jax.lax.cond(jnp.ones(()) > 0, lambda: asking(calls), lambda: 1.0)


@pytest.mark.parametrize("call", [printing, asking, asking_within])
def test_calls_of_the_host(call, used):
    """A step that prints, or asks the host for something, is run as often as it is due."""
    calls = []

    class Model(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            factor = call(calls)
            loss = super().compute_loss(*args, **kwargs)
            return loss if factor is None else loss * factor

    model = Model(normal().layers)
    model.compile("sgd", "mse")
    x, y = data()
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[NanGuard(verbose=0)])
    jax.effects_barrier()
    assert len(calls) == 16 and used() == 0


def test_a_generator_is_read_batch_by_batch():
    """What a generator does when it is asked for a batch is done in its turn."""
    x, y = data()
    taken, seen = [], []

    def batches():
        for start in range(0, ROWS, BATCH):
            taken.append(start)
            yield x[start : start + BATCH], y[start : start + BATCH]

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(len(taken) - batch)

    model = normal()
    model.compile("sgd", "mse")
    model.fit(batches(), verbose=0, callbacks=[Notes()])
    plain = list(seen)
    taken.clear(), seen.clear()
    model.fit(batches(), verbose=0, callbacks=[NanGuard(verbose=0), Notes()])
    assert seen == plain


def test_batches():
    """The next batch can be seen before it is taken; nobody can write to it, and the end is where it was."""
    rows = np.arange(6.0).reshape(3, 2)
    batches = Batches(iter(rows), early=True)
    first = batches.following()
    assert batches.following() is first and not first.flags.writeable
    rows[:] = -1
    np.testing.assert_array_equal(first, [0, 1])
    assert next(batches) is first
    assert [list(batch) for batch in batches] == [[-1, -1], [-1, -1]] and batches.following() is None
    late = Batches(iter([1, 2]), early=False)
    assert late.following() is None and list(late) == [1, 2]
