"""The names in a model file that a policy can refer to, read without building the model. Imports no
backend."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from keras_nanguard._files import reading
from keras_nanguard._files.config_tree import own_name
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.stored import Alive, plain_text

if TYPE_CHECKING:
    from keras_nanguard._policy.warnings import ModelNames

__all__ = ["model_names", "names_in"]

COMMON_NAMES = (
    *("kernel", "bias", "gamma", "beta", "embeddings", "scale", "moving_mean", "moving_variance"),
)
"""Common names of variables of layers."""


def model_names(path: str | os.PathLike[str]) -> ModelNames:
    """Return the Keras paths of a model file.

    Args:
        path: any model file that `scan` reads.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
    """
    from keras_nanguard._policy.warnings import ModelNames  # with pydantic: not for the worker

    file = os.fsdecode(path)
    found = reading.ask("names", file)
    name = found["root"] or os.path.basename(plain_text(file))
    return ModelNames(name, tuple(found["paths"]))


def names_in(path: str, alive: Alive) -> dict[str, Any]:
    """Return the name of the model in a file, `""` if it has none, and the paths in it."""
    with opened(path, alive) as contents:
        root = own_name(contents.config or {}) or contents.names.get("", "")
        roles = ("weight", "statistics", "slot")
        found = [one for one in identities(contents) if one.role in roles]
        return {"root": root, "paths": list(_spelled(found, root))}


def _spelled(found: Iterable[Identity], root: str) -> Iterable[str]:
    """Yield each path without and with the name of the model, which only some paths of Keras
    contain.

    A variable that has only a number in the file may have any of the common names.
    """
    for one in found:
        paths = (
            [f"{one.layer}/{name}" for name in COMMON_NAMES] if one.name.isdigit() else [one.path]
        )
        for path in paths:
            yield path
            if root:
                yield f"{root}/{path}"
