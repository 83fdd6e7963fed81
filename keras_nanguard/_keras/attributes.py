"""The Python attributes of what a train step calls: layers, losses, metrics, regularizers, custom
schedules.

A step may write them: a layer counts its calls, or a metric collects predictions in a list. That is
no write to a variable, so after a replay it is undone here.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    variables as keras_variables,
)

CONTAINERS = (list, OrderedDict, dict, set, deque)
"""Containers whose content is restored. Those that Keras tracks are derived from them."""

VALUES = (bool, int, float, str)


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
    Keras does not set, also text, random generators, and lists, dicts, sets and deques with their
    content.
    """
    attributes = attributes_of(objects)
    given = [entry for entry in attributes if entry[1] not in _set_by_keras()]
    contents = _contents(value for *_, value in given)
    generators = [_generator(value) for *_, value in given]
    values = [entry for entry in attributes if type(entry[2]) in (int, float)]
    values += [e for e in given if type(e[2]) in VALUES or isinstance(e[2], CONTAINERS)]

    def restore() -> None:
        for restore_generator in filter(None, generators):
            restore_generator()
        give_back_tensors(attributes)
        for held, name, before in values:
            held[name] = before
        for kind, container, before in contents:
            _refill(kind, container, before)

    return restore


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


def _generator(value: Any) -> Callable[[], None] | None:
    """Return a function that restores a random generator, `None` for anything else."""
    if isinstance(value, np.random.Generator):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state)
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    kind = type(value)
    of_torch = kind.__name__ == "Generator" and kind.__module__.startswith("torch")
    if of_torch or isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
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
