"""Each problem with place and severity, as text and JSON; counts agree with NumPy's."""

import json
import math
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from support.public_api import listed

from keras_nanguard import GuardError, repair, scan
from keras_nanguard._core.atomic_files import save_arrays, typed
from keras_nanguard._core.finiteness import is_float, named_dtype
from keras_nanguard._core.variable_names import SECOND_MOMENTS
from keras_nanguard._files.formats.contents import Identity, ModelArray, tiles
from keras_nanguard._files.problems import PROBLEMS, SEVERITIES, Limits, find_problems
from keras_nanguard._files.scan import _PIECE_VALUES, FLOAT16_MAX, statistics

DOCS = pathlib.Path(__file__).parents[2] / "docs"

CASES = {
    "nan": ("kernel", "weight", [[1.0, np.nan]], {}),
    "inf": ("kernel", "weight", [[1.0, -np.inf]], {}),
    "negative_variance": ("moving_variance", "statistics", [1.0, -0.5], {}),
    "loss_scale": ("dynamic_scale", "slot", 0.0, {}),
    "out_of_range": ("moving_mean", "statistics", [1.0, -2e6], {}),
    "beyond_limit": ("kernel", "weight", [[1.0, -20.0]], {"limit": 10.0}),
    "float16_overflow": ("kernel", "weight", [[1.0, 7e4]], {"dtype": "float16"}),
    "zero_variance": ("moving_variance", "statistics", [0.0, 0.0], {}),
}


def judged(name, role, values, layer_class="", limit=None, **settings):
    values, who = np.array(values), Identity("", name, role, layer_class, settings)
    limits, array = Limits(limit), ModelArray("", shape=np.shape(values), who=who)
    return find_problems(array, statistics([values], limits.of(who)), limits)


@pytest.mark.parametrize("code", sorted(set(PROBLEMS) - {"unread"}))
def test_every_problem_is_found_alone_with_its_severity_and_a_sentence(code):
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
        ("variance", "statistics", [1.0, 1e12], "Normalization"),  # describes data of any scale
        ("kernel_momentum", "slot", [[0.0, 0.0]], "Adam"),
        ("kernel_velocity", "slot", [[1e-310, 1e9]], "Adam"),
        ("kernel_gradient_accumulator", "slot", [[-1.0, 1.0]], "Adagrad"),
        ("kernel", "weight", [[7e4]], "Dense"),
        ("total", "other", [1.0, np.nan], "Metric"),
        ("kernel", "weight", np.zeros((0, 3)), "Dense"),
    ],
)
def test_valid_values_are_not_reported(name, role, values, layer_class):
    assert judged(name, role, values, layer_class) == ()


@pytest.mark.parametrize("optimizer", SECOND_MOMENTS)
def test_a_negative_second_moment_is_found(optimizer):
    name = f"kernel{SECOND_MOMENTS[optimizer]}"
    (found,) = judged(name, "slot", [[1.0, -1.0]], optimizer)
    assert found.code == "negative_variance"
    assert judged(name, "slot", [[1.0, -1.0]], "SGD") == ()


def test_the_worst_layer_and_the_worst_problem_come_first(make):
    """Errors come before warnings, and larger shares before smaller ones."""
    bad = {make.SECOND_VARIANCE: np.nan, make.FIRST_MEAN: 1e7}
    report = scan(make.keras(bad))
    assert [(layer.path, layer.severity) for layer in report.layers[:2]] == [
        ("backbone/second_bn", "error"),
        ("backbone/first_bn", "warning"),
    ]
    assert [entry.name for entry in report.bad] == ["moving_variance", "moving_mean"]
    assert report.layers[0].variables[0].name == "moving_variance"


def test_float16_layers_are_reported_by_the_configuration(make):
    """A weight beyond 65504 is a warning if its layer computes in float16."""
    variables = scan(make.keras({make.KERNEL: 7e4})).variables
    found = {entry.path: entry.problems for entry in variables if entry.problems}
    assert [problem.code for problem in found["head/kernel"]] == ["float16_overflow"]
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
    report = scan(make.keras({make.SECOND_VARIANCE: 100.0}), statistics_limit=50)
    assert report.bad[0].name == "moving_variance"


@pytest.mark.parametrize("limit", (0, -1.0, math.nan))
def test_a_limit_that_cannot_be_one_is_refused(make, limit):
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
    nan = sum(variable["statistics"]["nan"] for variable in listed)
    assert nan == document["counts"]["nan"] == 4


def test_only_a_velocity_that_averages_squares_cannot_be_negative(keras, tmp_path):
    """In a live model and in a file that names its optimizer."""

    class Momentum(keras.optimizers.Optimizer):
        def build(self, variables):
            super().build(variables)
            name = "velocity"
            self.moving = [self.add_variable_from_reference(v, name) for v in variables]

        def update_step(self, gradient, variable, learning_rate):
            moving = self.moving[self._get_variable_index(variable)]
            self.assign(moving, 0.9 * moving - learning_rate * gradient)
            self.assign_add(variable, moving)

    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    for optimizer, codes in ((Momentum(0.01), set()), ("adam", {"negative_variance"})):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(optimizer, "mse")
        model.fit(x, np.tile([5.0, -5.0], (16, 1)), verbose=0)
        if codes:
            slot = next(v for v in model.optimizer.variables if v.path.endswith("velocity"))
            slot.assign(np.full(slot.shape, -1.0))
        else:
            slots = [v for v in model.optimizer.variables if v.path.endswith("velocity")]
            assert any(keras.ops.convert_to_numpy(slot).min() < 0 for slot in slots)
        model.save(tmp_path / "model.h5")
        for place in (model, tmp_path / "model.h5"):
            report = scan(place)
            assert {p.code for entry in report.bad for p in entry.problems} == codes
        assert bool(repair(model).changes) == bool(codes)


@pytest.mark.requires_backend("tensorflow", "jax", reason="Keras cannot train a stateful LSTM on PyTorch")
def test_a_live_model_is_scanned_with_its_slots_metrics_and_states(keras):
    """Also variables that no layer lists: slots, metrics, states of a stateful layer."""
    model = keras.Sequential(
        [keras.Input((3, 2), batch_size=4), keras.layers.LSTM(2, stateful=True, name="memory")],
        name="m",
    )
    # some releases of Keras cannot trace a stateful LSTM
    model.compile("adam", "mse", run_eagerly=True)
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
    """NaN in metrics, also the model's own: the model is clean."""

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
    read = {entry.path for entry in report.variables if entry.statistics and entry.statistics.nan}
    assert {"metrics/loss/total", "metrics/tracker/total"} <= read
    assert report.ok and report.bad == ()
    repaired = repair(model)
    assert repaired.ok and repaired.changes == () and "Still bad" not in str(repaired)
    model.layers[0].kernel.assign(np.full((4, 1), np.nan))
    assert [entry.role for entry in scan(model).bad] == ["weight"]


def test_anything_but_a_model_is_rejected(keras):
    with pytest.raises(GuardError, match="Expected a Keras model"):
        scan(3)
    with pytest.raises(GuardError, match="built"):
        scan(keras.Sequential([keras.layers.Dense(2)]))


@pytest.mark.parametrize("held", (lambda o: [o], lambda o: (o,), lambda o: {"first": o}))
def test_optimizers_in_containers_are_scanned(keras, held):
    """Each optimizer in a list, a tuple or a dict of the model is scanned, and reset by itself."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizers = [keras.optimizers.Adam(), keras.optimizers.Adam()]
    for optimizer in optimizers:
        optimizer.build(model.trainable_variables)
    both = held(optimizers[0])
    if isinstance(both, dict):
        model.both = {**both, "second": optimizers[1]}
    else:
        model.both = type(both)([*both, optimizers[1]])
    bad, healthy = (next(v for v in o.variables if "kernel" in v.path) for o in optimizers)
    bad.assign(np.full(bad.shape, np.nan))
    healthy.assign(np.full(bad.shape, 2.0))
    assert len(scan(model).bad) == 1
    assert repair(model).ok
    np.testing.assert_array_equal(np.array(bad.numpy()), np.zeros(bad.shape))
    np.testing.assert_array_equal(np.array(healthy.numpy()), np.full(bad.shape, 2.0))


def test_every_problem_and_every_choice_is_on_the_page():
    text = (DOCS / "files.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for code in listed("problem of a file"):
        assert any(f"`{code}`" in row for row in rows), code
    for line in listed("command repair: "):
        option, found, choices = line.removeprefix("--").partition(" of ")
        if found:
            (row,) = [row for row in rows if row.startswith(f"| `{option}`")]
            assert all(f"`{choice}`" in row for choice in choices.split(", "))


# The counts

DTYPES = ("float16", "float32", "float64", "bfloat16", ">f4", "complex64")
DTYPES += ("float8_e4m3fn", "float8_e5m2")


def oracle(array, limit=math.inf):
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    values = parts.astype(np.float64).reshape(-1)
    finite = values[np.isfinite(values)]
    return {
        "size": values.size,
        "nan": int(np.isnan(values).sum()),
        "posinf": int(np.isposinf(values).sum()),
        "neginf": int(np.isneginf(values).sum()),
        "zeros": int((values == 0).sum()),
        "beyond_float16": int((np.abs(finite) > FLOAT16_MAX).sum()),
        "beyond_limit": int((np.abs(finite) > limit).sum()),
        "min": finite.min() if finite.size else None,
        "max": finite.max() if finite.size else None,
    }


def agrees(array, limit=None):
    found = statistics([array], limit)
    wanted = oracle(array, math.inf if limit is None else limit)
    assert {name: getattr(found, name) for name in wanted} == wanted
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_counts_agree_with_numpy_on_every_bit_pattern(dtype, data):
    kind = named_dtype(dtype)
    raw = data.draw(st.binary(min_size=0, max_size=64 * kind.itemsize))
    array = np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], kind)
    agrees(array, data.draw(st.sampled_from((None, 1.0, 1e-30, 7e4, 1e300))))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_every_sixteen_bit_float_is_counted(dtype):
    """All 65536 patterns, denormals and NaN payloads included."""
    agrees(np.arange(65536, dtype=np.uint16).view(named_dtype(dtype)), 1.0)


@pytest.mark.parametrize("dtype", ("float16", "float32", "float64", "bfloat16"))
@pytest.mark.parametrize(
    ("bad", "name"), [(np.nan, "nan"), (np.inf, "posinf"), (-np.inf, "neginf")]
)
def test_the_bad_value_is_found_at_any_position(dtype, bad, name):
    """One bad value is found at the first, the last and every inner border of the pieces."""
    size = _PIECE_VALUES * 2 + 3
    for place in (0, 1, _PIECE_VALUES - 1, _PIECE_VALUES, 2 * _PIECE_VALUES, size - 1):
        array = np.ones(size, named_dtype(dtype))
        array[place] = bad
        found = statistics([array])
        assert (getattr(found, name), found.nonfinite) == (1, 1)


def test_large_finite_values_are_not_infinities():
    """A sum that overflows proves nothing, and the mean is right."""
    array = np.full(1000, np.finfo(np.float32).max, np.float32)
    found = agrees(array)
    assert found.nonfinite == 0
    assert found.mean == pytest.approx(float(np.finfo(np.float32).max))


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        (((100_000, 1e308), (100_000, -1e308)), 0.0),
        (((30_000, 1e308), (90_000, -1e308)), -5e307),
        (((1, 1.7e308), (1, np.nan), (1, -1.7e308)), 0.0),
        (((70_000, np.finfo(np.float64).max),), np.finfo(np.float64).max),
        (((70_000, 5e-324),), 5e-324),
        (((1, -1.7e308), (60_000, 1.7e308)), 1.7e308 * (59_999 / 60_001)),
    ],
)
def test_the_mean_of_the_largest_and_smallest_numbers(parts, mean):
    """Sums that overflow to Inf of both signs make no NaN."""
    found = statistics([np.full(count, value) for count, value in parts])
    assert found.mean == pytest.approx(mean, rel=1e-9, abs=1e296 if mean == 0.0 else 0.0)


@pytest.mark.parametrize("dtype", ("float16", "float32", "float64", "bfloat16"))
def test_the_mean_is_that_of_the_finite_values(dtype):
    array = np.random.default_rng(0).normal(3.0, 1.0, 200_000).astype(named_dtype(dtype))
    array[::1000] = np.nan
    finite = array.astype(np.float64)[np.isfinite(array.astype(np.float64))]
    assert statistics([array]).mean == pytest.approx(finite.mean(), rel=1e-5)


def test_only_floats_can_be_non_finite():
    """Neither integers, bools, text nor records; but float8 and bfloat16, NumPy's voids."""
    for kind in ("int32", "bool", "uint8", "S3", "U2", "V2", "M8[s]"):
        assert not is_float(np.dtype(kind).name)
    assert not is_float(np.dtype([("a", "f4")]).name)
    assert is_float(named_dtype("bfloat16").name) and is_float(np.dtype(np.longdouble).name)
    assert named_dtype("float8_nonsense") is None
    assert named_dtype("os.system") is None


@given(st.data(), hnp.array_shapes(min_dims=0, max_dims=4, max_side=7))
def test_tiles_cover_an_array_once(data, shape):
    tile = tuple(data.draw(st.integers(1, length + 1)) for length in shape)
    met = np.zeros(shape, int)
    for part in tiles(shape, tile):
        met[part] += 1
        assert met[part].size <= math.prod(tile)
    assert (met == 1).all()


def test_saved_arrays_keep_their_names_and_dtypes(tmp_path):
    """Any name is possible, nothing else is in the file, and old NumPy can read it."""
    arrays = {"file": np.ones(2), "0": np.ones(3, ml_dtypes.bfloat16), "a/b": np.array("text")}
    save_arrays(tmp_path / "saved.npz", arrays)
    with np.load(tmp_path / "saved.npz", allow_pickle=False) as found:
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            read = typed(found[name], array.dtype.name)
            assert read.dtype == array.dtype and (read == array).all()


def test_limits_can_be_numbers_of_numpy(make):
    """For a file, too, whose limits go to another process as JSON."""
    assert scan(make.keras(), limit=10**400).ok
    report = scan(make.keras(), limit=np.float32(8.5), statistics_limit=np.int64(10**6))
    assert [problem.code for entry in report.bad for problem in entry.problems] == ["beyond_limit"]
