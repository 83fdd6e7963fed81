"""Healthy training that looks alarming is left alone: no incident, and the bits of the plain run."""

from __future__ import annotations

import pytest
from support import zoo
from support.wild_programs import WILD, Wild, train

ROUNDED = {
    "wgan": "a clipped weight is one rounding away from its bound",
    "bfloat16": "a sum in float32 is rounded to three digits between two operations",
}
"""What XLA, which compiles a guarded step as another program than a plain one, rounds in another way."""

KINDS = (
    *("gan", "reinforce", "vae", "weight-", "curriculum", "catapult", "matrix-factorisation", "normalised", "float16"),
    *("batch-of", "triplet", "random-labels", "wgan"),
)
"""How the names of programs begin of which there are several variants."""


def compared(program: Wild, one: zoo.Run, other: zoo.Run, tolerance: float) -> list[str]:
    """Return in which variables and logs two runs differ; of a program that overflows, in which weights and slots."""
    told = zoo.differences(one, other, tolerance)
    return [text for text in told if not (program.overflows and text.startswith(("loss/", "history[")) or "/moving_" in text.split(":")[0])]


def case(name: str) -> object:
    reason = WILD[name].found.get(zoo.BACKEND, "")
    return pytest.param(name, marks=[pytest.mark.xfail(reason=reason, strict=True)] if reason else ())


@pytest.mark.parametrize("name", list(map(case, WILD)))
def test_left_alone(name):
    """A default guard has nothing to say of it and changes nothing, and it is as wild as it says."""
    program = WILD[name]
    if zoo.BACKEND in program.not_on:
        pytest.skip(program.not_on[zoo.BACKEND])
    plain, measured = train(program, guarded=False)
    assert zoo.bad_entries(plain.model) == []
    assert {key: measured[key] for key, (low, high) in program.claims.items() if not low <= measured[key] <= high} == {}
    assert 60 <= measured["steps"] <= 300
    guarded, _ = train(program, guarded=True)
    assert [str(incident) for incident in guarded.guard.incidents] == []
    assert bool(guarded.guard.session.refused) == bool(program.overflows)
    assert compared(program, guarded, plain, 1e-5 if zoo.BACKEND == "jax" and name in ROUNDED else 0.0) == []


def test_the_table_is_wide():
    """There are many programs, each says how wild it is and what it is, and of each of these kinds there are several."""
    assert len(WILD) >= 60
    assert all(program.claims and program.build.__doc__ for program in WILD.values())
    assert {kind for kind in KINDS if sum(name.startswith(kind) for name in WILD) < 2} == set()
