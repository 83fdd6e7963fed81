"""The cause follows from the evidence alone; without sufficient evidence it is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keras_nanguard._core.evidence import (
    NOWHERE,
    Constant,
    Evidence,
    Growth,
    Operand,
    OptimizerFacts,
    Origin,
    Spread,
    TargetFault,
)
from keras_nanguard._core.incident import CAUSES
from keras_nanguard._core.literals import CAUSE_WORDS
from keras_nanguard._diagnose.words import conclude

SMALL, ZERO = Operand(1.0, False, False, "float32"), Operand(0.0, True, False, "float32")
LARGE = Operand(1e30, False, False, "float32")
LOG = Origin(5, "operation", "Log", "loss", ("mse",), "mse", "Loss", 1, 0, 8, (ZERO,), "float32", (3,))
BAD = Evidence(step=7, replay="bad", first="loss", origin=LOG, rows=(3,))
HALF = replace(BAD, low_precision="float16", float32="finite")
GROWN = Growth(steps=6, loss=1e9, norm=1e9, weights=1e6)
ADAM = OptimizerFacts("Adam", 1e-3, 1e-8, 0.0, "float16")

TABLE = {
    "input_nonfinite": replace(
        BAD, origin=Origin(-1, "batch", "inputs", "forward"), inputs_bad=(Constant("inputs", (2,), 1, 0),)
    ),
    "target_nonfinite": replace(BAD, origin=Origin(-1, "batch", "targets", "forward")),
    "target_out_of_range": replace(BAD, target_fault=TargetFault("cce", "", (3,), "class index 12 with 10 classes")),
    "input_scale": replace(
        BAD, origin=replace(LOG, op="Square", operands=(LARGE,)), inputs=(Spread("inputs", 1e30, 0, 1),)
    ),
    "forward_domain": replace(BAD, origin=replace(LOG, phase="forward", culprit="log")),
    "loss_domain": BAD,
    "gradient_domain": replace(BAD, first="gradients", origin=replace(LOG, op="SqrtGrad", phase="backward")),
    "divergence": replace(BAD, origin=replace(LOG, op="Square", operands=(LARGE,)), growth=GROWN),
    "float16_overflow": replace(HALF, origin=replace(LOG, op="MatMul", dtype="float16", operands=(SMALL,))),
    "float16_underflow": replace(HALF, origin=replace(LOG, op="RealDiv", operands=(SMALL, ZERO))),
    "loss_scale_collapsed": replace(BAD, first="gradients", loss_scale=0.0),
    "optimizer_domain": replace(BAD, first="weights", first_path="dense/kernel", origin=NOWHERE, optimizers=(ADAM,)),
    "state_nonfinite": replace(BAD, state=(("dense/kernel", "weights"),)),
    "batchnorm_statistics": Evidence(
        refused=False, sites=("validation:nonfinite",), state=(("bn/moving_variance", "statistics"),)
    ),
    "training_flag": Evidence(refused=False, sites=("statistics:stuck",), first_path="bn/moving_mean"),
    "spike": Evidence(refused=False, sites=("loss:spike",), value=1e6),
    "transient": replace(BAD, replay="finite", same_mode="finite", first="", origin=NOWHERE),
    "unknown": replace(BAD, replay="finite", same_mode="", first="", origin=NOWHERE),
}  # fmt: skip


@pytest.mark.parametrize("cause", TABLE)
def test_the_evidence_decides(cause):
    diagnosis = conclude(TABLE[cause])
    assert diagnosis.cause == cause and diagnosis.advice and diagnosis.evidence
    assert all(text.endswith((".", ":")) for text in diagnosis.advice)


def test_unscaled_data_that_has_made_training_diverge():
    """The cause is the scale of the data; a rule on `divergence` matches it only if the run has
    diverged.
    """
    grown = replace(TABLE["divergence"], rescaled="finite", targets=(Spread("targets", 1e3, 300, 200),))
    assert conclude(grown).causes == {"input_scale", "divergence"} and conclude(grown).diverged
    assert conclude(TABLE["input_scale"]).causes == {"input_scale"}
    assert conclude(TABLE["divergence"]).causes == {"divergence"} and conclude(TABLE["divergence"]).diverged


@pytest.mark.parametrize("written", [True, False])
def test_values_that_the_update_cannot_have_made_were_there_before(written):
    """With finite gradients and bad weights the optimizer is to blame, unless its arithmetic cannot
    have done it.
    """
    evidence = replace(TABLE["optimizer_domain"], refused=False, optimizers=(replace(ADAM, epsilon_in_dtype=1e-8),))
    diagnosis = conclude(replace(evidence, written=written))
    assert diagnosis.cause == ("state_nonfinite" if written else "optimizer_domain")
    assert any("other code has written it" in line for line in diagnosis.evidence) is written


def test_bfloat16_overflows_like_float32():
    """Its range is that of float32: a number that rounds to Inf is too large for both."""
    huge = replace(TABLE["input_scale"], float32="finite")
    assert conclude(replace(huge, low_precision="float16")).cause == "float16_overflow"
    assert conclude(replace(huge, low_precision="bfloat16")).cause == "input_scale"


def test_every_cause_has_advice():
    assert set(CAUSE_WORDS) == set(CAUSES)


def test_nothing_is_guessed_from_nothing():
    assert conclude(Evidence()).cause == "unknown"
