"""The names in policy documents that are fixed: presets, sections, the number of the form. Imports no backend."""

from __future__ import annotations

__all__ = ["DEFAULT_PRESET", "NO_PRESET", "PRESETS", "SECTIONS", "VERSION"]

VERSION = 1
"""Number of the form of policy files."""

PRESETS = ("recover", "stop", "raise", "observe", "strict-fp16", "finetune", "long-run")
"""The policies that come with the package."""

DEFAULT_PRESET = "recover"
"""What a document builds on where it does not say."""

SECTIONS = ("version", "preset", "title", "refuse", "checks", "snapshot", "rules", "layers")
"""The words that a document may hold."""

NO_PRESET = "none"
"""What a document says that builds on nothing."""
