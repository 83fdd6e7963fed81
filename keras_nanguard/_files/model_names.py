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
from keras_nanguard._files.stored import Contents, plain_text, readable
from keras_nanguard._policy.no_effect import ModelNames

__all__ = ["model_names"]

COMMON_NAMES = ("kernel", "bias", "gamma", "beta", "embeddings", "scale", "moving_mean", "moving_variance")
"""Common names of variables of layers."""


def model_names(path: str | os.PathLike[str]) -> ModelNames:
    """Return the Keras paths of a model file, by site.

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
            yield {"root": root, "paths": dict(_by_site(contents, identities(contents), root))}

    if is_orbax(file):  # as in `scan`
        with work(None) as found:
            pass
    else:
        found = isolated(work, None, plain_text(file), size_on_disk(file))
    name = found["root"] or os.path.basename(plain_text(file))
    return ModelNames(name, {site: tuple(paths) for site, paths in found["paths"].items()})


def _by_site(contents: Contents, found: Iterable[Identity], root: str) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Yield the paths at each site that are known from the file.

    Only some files contain the classes of layers, and slots have numbers for names: sites that are not known are omitted.
    """
    weights = [one for one in found if one.role == "weight"]
    statistics = [one for one in found if one.role == "statistics"]
    optimizer = [one for one in found if one.role == "slot"]
    yield "weights", tuple(_spelled(weights, root))
    yield "gradients", tuple(_spelled(weights, root))
    yield "state", tuple(_spelled([*weights, *statistics], root))
    if all(one.layer_class for one in weights):
        yield "statistics", tuple(_spelled(statistics, root))
    if optimizer and contents.names:
        yield "loss_scale", tuple(one.path for one in optimizer if one.name == "dynamic_scale")
    if optimizer and not any(one.name.isdigit() for one in optimizer):
        yield "slots", ()


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
