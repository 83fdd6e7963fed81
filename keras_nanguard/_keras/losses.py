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

from keras_nanguard._keras import layers as keras_layers

__all__ = ["build_losses", "loss_weights", "losses_by_output", "losses_of"]


def losses_of(model: Any) -> list[Any]:
    """Return the losses of a model: the `CompileLoss`, each loss given to `compile`, and those that
    are attributes of layers.
    """
    compiled = getattr(model, "_compile_loss", None)
    found = [compiled] if compiled is not None else []
    entries = (
        getattr(compiled, "_flat_losses", None) or getattr(compiled, "flat_losses", None) or ()
    )  # Keras 3.6
    found += [loss for entry in entries if (loss := getattr(entry, "loss", entry)) is not None]
    for layer in keras_layers.layers_of(model):
        for value in vars(layer).values():
            value = list(value.values()) if isinstance(value, dict) else value
            items = value if isinstance(value, (list, tuple)) else (value,)
            found += [item for item in items if isinstance(item, keras.losses.Loss)]
    return list({id(loss): loss for loss in found}.values())


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
    compiled: Any = getattr(model, "_compile_loss", None)
    if hasattr(compiled, "flat_losses"):  # Keras before 3.8 or so
        names = compiled.inferred_output_names or compiled.output_names or ()
        pairs = itertools.zip_longest(names, compiled.flat_losses or ())
        return [(str(name or ""), loss) for name, loss in pairs if loss is not None]
    return [
        (str(e.name or ""), e.loss)
        for e in getattr(compiled, "_flat_losses", None) or ()
        if e.loss is not None
    ]


def loss_weights(model: Any) -> list[tuple[str, float]]:
    """Return name and weight of each loss given to `compile` that has a weight."""
    compiled: Any = getattr(model, "_compile_loss", None)
    if hasattr(compiled, "flat_losses"):  # Keras before 3.8 or so
        pairs = list(zip(compiled.flat_losses or (), compiled.flat_loss_weights or ()))
    else:
        pairs = [(e.loss, e.loss_weights) for e in getattr(compiled, "_flat_losses", None) or ()]
    return [
        (str(loss.name), float(weight))
        for loss, weight in pairs
        if loss is not None and isinstance(weight, (int, float))
    ]
