"""The closed lists of words, as types for editors and type checkers and as tuples. The properties
of each cause, from `causes.toml`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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

SITES: tuple[str, ...] = get_args(Site)
"""Parts of a step that are checked, in causal order: an earlier site can cause a finding at a later
one, never the reverse."""

RESULT_SITES = ("validation", "predictions")
"""The sites of results: those of `evaluate` and `predict` during training. They have no steps."""

KINDS: tuple[str, ...] = get_args(Kind)
"""The kinds of findings.

`nonfinite`: NaN or Inf. `explosion`: a step was refused, and the sum of an array overflows although
its entries are finite. `divergence`: training has diverged without NaN or Inf.
`spike`: a moving variance that grew more than 1000-fold between two checks. `out_of_range`: outside
of a limit. `collapse`: a loss scale below its floor, or invalid. `stuck`: a value that should
change but does not (BatchNormalization statistics, zero gradients).
"""

CAUSES: tuple[str, ...] = get_args(Cause)
"""The closed list of causes; docs/causes.md has a paragraph on each."""

FaultSite = Literal[
    "inputs", "targets", "loss", "gradients", "weights", "statistics", "slots", "loss_scale"
]
"""The part of a step into which a fault is injected."""

FaultKind = Literal["nan", "inf", "-inf", "overflow", "spike", "zero"]
"""The value that is injected."""

_FILE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "causes.toml").read_text("utf-8"))

LOW = ("float16", "bfloat16")
"""Dtypes of low precision."""

CAUSE_WORDS: dict[str, dict[str, Any]] = _FILE["causes"]
"""The table of each cause."""

HINTS: dict[str, str] = _FILE["hints"]
"""Advice by the operation or layer that produced a bad value."""


CauseProperty = Literal["batch", "data", "start", "rate", "settings"]
"""A property of a cause, which `causes.toml` explains."""


def causes_with(name: CauseProperty) -> frozenset[str]:
    """Return the causes that have a property."""
    return frozenset(cause for cause, table in CAUSE_WORDS.items() if table.get(name))


NAMES_DATA = causes_with("data")
"""Causes whose culprit may be an array of the batch."""
