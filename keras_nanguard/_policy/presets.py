"""The fixed names of policy documents: presets, sections, format version. Imports no backend."""

from __future__ import annotations

__all__ = ["DEFAULT_PRESET", "NO_PRESET", "PRESETS", "SECTIONS", "VERSION"]

VERSION = 1
"""Version of the format of policy files."""

PRESETS = ("recover", "stop", "raise", "observe", "strict-fp16", "finetune", "long-run", "tune")
"""The policies that come with the package."""

DEFAULT_PRESET = "recover"
"""The preset of a document that names none."""

SECTIONS = ("version", "preset", "title", "refuse", "checks", "snapshot", "rules", "layers")
"""The sections of a document."""

NO_PRESET = "none"
"""The preset of a document that inherits nothing."""
