"""On PyTorch a guarded step is diagnosed as it runs: eagerly, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult

__all__ = ["MODES", "run_compiled"]

MODES = ("eager",)
"""The modes in which a step can be run again."""


def run_compiled(step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
    """Run a step once and forget it; see what it came to."""
    return step.run(args)
