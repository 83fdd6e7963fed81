"""Replays on PyTorch, where a diagnosis always runs eagerly, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult

__all__ = ["MODES", "run_compiled"]

MODES = ("eager",)
"""The modes in which a step can be replayed."""


def run_compiled(step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
    """Run a step once, without side effects, and return the result."""
    return step.run(args)
