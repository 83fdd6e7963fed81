"""The losses of a compiled model, by output, with their weights.

Names private to Keras that are used here, because there is no public way from a compiled model to
its loss objects:

- ``Trainer._compile_loss`` and its ``_flat_losses``; before Keras 3.8 or so its ``flat_losses``,
  ``flat_loss_weights``, ``inferred_output_names`` and ``output_names``.

`tests/diagnosis/test_internals.py` fails when a release of Keras removes one of them.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import keras

from keras_nanguard._keras import layers as keras_layers, variables as keras_variables

__all__ = ["build_losses", "loss_weights", "losses_by_output", "losses_of"]


def _entries(model: Any) -> list[tuple[str, Any, Any]]:
    """Return `(name of the output, loss, weight)` for each loss given to `compile`."""
    compiled: Any = getattr(model, "_compile_loss", None)
    if hasattr(compiled, "flat_losses"):  # Keras before 3.8 or so
        names = compiled.inferred_output_names or compiled.output_names or ()
        found = list(
            itertools.zip_longest(
                names, compiled.flat_losses or (), compiled.flat_loss_weights or ()
            )
        )
    else:
        entries = getattr(compiled, "_flat_losses", None) or ()
        found = [(e.name, e.loss, e.loss_weights) for e in entries]
    return [(str(name or ""), loss, weight) for name, loss, weight in found if loss is not None]


def losses_of(model: Any) -> list[Any]:
    """Return the losses of a model: the `CompileLoss`, each loss given to `compile`, and those that
    are attributes of layers.
    """
    compiled = getattr(model, "_compile_loss", None)
    found = [compiled] if compiled is not None else []
    found += [loss for _, loss, _ in _entries(model)]
    for layer in keras_layers.layers_of(model):
        items = [item for v in vars(layer).values() for item in keras_variables.flat(v)]
        found += [item for item in items if isinstance(item, keras.losses.Loss)]
    return keras_variables.unique(found)


def build_losses(model: Any, y: Any, y_pred: Any) -> None:
    """Build the losses given to `compile`, as the first step does: before that they have no
    names.
    """
    compiled: Any = getattr(model, "_compile_loss", None)
    if compiled is not None and not getattr(compiled, "built", True):
        with contextlib.suppress(Exception):  # the step reports the fault of the targets
            compiled.build(y, y_pred)


def losses_by_output(model: Any) -> list[tuple[str, Any]]:
    """Return `(name of the output, loss)` for each loss given to `compile`."""
    return [(name, loss) for name, loss, _ in _entries(model)]


def loss_weights(model: Any) -> list[tuple[str, float]]:
    """Return name and weight of each loss given to `compile` that has a weight."""
    entries = _entries(model)
    weighted = ((loss, w) for _, loss, w in entries if isinstance(w, (int, float)))
    return [(str(loss.name), float(weight)) for loss, weight in weighted]
