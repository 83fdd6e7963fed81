"""The names in a model file that a policy can refer to, read without building the model. Imports no backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from keras_nanguard._files.config_tree import own_name
from keras_nanguard._files.isolated import isolated
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened, size_on_disk
from keras_nanguard._files.orbax import is_orbax
from keras_nanguard._files.stored import plain_text, readable
from keras_nanguard._policy.warnings import ModelNames

__all__ = ["model_names"]

COMMON_NAMES = ("kernel", "bias", "gamma", "beta", "embeddings", "scale", "moving_mean", "moving_variance")
"""Common names of variables of layers."""


def model_names(path: str | os.PathLike[str]) -> ModelNames:
    """Return the Keras paths of a model file.

    Args:
        path: any model file that `scan` reads.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
    """
    file = os.fspath(path)

    @contextmanager
    def work(_: object) -> Iterator[dict[str, Any]]:
        with readable(file), opened(file) as contents:
            root = own_name(contents.config or {}) or contents.names.get("", "")
            found = [one for one in identities(contents) if one.role in ("weight", "statistics", "slot")]
            yield {"root": root, "paths": tuple(_spelled(found, root))}

    if is_orbax(file):  # as in `scan`
        with work(None) as found:
            pass
    else:
        found = isolated(work, None, plain_text(file), size_on_disk(file))
    name = found["root"] or os.path.basename(plain_text(file))
    return ModelNames(name, tuple(found["paths"]))


def _spelled(found: Iterable[Identity], root: str) -> Iterable[str]:
    """Yield each path without and with the name of the model, which only some paths of Keras contain.

    A variable that has only a number in the file may have any of the common names.
    """
    for one in found:
        paths = [f"{one.layer}/{name}" for name in COMMON_NAMES] if one.name.isdigit() else [one.path]
        for path in paths:
            yield path
            if root:
                yield f"{root}/{path}"
