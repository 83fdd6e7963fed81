"""A repair replaces bad values, keeps every bit of the others, and reports both."""

import contextlib
import errno
import functools
import hashlib
import inspect
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from keras_nanguard import FileFormatError, GuardError, NanGuard, repair, scan
from keras_nanguard._files.formats.opening import opened
from keras_nanguard._files.repair_arrays import NotRepaired
from keras_nanguard._files.repair_file import _ZERO_SLOTS, initial_value


def values(path):
    with opened(path) as contents:
        return {array.who.path: array.read() for array in contents.arrays if not array.unread}


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


@pytest.mark.parametrize("kind", ("keras", "weights"))
def test_only_the_bad_values_change(make, kind):
    """A NaN channel of a variance becomes 1; all other bits stay, and so does the old file."""
    path = getattr(make, kind)({make.SECOND_VARIANCE: [2.0, np.nan, 2.0, 3e7]})
    before, old = values(path), digest(path)
    report = repair(path)
    assert report.ok
    assert digest(path) == old
    after = values(report.output)
    assert after.keys() == before.keys()
    variance = after.pop("backbone/second_bn/moving_variance")
    np.testing.assert_array_equal(variance, [2.0, 1.0, 2.0, 1.0])
    for name, array in after.items():
        assert array.tobytes() == before[name].tobytes(), name
    (change,) = report.done
    assert (change.path, change.count) == ("backbone/second_bn/moving_variance", 2)


def test_a_negative_variance_is_bad(make):
    bad = {make.SECOND_VARIANCE: [2.0, -1e-3, 2.0, 2.0], make.FIRST_MEAN: -5.0}
    report = repair(make.keras(bad))
    after = values(report.output)
    np.testing.assert_array_equal(after["backbone/second_bn/moving_variance"], [2.0, 1.0, 2.0, 2.0])
    np.testing.assert_array_equal(after["backbone/first_bn/moving_mean"], np.full(4, -5.0))


def test_everything_else_in_an_archive_is_carried_over(make):
    """Configuration, metadata and assets are copied bit for bit, compressed or not."""
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        extra = [("assets/vocabulary.txt", b"a\nb" * 99)]
        path = make.keras({make.SECOND_VARIANCE: np.nan}, compression=compression, extra=extra)
        output = repair(path, overwrite=True).output
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(output) as new:
            assert old.namelist() == new.namelist()
            assert new.testzip() is None
            for info in old.infolist():
                assert new.getinfo(info.filename).compress_type == info.compress_type
                if info.filename != "model.weights.h5":
                    assert old.read(info) == new.read(info.filename)


def test_weights_are_kept_by_default(make):
    """Without a choice a bad weight is skipped with the reason; the report is not clean."""
    path = make.keras({make.KERNEL: np.nan})
    report = repair(path)
    assert not report.ok
    assert report.output is None
    assert "choose" in report.skipped[0].detail
    assert "Still bad: head/kernel" in str(report)
    assert os.listdir(os.path.dirname(path)) == ["model.keras"]


@pytest.mark.parametrize(("weights", "value"), [("zeros", 0.0), ("ones", 1.0)])
def test_weights_become_the_chosen_values(make, weights, value):
    kernel = np.arange(12.0).reshape(4, 3)
    kernel[1, 2] = np.inf
    report = repair(make.keras({make.KERNEL: kernel}), weights=weights)
    kernel[1, 2] = value
    np.testing.assert_array_equal(values(report.output)["head/kernel"], kernel)


def test_a_good_file_gives_whole_variables(make):
    """Values of a variable belong together; good variables are kept."""
    good = make.keras({make.FIRST_MEAN: 0.75, make.KERNEL: 7.0}, name="good.keras")
    bad = make.weights({make.FIRST_MEAN: [0.5, np.nan, 0.5, 0.5]})
    report = repair(bad, source=good)
    after = values(report.output)
    np.testing.assert_array_equal(after["backbone/first_bn/moving_mean"], np.full(4, 0.75))
    np.testing.assert_array_equal(after["head/kernel"].ravel(), np.arange(12.0))


def test_a_source_that_does_not_fit_is_a_reason(make):
    """A missing variable, another shape and a bad source are skipped, each with its reason."""
    bad = make.weights({make.KERNEL: np.nan, make.SECOND_VARIANCE: np.nan, make.FIRST_MEAN: np.nan})
    arrays = {"head/kernel": np.ones((2, 2))}
    arrays["backbone/second_bn/moving_variance"] = np.full(4, np.inf)
    source = make.npz(**arrays, name="s.npz")
    details = {change.path: change.detail for change in repair(bad, source=source).skipped}
    assert "shape (2, 2)" in details["head/kernel"]
    assert details["backbone/second_bn/moving_variance"] == "the new values are bad too"
    assert "no such variable" in details["backbone/first_bn/moving_mean"]


def projections(path, **groups):
    """Write layers by the name of their group: the name of the layer, and its values."""
    with h5py.File(path, "w") as file:
        for group, (name, *kernel) in groups.items():
            file.create_group(f"{group}/vars").attrs["name"] = name
            file[f"{group}/vars/0"] = np.array(kernel, np.float32)
    return path


def test_layers_deep_in_a_model_keep_their_variables_apart(tmp_path):
    """However long their locations are; what is shown of one is short."""
    path, outer = tmp_path / "deep.weights.h5", "layers/functional/" * 20
    with h5py.File(path, "w") as file:
        for number, value in enumerate((1.0, 0.0, 0.0, np.nan)):
            file[f"{outer}layers/batch_normalization/vars/{number}"] = np.full(3, value)
    report = repair(path)
    assert report.ok and [change.count for change in report.done] == [3]
    assert all(len(change.location) <= 300 for change in report.changes)
    with h5py.File(report.output) as file:
        found = [file[f"{outer}layers/batch_normalization/vars/{n}"][0] for n in range(4)]
    assert found == [1.0, 0.0, 0.0, 1.0]


def test_layers_of_one_name_are_told_apart_by_their_location(tmp_path):
    """Keras gives layers of one name in a custom layer one path. A location alone decides nothing."""
    bad = projections(tmp_path / "bad.weights.h5", first=("proj", 1, 1), second=("proj", np.nan, 2))
    good = projections(tmp_path / "good.weights.h5", first=("proj", 1, 1), second=("proj", 2, 2))
    with h5py.File(repair(bad, source=good).output) as file:
        np.testing.assert_array_equal(file["second/vars/0"], [2.0, 2.0])
    for groups in (
        {"second": ("other", 3, 3), "third": ("proj", 4, 4)},
        {"first": ("proj", 1, 1), "third": ("proj", 4, 4)},
    ):
        other = projections(tmp_path / "other.weights.h5", **groups)
        report = repair(bad, source=other, overwrite=True)
        (change,) = report.skipped
        assert report.output is None and "several variables have this path" in change.detail
    bad = projections(tmp_path / "b.weights.h5", third=("proj", np.nan, 2))
    (change,) = repair(bad, source=good).skipped
    assert "or several variables of this path" in change.detail
    bad = projections(tmp_path / "b.weights.h5", first=("a", 1, 1), second=("proj", np.nan, 2))
    swapped = projections(tmp_path / "s.weights.h5", first=("proj", 2, 2), second=("a", 1, 1))
    with h5py.File(repair(bad, source=swapped).output) as file:
        np.testing.assert_array_equal(file["second/vars/0"], [2.0, 2.0])


def test_layers_of_one_name_in_a_model_and_not_in_its_source(keras):
    """Which of them the layer of the source is cannot be known, so neither is repaired from it."""

    class Two(keras.Model):
        def __init__(self, second):
            super().__init__(name="two")
            self.a, self.b = (
                keras.layers.Dense(2, use_bias=False, name=name) for name in ("proj", second)
            )

        def call(self, x):
            return self.b(self.a(x))

    bad, good = Two("proj"), Two("other")
    for model in (bad, good):
        model(np.ones((1, 2)))
        model.a.kernel.assign(np.ones((2, 2)))
    bad.b.kernel.assign(np.full((2, 2), np.nan))
    (change,) = repair(bad, source=good).changes
    assert change.status == "skipped" and "several variables have this path" in change.detail


@pytest.mark.parametrize("kinds", ["model model", "model file", "file model"])
def test_layers_of_one_name_in_a_model(keras, tmp_path, kinds):
    """From another model, or between a model and a file, no value gets to the wrong layer."""

    @keras.saving.register_keras_serializable("tests")
    class Twins(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.a, self.b = (keras.layers.Dense(2, use_bias=False, name="proj") for _ in range(2))

        def call(self, x):
            return self.b(self.a(x))

    bad, good = Twins(), Twins()
    for model in (bad, good):
        model(np.ones((1, 2)))
        model.a.kernel.assign(np.ones((2, 2)))
        model.b.kernel.assign(np.full((2, 2), 2.0))
    bad.b.kernel.assign(np.full((2, 2), np.nan))
    source, target = good, bad
    if kinds.startswith("file"):
        source = tmp_path / "good.weights.h5"
        good.save_weights(source)
    if kinds.endswith("file"):
        target = tmp_path / "bad.weights.h5"
        bad.save_weights(target)
    report = repair(target, source=source)
    (change,) = report.skipped
    assert not report.ok and "several variables have this path" in change.detail
    assert np.isnan(np.array(bad.b.kernel)).all()


def test_a_dry_run_writes_nothing_and_has_the_same_report(make):
    path = make.keras({make.SECOND_VARIANCE: np.nan, make.KERNEL: np.inf})
    planned = repair(path, weights="zeros", dry_run=True)
    assert os.listdir(os.path.dirname(path)) == ["model.keras"]
    assert planned.after is None
    assert not planned.ok
    assert planned.changes == repair(path, weights="zeros").changes


def test_in_place_keeps_the_old_file(make):
    path = make.keras({make.SECOND_VARIANCE: np.nan})
    old = digest(path)
    report = repair(path, in_place=True)
    assert report.output == path
    assert digest(report.backup) == old
    assert report.backup.endswith("model.keras.bak")
    os.replace(report.backup, path)
    (make.folder / "model.keras.bak").write_text("mine")
    assert repair(path, in_place=True).backup.endswith(".bak1")
    assert (make.folder / "model.keras.bak").read_text() == "mine"


def test_files_that_cannot_be_rewritten_are_rejected_with_the_remedy(make):
    """Each shard can be repaired; the index and the folder are rejected, unchanged. So does a dry
    run; without anything to rewrite there is nothing to reject."""
    index = make.sharded({make.SECOND_VARIANCE: np.nan})
    for options in ({"in_place": True}, {"dry_run": True}):
        with pytest.raises(FileFormatError, match="repair each shard"):
            repair(index, **options)
        assert repair(index, statistics="keep", **options).output is None
    assert repair(make.folder / "model_00000.weights.h5", in_place=True).ok and scan(index).ok
    os.mkdir(make.folder / "model")
    make.weights({make.SECOND_VARIANCE: np.nan}, name="model/model.weights.h5")
    for dry_run in (False, True):
        with pytest.raises(FileFormatError, match=r"repair its model\.weights\.h5"):
            repair(make.folder / "model", dry_run=dry_run)
    assert repair(make.folder / "model" / "model.weights.h5", in_place=True).ok


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="limits the size of files as Linux does"
)
@pytest.mark.parametrize("kind", ("keras", "weights"))
def test_a_repair_that_fails_leaves_nothing_behind(make, kind):
    """The final name never appears, no partial file remains, and the error names it."""
    path = getattr(make, kind)({make.SECOND_VARIANCE: np.nan})
    before = os.listdir(make.folder)
    code = (
        "import resource, signal, sys; from keras_nanguard import repair\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try: repair(sys.argv[1], sys.argv[2])\n"
        "except OSError as error: print(type(error).__name__, error.errno, error.filename)\n"
    )
    output = str(make.folder / f"new.{os.path.basename(path).partition('.')[2]}")
    command = [sys.executable, "-c", code, path, output]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["OSError", str(errno.EFBIG), output]
    assert os.listdir(make.folder) == before


@pytest.mark.skipif(os.name == "nt", reason="takes symbolic links and permissions of POSIX")
@pytest.mark.parametrize("kind", ("keras", "weights"))
def test_in_place_through_a_link(make, kind):
    """The target is replaced, the link stays; a private file stays private, as its copy."""
    path = getattr(make, kind)({make.SECOND_VARIANCE: np.nan})
    os.chmod(path, 0o600)
    link = make.folder / ("latest" + os.path.basename(path))
    link.symlink_to(os.path.basename(path))
    copy = repair(path).output
    report = repair(link, in_place=True)
    assert link.is_symlink() and scan(path).ok and not scan(report.backup).ok
    modes = {stat.S_IMODE(os.stat(name).st_mode) for name in (path, copy, report.backup)}
    assert modes == {0o600}


@pytest.mark.skipif(os.name == "nt", reason="takes users and permissions of POSIX")
@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("kind", ("keras", "weights"))
def test_a_file_that_is_read_only(make, kind, in_place):
    """The new file is read-only, too. Root may write to either, so another user repairs it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        make.folder = Path(folder)
        path = getattr(make, kind)({make.SECOND_VARIANCE: np.nan})
        os.chmod(path, 0o444)
        root = os.geteuid() == 0
        os.seteuid(65534 if root else os.geteuid())
        try:
            report = repair(path, in_place=in_place)
        finally:
            os.seteuid(0 if root else os.geteuid())
        assert report.ok and stat.S_IMODE(os.stat(report.output).st_mode) == 0o444


def test_contradictions_are_refused_before_anything_is_read(make):
    """An existing output, two outputs, an unknown choice, an invalid source."""
    path = make.keras({make.SECOND_VARIANCE: np.nan})
    (make.folder / "taken.keras").touch()
    for options in (
        {"output": make.folder / "taken.keras"},
        {"output": make.folder / "x", "in_place": True},
        {"output": path},
        {"weights": "median"},
        {"weights": "source"},
        {"output": make.folder / "missing" / "x.keras"},
    ):
        with pytest.raises(GuardError):
            repair(path, **options)
    assert sorted(os.listdir(make.folder)) == ["model.keras", "taken.keras"]


@pytest.mark.parametrize("only", (["*second_bn*"], "*second_bn*"))
def test_only_matching_variables_are_repaired(make, only):
    """`only` takes shell patterns on paths and layers; a string is one pattern."""
    path = make.keras({make.SECOND_VARIANCE: np.nan, make.FIRST_MEAN: np.nan})
    with pytest.raises(GuardError, match=r"matches a pattern.*Received.*second_norm"):
        repair(path, only="second_norm")
    report = repair(path, only=only)
    assert [change.path for change in report.changes] == ["backbone/second_bn/moving_variance"]
    assert [entry.path for entry in report.after.bad] == ["backbone/first_bn/moving_mean"]


@pytest.mark.skipif(os.name == "nt", reason="takes symbolic links and pipes")
@pytest.mark.parametrize("kind", ["a link to the input", "a folder", "a pipe"])
def test_an_output_that_is_the_input_or_not_a_file_is_rejected(make, tmp_path, kind):
    """Neither the input, by a link, nor a folder or pipe, with `overwrite` or without."""
    path, output = make.keras({make.KERNEL: np.nan}), tmp_path / "output.keras"
    if kind == "a link to the input":
        output.symlink_to(path)
    else:
        output.mkdir() if kind == "a folder" else os.mkfifo(output)
    before = digest(path), os.lstat(output).st_ino
    with pytest.raises(GuardError, match="output"):
        repair(path, weights="zeros", output=output, overwrite=True)
    assert (digest(path), os.lstat(output).st_ino) == before


@pytest.mark.parametrize(
    ("kind", "output"), [("weights", "x.keras"), ("keras", "x.weights.h5"), ("keras", "x")]
)
def test_an_output_of_another_format_is_rejected(make, kind, output):
    """A repaired file has the format of the old one, so Keras could not load it by this name."""
    path = getattr(make, kind)({make.SECOND_VARIANCE: np.nan})
    with pytest.raises(GuardError, match=r"Expected an output that ends in \..*Received.*output="):
        repair(path, make.folder / output)
    assert os.listdir(make.folder) == [os.path.basename(path)]


def test_bfloat16_is_repaired_in_place_of_its_bytes(make, tmp_path):
    import ml_dtypes

    path = tmp_path / "b.weights.h5"
    with h5py.File(path, "w") as file:
        kernel = np.array([[1.0, np.nan], [2.0, 3.0]], ml_dtypes.bfloat16)
        dataset = file.create_dataset("layers/dense/vars/0", data=kernel)
        dataset.attrs["dtype"] = "bfloat16"
    report = repair(path, weights="zeros")
    assert report.ok
    after = values(report.output)["dense/kernel"].astype(float)
    np.testing.assert_array_equal(after, [[1.0, 0.0], [2.0, 3.0]])


def test_large_chunked_and_scalar_arrays_are_written_whole(tmp_path):
    """More than one piece, compressed, big-endian, and a scalar."""
    path = tmp_path / "layouts.weights.h5"
    draw = np.random.default_rng(0)
    arrays = {
        "large": (draw.normal(size=(1_100_000, 2)).astype(np.float32), {}),
        "chunked": (draw.normal(size=(301, 70)), {"chunks": (7, 70), "compression": "gzip"}),
        "big": (draw.normal(size=(9, 3)).astype(">f4"), {}),
        "scalar": (np.float32(2.0), {}),
        "half": (draw.normal(size=(50, 4)).astype(np.float16), {}),
    }
    with h5py.File(path, "w") as file:
        for name, (array, options) in arrays.items():
            broken = np.array(array)
            broken[(-1,) * broken.ndim] = np.nan
            file.create_dataset(name, data=broken, **options)
    after = values(repair(path, weights="ones").output)
    for name, (array, _) in arrays.items():
        expected = np.array(array)
        expected[(-1,) * expected.ndim] = 1.0
        np.testing.assert_array_equal(after[name], expected, name)


def test_npz_keeps_order_and_compression(make):
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    array[1, 0] = np.nan
    path = make.folder / "x.npz"
    np.savez_compressed(path, a=array, b=np.arange(3))
    report = repair(path, weights="ones")
    with np.load(report.output) as loaded:
        assert loaded["a"].flags.f_contiguous
        array[1, 0] = 1.0
        np.testing.assert_array_equal(loaded["a"], array)
        np.testing.assert_array_equal(loaded["b"], np.arange(3))


def test_optimizer_slots_of_a_file_are_reset(nested, task, tmp_path):
    """One bad slot resets all slots; step count, rate and weights keep their bits."""
    model = nested()
    model.fit(*task, epochs=1, verbose=0)
    model.optimizer.variables[5].assign(np.full(model.optimizer.variables[5].shape, np.inf))
    model.save(tmp_path / "model.keras")
    before = values(tmp_path / "model.keras")
    report = repair(tmp_path / "model.keras")
    assert report.ok
    after = values(report.output)
    for name, array in after.items():
        kept = ("optimizer/iteration", "optimizer/learning_rate")
        if name.startswith("optimizer/") and name not in kept:
            assert not array.any(), name
        else:
            assert array.tobytes() == before[name].tobytes(), name
    assert after["optimizer/iteration"] == 6


def test_a_layer_that_counts_its_updates_is_no_optimizer(keras, tmp_path):
    """Its bad values are reported as any layer's; all finite ones keep their bits."""

    @keras.saving.register_keras_serializable("tests")
    class Averaged(keras.layers.Layer):
        def build(self, shape):
            add = functools.partial(self.add_weight, trainable=False)
            self.count = add(name="count", shape=(), dtype="int32", initializer="ones")
            self.mean = add(name="mean", shape=shape[-1:], initializer="ones")
            self.variance = add(name="variance", shape=shape[-1:], initializer="ones")

        def call(self, x):
            return x - self.mean

    @keras.saving.register_keras_serializable("tests")
    class Model(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.own, self.blocks, self.head = Averaged(), [Averaged()], keras.layers.Dense(1)
            self.d_optimizer = keras.optimizers.Adam()

        def call(self, x):
            return self.head(self.blocks[0](self.own(x)))

    model = Model()
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    model.d_optimizer.build(model.trainable_variables)
    model.own.mean.assign([np.nan, 1.0, 1.0])
    model.save(tmp_path / "model.keras")
    before = values(tmp_path / "model.keras")
    report = repair(tmp_path / "model.keras", weights="zeros")
    after = values(report.output)
    (changed,) = (name for name in before if after[name].tobytes() != before[name].tobytes())
    np.testing.assert_array_equal(after[changed], [0.0, 1.0, 1.0])
    roles = {entry.path.partition("/")[0]: entry.role for entry in report.before.variables}
    assert {name for name, role in roles.items() if role == "slot"} == {"optimizer", "d_optimizer"}


def test_only_some_slots_are_reset(nested, task, tmp_path):
    model = nested()
    model.fit(*task, epochs=1, verbose=0)
    slot = model.optimizer.variables[5]
    slot.assign(np.full(slot.shape, np.inf))
    model.save(tmp_path / "model.keras")
    for target in (tmp_path / "model.keras", model):
        (bad,) = (entry for entry in scan(target).bad)
        report = repair(target, only=bad.path)
        assert report.ok
        assert [change.path for change in report.done] == [bad.path]


@pytest.mark.parametrize(
    "name", ("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "Lion", "Lamb", "Adadelta")
)
def test_slots_that_are_set_to_zero_do_start_at_zero(keras, name):
    """Every optimizer whose slots a file repair sets to 0 has initial slots of 0 in Keras."""
    assert name in _ZERO_SLOTS
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(keras.optimizers, name)(0.1, **options)
    optimizer.build([keras.Variable(np.ones((2, 3)))])
    slots = [v for v in optimizer.variables if v.name not in ("iteration", "learning_rate")]
    assert slots
    assert not any(np.asarray(slot).any() for slot in slots)


def test_slots_that_do_not_start_at_zero_are_left_alone(make):
    """An optimizer that keeps averages, or that the file does not name, is not reset."""
    for optimizer, word in (
        ({"class_name": "Adagrad", "config": {}}, "Adagrad"),
        ({"class_name": "Adam", "config": {"use_ema": True}}, "averages"),
        (None, "does not name"),
    ):
        path = make.keras(config={**make.CONFIG, "compile_config": {"optimizer": optimizer}})
        with zipfile.ZipFile(path) as archive:
            names = {name: archive.read(name) for name in archive.namelist()}
        (make.folder / "w.h5").write_bytes(names["model.weights.h5"])
        with h5py.File(make.folder / "w.h5", "r+") as file:
            file["optimizer/vars/0"] = np.int64(3)
            file["optimizer/vars/1"] = np.float32(0.1)
            file["optimizer/vars/2"] = np.full(4, np.nan)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", names["config.json"])
            archive.write(make.folder / "w.h5", "model.weights.h5")
        (change,) = repair(path, overwrite=True).changes
        assert change.status == "skipped"
        assert word in change.detail


def test_a_slot_that_cannot_be_read_is_left_alone(make):
    """The others of its optimizer are reset."""
    adam = {"optimizer": {"class_name": "Adam", "config": {}}}
    path = make.keras(config={**make.CONFIG, "compile_config": adam})
    with zipfile.ZipFile(path) as archive:
        archive.extract("model.weights.h5", make.folder)
        config = archive.read("config.json")
    with h5py.File(make.folder / "model.weights.h5", "r+") as file:
        file["optimizer/vars/2"] = np.full(4, np.nan)
        outside = [(str(make.folder / "raw.bin"), 0, 32)]
        file.create_dataset("optimizer/vars/3", (4,), "f8", external=outside)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", config)
        archive.write(make.folder / "model.weights.h5", "model.weights.h5")
    report = repair(path, overwrite=True)
    reset, left = report.changes
    assert (reset.path, reset.status) == ("optimizer/2", "done")
    assert (left.path, left.status) == ("optimizer/3", "skipped") and "not read" in left.detail
    assert not report.ok and not (make.folder / "raw.bin").exists()


def test_both_copies_of_a_loss_scale_optimizer_are_repaired(keras, tmp_path):
    """Keras saves such slots twice; both copies and the scale are repaired."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="mixed_float16")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.25)), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    model.optimizer.dynamic_scale.assign(0.0)
    model.optimizer.inner_optimizer.variables[3].assign(np.full((3, 2), np.nan))
    model.save(tmp_path / "model.keras")
    report = repair(tmp_path / "model.keras")
    assert report.ok
    loaded = keras.models.load_model(report.output)
    assert float(loaded.optimizer.dynamic_scale.numpy()) == 2.0**15
    assert float(loaded.optimizer.inner_optimizer.learning_rate.numpy()) == 0.25
    assert scan(loaded).ok


def test_slots_that_the_configuration_of_an_optimizer_does_not_describe(keras):
    """They are left alone, as their first values are unknown; weights are repaired."""

    class Counting(keras.optimizers.SGD):
        counts = False

        def build(self, variables):
            super().build(variables)
            self.seen = [self.add_variable((), name="seen")] if self.counts else []

    optimizer = Counting(0.1, momentum=0.9)
    optimizer.counts = True
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="d")])
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    for variable in (model.layers[0].bias, optimizer.variables[2]):
        variable.assign(np.full(variable.shape, np.nan))
    report = repair(model, weights="initial")
    done = {change.path for change in report.done}
    assert len(done) == 1 and done.pop().endswith("d/bias")
    skipped = [change.detail for change in report.changes if change.status == "skipped"]
    assert skipped and all(
        "a new optimizer of this configuration has other slots" in text for text in skipped
    )


class NoConfig:
    """An initializer that raises, or gives another shape than it was asked for."""

    def __init__(self, shape=None):
        self.shape = shape

    def __call__(self, shape, dtype=None):
        if self.shape is None:
            raise TypeError("no such table")
        return np.ones(self.shape, dtype)


def test_initial_values_that_raise_are_a_reason(keras):
    """Classes of the user may raise anything: the other variables are repaired and reported."""

    class Own(keras.optimizers.SGD):
        def __init__(self, factor, **options):
            super().__init__(momentum=0.9, **options)

    names = {"raises": NoConfig(), "other_shape": NoConfig((7, 7))}
    dense = keras.layers.Dense
    layers = [dense(2, name="good"), *(dense(2, name=name) for name in names)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(Own(2.0, learning_rate=0.1), "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 2)), verbose=0)
    for layer in layers:
        layer.kernel_initializer = names.get(layer.name, layer.kernel_initializer)
        layer.kernel.assign(np.full((2, 2), np.nan))
    model.optimizer.variables[-1].assign(np.full((2,), np.nan))
    report = repair(model, weights="initial")
    assert [change.path for change in report.done] == ["good/kernel"] and not report.ok
    assert np.isfinite(np.array(layers[0].kernel.numpy())).all()
    reasons = {change.path: change.detail for change in report.skipped}
    assert "could not be evaluated (no such table)" in reasons.pop("raises/kernel")
    assert "could not be evaluated" in reasons.pop("other_shape/kernel")
    assert len(reasons) == len(model.optimizer.variables) - 2
    assert all("'factor'" in reason and "get_config" in reason for reason in reasons.values())


def test_a_live_model_is_repaired_in_place(nested, task):
    """Statistics become initial values, slots those of a fresh optimizer; nothing else changes."""
    model = nested()
    model.fit(*task, epochs=1, verbose=0)
    post = model.get_layer("backbone").get_layer("post_bn")
    post.moving_variance.assign(np.full(6, np.nan))
    model.optimizer.variables[4].assign(np.full(model.optimizer.variables[4].shape, np.nan))
    kept = {v.path: v.numpy() for v in model.variables if v is not post.moving_variance}
    rehearsal = repair(model, dry_run=True)
    assert np.isnan(post.moving_variance.numpy()).all()
    report = repair(model)
    assert report.changes == rehearsal.changes
    assert report.ok
    np.testing.assert_array_equal(post.moving_variance.numpy(), np.ones(6))
    for variable in model.variables:
        if variable.path in kept:
            assert variable.numpy().tobytes() == kept[variable.path].tobytes()
    assert int(model.optimizer.iterations.numpy()) == 6
    model.fit(*task, epochs=1, verbose=0)
    assert scan(model).finite


def test_a_live_model_is_repaired_from_another(nested, task):
    good, bad = nested(0), nested(1)
    bad.get_layer("head").kernel.assign(np.full((6, 3), np.inf))
    assert repair(bad, source=good).ok
    kernels = (model.get_layer("head").kernel.numpy() for model in (bad, good))
    np.testing.assert_array_equal(*kernels)
    with pytest.raises(GuardError, match="a path"):
        repair(bad, "out.keras")


def test_a_repaired_normalization_computes_with_its_new_values(keras):
    """Also in functions that ran before, of Keras and of the guard; as after adapting to clean
    data."""
    x = np.random.default_rng(0).normal(100.0, 5.0, (64, 3)).astype("float32")
    broken = x.copy()
    broken[5, 1] = np.nan
    built = []
    for data in (x, broken):
        norm = keras.layers.Normalization(name="norm")
        norm.adapt(data)
        inner = keras.Sequential([keras.Input((3,)), norm], name="inner")
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        built.append(keras.Sequential([keras.Input((3,)), inner, dense]))
        built[-1].compile("sgd", "mse")
    good, bad = built
    assert np.isnan(bad.predict(x, verbose=0)).any()
    assert np.isnan(bad.get_layer("inner").predict(x, verbose=0)).any()
    assert np.isnan(bad.evaluate(x, x[:, :1], verbose=0))
    guard = NanGuard(verbose=0, diagnose=False)
    bad.fit(x, x[:, :1], verbose=0, callbacks=[guard])
    assert guard.incidents
    assert repair(bad, source=good).ok
    np.testing.assert_array_equal(bad.predict(x, verbose=0), good.predict(x, verbose=0))
    assert np.isfinite(bad.get_layer("inner").predict(x, verbose=0)).all()
    assert np.isfinite(bad.evaluate(x, x[:, :1], verbose=0))
    guard = NanGuard(verbose=0, diagnose=False)
    bad.fit(x, x[:, :1], verbose=0, callbacks=[guard])
    assert not guard.incidents


def test_bad_weights_of_a_live_model_are_drawn_by_their_initializer(nested):
    """`weights="initial"` redraws the bad entries and keeps the others."""
    model = nested()
    kernel = model.get_layer("head").kernel
    old = kernel.numpy()
    broken = old.copy()
    broken[0, 0] = np.nan
    kernel.assign(broken)
    assert repair(model, weights="initial").ok
    new = kernel.numpy()
    assert np.isfinite(new[0, 0])
    np.testing.assert_array_equal(new.ravel()[1:], old.ravel()[1:])


def test_a_trained_variable_is_not_a_variance(keras):
    """Negative values of a weight are healthy, whatever its name: only the NaN is replaced."""

    class Noise(keras.layers.Layer):
        def build(self, shape):
            for name in ("log_variance", "moving_variance", "stddev_logits"):
                self.add_weight(shape=(3,), name=name)

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((3,)), Noise(name="noise")])
    for variable in model.variables:
        variable.assign([-1.0, np.nan, -2.0])
    found = scan(model)
    codes = {problem.code for entry in found.variables for problem in entry.problems}
    assert codes == {"nan"}
    assert repair(model, weights="zeros").ok
    for variable in model.variables:
        np.testing.assert_array_equal(np.array(variable.numpy()), [-1.0, 0.0, -2.0])


@pytest.mark.parametrize("name", ("velocity", "dynamic_scale"))
def test_a_bad_slot_of_a_live_model_is_taken_from_the_source(keras, name):
    """A second moment below 0 and a loss scale of 0 are bad values, in a scan and in a repair."""
    models = []
    for _ in range(2):
        inputs, head = keras.Input((2,)), keras.layers.Dense(1, name="head")
        model = keras.Sequential([inputs, head], name="same")
        optimizer = keras.optimizers.Adam(name="adam")
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer, name="scaled"))
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    good, bad = models
    slot = next(v for v in bad.optimizer.variables if v.path.endswith(name))
    slot.assign(np.full(slot.shape, -1.0 if name == "velocity" else 0.0))
    assert not scan(bad).ok
    assert repair(bad, source=good, slots="source").ok


def test_statistics_of_a_live_model_start_as_in_a_file(keras):
    """The moving standard deviations of batch renormalization start at 1, as the variances do."""
    if "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters:
        pytest.skip("this Keras has no batch renormalization")
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(renorm=True)])
    (layer,) = model.layers
    for name in ("moving_stddev", "renorm_stddev"):
        getattr(layer, name).assign([np.nan, -1.0])
    assert repair(model).ok
    for name in ("moving_stddev", "renorm_stddev"):
        np.testing.assert_array_equal(np.array(getattr(layer, name).numpy()), np.ones(2))


def test_initial_values_of_a_file_are_those_of_its_configuration():
    """Constants are exact; for any other or invalid initializer there is a reason, never a guess."""
    for node, value in (
        ({"class_name": "Zeros"}, 0.0),
        ({"class_name": "Ones", "config": {}}, 1.0),
        ({"class_name": "Constant", "config": {"value": 3}}, 3.0),
        (None, 1.0),
    ):
        settings = {"moving_variance_initializer": node}
        assert initial_value("moving_variance", (2,), settings) == value
    for node in (
        None,
        {"class_name": "Constant", "config": {"value": "x"}},
        {"class_name": "Constant", "config": {"value": 10**400}},
        {"class_name": "Constant", "config": {"value": float("nan")}},
        {"class_name": "Mine"},
        {"class_name": None},
        {"class_name": ["HeNormal"]},
        {"class_name": "GlorotUniform", "config": {}},
        {"class_name": "RandomUniform", "config": {"minval": -1e308, "maxval": 1e308}},
    ):
        with pytest.raises(NotRepaired):
            initial_value("kernel", (2, 2), {"kernel_initializer": node})


def test_random_weights_of_a_file_are_left_to_the_model(keras, tmp_path):
    """A kernel is skipped with the remedy; the bias, which starts as a constant, is not."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, name="head")])
    for variable in model.weights:
        variable.assign(np.full(variable.shape, np.nan))
    model.save(tmp_path / "bad.keras")
    report = repair(tmp_path / "bad.keras", weights="initial")
    (skipped,) = report.skipped
    assert skipped.path == "head/kernel" and "'GlorotUniform'" in skipped.detail
    assert "load the model and repair that" in skipped.detail
    loaded = keras.saving.load_model(report.output)
    assert repair(loaded, weights="initial").ok and scan(loaded).ok


def with_named_initializers(keras):
    """Return a model whose layers have initializers of other names than their variables."""
    two, layers = keras.initializers.Constant(2.0), keras.layers
    return keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            layers.DepthwiseConv2D(2, depthwise_initializer=two),
            layers.SeparableConv2D(3, 2, depthwise_initializer=two, pointwise_initializer=two),
            layers.Reshape((-1, 3)),
            *([layers.RMSNormalization()] if hasattr(layers, "RMSNormalization") else []),
            layers.LSTM(
                2, return_sequences=True, recurrent_initializer=two, kernel_initializer=two
            ),
            layers.GRU(2, recurrent_initializer=two, kernel_initializer="ones"),
        ]
    )


@pytest.mark.parametrize("where", ["live", "file"])
def test_initial_weights_are_those_of_a_new_model(keras, tmp_path, where):
    """Also of a layer that calls the initializer of a variable after something else."""
    model, new = (with_named_initializers(keras) for _ in range(2))
    for variable in model.weights:
        variable.assign(np.full(variable.shape, np.nan))
    if where == "file":
        model.save(tmp_path / "bad.keras")
        assert repair(
            str(tmp_path / "bad.keras"), str(tmp_path / "new.keras"), weights="initial"
        ).ok
        model = keras.saving.load_model(tmp_path / "new.keras")
    else:
        assert repair(model, weights="initial").ok
    assert len(new.weights) >= 11
    assert all(map(np.array_equal, model.get_weights(), new.get_weights()))


def test_weights_of_an_unknown_initializer_are_not_repaired(keras):
    class Own(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(3,), initializer="ones", name="table")

        def call(self, x):
            return x * self.table

    model = keras.Sequential([keras.Input((3,)), Own()])
    model.layers[0].table.assign(np.full(3, np.nan))
    report = repair(model, weights="initial")
    (change,) = report.changes
    assert (report.ok, change.status, change.detail) == (
        False,
        "skipped",
        "its initializer is not known (table)",
    )
    assert np.isnan(model.get_weights()[0]).all()


def test_a_source_may_be_a_model_for_a_file_and_a_file_for_a_model(keras, nested, tmp_path):
    """Whole variables are taken from it, weights and moving statistics."""
    good, bad = nested(0), nested(1)

    def damaged(model):
        return model.get_layer("head").kernel, model.get_layer("backbone").weights[-1]

    for variable in damaged(bad):
        variable.assign(np.full(variable.shape, np.nan))
    good_path, bad_path = str(tmp_path / "good.keras"), str(tmp_path / "bad.keras")
    good.save(good_path)
    bad.save(bad_path)
    report = repair(bad_path, source=good)
    assert report.ok
    assert repair(bad, source=good_path).ok
    loaded = keras.saving.load_model(report.output)
    for expected, *repaired in zip(damaged(good), damaged(bad), damaged(loaded), strict=True):
        for variable in repaired:
            np.testing.assert_array_equal(np.array(variable.numpy()), np.array(expected.numpy()))


@pytest.mark.parametrize("kind", ["custom", "EinsumDense", "Attention", "SpectralNormalization"])
def test_a_live_source_and_a_file_know_a_variable_by_its_place(keras, tmp_path, kind):
    """A file may have a number for a variable that has a name in the live model."""

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=shape[-1:], initializer="ones", name="factor")

        def call(self, x):
            return self.factor * x

    def save(model, path):
        (model.save if path.endswith(".keras") else model.save_weights)(path)

    def built(name):
        inputs = keras.Input((3, 4))
        given = {
            "EinsumDense": {"equation": "abc,cd->abd", "output_shape": (None, 2)},
            "Attention": {"use_scale": True},
            "SpectralNormalization": {"layer": keras.layers.Dense(2, name="inner")},
        }
        made = Scale if kind == "custom" else getattr(keras.layers, kind)
        layer = made(name="one", **given.get(kind, {}))
        output = layer([inputs, inputs]) if kind == "Attention" else layer(inputs)
        model = keras.Model(inputs, output)
        for place, variable in enumerate(model.trainable_variables):
            variable.assign(np.full(variable.shape, 2.0 + place))
        path = str(tmp_path / name)
        save(model, path)
        return model, path

    def damage(model):
        for variable in model.weights:
            variable.assign(np.full(variable.shape, np.nan))

    good, good_path = built("good.keras")
    for name in ("bad.keras", "bad.weights.h5"):
        bad, path = built(name)
        damage(bad)
        save(bad, path)
        assert repair(path, source=good, overwrite=True).ok
        assert repair(bad, source=good_path).ok
        for expected, repaired in zip(good.get_weights(), bad.get_weights(), strict=True):
            np.testing.assert_array_equal(repaired, expected)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_is_not_blamed_on_the_source(keras, nested, tmp_path, monkeypatch):
    """The error is that of the system, and names the temporary file that cannot be written."""
    model, source, folder = nested(1), str(tmp_path / "good.keras"), tmp_path / "temporary"
    nested(0).save(source)
    kernel = model.get_layer("head").kernel
    kernel.assign(np.full(kernel.shape, np.nan))
    folder.mkdir()
    (folder / "values.npz").symlink_to("/dev/full")
    monkeypatch.setattr(
        tempfile, "TemporaryDirectory", lambda **_: contextlib.nullcontext(str(folder))
    )
    with pytest.raises(OSError, match="No space left") as caught:
        repair(model, source=source)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(folder / "values.npz"))


def test_a_damaged_array_does_not_prevent_the_repair_of_others(keras, tmp_path):
    """Neither in the file nor in the source: it is skipped, with the reason."""

    def write(name, value):
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            layout = {"chunks": (64, 64), "compression": "gzip"}
            file.create_dataset("layers/dense/vars/0", data=np.eye(64), **layout)
            file["layers/dense_1/vars/0"] = np.array([[1.0, value]])
            chunk = file["layers/dense/vars/0"].id.get_chunk_info(0)
        with open(path, "r+b") as file:
            file.seek(chunk.byte_offset)
            file.write(bytes(chunk.size))
        return path

    path = write("bad.weights.h5", np.nan)
    report = repair(path, weights="zeros")
    with h5py.File(report.output) as file:
        np.testing.assert_array_equal(file["layers/dense_1/vars/0"], [[1.0, 0.0]])
    assert [(c.path, c.detail[:8]) for c in report.skipped] == [("dense/kernel", "not read")]
    with h5py.File(tmp_path / "whole.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.full((64, 64), np.nan)
    report = repair(tmp_path / "whole.weights.h5", source=path)
    assert [change.detail[:8] for change in report.skipped] == ["not read"]
    layers = [keras.Input((64,)), keras.layers.Dense(64, use_bias=False, name="dense")]
    model = keras.Sequential(layers)
    model.layers[0].kernel.assign(np.full((64, 64), np.nan))
    report = repair(model, source=path)
    assert [change.detail[:8] for change in report.skipped] == ["not read"]
