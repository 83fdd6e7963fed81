"""Weights saved and loaded by Keras, again and again in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from keras.src.backend.common import global_state
from keras.src.saving import saving_lib

__all__ = ["load_weights", "save_weights"]


def save_weights(model: Any, path: Path) -> None:
    """Save as `Model.save_weights` does, even if an instance overrides that method."""
    _remember_attributes()
    type(model).save_weights(model, path)


def load_weights(model: Any, path: Path) -> None:
    """Load as `Model.load_weights` does."""
    _remember_attributes()
    model.load_weights(path)


def _remember_attributes() -> None:
    """Let Keras find, in this thread, which attributes of an optimizer it does not save.

    It inspects an empty optimizer for that, and stores the answer under another name than the one
    it reads (keras/src/saving/saving_lib.py, `get_attr_skipset`: `saving_attr_skipset_` and
    `saving_attr_skiplist_`). So it creates one each time; on TensorFlow each leaks 70 KB, as the
    runtime keeps an operation for every name of a variable.
    """
    known = _attributes_of_optimizers()
    if (
        known is not None
        and global_state.get_global_attribute("saving_attr_skiplist_Optimizer") is None
    ):
        global_state.set_global_attribute("saving_attr_skiplist_Optimizer", known)


@functools.cache
def _attributes_of_optimizers() -> Any:
    look = getattr(
        saving_lib, "get_attr_skipset", None
    )  # if a release renames it, Keras' behavior does not change
    return None if look is None else look("Optimizer")
