"""A bundle has everything to replay the bad step, and a malicious one is rejected."""

import json
import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import keras
import mechanisms
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import BundleError, GuardError, NanGuard, replay

MODES = ["eager"] if keras.backend.backend() == "torch" else ["eager", "graph", "xla"]


def written(name: str, directory: Path):
    case = mechanisms.PROGRAMS[name](True)
    incidents = case.train(NanGuard(verbose=0, directory=directory))
    return case, next(incident for incident in incidents if incident.bundle)


@pytest.fixture(scope="module")
def overflow(tmp_path_factory):
    return written("overflowing_row_where_batchnorm_mixes_rows", tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """A bundle whose state was bad before the step, which decides the cause without a replay."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
    guard = NanGuard("stop", verbose=0, directory=tmp_path_factory.mktemp("run"))
    spoil = zoo.Before(lambda model: model.layers[0].kernel.assign(np.full((4, 1), np.nan)), 2)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard, spoil])
    return model, guard.incidents[0]


@pytest.fixture
def copy(overflow, tmp_path):
    return Path(shutil.copytree(overflow[1].bundle, tmp_path / "bundle"))


@pytest.mark.parametrize("mode", MODES)
def test_the_step_is_bad_again(overflow, mode):
    _, incident = overflow
    found = replay(incident.bundle, mode=mode)
    assert found.result == "bad"
    assert (found.diagnosis.cause, found.diagnosis.samples) == (incident.diagnosis.cause, incident.diagnosis.samples)
    assert "bn" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_float32_cures_a_float16_overflow(tmp_path):
    case, incident = written("mask_of_minus_1e9_in_float16", tmp_path)
    assert replay(incident.bundle, case.model).result == "bad"
    assert replay(incident.bundle, case.model, dtype="float32").result == "finite"


def test_a_model_made_from_a_bundle_normalizes_as_the_trained_one(tmp_path):
    x = np.random.default_rng(0).normal(100.0, 5.0, (32, 3)).astype("float32")
    norm = layers.Normalization(name="norm")
    norm.adapt(x)
    model = keras.Sequential([keras.Input((3,)), norm, layers.Dense(1, name="head")])
    model.compile("sgd", "mse")
    x[20, 1] = 1e30
    guard = NanGuard("stop", verbose=0, directory=tmp_path)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False, callbacks=[guard])
    found = replay(guard.incidents[0].bundle)
    row = next(row for row in found.layers if row.path.endswith("norm"))
    outputs = keras.ops.convert_to_numpy(norm(x[16:24]))
    np.testing.assert_allclose([row.minimum, row.maximum], [outputs.min(), outputs.max()], 1e-6)


def test_a_bundle_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """All its files and their names: else they could be empty after a power failure."""
    real, replaced, synced = os.fsync, os.replace, set()

    def fsync(handle):
        real(handle)
        synced.add(os.fstat(handle).st_ino)

    def replace(path, final):
        if Path(path).is_dir():
            assert {file.stat().st_ino for file in (Path(path), *Path(path).iterdir())} <= synced
        elif Path(path).parent.name.endswith("-00"):  # of a folder that has to be synced again
            synced.discard(Path(path).parent.stat().st_ino)
        replaced(path, final)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    _, incident = written("nan_in_one_input_row", tmp_path)
    assert len(list(Path(incident.bundle).iterdir())) >= 6


def test_a_bundle_reads_for_a_human(overflow):
    text = (Path(overflow[1].bundle) / "README.txt").read_text()
    assert f"{overflow[1].diagnosis.headline}\n" in text and text.endswith(f"keras-nanguard replay {overflow[1].bundle}\n")


def test_the_oldest_bundle_is_removed_first(tmp_path, set_limit):
    set_limit("bundles of a directory", 2)
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](False)
    case.x[[5, 21, 37, 53]] = np.nan
    guard = NanGuard(verbose=0, directory=tmp_path)

    def set_the_clock_back(batch, logs):
        for number, path in enumerate(sorted(tmp_path.glob("incidents/incident-*"))):
            os.utime(path, (4e9 + number, 4e9 + number))

    clock = keras.callbacks.LambdaCallback(on_train_batch_end=set_the_clock_back)
    how = {"batch_size": 8, "verbose": 0, "shuffle": False}
    case.model.fit(case.x, case.y, **how, callbacks=[guard, clock])
    kept = sorted(path.name for path in (tmp_path / "incidents").iterdir())
    assert kept == ["incident-00000004-00", "incident-00000006-00"]
    named = [incident.bundle for incident in guard.incidents]
    assert named == [None, None, *(str(tmp_path / "incidents" / name) for name in kept)]
    removed = tmp_path / "incidents" / "incident-00000000-00"
    for gone, words in ((removed, "which does not exist"), (None, "Received: None")):
        with pytest.raises(BundleError, match=f"{words}.*a directory keeps the newest 2"):
            replay(gone)


def test_a_state_above_the_limit_is_omitted_and_reported(tmp_path, monkeypatch, set_limit):
    set_limit("bytes of a bundle", 300)
    _, incident = written("nan_in_one_input_row", tmp_path)
    monkeypatch.undo()
    folder = Path(incident.bundle)
    assert not (folder / "state.npz").exists() or np.load(folder / "state.npz").files == []
    assert "too large" in json.loads((folder / "bundle.json").read_text())["notes"][0]


def test_a_batch_that_cannot_be_read_back_is_omitted_and_reported(tmp_path, monkeypatch, set_limit):
    set_limit("bytes of a bundle", 50)
    _, incident = written("nan_in_one_input_row", tmp_path)
    monkeypatch.undo()
    folder = Path(incident.bundle)
    assert np.load(folder / "batch.npz").files == []
    assert "The batch was too large for the bundle" in (folder / "README.txt").read_text()
    with pytest.raises(BundleError, match="omitted"):
        replay(folder)


def test_a_configuration_that_cannot_be_read_back_is_omitted(tmp_path, set_limit):
    set_limit("bytes of the configuration in a bundle", 100)
    case, incident = written("nan_in_one_input_row", tmp_path)
    with pytest.raises(BundleError, match="no configuration"):
        replay(incident.bundle)
    assert replay(incident.bundle, case.model).result == "bad"


def test_a_batch_is_restored_unchanged(tmp_path):
    case, incident = written("inf_in_second_input", tmp_path)
    kept = list(np.load(Path(incident.bundle) / "batch.npz").values())
    for array in (case.x["a"][32:40], case.x["b"][32:40], case.y[32:40]):
        assert any(np.array_equal(array, one, equal_nan=True) for one in kept)


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """The bundle of a divergence, and the weights before the first step."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    weights = model.get_weights()
    x = 300 * np.random.default_rng(0).standard_normal((256, 8)).astype("float32")
    guard = NanGuard(verbose=0, directory=tmp_path_factory.mktemp("run"))
    how = {"batch_size": 8, "verbose": 0, "shuffle": False}
    model.fit(x, x.sum(1, keepdims=True), **how, callbacks=[guard])
    return next(incident for incident in guard.incidents if incident.bundle), weights


def restarted(diagnosis):
    return [text for text in diagnosis.evidence if text.startswith("Restarted with")]


def test_the_diagnosis_of_a_divergence_starts_again_from_the_first_state(diverged):
    """The bundle has this state, so the trial with scaled data gives the same result again."""
    incident, weights = diverged
    first = list(np.load(Path(incident.bundle) / "start.npz").values())
    assert all(any(np.array_equal(weight, one) for one in first) for weight in weights)
    found = replay(incident.bundle).diagnosis
    assert (found.cause, found.culprit) == (incident.diagnosis.cause, incident.diagnosis.culprit)
    assert restarted(found) == restarted(incident.diagnosis) != []


def test_a_damaged_first_state_is_refused(diverged, tmp_path):
    copy = Path(shutil.copytree(diverged[0].bundle, tmp_path / "bundle"))
    (copy / "start.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(BundleError):
        replay(copy)


def test_a_relative_directory_is_that_of_the_start(tmp_path, monkeypatch, capsys):
    """Also if other code changes the working directory; files and lines name it as the user did."""
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](False)
    case.x[[5, 21, 53]] = np.nan
    guard = NanGuard(directory="run1", snapshot={"every": 2, "storage": "disk"})
    leaves = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: os.chdir(other))
    case.model.fit(case.x, case.y, batch_size=8, verbose=0, shuffle=False, epochs=2, callbacks=[leaves, guard])
    assert list(other.iterdir()) == [] and guard.directory == tmp_path / "run1"
    named = [incident.bundle for incident in guard.incidents]
    kept = sorted(path.name for path in (tmp_path / "run1" / "incidents").iterdir())
    assert named == [f"run1/incidents/{name}" for name in kept] and len(kept) == 6
    assert replay(tmp_path / named[-1], case.model).result == "bad"
    assert "keras-nanguard report run1 -o" in capsys.readouterr().out
    steps = [json.loads(path.read_text())["step"] for path in (tmp_path / "run1" / "snapshots").glob("*/snapshot.json")]
    assert max(steps) > 8, "snapshots go on"
    monkeypatch.chdir(tmp_path)
    moved = (tmp_path / "run1").rename(tmp_path / "run2")
    again = NanGuard(directory="run2", resume=True, verbose=0)
    history = case.model.fit(case.x, case.y, batch_size=8, verbose=0, shuffle=False, epochs=3, callbacks=[leaves, again])
    assert history.epoch[0] >= 1, "it resumes"
    assert [i.bundle for i in again.incidents][-1].startswith("run2/") and replay(moved / named[0][5:], case.model)


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = mechanisms.PROGRAMS["nan_in_one_input_row"](True)
    assert case.train(NanGuard(verbose=0))[0].bundle is None
    assert list(tmp_path.iterdir()) == []


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("pwned"),))


def test_a_pickle_is_not_loaded(copy, monkeypatch):
    monkeypatch.chdir(copy)
    np.savez(copy / "batch.npz", **{"0": np.array([Evil()], dtype=object), "1": np.zeros(2)})
    with pytest.raises(BundleError):
        replay(copy)
    (copy / "batch.npz").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(BundleError):
        replay(copy)
    assert not (copy / "pwned").exists()


def test_a_path_out_of_the_folder_is_not_followed(copy):
    with zipfile.ZipFile(copy / "batch.npz", "w") as archive:
        archive.writestr("../../evil.npy", b"x")
    with pytest.raises(BundleError):
        replay(copy)
    assert not (copy.parent.parent / "evil.npy").exists()


@pytest.mark.daily("link-batch.npz", "pipe-bundle.json", "link-model.json")
@pytest.mark.parametrize("name", ("bundle.json", "incident.json", "batch.npz", "state.npz", "model.json"))
@pytest.mark.parametrize("how", ("link", "pipe"))
def test_links_out_of_the_folder_are_not_opened(copy, name, how):
    (copy / name).rename(copy / "elsewhere")
    (copy / name).symlink_to(copy / "elsewhere") if how == "link" else os.mkfifo(copy / name)
    with pytest.raises(BundleError, match=r"link|not a file|contains bundle\.json"):
        replay(copy)


def test_the_sentence_that_refuses_a_bundle_is_short_and_printable(copy):
    (copy / "bundle.json").write_text(json.dumps({"format": "\x1b[31m" + "x" * 100_000}))
    with pytest.raises(BundleError) as caught:
        replay(copy)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_a_bomb_is_refused(copy, set_limit):
    set_limit("bytes of a bundle", 1000)
    with (
        zipfile.ZipFile(copy / "batch.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("0.npy", "w") as member,
    ):
        np.lib.format.write_array(member, np.zeros(1 << 20))
    with pytest.raises(BundleError):
        replay(copy)


def test_python_code_in_a_configuration_is_not_run(tmp_path):
    _, incident = written("log_of_a_negative_activation", tmp_path)
    with pytest.raises(BundleError, match="Python code"):
        replay(incident.bundle)


@pytest.fixture
def own_layer(tmp_path):
    """The bundle of a model with an unregistered layer, and the module that defines it."""
    source = """
import keras

class Root(keras.layers.Layer):
    def call(self, inputs):
        return keras.ops.log(keras.ops.relu(inputs))
"""
    (tmp_path / "parts_of_mine.py").write_text(source)
    names = {}
    exec(source, names)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), names["Root"](name="root"), layers.Dense(1)])
    model.compile("sgd", "mse")
    guard = NanGuard("stop", verbose=0, directory=tmp_path / "run")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0, callbacks=[guard])
    return guard.incidents[0].bundle, names["Root"]


def test_a_missing_custom_layer_is_named(own_layer):
    bundle, layer = own_layer
    with pytest.raises(BundleError, match="its custom class 'Root' is not known here") as reported:
        replay(bundle)
    assert len(str(reported.value)) < 400, "the configuration of the model is not poured over the user"
    found = replay(bundle, custom_objects={"Root": layer})
    assert (found.result, found.diagnosis.culprit) == ("bad", "root")


def test_the_command_line_imports_custom_layers(own_layer, tmp_path, monkeypatch, capsys):
    from support.command_line import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["replay", own_layer[0], "--json"]) == 2
    assert "--import" in capsys.readouterr().err
    assert main(["replay", own_layer[0], "--import", "nowhere_to_be_found"]) == 2
    capsys.readouterr()
    assert main(["replay", own_layer[0], "--json", "--import", "parts_of_mine"]) == 1
    assert json.loads(capsys.readouterr().out)["diagnosis"]["culprit"] == "root"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bundle.json", "[]"),
        ("bundle.json", "{"),
        ("bundle.json", '{"format": 99}'),
        ("incident.json", "{}"),
        ("bundle.json", None),
    ],
)
def test_a_damaged_bundle_is_refused(copy, name, text):
    (copy / name).write_text(text) if text is not None else (copy / name).unlink()
    with pytest.raises(BundleError):
        replay(copy)


@pytest.mark.parametrize("growth", [{"steps": "many"}, {"more": 1}, []])
def test_a_malformed_growth_is_refused(copy, growth):
    about = json.loads((copy / "bundle.json").read_text())
    (copy / "bundle.json").write_text(json.dumps({**about, "growth": growth}))
    with pytest.raises(BundleError, match="growth"):
        replay(copy)


def test_another_model_is_refused(overflow):
    keras.utils.set_random_seed(0)
    other = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(3)])
    other.compile("sgd", "mse")
    with pytest.raises(BundleError):
        replay(overflow[1].bundle, other)


def test_a_part_of_the_model_is_refused(overflow):
    """Not replayed without the weights of the other layers."""
    whole = overflow[0].model
    part = keras.Model(whole.inputs, whole.get_layer("bn").output, name=whole.name)
    part.compile("sgd", "mse")
    with pytest.raises(BundleError, match="variables"):
        replay(overflow[1].bundle, part)


def test_a_legacy_file_is_never_loaded(overflow, tmp_path):
    """Some versions of Keras run the code that it may contain."""
    overflow[0].model.save(tmp_path / "model.h5")
    with pytest.raises(BundleError, match="a legacy file, which may contain code"):
        replay(overflow[1].bundle, tmp_path / "model.h5")


def test_a_missing_model_file_is_reported_without_another_remedy(overflow, tmp_path):
    with pytest.raises(BundleError, match=r"Received: path='.*nowhere.keras'\. There is no such file\.$") as reported:
        replay(overflow[1].bundle, tmp_path / "nowhere.keras")
    assert str(reported.value).startswith("Expected a model file.")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kept", ["overflow", "spoiled"])
def test_a_step_that_was_not_replayed_is_not_called_finite(kept, mode, room, request):
    """Without memory for a copy of the state it is not run, and the error names what is missing."""
    _, incident = request.getfixturevalue(kept)
    room(0)
    with pytest.raises(GuardError, match=r"The step was not replayed: this needs \d+ MB of free memory\. .*enough memory"):
        replay(incident.bundle, mode=mode)


def test_the_step_of_an_incident_that_was_only_observed_is_replayed(copy):
    about = json.loads((copy / "incident.json").read_text())
    (copy / "incident.json").write_text(json.dumps({**about, "refused": False}))
    found = replay(copy)
    assert (found.result, found.ok) == ("bad", False)


@pytest.mark.parametrize("arguments", [{"mode": "fast"}, {"dtype": "float8"}])
def test_an_unknown_way_to_run_is_refused(overflow, arguments):
    with pytest.raises(GuardError):
        replay(overflow[1].bundle, **arguments)


def test_the_command_line_runs_a_bundle_again(overflow, capsys):
    from support.command_line import main

    assert main(["replay", overflow[1].bundle, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["result"] == "bad"
    assert main(["replay", str(Path(overflow[1].bundle).parent)]) == 2


@pytest.mark.parametrize(
    ("layer", "name", "value"), [("hidden", "kernel", 1e32), ("norm", "gamma", np.nan), ("norm", "moving_variance", np.nan)]
)
def test_a_state_that_was_bad_before_the_step_is_named_again(tmp_path, layer, name, value):
    """Finite numbers so large that sums over them overflow have made the state bad, too."""
    keras.utils.set_random_seed(0)
    hidden, norm = layers.Dense(8, name="hidden"), layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((4,)), hidden, norm, layers.Dense(1)])
    model.compile("sgd", "mse")

    def spoil(model):
        variable = getattr(model.get_layer(layer), name)
        variable.assign(keras.ops.convert_to_numpy(variable) * value)

    x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
    guard = NanGuard("stop", verbose=0, directory=tmp_path)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard, zoo.Before(spoil, 2)])
    incident = guard.incidents[0]
    assert incident.sites[0] == "state"
    for again in (replay(incident.bundle), replay(incident.bundle, model)):
        for attribute in ("cause", "culprit", "samples"):
            assert getattr(again.diagnosis, attribute) == getattr(incident.diagnosis, attribute)
        assert again.diagnosis.evidence[0] == incident.diagnosis.evidence[0]
