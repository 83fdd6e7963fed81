"""The eyes of a diagnosis on the running backend: `births`, `instrument` and tensors in its own words.

`on_tensorflow` and `on_torch` hold the same names: `Births` (which operation made the first bad value), `Instrument`
(which layer was running), `intercepted` (losses and updates), `kept` (nothing has happened afterwards), and a few words
for tensors.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

__all__ = ["compiled", "here", "is_compiled"]


def here() -> Any:
    """Return the module of the running backend.

    Raises:
        ImportError: on a backend that has none; what asked for a diagnosis then does without.
    """
    return importlib.import_module(f"keras_nanguard._diagnose.on_{keras.backend.backend()}")


def is_compiled(step: Any) -> bool:
    """Whether running a step in the mode it was compiled in is cheaper than running it eagerly: where nothing is compiled for it."""
    found = f"keras_nanguard._diagnose.compiled_{keras.backend.backend()}"
    return keras.backend.backend() == "jax" and bool(importlib.import_module(found).is_compiled(step))


def compiled() -> Any:
    """Return `run_compiled` of the running backend, which runs a step once in the mode it was compiled in.

    Raises:
        ImportError: on a backend that has none.
    """
    backend = keras.backend.backend()
    name = "compiled" if backend == "tensorflow" else f"compiled_{backend}"
    return importlib.import_module(f"keras_nanguard._diagnose.{name}").run_compiled
