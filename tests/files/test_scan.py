"""A scan reports each problem, its place and its severity, worst first, as text and JSON."""

import json
import math

import numpy as np
import pytest

from keras_nanguard import GuardError, repair, scan
from keras_nanguard._files.problems import (
    PROBLEMS,
    SEVERITIES,
    Limits,
    find_problems,
)
from keras_nanguard._files.scan import statistics
from keras_nanguard._files.stored import Identity, ModelArray

CASES = {
    "nan": ("kernel", "weight", [[1.0, np.nan]], {}),
    "inf": ("kernel", "weight", [[1.0, -np.inf]], {}),
    "negative_variance": ("moving_variance", "statistics", [1.0, -0.5], {}),
    "loss_scale": ("dynamic_scale", "slot", 0.0, {}),
    "out_of_range": ("moving_mean", "statistics", [1.0, -2e6], {}),
    "beyond_limit": ("kernel", "weight", [[1.0, -20.0]], {"limit": 10.0}),
    "float16_overflow": ("kernel", "weight", [[1.0, 7e4]], {"dtype": "float16"}),
    "zero_variance": ("moving_variance", "statistics", [0.0, 0.0], {}),
    "beyond_float16": ("kernel", "weight", [[1.0, 7e4]], {}),
    "metric": ("total", "other", [1.0, np.nan], {"layer_class": "Metric"}),
    "all_zero": ("kernel", "weight", [[0.0, 0.0]], {}),
    "constant": ("kernel", "weight", [[2.0, 2.0]], {}),
    "denormal": ("kernel", "weight", [[1.0, 1e-310]], {}),
}


def judged(name, role, values, layer_class="", limit=None, **settings):
    values, who = np.array(values), Identity("", name, role, layer_class, settings)
    limits, array = Limits(limit), ModelArray("", shape=np.shape(values), who=who)
    return find_problems(array, statistics([values], limits.of(who)), limits)


@pytest.mark.parametrize("code", sorted(set(PROBLEMS) - {"unread"}))
def test_every_problem_is_found_alone_with_its_severity_and_a_sentence(code):
    """Each problem of the table has a minimal example in which only this problem is found."""
    name, role, values, options = CASES[code]
    (found,) = judged(name, role, values, **options)
    assert (found.code, found.severity) == (code, PROBLEMS[code][0])
    assert found.severity in SEVERITIES
    assert "{" not in found.detail


@pytest.mark.parametrize(
    ("name", "role", "values", "layer_class"),
    [
        ("bias", "weight", [0.0, 0.0], "Dense"),  # how a bias starts
        ("gamma", "weight", [1.0, 1.0], "BatchNormalization"),
        ("moving_mean", "statistics", [0.0, 0.0], "BatchNormalization"),
        ("moving_variance", "statistics", [1.0, 9e5], "BatchNormalization"),
        (
            "variance",
            "statistics",
            [1.0, 1e12],
            "Normalization",
        ),  # describes the data, at any scale
        ("kernel_momentum", "slot", [[0.0, 0.0]], "Optimizer"),
        ("kernel_velocity", "slot", [[1e-310, 1e9]], "Optimizer"),
        ("kernel", "weight", [[3.0]], "Dense"),
        ("kernel", "weight", np.zeros((0, 3)), "Dense"),
    ],
)
def test_valid_values_are_not_reported(name, role, values, layer_class):
    """Initial values, small slots, large data statistics and empty arrays are not problems."""
    assert judged(name, role, values, layer_class) == ()


def test_the_worst_layer_and_the_worst_problem_come_first(make):
    """Errors come before warnings, warnings before notes, and larger shares before smaller ones."""
    report = scan(
        make.keras({make.SECOND_VARIANCE: np.nan, make.FIRST_MEAN: 1e7, make.KERNEL: 0.0})
    )
    assert [(layer.path, layer.severity) for layer in report.layers] == [
        ("backbone/second_bn", "error"),
        ("backbone/first_bn", "warning"),
        ("head", "note"),
    ]
    assert [entry.name for entry in report.bad] == ["moving_variance", "moving_mean"]
    assert report.layers[0].variables[0].name == "moving_variance"


def test_notes_do_not_spoil_a_clean_report(make):
    """A model with harmless oddities is clean, and the report has the number of scanned values."""
    report = scan(make.keras({make.KERNEL: 0.0}))
    assert report.ok
    assert report.finite
    assert report.counts["notes"] == 1
    assert str(report).endswith("clean, 47 values in 10 variables.")


def test_float16_layers_are_reported_by_the_configuration(make):
    """A weight beyond 65504 is a warning in a layer that computes in float16 and a note
    elsewhere."""
    found = {
        entry.path: entry.problems
        for entry in scan(make.keras({make.KERNEL: 7e4})).variables
        if entry.problems
    }
    assert [problem.code for problem in found["head/kernel"]] == ["float16_overflow", "constant"]
    elsewhere = scan(make.weights({make.KERNEL: 7e4}))
    assert elsewhere.ok


def test_the_limit_holds_for_every_float_but_counters(make):
    """`limit` applies to weights, slots and statistics alike."""
    report = scan(make.keras(), limit=1.5)
    assert {entry.path for entry in report.bad} == {
        "head/kernel",
        "backbone/first_bn/moving_variance",
        "backbone/second_bn/moving_variance",
    }
    assert all(entry.problems[0].code == "beyond_limit" for entry in report.bad)
    assert (
        scan(make.keras({make.SECOND_VARIANCE: 100.0}), statistics_limit=50).bad[0].name
        == "moving_variance"
    )


@pytest.mark.parametrize("limit", (0, -1.0, math.nan))
def test_a_limit_that_cannot_be_one_is_refused(make, limit):
    """A limit has to be a positive number."""
    with pytest.raises(GuardError, match="above 0"):
        scan(make.keras(), limit=limit)


def test_the_json_form_is_strict_numbered_and_whole(make):
    """`to_dict` is plain JSON with a format number, names every variable and contains no NaN."""
    path = make.keras({make.SECOND_VARIANCE: np.nan, make.KERNEL: np.inf})
    document = json.loads(json.dumps(scan(path).to_dict(), allow_nan=False))
    assert document["format"] == 1
    assert (document["clean"], document["finite"], document["kind"]) == (False, False, "keras")
    listed = [variable for layer in document["layers"] for variable in layer["variables"]]
    assert len(listed) == document["counts"]["variables"] == 10
    assert (
        sum(variable["statistics"]["nan"] for variable in listed) == document["counts"]["nan"] == 4
    )


def test_a_live_model_is_scanned_with_its_slots_metrics_and_states(keras):
    """Variables that no layer lists are also scanned: slots, metrics, the states of a stateful
    layer.
    """
    if keras.backend.backend() == "torch":
        pytest.skip(
            "Keras cannot train a stateful LSTM on PyTorch: it writes over what its gradients need"
        )
    model = keras.Sequential(
        [keras.Input((3, 2), batch_size=4), keras.layers.LSTM(2, stateful=True, name="memory")],
        name="m",
    )
    model.compile(
        "adam", "mse", run_eagerly=True
    )  # some releases of Keras cannot trace a stateful LSTM
    model.fit(np.zeros((4, 3, 2)), np.zeros((4, 2)), verbose=0)
    assert scan(model).ok
    model.layers[0].states[1].assign(np.full((4, 2), np.nan))
    model.optimizer.variables[3].assign(np.full((2, 8), -1.0))
    model.metrics_variables[0].assign(np.inf)
    found = {entry.path: entry.problems[0].code for entry in scan(model).bad}
    assert found == {
        "memory/states/1": "nan",
        "optimizer/adam/m_memory_lstm_cell_kernel_velocity": "negative_variance",
    }


def test_a_bad_metric_is_not_a_fault_of_the_model(keras):
    """Metrics with NaN, including those of the model itself, are notes: the model is clean, and
    nothing needs repair.
    """

    class Tracking(keras.Sequential):
        def __init__(self, layers):
            super().__init__(layers)
            self.tracker = keras.metrics.Mean(name="tracker")

    model = Tracking([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.full((8, 4), np.nan, "float32")
    model.evaluate(x, x[:, :1], verbose=0)
    model.tracker.update_state(np.nan)
    report = scan(model)
    noted = {entry.path: entry.problems[0] for entry in report.variables if entry.problems}
    assert {"metrics/loss/total", "metrics/tracker/total"} <= set(noted)
    assert {(found.code, found.severity) for found in noted.values()} == {("metric", "note")}
    assert report.ok and report.bad == ()
    repaired = repair(model)
    assert repaired.ok and repaired.changes == () and "Still bad" not in str(repaired)
    model.layers[0].kernel.assign(np.full((4, 1), np.nan))
    assert [entry.role for entry in scan(model).bad] == ["weight"]


def test_anything_but_a_model_is_rejected(keras):
    """Anything but a path or a built model is rejected."""
    with pytest.raises(GuardError, match="Expected a Keras model"):
        scan(3)
    with pytest.raises(GuardError, match="built"):
        scan(keras.Sequential([keras.layers.Dense(2)]))
