"""Functions that read their data from an iterator."""

import functools
import itertools
import types

import keras
import numpy as np
import pytest
from support.programs import differentiated

from keras_nanguard import NanGuard
from keras_nanguard._diagnose.iterators import reads_iterator

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
    "a method in a partial": functools.partial(Owner(feed=iter(ROWS)).step),
    "below a decorator": functools.wraps(of_global)(lambda: None),
    "below a tf.function": types.SimpleNamespace(python_function=of_global),
}
DOES_NOT = {"a list": of_list, "a closure of data": enclosing(ROWS), "an attribute of data": Owner(feed=ROWS).step, "no function": 3}


@pytest.mark.parametrize("name", READS)
def test_found(name):
    assert reads_iterator(READS[name])


@pytest.mark.parametrize("name", DOES_NOT)
def test_not_found(name):
    assert not reads_iterator(DOES_NOT[name])


def test_an_open_file_is_not_data(tmp_path):
    with (tmp_path / "log").open("w") as file:
        assert not reads_iterator(enclosing(file))


def test_functions_that_call_each_other():
    functions = {}
    functions["one"] = enclosing(functions)
    module = types.FunctionType((lambda: later()).__code__, {"later": None, "__name__": __name__})  # noqa: F821
    module.__globals__["later"] = module
    assert not reads_iterator(module)


@pytest.mark.requires_backend("tensorflow", "torch", reason="a step on JAX is given its batch")
def test_no_batch_is_lost_to_a_replay(tmp_path):
    """Each call of the step takes the next batch, no replay does; so the cause is unknown."""
    batches = np.random.default_rng(0).normal(size=(20, 8, 4)).astype("float32")
    batches[7] = np.nan
    feed, taken = iter(batches), []
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step():
        batch = keras.ops.convert_to_tensor(next(feed))
        taken.append(batch)
        loss, gradients = differentiated(
            lambda: keras.ops.mean(keras.ops.square(model(batch))),
            lambda: model.trainable_variables,
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    guard = NanGuard(verbose=0, directory=str(tmp_path))
    with guard.watch(model, optimizer):
        guarded = guard.step(step)
        for _ in range(len(batches)):
            guarded()
    assert len(taken) == len(batches) and next(feed, None) is None
    (incident,) = guard.incidents
    assert incident.step == 7 and incident.diagnosis.cause == "unknown"
    assert any("reads from an iterator" in text for text in incident.diagnosis.evidence)
    assert all(np.isfinite(w).all() for w in model.get_weights())
