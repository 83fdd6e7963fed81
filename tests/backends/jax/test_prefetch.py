"""The next batch of arrays is taken while JAX computes a step; data of a user's own are asked when they always were."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard._backends.jax.prefetch import Prefetch

BATCHES = zoo.regression().batches


@pytest.fixture
def taken(monkeypatch):
    """Whether there was a batch, each time that one was taken ahead."""
    found, real = [], Prefetch.fetch

    def fetch(self):
        real(self)
        found.append(self.holds)

    monkeypatch.setattr(Prefetch, "fetch", fetch)
    return found


def same(data=None, build=zoo.plain, **fit):
    """Train plain and guarded, in the same way, to the same end."""
    plain, guarded = (zoo.run(build, data or zoo.regression(), guard=guard, **fit) for guard in (None, True))
    assert zoo.differences(guarded, plain, 1e-5) == [] and guarded.guard.incidents == []
    return guarded


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("steps_per_epoch", [None, 6])
def test_arrays(taken, steps_per_execution, steps_per_epoch):
    """No batch is lost, and none is seen twice, within an epoch and where epochs share what is left of the data."""
    more = {"steps_per_epoch": steps_per_epoch} if steps_per_epoch else {}
    same(build=lambda: zoo.plain(steps_per_execution=steps_per_execution), **more)
    ends = taken.count(False)
    assert len(taken) == 2 * (steps_per_epoch or BATCHES)
    assert ends == 2 * (steps_per_epoch or BATCHES) // BATCHES


def test_shuffled(taken):
    """The order is that of a plain fit."""
    same(shuffle=True)
    assert any(taken)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_too_little_data(taken):
    """Data that end before the epoch does end it there, and Keras warns of it."""
    run = same(steps_per_epoch=BATCHES + 3, epochs=1)
    assert run.guard.session.step == BATCHES


class Noting(keras.utils.PyDataset):
    """Gives batches that depend on when they are asked for: how many steps had been through by then."""

    def __init__(self, clock, data):
        super().__init__()
        self.clock, self.data = clock, data

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        rows = slice(index * zoo.BATCH, (index + 1) * zoo.BATCH)
        return self.data.x[rows] * (1 + self.clock.steps), self.data.y[rows]


class Clock(keras.callbacks.Callback):
    """Counts steps."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1


@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
def test_data_of_a_users_own(taken, kind):
    """A step runs on what the data were after the step before it, as without a guard."""
    ends = []
    for guard in (None, NanGuard(verbose=0)):
        clock = Clock()
        source = Noting(clock, zoo.regression())
        given = source if kind == "PyDataset" else (source[i] for i in range(BATCHES))
        ends.append(zoo.run(zoo.plain, lambda given=given: given, guard=guard, epochs=1, callbacks=[clock]))
    assert zoo.differences(*ends, 1e-5) == [] and not taken


class Between(keras.callbacks.Callback):
    """Trains on one more batch after the fourth step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            data = zoo.regression(seed=5)
            self.model.train_on_batch(data.x[: zoo.BATCH], data.y[: zoo.BATCH])


def test_train_on_batch_in_between(taken):
    """The batch that was taken ahead is not lost."""
    plain, guarded = (zoo.run(zoo.plain, zoo.regression(), guard=guard, epochs=1, callbacks=[Between()]) for guard in (None, True))
    assert guarded.guard.session.step == BATCHES + 1 and any(taken)
    assert zoo.differences(guarded, plain, 1e-5) == []


class Stop(keras.callbacks.Callback):
    """Ends training after the third step."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2


@pytest.mark.parametrize("for_good", [False, True])
def test_let_go(for_good):
    """A fit that was ended early leaves no data behind, and the next one begins with its first batch."""
    held = []

    class Held(np.ndarray):
        pass

    inputs = keras.Input((6,))
    net = (NanGuardModel if for_good else keras.Model)(inputs, keras.layers.Dense(1)(inputs))
    net.compile("adam", "mse")
    callbacks = [] if for_good else [NanGuard(verbose=0)]
    for _ in range(2):
        x = zoo.regression().x.view(Held)
        held.append(weakref.ref(x))
        net.fit(x, zoo.regression().y, batch_size=zoo.BATCH, verbose=0, callbacks=[*callbacks, Stop()])
    del x
    gc.collect()
    session = net.nanguard.session if for_good else callbacks[0].session
    assert session.step == 3 and all(reference() is None for reference in held)


def test_an_exception_comes_in_its_turn():
    """What goes wrong while an item is taken ahead is raised when that item is asked for."""

    def items():
        yield 1
        raise OSError("gone")

    source = items()
    ahead = Prefetch(source)
    assert next(ahead) == 1
    ahead.fetch()
    assert not ahead.holds
    with pytest.raises(OSError, match="gone"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
