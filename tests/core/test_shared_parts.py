"""Incidents that have parts in common hold them once, and are what they were."""

from __future__ import annotations

import dataclasses

import pytest

from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.shared_parts import RECENT, sharing


def incident(step, bad=2, diagnosed=True):
    """Return an incident of which every part is made anew."""
    findings = (Finding("inputs", "nonfinite", "x", bad, 0, 32), Finding("loss", "nonfinite", "", value=float("nan")))
    evidence, advice = (f"'x' contains {bad} NaN.", f"{step}"[:0] + "Without it all is well."), (f"{step}"[:0] + "Clean 'x'.",)
    diagnosis = Diagnosis("input_nonfinite", "x", (3,), evidence, advice)
    return Incident(step, 0, step, findings, values={"loss": float("nan")}, diagnosis=diagnosis if diagnosed else None)


def told(one):
    """Return all that an incident says, with NaN as text."""
    return repr(dataclasses.asdict(one))


@pytest.mark.parametrize("diagnosed", [True, False])
def test_equal_parts_are_held_once(diagnosed):
    """Findings, evidence and advice, NaN among them."""
    first, second = incident(1, diagnosed=diagnosed), incident(2, diagnosed=diagnosed)
    shared = sharing(second, [first])
    assert told(shared) == told(second)
    assert shared.findings is first.findings
    if diagnosed:
        assert shared.diagnosis.evidence is first.diagnosis.evidence and shared.diagnosis.advice is first.diagnosis.advice


def test_other_parts_stay():
    """What is told in other numbers is its own; single findings and sentences are shared all the same."""
    first, second = incident(1), incident(2, bad=3)
    shared = sharing(second, [first])
    assert told(shared) == told(second)
    assert shared.findings[0] is second.findings[0] and shared.findings[1] is first.findings[1]
    assert shared.diagnosis.evidence[0] is second.diagnosis.evidence[0] and shared.diagnosis.evidence[1] is first.diagnosis.evidence[1]


def test_the_last_ones_are_looked_at():
    """So that the work for one more does not grow with those that there are."""
    first, others = incident(0), [incident(n, bad=n + 10) for n in range(1, RECENT)]
    assert sharing(incident(99), [first, *others]).findings is first.findings
    assert sharing(incident(99), [first, *others, incident(98, bad=99)]).findings is not first.findings
