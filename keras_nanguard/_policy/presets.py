"""The fixed names of policies. Imports no backend."""

from __future__ import annotations

from typing import Literal, get_args

from keras_nanguard._core.literals import Preset

__all__ = ["DEFAULT_PRESET", "PRESETS", "VERSION"]

VERSION: Literal[2] = 2
"""Version of the form of policy files."""

PRESETS: tuple[str, ...] = get_args(Preset)
"""The policies that come with the package."""

DEFAULT_PRESET: Preset = "recover"
"""The preset of a policy that names none."""
