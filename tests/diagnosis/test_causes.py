"""The cause follows from evidence alone, else it is unknown; advice names what to change."""

from dataclasses import asdict, replace
from string import Formatter

import keras
import numpy as np
import pytest
from diagnosis.test_decided import CASES
from support.evidence import changed, evidence_of

from keras_nanguard import NanGuard
from keras_nanguard._core.literals import CAUSE_WORDS
from keras_nanguard._core.observations import Operand, Origin, Spread
from keras_nanguard._diagnose import advice as advice_module
from keras_nanguard._diagnose.causes import BECAUSE, decide
from keras_nanguard._diagnose.evidence import OptimizerFacts
from keras_nanguard._diagnose.exceptions import explain_exception
from keras_nanguard._diagnose.explainer import conclude
from keras_nanguard._diagnose.growth import Growth

LOG = Origin(5, "operation", "Log", "loss", ("mse",), "mse", "Loss", 1, 0, 8, (Operand(0.0, True, False),), "float32", (3,))
BAD = evidence_of(step=7, result="bad", bad_site="loss", origin=LOG, rows=(3,))
OVERFLOW = changed(BAD, origin=replace(LOG, op="Square", operands=(Operand(1e30, False, False),)))
GROWN = changed(OVERFLOW, growth=Growth(steps=6, loss=1e9, norm=1e9, weights=1e6))
ADAM = OptimizerFacts("Adam", 1e-3, 1e-8, 0.0, "float16")


def test_unscaled_data_that_has_made_training_diverge():
    """The scale of the data; a rule on `divergence` matches only if the run has diverged."""
    grown = changed(GROWN, rescaled="finite", targets=(Spread("targets", 1e3, 300, 200),))
    assert conclude(grown).causes == {"input_scale", "divergence"} and conclude(grown).diverged
    assert conclude(changed(OVERFLOW, inputs=(Spread("inputs", 1e30, 0, 1),))).causes == {"input_scale"}
    assert conclude(GROWN).causes == {"divergence"} and conclude(GROWN).diverged


@pytest.mark.requires_backend("tensorflow", "torch", reason="such a step fails in Keras, too")
def test_a_loss_scale_that_makes_the_loss_itself_overflow():
    """In a step of the user that returns the scaled loss."""

    class Scaled(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return self.optimizer.scale_loss(super().compute_loss(*args, **kwargs))

    model = Scaled([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**126), "mse")
    guard = NanGuard(verbose=0)
    model.fit(np.ones((8, 4), "float32"), np.full((8, 1), 50.0), verbose=0, callbacks=[guard])
    found = guard.incidents[0].diagnosis
    assert found.cause == "loss_scale_collapsed"
    assert "With a loss scale of 1 the same step is finite." in found.evidence


@pytest.mark.parametrize("cause", CAUSE_WORDS)
def test_the_conditions_and_names_of_advice_exist(cause):
    """A condition is a fact, the observation that decides in a rule, or a property of what a sentence is said of."""
    own = {
        "optimizers": advice_module._about(ADAM),
        "raw_inputs": {**asdict(Spread("inputs", 1.0, 0.0, 1.0)), "name": ""},
        "columns": {"name": "", "column": 0},
    }
    entries = [{"say": entry} if isinstance(entry, str) else entry for entry in CAUSE_WORDS[cause]["do"]]
    for entry in entries:
        known = {*advice_module._conditions(BAD, decide(BAD)), *own.get(entry.get("each"), ())}
        assert {word.lstrip("!") for word in entry.get("when", "").split()} <= known
    items = {name for item in own.values() for name in item}
    named = {field for entry in entries for _, field, *_ in Formatter().parse(entry["say"]) if field}
    assert named <= {*items, *advice_module._names(BAD, decide(BAD))}


def test_every_observation_that_advice_or_evidence_reads_decides_somewhere():
    assert {decided.because for _, decided in CASES.values()} == {*BECAUSE}


@pytest.mark.parametrize(("node", "cause"), [("net/whiten", "forward_domain"), ("gradient_tape", "gradient_domain")])
def test_an_exception_is_of_the_pass_in_which_it_was_raised(node, cause):
    message = f"Detected at node {node}/MatrixInverse defined at (most recent call last): ... Input is not invertible."
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    _, found = explain_exception(model, message)
    assert found.cause == cause and ("in the backward pass" in found.evidence[0]) is (cause == "gradient_domain")


@pytest.mark.parametrize(
    ("message", "pieces"), [("Input is not invertible.", 1), ("Tensor had NaN values", 0)]
)
def test_advice_about_a_matrix_is_given_for_a_matrix(message, pieces):
    _, found = explain_exception(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), message)
    assert len(found.advice) == pieces


@pytest.mark.parametrize("loss", ["mse", "binary_crossentropy"])
def test_targets_are_not_blamed_for_an_index_beyond_an_embedding_table(loss):
    """PyTorch's compiler names neither; the number of entries is that of the table."""
    inputs = keras.Input((1,), dtype="int32")
    table = keras.layers.Embedding(10, 3, name="table")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(table)))
    model.compile("sgd", loss)
    x, y = np.array([[1], [2], [9], [3]]), np.array([[1.0], [0.0], [1.0], [0.0]])
    model.train_on_batch(x, y)
    x[2] = 12
    _, found = explain_exception(model, "index out of bounds: 0 <= tmp4 < 10", ((x, y),))
    assert (found.cause, found.culprit, found.samples) == ("forward_domain", "table", (2,))
