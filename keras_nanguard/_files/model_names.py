"""The names in a model file that a policy can refer to, read without building the model. Imports no
backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keras_nanguard._files import reading
from keras_nanguard._files.config_tree import LayerConfig
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.reading import Progress
from keras_nanguard._files.stored import plain_text

if TYPE_CHECKING:
    from keras_nanguard._policy.warnings import ModelNames

__all__ = ["model_names", "names_in"]

_COMMON_NAMES = (
    *("kernel", "bias", "gamma", "beta", "embeddings", "scale", "moving_mean", "moving_variance"),
)
"""Common names of variables of layers: what only has a number in the file may have any of them."""


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


def names_in(path: str, progress: Progress) -> dict[str, Any]:
    """Return the name of the model in a file, `""` if it has none, and the paths in it, each
    without and with the name of the model, which only some paths of Keras contain."""
    with opened(path) as contents:
        root = LayerConfig(contents.config).name or contents.names.get("", "")
        found = [path for one in identities(contents) for path in _paths(one)]
    return {"root": root, "paths": found + ([f"{root}/{path}" for path in found] if root else [])}


def _paths(one: Identity) -> Iterator[str]:
    if one.role == "other":
        return
    names = _COMMON_NAMES if one.name.isdigit() else (one.name,)
    yield from (f"{one.layer}/{name}" if one.layer else name for name in names)
