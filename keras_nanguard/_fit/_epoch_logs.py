"""The logs of an epoch in which nothing was committed yet."""

from __future__ import annotations

from math import isfinite
from typing import Any

__all__ = ["stand_in"]

HUGEST = 3.4028234663852886e38
"""The largest number of float32: finite, as TerminateOnNaN wants it, and never the best loss."""


def stand_in(logs: dict[str, Any], known: Any, loss: float) -> dict[str, Any]:
    """Return what stands for the logs of a step while every step of its epoch was refused.

    The mean over nothing is 0 to Keras, which would pass for the best loss of all. In its place stands what the last
    committed step left (`known`), else the loss that this step computed, else `HUGEST`.
    """
    known = known if isinstance(known, dict) else {}
    loss = loss if isfinite(loss) else HUGEST
    return {key: known.get(key, loss if str(key).endswith("loss") else value) for key, value in logs.items()}
