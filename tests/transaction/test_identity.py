"""Guarded runs, with bad batches or without, end like plain ones on good data."""

from __future__ import annotations

import pytest
from support import zoo
from support.programs import PROGRAMS

BAD = (3, 8)
"""Numbers of the bad batches."""

NORMAL = {"model-many-inputs-outputs"}
"""Programs of the normal run, in graph mode; a campaign runs all of them."""

if zoo.BACKEND != "tensorflow":  # which compiles longest
    NORMAL |= {"precision-mixed_float16", "step-gan"}
if zoo.BACKEND == "torch":  # where nothing is compiled
    NORMAL |= {"feed-sample-weight-bad", "model-subclassed", "precision-bfloat16"}
    NORMAL |= {"optimizer-accumulation", "optimizer-clipnorm", "precision-float64"}
assert set(PROGRAMS) >= NORMAL

NOT_ON_JAX = {
    "step-": "a train step on JAX takes and returns its state; those are in tests/backends/jax",
    "model-unlisted-state": "a pure step cannot write anything outside of its state",
    "model-stateful-rnn": "Keras hands the states of stateful RNNs to no step on JAX",
    "precision-float64": "JAX has no float64 unless it is reported so before it starts",
}
"""Programs that Keras cannot express on JAX, by the start of their name, with the reason."""

TOLERANCE = 1e-5 if zoo.BACKEND == "jax" else 0.0
"""XLA fuses what it compiles; two programs that mean the same may round differently."""

CASES = [
    pytest.param(name, mode, marks=() if name in NORMAL and mode == "graph" else pytest.mark.slow)
    for name in PROGRAMS
    for mode in ("graph", "eager")
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_program(name, mode):
    """A guarded run gives the bits of an unguarded one; so does the next fit, with bad batches."""
    reason = next((text for start, text in NOT_ON_JAX.items() if name.startswith(start)), "")
    if zoo.BACKEND == "jax" and reason:
        pytest.skip(reason)
    program = PROGRAMS[name]
    oracle = program.run(program.data(), None, mode)
    healthy = program.run(program.data(), True, mode)
    assert zoo.differences(healthy, oracle, TOLERANCE) == []
    assert healthy.guard.incidents == [] and healthy.guard.session.run.counts.refused == 0
    assert set(healthy.history["refused_steps"]) == {0}
    if zoo.BACKEND == "jax" and name == "optimizer-ema":
        return  # after a fit, weights and averages share buffers, and a second fit of Keras fails
    poison = program.data().with_poison(BAD, where=program.where)
    poisoned = program.again(healthy, poison, "undiagnosed")
    assert zoo.differences(poisoned, program.again(oracle, program.data(), None), TOLERANCE) == []
    epoch = program.data().batches + len(BAD)
    assert poisoned.steps == [*BAD, *(epoch + batch for batch in BAD)]
    assert zoo.bad_entries(poisoned.model) == []
