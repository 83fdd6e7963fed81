"""Snapshots forged with checksums give one sentence, and set only the state of the model."""

import itertools
import json
import os
import shutil
import zipfile

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support import zoo

from keras_nanguard import FileFormatError, GuardError, NanGuard, NonFiniteError
from keras_nanguard._core import atomic_files
from keras_nanguard._fit.rates import Lowering, RateChange
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._fit.resume import find
from keras_nanguard._fit.snapshot_files import written
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._policy.decide import PolicyState

RATE = {"factor": 0.5, "rate": 0.1, "absolute": False}
SETTINGS = ({"global_clipnorm": None}, {"dynamic_growth_steps": 9})
RATES, LOWERING = (RateChange(**RATE), None), Lowering(at=-6, recover_after=5)
GOOD = GuardState(policy_state=PolicyState(), rates=RATES, settings=SETTINGS, rollbacks=3, lowering=LOWERING).to_dict()

LOWERED = GOOD["lowering"]
WRONG_STATES = {"consecutive": -1, "climb": "many", "refused": [1.5], "more": 1}
WRONG_STATES["rules"] = {"a": {"last": []}}
STATES = {
    "an attribute of the optimizer": {"settings": [{"apply": 5}]},
    "a class": {"settings": [{"__class__": 1}]},
    "a setting that is a text": {"settings": [{"global_clipnorm": "1"}]},
    "a setting that is NaN": {"settings": [{"global_clipnorm": float("nan")}]},
    "settings that are a text": {"settings": "global_clipnorm"},
    "a rate that is a list": {"rates": [[]]},
    "a rate without a factor": {"rates": [{"rate": 0.1}]},
    "a rate with more": {"rates": [{**RATE, "more": 1}]},
    "a factor below 0": {"rates": [{**RATE, "factor": -1.0}]},
    "a factor of 0": {"rates": [{**RATE, "factor": 0}]},
    "an endless rate": {"rates": [{**RATE, "rate": float("inf")}]},
    "a mark that is a number": {"rates": [{**RATE, "absolute": 1}]},
    "a list for a number": {"lowering": {**LOWERED, "at": [1, 2]}},
    "a text for a number": {"lowering": {**LOWERED, "recover_after": "5"}},
    "a divergence that is a number": {"lowering": {**LOWERED, "diverged": 1}},
    "a lowering without a time": {"lowering": {"diverged": True}},
    "rollbacks of many digits": {"rollbacks": 10**100},
    "another field": {"more": 1},
    "another format": {"format": 7},
    **{
        f"a policy state with {name}": {"policy_state": {**PolicyState().model_dump(mode="json"), name: value}}
        for name, value in WRONG_STATES.items()
    },
    "no policy state": {"policy_state": None},
}


def test_a_guard_state_of_a_run_is_accepted():
    """The rejected ones below each differ from it in one point."""
    assert GuardState.from_dict(json.loads(json.dumps(GOOD))).to_dict() == GOOD


@pytest.mark.parametrize("estimate", [None, [40, 60]])
def test_a_guard_state_of_the_format_before(estimate):
    """It has an estimate of BatchNorm statistics, which no longer lasts for several steps."""
    assert GuardState.from_dict({**GOOD, "format": 4, "recalibration": estimate}).to_dict() == GOOD
    with pytest.raises(FileFormatError, match="format=3"):
        GuardState.from_dict({**GOOD, "format": 3, "recalibration": estimate})
    with pytest.raises(FileFormatError):
        GuardState.from_dict({**GOOD, "recalibration": estimate})


@pytest.mark.parametrize("name", STATES)
def test_a_guard_state_sets_only_what_an_action_can_have_set(name):
    """Names and numbers that no action can produce are rejected before anything is set."""
    with pytest.raises(FileFormatError):
        GuardState.from_dict({**GOOD, **STATES[name]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from([10**400, RATE, "rate"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.sampled_from(sorted(RATE)), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_a_guard_state_is_accepted_or_rejected(name, value):
    """With any value in place of a field a guard state is rejected, or written again unchanged."""
    try:
        found = GuardState.from_dict({**GOOD, name: value})
    except FileFormatError as error:
        assert len(str(error)) < 2000
        return
    assert json.loads(json.dumps(found.to_dict())) == json.loads(json.dumps({**GOOD, name: value}))


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    guard = NanGuard(verbose=0, diagnose=False, directory=directory, snapshot={"storage": "disk", "every": 4, "verify_after": 0})
    zoo.run(lambda: zoo.plain(run_eagerly=True), zoo.regression(batches=6), guard=guard, epochs=1)
    return directory


@pytest.fixture
def snapshot(left, tmp_path):
    """Return the newest snapshot of a copy of it, alone."""
    shutil.copytree(left / "snapshots", tmp_path / "snapshots")
    *older, newest = written(tmp_path / "snapshots")
    for path in older:
        shutil.rmtree(path)
    return newest


def sealed(path, **changes):
    data = {**atomic_files.read_json(path), **changes}
    path.write_text(json.dumps({**data, "sha256": atomic_files._checksum(data)}))


def with_arrays(snapshot, change):
    """Change the arrays of a snapshot by a function."""
    with np.load(snapshot / "state.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    change(arrays)
    np.savez(snapshot / "state.npz", **arrays)


def resumed(snapshot, folder, policy="recover", build=lambda: zoo.plain(run_eagerly=True)):
    """Resume from a snapshot whose arrays were changed, and its checksum with them."""
    sealed(snapshot / "snapshot.json", state=atomic_files.fingerprint(snapshot / "state.npz"))
    guard = NanGuard(policy, verbose=0, diagnose=False, directory=folder, resume=True)
    zoo.run(build, zoo.regression(batches=6), guard=guard, epochs=2)


RECORDS = {
    "a step that is a text": {"step": "5"},
    "a batch below 0": {"batch": -1},
    "an epoch of many digits": {"epoch": 10**100},
    "a mark that is a text": {"verified": "no"},
    "a checksum that is a list": {"state": ["0"]},
    "another checksum": {"state": "../../state.npz"},
    "variables that are a text": {"variables": "all"},
    "variables of three": {"variables": [[0, "a", "float32"]]},
    "a number below 0": {"metrics": -1},
    "optimizers of texts": {"optimizers": [["a"]]},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_with_a_right_checksum_and_wrong_fields(snapshot, tmp_path, name):
    """An attacker can compute the checksum of a changed file, so its fields are checked, too."""
    assert find(tmp_path) is not None
    sealed(snapshot / "snapshot.json", **RECORDS[name])
    with pytest.warns(UserWarning, match="older snapshot") as warned, pytest.raises(GuardError):
        find(tmp_path)
    assert all(str(one.message).isprintable() for one in warned)


def test_arrays_that_are_damaged_behind_a_right_checksum(snapshot, tmp_path):
    """An archive with damaged members does not fit the model, and the error states this."""
    raw = bytearray((snapshot / "state.npz").read_bytes())
    raw[:4] = b"none"
    (snapshot / "state.npz").write_bytes(raw)
    with pytest.raises(GuardError, match="does not fit this model"):
        resumed(snapshot, tmp_path)


@pytest.mark.parametrize("fault", ["an array of another shape", "no memory to read", "no memory to write"])
def test_a_state_that_cannot_be_restored_leaves_the_model_as_it_was(snapshot, tmp_path, monkeypatch, fault):
    """All or none is written. A lack of memory is not taken for another model, and the file is closed."""
    model, calls, error = zoo.plain(run_eagerly=True), itertools.count(), GuardError if "shape" in fault else MemoryError
    before = model.get_weights()

    def failing(real):
        def call(*args):
            if next(calls) in (7, 8):
                raise MemoryError("Unable to allocate 3.00 GiB")
            return real(*args)

        return call

    if fault == "no memory to read":
        monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", failing(np.lib.npyio.NpzFile.__getitem__))
    elif fault == "no memory to write":
        monkeypatch.setattr(keras_variables, "write", failing(keras_variables.write))
    else:
        with_arrays(snapshot, lambda arrays: arrays.update({"v7": np.zeros((3, 5, 7), "float32")}))
    with pytest.raises(error) as raised:
        resumed(snapshot, tmp_path, build=lambda: model)
    assert type(raised.value) is error
    zoo.assert_same(model.get_weights(), before)
    open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(snapshot / "state.npz") not in open_files


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_arrays_that_could_unpack_without_limit(snapshot, tmp_path, method):
    """Members that are neither stored nor deflated are refused before any is read."""
    with zipfile.ZipFile(snapshot / "state.npz") as stored:
        members = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(snapshot / "state.npz", "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(GuardError, match="stored or deflated"):
        resumed(snapshot, tmp_path)


def test_nan_behind_a_right_checksum_is_reported_when_a_run_resumes(snapshot, tmp_path):
    """It is not trained on, and not turned into a number."""
    names = [path for path, *_ in atomic_files.read_json(snapshot / "snapshot.json")["variables"]]
    kernel = f"v{next(n for n, path in enumerate(names) if path.endswith('kernel'))}"
    with_arrays(snapshot, lambda arrays: np.put(arrays[kernel], 0, np.nan))
    with pytest.raises(NonFiniteError) as raised:
        resumed(snapshot, tmp_path, "raise")
    incident = raised.value.incident
    assert incident.sites == ("state",) and incident.findings[0].nan == 1


def test_a_pipe_is_not_waited_for(snapshot, tmp_path):
    (snapshot / "snapshot.json").unlink()
    os.mkfifo(snapshot / "snapshot.json")
    with pytest.warns(UserWarning, match="no such file"), pytest.raises(GuardError):
        find(tmp_path)


@pytest.mark.requires_backend("torch", reason="only PyTorch has a generator that belongs to no variable")
def test_a_generator_with_another_state(snapshot, tmp_path):
    """A state that PyTorch's generator does not accept is rejected with one sentence."""
    with_arrays(snapshot, lambda arrays: arrays.update(generator=np.zeros(3, np.float64)))
    with pytest.raises(GuardError, match="generator"):
        resumed(snapshot, tmp_path)
