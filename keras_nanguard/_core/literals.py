"""The closed lists of words, as types for editors and type checkers. Tuples of the same words are
derived from these."""

from __future__ import annotations

from typing import Literal

__all__ = ["Cause", "FaultKind", "FaultSite", "Kind", "Preset", "Site"]

Preset = Literal["recover", "stop", "raise", "observe", "long-run", "tune"]
"""A policy that comes with the package."""

Site = Literal[
    "inputs",
    "targets",
    "state",
    "outputs",
    "loss",
    "gradients",
    "weights",
    "statistics",
    "slots",
    "loss_scale",
    "metrics",
    "validation",
    "predictions",
]
"""The part of a step that a check found bad, in causal order."""

Kind = Literal[
    "nonfinite",
    "explosion",
    "divergence",
    "spike",
    "out_of_range",
    "collapse",
    "stuck",
]
"""The type of problem that a check found."""

Cause = Literal[
    "input_nonfinite",
    "target_nonfinite",
    "target_out_of_range",
    "input_scale",
    "forward_domain",
    "loss_domain",
    "gradient_domain",
    "divergence",
    "float16_overflow",
    "float16_underflow",
    "loss_scale_collapsed",
    "optimizer_domain",
    "state_nonfinite",
    "batchnorm_statistics",
    "training_flag",
    "spike",
    "transient",
    "unknown",
]
"""The cause in a diagnosis."""

FaultSite = Literal[
    "inputs", "targets", "loss", "gradients", "weights", "statistics", "slots", "loss_scale"
]
"""The part of a step into which a fault is injected."""

FaultKind = Literal["nan", "inf", "-inf", "overflow", "spike", "zero"]
"""The value that is injected."""
