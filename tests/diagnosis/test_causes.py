"""The cause follows from evidence alone, else it is unknown; advice names what to change."""

from dataclasses import asdict, replace
from string import Formatter

import keras
import numpy as np
import pytest
from diagnosis.test_decided import CASES
from support.evidence import changed, evidence_of

from keras_nanguard._core.history import Growth
from keras_nanguard._core.literals import CAUSE_WORDS
from keras_nanguard._core.observations import BadArray, Operand, Origin, Spread
from keras_nanguard._diagnose import advice as advice_module
from keras_nanguard._diagnose.advice import advice
from keras_nanguard._diagnose.causes import decide
from keras_nanguard._diagnose.evidence import OptimizerFacts
from keras_nanguard._diagnose.explain_step import conclude
from keras_nanguard._diagnose.raised import explained

LOG = Origin(5, "operation", "Log", "loss", ("mse",), "mse", "Loss", 1, 0, 8, (Operand(0.0, True, False),), "float32", (3,))
BAD = evidence_of(step=7, result="bad", first="loss", origin=LOG, rows=(3,))
OVERFLOW = changed(BAD, origin=replace(LOG, op="Square", operands=(Operand(1e30, False, False),)))
GROWN = changed(OVERFLOW, growth=Growth(steps=6, loss=1e9, norm=1e9, weights=1e6))
ADAM = OptimizerFacts("Adam", 1e-3, 1e-8, 0.0, "float16")


def test_unscaled_data_that_has_made_training_diverge():
    """The scale of the data; a rule on `divergence` matches only if the run has diverged."""
    grown = changed(GROWN, rescaled="finite", targets=(Spread("targets", 1e3, 300, 200),))
    assert conclude(grown).causes == {"input_scale", "divergence"} and conclude(grown).diverged
    assert conclude(changed(OVERFLOW, inputs=(Spread("inputs", 1e30, 0, 1),))).causes == {"input_scale"}
    assert conclude(GROWN).causes == {"divergence"} and conclude(GROWN).diverged


@pytest.mark.parametrize("cause", CAUSE_WORDS)
def test_the_conditions_and_names_of_advice_exist(cause):
    """A condition is a fact, or the observation that decides in a rule."""
    items = {**advice_module._about(ADAM), **asdict(Spread("inputs", 1.0, 0.0, 1.0)), "name": "", "column": 0}
    conditions = {*items, *advice_module._conditions(BAD, decide(BAD)), *(decided.because for _, decided in CASES.values())}
    entries = [{"say": entry} if isinstance(entry, str) else entry for entry in CAUSE_WORDS[cause]["do"]]
    assert {word.lstrip("!") for entry in entries for word in entry.get("when", "").split()} <= conditions
    named = {field for entry in entries for _, field, *_ in Formatter().parse(entry["say"]) if field}
    assert named <= {*items, *advice_module._names(BAD, decide(BAD))}


# The advice

GROWING = (Operand(5e3, zero=False, negative=False),)


def advised(**evidence):
    e = evidence_of(**{"result": "bad", "count": 16, **evidence})
    return " ".join(advice(e, decide(e)))


def origin(op, phase="forward", **more):
    known = {"source": "operation", "frames": ("mean",), "culprit": "mean", "layer_class": "Dense", "dtype": "float32"}
    return Origin(5, op=op, phase=phase, **{"operands": GROWING, **known, **more})


@pytest.mark.parametrize("phase", ["backward", "slope"])
def test_a_derivative_is_explained_by_operations_that_a_user_writes(phase):
    """The divisions and roots in the backward pass of an acos are not in the user's code."""
    said = advised(first="gradients", origin=origin("Reciprocal", phase))
    assert "arccos" in said and "denominator" not in said


def test_an_exponential_of_raw_inputs():
    """They get scaling, ordinary ones no advice."""
    cases = {"standard deviation": Spread("inputs", 1e4, 100.0, 600.0), "": Spread("inputs", 3.0, 0.0, 1.0)}
    for words, spread in cases.items():
        said = advised(first="loss", origin=origin("Exp"), inputs=(spread,))
        assert "softplus" in said and (words in said if words else "'x'" not in said)


def test_a_negative_loss_grows_in_magnitude():
    falls = Growth(steps=9, loss=20.0, losses=(-1.0, -20.0))
    said = " ".join(conclude(evidence_of(result="bad", first="loss", origin=origin("Log"), growth=falls)).evidence)
    assert "The magnitude of the loss has grown by a factor of 20" in said


def test_inputs_and_targets_are_both_named():
    names = ("inputs", "targets")
    bad = {f"{name}_bad": (BadArray(name, (2,), 1, 0),) for name in names}
    assert "'x' and 'y'" in advised(
        first="loss", origin=Origin(0, "batch", "inputs", "forward"), **bad
    )


def test_a_loss_of_the_library_is_changed_by_its_parameter():
    """Users cannot add an epsilon inside a Keras loss."""
    focal = origin("Pow", "backward", culprit="focal", frames=("focal",))
    assert "gamma of a focal loss" in advised(first="gradients", origin=focal)


def test_a_centered_optimizer_is_distinguished():
    facts = OptimizerFacts("RMSprop", 1e-3, 1e-7, 1e-7, settings={"centered": 1.0})
    assert "centered=False" in advised(first="weights", optimizers=(facts,), gradient_norm=1.0)


def test_a_custom_optimizer_is_to_be_made_finite():
    facts = OptimizerFacts("Normalized", 1e-3, own=True)
    said = advised(first="weights", optimizers=(facts,), gradient_norm=1.0)
    assert "the update of Normalized finite for every gradient" in said and "hyperparameters" not in said


@pytest.mark.parametrize(("node", "cause"), [("net/whiten", "forward_domain"), ("gradient_tape", "gradient_domain")])
def test_an_exception_is_of_the_pass_in_which_it_was_raised(node, cause):
    message = f"Detected at node {node}/MatrixInverse defined at (most recent call last): ... Input is not invertible."
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    _, found = explained(model, message)
    assert found.cause == cause and ("in the backward pass" in found.evidence[0]) is (cause == "gradient_domain")


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
    _, found = explained(model, "index out of bounds: 0 <= tmp4 < 10", ((x, y),))
    assert (found.cause, found.culprit, found.samples) == ("forward_domain", "table", (2,))


def test_an_outlier_is_a_matter_of_its_row():
    far = Spread("inputs", 1e20, 0.0, 1e19, outliers=(3,))
    said = advised(first="loss", rows=(3,), without_rows="finite", inputs=(far,))
    assert "row at index 3" in said and "Scale" not in said
