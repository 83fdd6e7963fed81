"""A refused step that is examined: what its batch, its targets and a replay show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.compiled_replay import run_compiled
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._core.data import input_names, named
from keras_nanguard._core.evidence import NOWHERE, Evidence, TargetFault
from keras_nanguard._diagnose.facts import target_fault
from keras_nanguard._keras import layers as keras_layers

NOT_RUN = ReplayResult()
"""The result of a step that has not been replayed."""

Start = Callable[[Any], Any]
"""Returns the value that a variable had in an earlier state, `None` if it was not in it."""


@dataclass(frozen=True)
class Case:
    """A step, and what is known about it.

    Attributes:
        step: the step, on the state before it.
        batch: its arguments.
        evidence: what is known.
        start: the state before the first step, `None` if it is not known.
        run: the replay that the evidence describes.
    """

    step: ReplayableStep
    batch: Any
    evidence: Evidence
    start: Start | None = None
    run: ReplayResult = NOT_RUN

    def with_(self, **found: Any) -> Case:
        """Return the case with more evidence."""
        return dataclasses.replace(self, evidence=dataclasses.replace(self.evidence, **found))

    def with_run(self, run: ReplayResult, **found: Any) -> Case:
        """Return the case with the result of a replay, and more evidence."""
        e = self.evidence
        return dataclasses.replace(self, run=run).with_(
            replay_error=run.error,
            first=run.first,
            first_path=run.first_path if run.first else e.first_path,
            origin=run.origin or NOWHERE,
            loss_parts=tuple((name, float(np.mean(values))) for name, values in run.sample_losses),
            table=run.rows,
            **found,
        )

    def again(self, batch: Any) -> ReplayResult:
        """Run the step once more, in the fastest mode in which it is bad."""
        e = self.evidence
        if e.first in ("slots", "weights"):
            return self.step.run(batch, update=True)
        if e.replay == "finite" and self.step.judged is None:  # bad in its compiled form alone
            return compiled(self.step, batch, e.mode)
        return self.step.rerun(batch)


def compiled(step: ReplayableStep, batch: Any, mode: str) -> ReplayResult:
    """Run a step once as it was compiled."""
    return run_compiled(step, batch, jit=mode == "xla")


def batch_facts(batch: Any) -> dict[str, Any]:
    """Return the evidence from the batch alone."""
    return {
        "count": batches.row_count(batch),
        "inputs_bad": batches.bad(batch, ("inputs",)),
        "targets_bad": batches.bad(batch, ("targets", "sample_weight")),
        "inputs": batches.spreads(batch, "inputs"),
        "targets": batches.spreads(batch, "targets"),
    }


def rejected_targets(model: Any, batch: Any, run: ReplayResult) -> TargetFault | None:
    """Return what the losses do not accept, given a replay with the shapes of the outputs, if it
    has any.
    """
    arrays = [p.array for p in batches.parts(batch) if p.role == "targets"]
    shapes = [array.shape for _, array in run.outputs] or keras_layers.output_shapes(model)
    widths = [int(shape[-1] or 0) if shape else 0 for shape in shapes]
    return target_fault(model, arrays, widths)


def with_names(evidence: Evidence, model: Any) -> Evidence:
    """Return the evidence with the names of the model's inputs in place of their indices, if the
    user named them.
    """
    names, origin = input_names(model), evidence.origin
    if not any(names):
        return evidence
    if origin.source == "batch":
        origin = dataclasses.replace(origin, op=named(origin.op, names))
    parts: dict[str, Any] = {
        field: tuple(dataclasses.replace(part, name=named(part.name, names)) for part in found)
        for field, found in (("inputs", evidence.inputs), ("inputs_bad", evidence.inputs_bad))
    }
    return dataclasses.replace(evidence, origin=origin, **parts)
