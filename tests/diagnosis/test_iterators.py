"""Functions that read their data from an iterator."""

from __future__ import annotations

import functools
import itertools
import types

import pytest

from keras_nanguard._backends.shared.iterators import reads_iterator

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
