"""The keywords of `NanGuard` that are laid over its policy, as a type: a misspelt one is an error to an editor, too."""

from __future__ import annotations

import sys
from typing import Any, TypedDict

from keras_nanguard._core.literals import Preset

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack  # pydantic depends on it

__all__ = ["Overrides", "Preset", "Unpack"]


class Overrides(TypedDict, total=False):
    """The sections of a policy, and the words of `keras.callbacks.ReduceLROnPlateau`."""

    version: int
    preset: str
    title: str
    refuse: bool
    checks: Any
    snapshot: Any
    rules: Any
    layers: Any
    patience: int | None
    factor: float | None
    min_lr: float | None
