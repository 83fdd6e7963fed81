"""The Python state of what a train step calls: the attributes of layers, losses, metrics,
regularizers and custom schedules, and what the code of custom ones names: globals and closures.

A step may write it: a layer counts its calls, a metric collects predictions in a list, a loss draws
from a generator of its module. That is no write to a variable, so after a replay it is undone here.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    torch_tensors,
    variables as keras_variables,
)

CONTAINERS = (list, OrderedDict, dict, set, deque)
"""Containers whose content is restored. Those that Keras tracks are derived from them."""

VALUES = (bool, int, float, str)

DATA = 1 << 24
"""Bytes above which an array is taken for data, which no step writes, and is not copied."""

MAX_DEPTH = 4
"""Maximum depth to which calls between functions of the user are followed."""

LIBRARIES = ("builtins", "keras.", "keras_nanguard.", "torch.", "tensorflow.", "jax.")
"""Modules whose functions keep no state outside of objects."""


def attributes_of(layers: Iterable[Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return `(dict of the layer, name, current value)` for each attribute of layers."""
    return [(vars(layer), name, value) for layer in layers for name, value in vars(layer).items()]


def give_back_tensors(attributes: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    """Restore attributes that had a tensor before a call or have one after it, if it has replaced
    or deleted it: that is no write to a variable.
    """
    for held, name, before in attributes:
        now = held.get(name)
        if now is not before and any(map(keras.ops.is_tensor, (before, now))):
            held[name] = before


def called_by_step(model: Any) -> tuple[Any, ...]:
    """Return what Keras' train step calls: layers, losses, metrics, regularizers, constraints, and
    learning rate schedules of custom classes.
    """
    layers = keras_layers.layers_of(model)
    kinds = (keras.regularizers.Regularizer, keras.constraints.Constraint)
    helpers = [item for item in keras_layers.held_by(layers) if isinstance(item, kinds)]
    metrics = keras_losses.with_inner(getattr(model, "metrics", ()))
    losses = [loss for loss in keras_losses.losses_of(model) if hasattr(loss, "__dict__")]
    schedules = keras_optimizers.custom_schedules(keras_optimizers.find_optimizers(model))
    return keras_variables.unique([*layers, *losses, *metrics, *helpers, *schedules])


def variables_of(objects: Iterable[Any]) -> tuple[Any, ...]:
    """Return the Keras variables in attributes of objects and of their seed generators, also those
    that no model lists.
    """
    held = [*keras_layers.held_by(objects)]
    seeds = (item for item in held if isinstance(item, keras.random.SeedGenerator))
    return keras_variables.unique(
        filter(keras_variables.is_variable, [*held, *keras_layers.held_by(seeds)])
    )


def restorer(objects: Iterable[Any]) -> Callable[[], None]:
    """Return a function that restores attributes of objects: tensors and numbers, and of those that
    Keras does not set, also text, random generators, arrays that are written in place, and lists,
    dicts, sets and deques with their content. The same of what the code of custom ones names.
    """
    objects = tuple(objects)
    attributes = attributes_of(objects)
    given = [entry for entry in attributes if entry[1] not in _set_by_keras()]
    named = [entry for item in objects for code in _own_code(item) for entry in referred(code)]
    values = [entry for entry in attributes if type(entry[2]) in (int, float)]
    values += [e for e in given if type(e[2]) in VALUES or isinstance(e[2], CONTAINERS)]
    held = [value for *_, value in (*given, *named)]
    contents = _contents(held)
    for kind, _, before in contents:
        held += before.values() if issubclass(kind, dict) else before
    in_place = [_in_place(value) for value in keras_variables.unique(held)]

    def restore() -> None:
        for restore_content in filter(None, in_place):
            restore_content()
        give_back_tensors(attributes)
        for holder, name, before in values:
            holder[name] = before
        for entry in named:
            _bind_again(*entry)
        for kind, container, before in contents:
            _refill(kind, container, before)

    return restore


def _own_code(item: Any) -> Iterator[Any]:
    """Yield the functions of the user's that an object has: in its attributes, such as the function
    of a loss, and the methods of its class.
    """
    yield from (value for value in vars(item).values() if isinstance(value, _FUNCTIONS))
    for kind in type(item).__mro__:
        if not f"{kind.__module__}.".startswith(LIBRARIES):
            yield from (value for value in vars(kind).values() if isinstance(value, _FUNCTIONS))


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def referred(function: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield `(holder, name, value)` for each object to which a function refers, or one of the same
    module that it names: in its closure (the holder is the cell), among the globals that it names,
    as an attribute of these that it names, or as one of the object whose method it is.
    """
    return _referred(function, MAX_DEPTH, set())


def _referred(function: Any, depth: int, seen: set[int]) -> Iterator[tuple[Any, str, Any]]:
    if isinstance(function, functools.partial):
        yield from ((None, "", value) for value in (*function.args, *function.keywords.values()))
        function = function.func
    owner = getattr(function, "__self__", None)
    function = getattr(function, "python_function", function)  # of a `tf.function`
    function = getattr(function, "__wrapped__", function)
    owner, plain = getattr(function, "__self__", owner), getattr(function, "__func__", function)
    owner = getattr(owner, "weakrefself_target__", lambda: owner)()  # of a method of TensorFlow
    if depth == MAX_DEPTH and callable(plain) and not isinstance(plain, types.FunctionType):
        owner, plain = plain, type(plain).__call__
    if not isinstance(plain, types.FunctionType) or id(plain) in seen or not depth:
        return
    if f"{plain.__module__}.".startswith(LIBRARIES):
        return
    seen.add(id(plain))
    names, space = plain.__code__.co_names, plain.__globals__
    found: list[tuple[Any, str, Any]] = [
        (space, name, space[name]) for name in names if name in space
    ]
    for cell in plain.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            found.append((cell, "", cell.cell_contents))
    for *_, value in tuple(found):
        own = getattr(value, "__dict__", {})
        found += [(value, name, own[name]) for name in names if name in own]
    if not isinstance(owner, types.ModuleType):
        found += [(owner, name, value) for name, value in getattr(owner, "__dict__", {}).items()]
    for entry in found:
        yield entry
        if getattr(entry[2], "__module__", None) == plain.__module__:
            yield from _referred(entry[2], depth - 1, seen)


def _bind_again(holder: Any, name: str, before: Any) -> None:
    """Give a global, a closure or an attribute its former value, if it has another one."""
    if isinstance(holder, types.CellType):
        holder.cell_contents = before
        return
    held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    if name in held and held[name] is not before:
        if isinstance(held, dict):
            held[name] = before
        else:  # of a class
            setattr(holder, name, before)


@contextlib.contextmanager
def python_state_restored(called: Sequence[Any]) -> Iterator[None]:
    """Restore at the end, also after an exception, what steps may write outside of variables: the
    random generators of Python and NumPy, and the attributes of what they call.

    Args:
        called: the objects, from `called_by_step`.
    """
    with contextlib.ExitStack() as ending:  # the last one first, even if another one raises
        ending.callback(random.setstate, random.getstate())
        ending.callback(np.random.set_state, np.random.get_state())
        ending.callback(restorer(called))
        yield


def _in_place(value: Any) -> Callable[[], None] | None:
    """Return a function that restores a random generator, or an array or tensor that is written in
    place; `None` for anything else.
    """
    if isinstance(value, np.random.Generator):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state)
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    kind = type(value)
    of_torch = kind.__module__.split(".")[0] == "torch"
    if isinstance(value, np.random.RandomState) or (of_torch and kind.__name__ == "Generator"):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.ndarray) and value.nbytes <= DATA:
        copy = value.copy()
        return lambda: None if np.array_equal(value, copy) else value.__setitem__(..., copy)
    if of_torch and hasattr(value, "copy_"):  # a tensor
        return torch_tensors.content_restorer(value) if value.nbytes <= DATA else None
    return None


def _contents(values: Iterable[Any]) -> list[tuple[Any, Any, Any]]:
    """Return the containers among values, and those within them: `(kind, container, copy)`."""
    found: dict[int, tuple[Any, Any, Any]] = {}
    coming = list(values)
    while coming:
        value = coming.pop()
        kind = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
        if kind is not None and id(value) not in found:
            found[id(value)] = kind, value, kind(value)
            coming += value.values() if isinstance(value, dict) else value
    return list(found.values())


def _refill(kind: Any, container: Any, before: Any) -> None:
    """Give a container its former items, without the tracking of Keras."""
    items, former = (list(c.items() if isinstance(c, dict) else c) for c in (container, before))
    same = len(items) == len(former) and all(map(_is_same, items, former))
    if not same:
        kind.clear(container)
        (kind.update if hasattr(kind, "update") else kind.extend)(container, before)


def _is_same(item: Any, former: Any) -> bool:
    """Whether two items, or two pairs of key and value, are the same objects."""
    if isinstance(item, tuple) and isinstance(former, tuple) and len(item) == len(former) == 2:
        return item[0] is former[0] and item[1] is former[1]
    return item is former


@functools.cache
def _set_by_keras() -> frozenset[str]:
    """Return the names of the attributes that Keras sets itself."""
    model = keras.Sequential([], name="none")
    bases = (keras.layers.Layer(name="none"), keras.metrics.Metric(name="none"), model)
    return frozenset(name for base in bases for name in vars(base))
