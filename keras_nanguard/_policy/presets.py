"""The fixed names of policy documents: presets, sections, format version. Imports no backend."""

from __future__ import annotations

from typing import get_args

from keras_nanguard._core.literals import Preset

__all__ = ["DEFAULT_PRESET", "NO_PRESET", "PRESETS", "SECTIONS", "VERSION"]

VERSION = 1
"""Version of the format of policy files."""

PRESETS: tuple[str, ...] = get_args(Preset)
"""The policies that come with the package."""

DEFAULT_PRESET = "recover"
"""The preset of a document that names none."""

SECTIONS = ("version", "preset", "title", "refuse", "checks", "snapshot", "rules", "layers")
"""The sections of a document."""

NO_PRESET = "none"
"""The preset of a document that inherits nothing."""
