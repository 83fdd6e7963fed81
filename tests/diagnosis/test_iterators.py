"""Functions that read their data from an iterator."""

import functools
import itertools
import types

import keras
import numpy as np
import pytest
from support.programs import differentiated

from keras_nanguard import NanGuard
from keras_nanguard._backends.shared.batches import takes_iterator
from keras_nanguard._backends.shared.iterators import reads_iterator

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

FEED = iter([1, 2])
ROWS = [1, 2]


def of_global():
    return next(FEED)


def of_list():
    return ROWS[0]


def through_another():
    return of_global()


class Owner:
    def __init__(self, **held):
        vars(self).update(held)

    def step(self):
        return next(self.feed)

    __call__ = step

    def nested(self):
        return lambda: next(self.feed)


def enclosing(value):
    def step():
        return value

    return step


READS = {
    "a global": of_global,
    "a function that it calls": through_another,
    "a closure": enclosing(zip(ROWS, ROWS)),
    "a generator": enclosing(n for n in ROWS),
    "a counter": enclosing(itertools.count()),
    "an attribute": Owner(feed=iter(ROWS)).step,
    "an argument of partial": functools.partial(of_list, iter(ROWS)),
    "an attribute of an object in a closure": Owner(feed=iter(ROWS)).nested(),
    "an attribute of an object that is the step": Owner(feed=iter(ROWS)),
    "a method in a partial": functools.partial(Owner(feed=iter(ROWS)).step),
    "below a decorator": functools.wraps(of_global)(lambda: None),
    "below a tf.function": types.SimpleNamespace(python_function=of_global),
}
DOES_NOT = {
    "a list": of_list,
    "a closure of data": enclosing(ROWS),
    "an attribute of data": Owner(feed=ROWS).step,
    "another attribute of an object in a closure": enclosing(Owner(other=iter(ROWS))),
    "no function": 3,
}
TAKES = {
    "an iterator": ((iter(ROWS),), {}),
    "a generator": ((ROWS, (n for n in ROWS)), {}),
    "a keyword": (((), {"feed": iter(ROWS)})),
    "an iterator in a structure": (({"feeds": [ROWS, (iter(ROWS),)]},), {}),
    "a method": ((Owner(feed=iter(ROWS)).step,), {}),
}


@pytest.mark.parametrize("name", READS)
def test_found(name):
    assert reads_iterator(READS[name])


@pytest.mark.parametrize("name", DOES_NOT)
def test_not_found(name):
    assert not reads_iterator(DOES_NOT[name])


@pytest.mark.parametrize("name", TAKES)
def test_found_among_arguments(name):
    assert takes_iterator(TAKES[name])


def test_not_found_among_arguments():
    assert not takes_iterator(((ROWS, of_list, {"x": np.zeros(2)}, None, "text"), {"y": Owner(feed=ROWS)}))


@pytest.mark.requires_backend("tensorflow", reason="of TensorFlow")
def test_a_method_that_is_compiled():
    class Compiled(Owner):
        step = tf.function(Owner.step)

    assert reads_iterator(Compiled(feed=iter(ROWS)).step)
    assert not reads_iterator(Compiled(feed=ROWS).step)


def test_an_open_file_is_not_data(tmp_path):
    with (tmp_path / "log").open("w") as file:
        assert not reads_iterator(enclosing(file))


def test_functions_that_call_each_other():
    functions = {}
    functions["one"] = enclosing(functions)
    module = types.FunctionType((lambda: later()).__code__, {"later": None, "__name__": __name__})  # noqa: F821
    module.__globals__["later"] = module
    assert not reads_iterator(module)


def loop(batches, given, compiled=False, **settings):
    """Train on batches from an iterator, which the step is `given` or refers to; return the guard, the first
    value of each batch that a step has read, in order, and a function that trains to the end and returns the model."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    own = iter(tf.data.Dataset.from_tensor_slices(batches) if compiled else batches)
    guard, taken = NanGuard(verbose=0, **settings), []

    def update(batch):
        loss, gradients = differentiated(
            lambda: keras.ops.mean(keras.ops.square(model(batch, training=True))),
            lambda: model.trainable_variables,
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss, batch[0, 0]

    def step():
        return update(keras.ops.convert_to_tensor(next(own)))

    def step_on(feed):
        return update(keras.ops.convert_to_tensor(next(feed)))

    def train(before=lambda model, number: None):
        function, args = (step_on, (own,)) if given else (step, ())
        with guard.watch(model, optimizer):
            guarded = guard.step(tf.function(function) if compiled else function)
            for number in range(len(batches)):
                before(model, number)
                taken.append(float(guarded(*args)[1]))
        assert next(own, None) is None
        return model

    return guard, taken, train


def numbered(count=20):
    """Return batches whose first value is their number."""
    batches = np.random.default_rng(0).normal(size=(count, 8, 4)).astype("float32")
    batches[:, 0, 0] = np.arange(count)
    return batches


GIVEN = pytest.mark.parametrize("given", [False, True], ids=["closure", "argument"])
IN_LOOP = pytest.mark.requires_backend("tensorflow", "torch", reason="a step on JAX is given its batch")


@IN_LOOP
@GIVEN
@pytest.mark.parametrize("diagnose", [True, False])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.requires_backend("tensorflow", reason="tf.function"))])
def test_no_batch_is_lost_to_a_replay(tmp_path, given, compiled, diagnose):
    """Each call of the step takes the next batch, no replay does; so the cause is unknown."""
    batches = numbered()
    batches[7, 1:] = np.nan
    guard, taken, train = loop(batches, given, compiled, diagnose=diagnose, directory=str(tmp_path))
    model = train()
    assert taken == list(range(len(batches)))
    (incident,) = guard.incidents
    assert incident.step == 7
    if diagnose:
        assert incident.diagnosis.cause == "unknown"
        assert any("reads from an iterator" in text for text in incident.diagnosis.evidence)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@IN_LOOP
@GIVEN
def test_a_rollback_replays_no_step(given):
    """The batches of the undone steps are gone, so the rollback reports these steps as lost."""

    def spoil(model, number):
        if number == 12:
            model.layers[-1].kernel.assign(np.full((4, 1), np.nan))

    guard, taken, train = loop(numbered(), given)
    model = train(spoil)
    assert taken == list(range(20))
    (incident,) = guard.incidents
    (outcome,) = incident.outcomes
    assert outcome.action == "rollback" and outcome.detail.endswith("12 committed steps undone")
    assert guard._counted().run_again == 0
    assert all(np.isfinite(w).all() for w in model.get_weights())


@IN_LOOP
@pytest.mark.parametrize("eager", [False, True])
def test_a_train_function_that_passes_the_iterator_on(eager):
    """A custom train function of `fit` may leave it to the train step to read the batch."""
    batches = numbered()
    batches[7, 1:] = np.nan
    ended = []

    class Model(keras.Sequential):
        def train_step(self, data):
            batch = next(data)
            batch = batch[0] if isinstance(batch, tuple) else batch
            loss, gradients = differentiated(
                lambda: keras.ops.mean(keras.ops.square(self(batch, training=True))),
                lambda: self.trainable_variables,
            )
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

        def make_train_function(self, force=False):
            def function(data):
                return self.train_step(iter(data))

            compiled = keras.backend.backend() == "tensorflow" and not eager
            self.train_function = tf.function(function) if compiled else function

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 12:
                model.layers[-1].kernel.assign(np.full((4, 1), np.nan))

        def on_train_batch_end(self, batch, logs=None):
            ended.append(batch)

    model = Model([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", run_eagerly=eager)
    guard = NanGuard(verbose=0)
    model.fit(batches.reshape(-1, 4), batch_size=8, shuffle=False, callbacks=[guard, Watch()], verbose=0)
    assert ended == list(range(20))
    refused, spoiled = guard.incidents
    assert (refused.step, refused.diagnosis.cause, spoiled.step) == (7, "unknown", 12)
    assert "undone" in spoiled.outcomes[-1].detail and guard._counted().run_again == 0
