"""Each rule finds its hazard in its sample, nothing in the corrected one or good models."""

import functools
import pathlib
import re
from typing import NamedTuple

import keras
import numpy as np
import pytest
from support.public_api import listed

from keras_nanguard import lint

layers = keras.layers

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "lint.md").read_text(encoding="utf-8")


class Rule(NamedTuple):
    """A rule as described in its section of the docs."""

    code: str
    title: str
    severity: str
    fix: str


RULES = [
    Rule(*found)
    for found in re.findall(
        r"^## (\w+)\n\n\*\*(.*?)\*\* \((\w+)\)\. .+\.\n\n\*Instead:\* (.+\.)$", PAGE, re.M
    )
]


def section(rule):
    return PAGE.partition(f"\n## {rule.code}\n\n")[2].partition("\n## ")[0]


def samples(rule):
    """Return the program with the hazard, and the corrected one."""
    return re.findall(r"```python\n(.*?)```", section(rule), re.S)


@pytest.fixture(autouse=True)
def plain_dtypes():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def examine(program):
    made = {"keras": keras, "np": np}
    exec(program, made)
    return lint(made["model"], made.get("x"), made.get("y"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_finds_its_hazard_in_its_sample_and_nothing_in_the_corrected_one(rule):
    """The samples in the docs do what the docs describe."""
    invalid, valid = samples(rule)
    found = examine(invalid).hazards
    assert rule.code in {hazard.code for hazard in found}
    named = [hazard for hazard in found if hazard.code == rule.code]
    assert all((hazard.fix, hazard.severity) == (rule.fix, rule.severity) for hazard in named)
    assert examine(valid).hazards == ()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_that_is_ignored_or_blinded_finds_nothing(rule):
    made = {"keras": keras, "np": np}
    exec(samples(rule)[0], made)
    model, data = made["model"], (made.get("x"), made.get("y"))
    rest = lint(model, *data, ignore=[rule.code]).hazards
    assert rest == tuple(
        hazard for hazard in lint(model, *data).hazards if hazard.code != rule.code
    )


def test_the_page_in_the_docs_agrees_with_every_rule():
    """A row and a section for each rule, in the same order, with its severity, title and remedy."""
    rows = [f"| [`{one.code}`](#{one.code}) | {one.severity} | {one.title} |" for one in RULES]
    assert re.findall(r"^\| \[.*$", PAGE, re.M) == rows
    assert re.findall(r"^## (.*)$", PAGE, re.M) == [rule.code for rule in RULES]
    assert sorted(rule.code for rule in RULES) == list(listed("lint rule"))
    assert {rule.severity for rule in RULES} == {"error", "warning", "note"}


def head(activation, loss, units=3, **options):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(units, activation=activation)])
    model.compile("adam", loss, **options)
    return {hazard.code for hazard in lint(model).hazards}


@pytest.mark.parametrize(
    ("activation", "loss", "codes"),
    [
        ("softmax", "sparse_categorical_crossentropy", set()),
        ("sigmoid", "binary_crossentropy", set()),
        ("sigmoid", "categorical_crossentropy", set()),
        (None, "mse", set()),
        ("relu", "mse", set()),
        ("softplus", "poisson", set()),
        ("exponential", "poisson", set()),
        ("softmax", "kl_divergence", set()),
        ("relu", "mean_squared_logarithmic_error", set()),
        ("softmax", "categorical_focal_crossentropy", set()),
        (None, "poisson", {"activation_does_not_fit"}),
        ("relu", "poisson", {"activation_does_not_fit"}),
        (None, "kl_divergence", {"activation_does_not_fit"}),
        ("tanh", "binary_crossentropy", {"activation_does_not_fit"}),
        (None, "mean_squared_logarithmic_error", {"activation_does_not_fit"}),
        (None, "sparse_categorical_crossentropy", {"logits_as_probabilities"}),
        (None, "categorical_focal_crossentropy", {"logits_as_probabilities"}),
        ("sigmoid", keras.losses.BinaryCrossentropy(from_logits=True), {"probabilities_as_logits"}),
        (None, keras.losses.BinaryCrossentropy(from_logits=True), set()),
        ("tanh", keras.losses.BinaryCrossentropy(from_logits=True), set()),
        ("log_softmax", keras.losses.CategoricalCrossentropy(from_logits=True), set()),
        (None, lambda y, p: keras.ops.mean(p - y), set()),
    ],
)
def test_loss_and_last_activation(activation, loss, codes):
    """Keras' documented pairings have no hazard; those that take a log of wrong values have one."""
    assert head(activation, loss) == codes


class Head(layers.Layer):
    """A hidden layer and classes. Its activation is not its last one."""

    def __init__(self):
        super().__init__()
        self.activation = keras.activations.relu
        self.hidden, self.classes = layers.Dense(16), layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.classes(self.activation(self.hidden(x)))


class Classes(layers.Dense):
    def call(self, x):
        return keras.ops.softmax(super().call(x))


class SameCall(layers.Dense):
    """A layer that computes what its base does."""


@pytest.mark.parametrize("layer", [Head, lambda: Classes(3), lambda: SameCall(3, activation="softmax")])
def test_the_activation_of_a_layer_with_its_own_call_is_not_known(layer):
    model = keras.Sequential([keras.Input((4,)), layer()])
    model.compile("adam", "sparse_categorical_crossentropy")
    assert lint(model).ok
    model = keras.Sequential([keras.Input((4,)), SameCall(3)])
    model.compile("adam", "sparse_categorical_crossentropy")
    assert not lint(model).ok


@pytest.mark.parametrize("norm", [layers.BatchNormalization, layers.LayerNormalization])
def test_a_normalization_scales_the_inputs_if_it_is_first(norm):
    x = np.full((8, 4), 5000.0, "float32")
    first = keras.Sequential([keras.Input((4,)), layers.Reshape((2, 2)), norm(), layers.Dense(1)])
    second = keras.Sequential([keras.Input((4,)), layers.Dense(1), norm()])
    assert lint(first, x).ok
    assert [hazard.code for hazard in lint(second, x).hazards] == ["input_scale"]


def test_rows_without_a_class_are_ignored():
    """The loss there is 0, as for pixels that count for no class."""
    model = keras.Sequential([keras.Input((4, 3)), layers.Dense(3, activation="softmax")])
    model.compile("adam", "categorical_crossentropy")
    x, y = np.zeros((8, 4, 3), "f4"), np.eye(3)[np.zeros((8, 4), int)]
    y[:, :2] = 0.0
    assert lint(model, x, y).ok
    assert not lint(model, x, 0.5 * y).ok


def test_a_metric_that_expects_logits_takes_them():
    metrics = keras.metrics
    for metric in (metrics.CategoricalCrossentropy, metrics.BinaryCrossentropy):
        assert head("tanh", "mse", metrics=[metric(from_logits=True)]) == set()
        assert head("tanh", "mse", metrics=[metric()]) == {"metric_does_not_fit"}


@pytest.mark.filterwarnings("ignore:You are using a softmax")
@pytest.mark.parametrize("axis", [1, -1, (1, 2)])
@pytest.mark.parametrize("softmax", [lambda axis: layers.Softmax(axis), lambda axis: lambda x: keras.ops.softmax(x, axis)])
def test_a_softmax_over_another_axis_than_the_last(axis, softmax):
    inputs = keras.Input((10, 4))
    shares = softmax(axis)(layers.Dense(1)(inputs))
    for outputs in (shares, layers.Reshape((10,))(shares)):
        found = {hazard.code for hazard in lint(keras.Model(inputs, outputs)).hazards}
        assert found == ({"softmax_of_one"} if axis == -1 else set())


FIVES, LABELS = np.full((4, 3), 5.0), np.array([0, 1, 2, 1])
SPARSE, IGNORED = (
    keras.losses.sparse_categorical_crossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)


def own(name):
    """Return a loss of the user's that has the name of one of Keras, or contains it."""

    def masked(y_true, y_pred):
        return keras.ops.mean(keras.ops.where(y_true < 0, 0.0, y_pred))

    masked.__name__ = name
    return masked


class Masked(keras.losses.SparseCategoricalCrossentropy):
    """A loss of the user's that ignores negative classes."""

    def call(self, y_true, y_pred):
        return keras.ops.where(y_true < 0, 0.0, super().call(keras.ops.maximum(y_true, 0), y_pred))


class Named(keras.losses.SparseCategoricalCrossentropy):
    """A loss of Keras with another name."""


NOISY = getattr(keras.losses, "CategoricalGeneralizedCrossEntropy", IGNORED)  # new in Keras 3.9


@pytest.mark.parametrize(
    ("loss", "targets", "activation", "accepted"),
    [
        (IGNORED(ignore_class=255), [0, 1, 255, 2], "softmax", True),
        (IGNORED(ignore_class=-1), [0, 1, -1, 2], "softmax", True),
        (IGNORED(ignore_class=255), [255] * 4, "softmax", True),
        (functools.partial(SPARSE, ignore_class=255), [0, 1, 255, 2], "softmax", True),
        (IGNORED(ignore_class=255), [0, 7, 255, 2], "softmax", False),
        (IGNORED(), [0, 1, 255, 2], "softmax", False),
        (functools.partial(SPARSE), [0, 1, 255, 2], "softmax", False),
        *((name, FIVES, "softmax", False) for name in ("kl_divergence", "kld", "KLD")),
        (keras.losses.KLDivergence(), FIVES, "softmax", False),
        (keras.losses.kl_divergence, FIVES, "softmax", False),
        (keras.losses.kl_divergence, np.eye(3)[LABELS], "softmax", True),
        ("categorical_focal_crossentropy", FIVES, "softmax", False),
        (keras.losses.CategoricalFocalCrossentropy(), FIVES, "softmax", False),
        ("binary_focal_crossentropy", FIVES, "sigmoid", False),
        ("BCE", FIVES, "sigmoid", False),
        ("msle", -FIVES, "softplus", False),
        ("msle", -np.ones((4, 3)), "softplus", False),
        ("hinge", FIVES, "tanh", True),
        (NOISY(), LABELS, "softmax", True),
        (NOISY(), LABELS + 1, "softmax", False),
        (own("masked_sparse_categorical_crossentropy"), -LABELS, "softmax", True),
        (own("sparse_categorical_crossentropy"), -LABELS, "softmax", True),
        (own("binary_crossentropy"), -FIVES, "sigmoid", True),
        (Masked(), -LABELS, "softmax", True),
        (Named(), -LABELS, "softmax", False),
    ],
)
def test_targets_are_compared_with_the_range_of_the_loss(loss, targets, activation, accepted):
    """By each name and form of a loss; the class that a loss ignores may be any number."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation=activation)])
    model.compile("adam", loss)
    found = [hazard.code for hazard in lint(model, np.ones((4, 4)), np.array(targets)).hazards]
    assert ("labels_out_of_range" in found) is not accepted


def test_the_last_activation_is_found_behind_other_layers():
    """Nested models, Activation layers, Softmax and reshapes in between do not hide it."""
    inner_input = keras.Input((4,))
    inner = keras.Model(inner_input, layers.Dense(3, activation="softmax")(inner_input))
    outer_input = keras.Input((4,))
    for tail in (
        lambda x: inner(x),
        lambda x: layers.Reshape((3,))(inner(x)),
        lambda x: layers.Activation("softmax")(layers.Dense(3)(x)),
        lambda x: layers.Softmax()(layers.Dense(3)(x)),
        lambda x: keras.ops.softmax(layers.Dense(3)(x)),
    ):
        model = keras.Model(outer_input, tail(outer_input))
        model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
        assert [hazard.code for hazard in lint(model).hazards] == ["probabilities_as_logits"]


def test_each_output_is_held_against_its_own_loss_and_targets():
    inputs = keras.Input((4,))
    outputs = {
        "a": layers.Dense(2, activation="softmax", name="first")(inputs),
        "b": layers.Dense(1, name="second")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile("adam", {"a": "sparse_categorical_crossentropy", "b": "mse"})
    assert lint(model).ok
    (hazard,) = lint(model, y={"a": np.array([0, 2]), "b": np.array([9.0, -9.0])}).hazards
    assert (hazard.code, hazard.path) == ("labels_out_of_range", "a")
    model.compile("adam", {"a": "mse", "b": "poisson"})
    assert [hazard.path for hazard in lint(model).hazards] == ["second"]


@pytest.mark.parametrize(
    ("rate", "bad"),
    [(1e-3, False), (0.0, True), (-0.1, True), (2.0, True), (float("nan"), True), (1.0, False)],
)
def test_learning_rates(rate, bad):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mse")
    assert bool(lint(model).hazards) is bad


def test_schedules_are_checked_at_several_steps():
    """A warm-up from 0 is valid; a schedule that becomes negative is not."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    schedules = keras.optimizers.schedules
    warmup = schedules.CosineDecay(0.0, 99, warmup_target=1e-3, warmup_steps=9)
    negative = schedules.PolynomialDecay(1e-3, 50, end_learning_rate=-1e-3)
    for rate, ok in ((warmup, True), (negative, False)):
        model.compile(keras.optimizers.Adam(rate), "mse")
        assert lint(model).ok is ok


NAMED = (
    *("BatchNormalization", "Normalization", "AttentionPooling", "MaxPooling1D", "LSTM", "RNN"),
    *("Rescaling", "Embedding", "Bidirectional", "Log", "Divide", "Reciprocal", "Softmax", "Exp"),
    *("Identity", "Reshape", "Dropout", "Einsum", "DepthwiseConv"),
)


@pytest.mark.daily("BatchNormalization", "Normalization", "LSTM", "Embedding", "Log", "Softmax")
@pytest.mark.parametrize("name", NAMED)
def test_a_layer_of_your_own_may_have_any_name(name):
    """A class with only the name of one of Keras has none of its attributes or rules."""

    def call(self, x):
        return keras.ops.add(x, 1.0)

    def init(self, **settings):
        layers.Layer.__init__(self, **settings)
        self.operations, self.outputs, self.kernel = [("add", 1)], 3, "linear"
        self.kernel_initializer = type("RandomNormal", (), {})()

    own = type(name, (layers.Layer,), {"__init__": init, "call": call})
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), own(), layers.Dense(1), own()])
    model.compile("adam", "mse")
    assert lint(model, np.ones((3, 4), "float32"), np.ones((3, 1), "float32")).ok


def test_a_model_of_your_own_may_have_any_attribute():
    """Attributes of a subclassed model that only have the name of one of Keras are no graph."""

    class Sub(keras.Model):
        def __init__(self):
            super().__init__()
            self.outputs, self.output_names, self.operations = layers.Dense(2), 3, 7
            self.optimizer = "adam"

        def call(self, x):
            return self.outputs(x)

    model = Sub()
    model(np.ones((2, 3)))
    assert lint(model, np.ones((2, 3), "float32")).ok


@pytest.mark.parametrize("wrong", (np.nan, np.inf, -1.0))
def test_the_wrong_learning_rate_is_named(wrong):
    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.001 if step == 0 else wrong

    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(Schedule()), "mse")
    (hazard,) = lint(model).hazards
    assert hazard.detail == f"a learning rate of {wrong:g}"


def test_a_schedule_that_fails_outside_of_training_hides_no_other_hazard():
    """A table of rates ends before step 100."""

    class Table(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return [1e-3, 1e-3][int(step)]

    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.Adam(Table()), keras.losses.BinaryCrossentropy(from_logits=True))
    assert [hazard.code for hazard in lint(model).hazards] == ["probabilities_as_logits"]


def test_protected_operations_are_safe():
    """Adding a constant, clipping, softplus and the like protect a logarithm or a quotient."""
    inputs = keras.Input((4,))
    x, ops = layers.Dense(4)(inputs), keras.ops
    for expression in (
        ops.log(x + 1e-6),
        ops.log(ops.softplus(x)),
        ops.log(layers.Dense(3, activation=ops.exp)(inputs)),
        x / (ops.norm(x, axis=-1, keepdims=True) + 1e-9),
        x / 255.0,
        x / ops.sqrt(ops.var(x, axis=-1, keepdims=True) + 1e-6),
        ops.exp(x) / ops.sum(ops.exp(x), axis=-1, keepdims=True),
        x / ops.cosh(x),
        x / (2.0 * ops.softplus(x)),
        x / (ops.abs(x) + np.float32(1e-6)),
        ops.log(ops.where(x > 1e-3, x, 1e-3)),
        x / layers.Add()([ops.softplus(x), ops.exp(x)]),
    ):
        assert lint(keras.Model(inputs, expression)).ok
    for expression in (
        *(ops.log(x), 1.0 / x, x / ops.sum(x, axis=-1, keepdims=True), ops.rsqrt(x)),
        *(ops.log(ops.where(x > 0.0, x, 0.0)), x / (2.0 * x), x / ops.sqrt(ops.square(x))),
        x / layers.Add()([ops.softplus(x), x]),
    ):
        (hazard,) = lint(keras.Model(inputs, expression)).hazards
        assert hazard.code == "unprotected_operation"


def test_lint_ignores_parts_of_a_model_that_are_not_visible():
    """It fails on no model without a graph, a loss or an optimizer, and changes none."""

    class Sub(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(momentum=1.0)

        def call(self, x):
            return self.norm(x)

    model = Sub()
    model(np.ones((2, 3)))
    assert lint(model).hazards
    before = [variable.numpy() for variable in model.variables]
    lint(model, {"a": np.ones(3)}, [np.ones(3)])
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


APPLICATIONS = sorted(name for name in dir(keras.applications) if name[0].isupper())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "MobileNetV2" else pytest.mark.slow) for name in APPLICATIONS],
)
def test_every_keras_application_has_no_hazard(name):
    """No hazards in any model of `keras.applications`, compiled as documented."""
    if name == "NASNetMobile" and keras.backend.backend() == "torch":
        pytest.skip("Keras has no NASNetMobile on torch")
    model = getattr(keras.applications, name)(weights=None)
    model.compile(optimizer="adam", loss="categorical_crossentropy", metrics=["accuracy"])
    assert lint(model).hazards == ()
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy())
    assert lint(model).hazards == ()
    keras.backend.clear_session()


def test_data_of_any_float_dtype_are_checked():
    """bfloat16, which NumPy knows only by an extension, and complex numbers."""
    import ml_dtypes

    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    for dtype, value in ((ml_dtypes.bfloat16, np.nan), (np.complex64, np.inf * 1j)):
        bad = np.full((4, 2), value, dtype)
        assert [hazard.code for hazard in lint(model, bad).hazards] == ["data_nonfinite"]
        assert lint(model, np.zeros((4, 2), dtype)).ok


def test_targets_without_the_axis_of_the_classes():
    """A loss that the first step would refuse does not end the check."""
    model = keras.Sequential([keras.Input((4, 3)), layers.Dense(3, activation="softmax")])
    model.compile("adam", keras.losses.CategoricalCrossentropy(axis=2))
    assert lint(model, np.zeros((8, 4, 3), "f4"), np.eye(3)[np.zeros(8, int)]).ok


def test_bad_targets_of_a_model_whose_graph_is_not_known():
    class Subclassed(keras.Model):
        def call(self, inputs):
            return inputs

    y, fine = np.array([1.0, np.nan]), np.zeros((2, 1))
    found = [hazard.path for given in (y, [fine, y], {"price": y}) for hazard in lint(Subclassed(), fine, given).hazards]
    assert found == ["y", "target 1", "price"]


def test_intended_infinite_values_are_not_hazards():
    """Not a mask of -Inf, a NaN marker or metric; but a bad moving variance and slot."""

    class Masked(layers.Layer):
        def build(self, shape):
            for name, value in (("mask", -np.inf), ("mark", np.nan)):
                constant = keras.initializers.Constant(value)
                self.add_weight(shape=(2,), initializer=constant, trainable=False, name=name)

        def call(self, x):
            return x

    parts = [layers.Dense(2), layers.BatchNormalization(), Masked()]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile("adam", "mse")
    x = np.full((8, 4), np.nan, "float32")
    model.evaluate(x, x[:, :2], verbose=0)
    assert "nonfinite_weights" not in {hazard.code for hazard in lint(model).hazards}
    model.optimizer.build(model.trainable_variables)
    slot = next(v for v in model.optimizer.variables if v.shape == (4, 2))
    for variable in (model.layers[1].moving_variance, slot):
        variable.assign(np.full(variable.shape, np.inf))
    found = [hazard for hazard in lint(model).hazards if hazard.code == "nonfinite_weights"]
    assert [hazard.severity for hazard in found] == ["error", "error"]
    assert found[0].path == model.layers[1].moving_variance.path
