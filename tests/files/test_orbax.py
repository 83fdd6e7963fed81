"""Orbax checkpoints are read with TensorStore alone, and rejected with one sentence without it."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from keras_nanguard import FileFormatError, repair, scan


def test_without_tensorstore_a_checkpoint_is_rejected_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    tree = tmp_path / "checkpoint" / "3" / "pytree"
    tree.mkdir(parents=True)
    (tree / "_METADATA").write_text("{}")
    with pytest.raises(FileFormatError, match="pip install tensorstore"):
        scan(tmp_path / "checkpoint")


def test_a_shape_without_values_costs_nothing(tmp_path):
    """A few hundred bytes that declare a terabyte are rejected at once; existing data is read."""
    tensorstore = pytest.importorskip("tensorstore")
    tree = tmp_path / "run" / "1" / "pytree"
    good = np.full((300, 7), np.nan, np.float32)
    write(tensorstore, tree, {"trainable_variables.good": good}, packed=False)
    about = {"zarr_format": 2, "dtype": "<f4", "compressor": None, "fill_value": "NaN"}
    about |= {"order": "C", "filters": None, "shape": [10**12], "chunks": [10**6]}
    (tree / "trainable_variables.bad").mkdir()
    (tree / "trainable_variables.bad" / ".zarray").write_text(json.dumps(about))
    began = time.process_time()
    found = {entry.name: entry for entry in scan(tmp_path / "run").variables}
    assert time.process_time() - began < 10
    assert found["good"].statistics.nan == 2100 and "declares" in found["bad"].problems[0].detail


def write(tensorstore, folder, arrays, packed=True):
    """Write a step of a checkpoint in the layout of Orbax."""
    folder.mkdir(parents=True)
    (folder / "_METADATA").write_text(json.dumps({"use_ocdbt": packed, "use_zarr3": True}))
    store = {"driver": "file", "path": f"{folder}/"}
    if packed:
        store = {"driver": "ocdbt", "base": f"file://{folder}/"}
    for name, values in arrays.items():
        spec = {"driver": "zarr3", "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"}}
        about = {"dtype": values.dtype.name, "shape": list(values.shape)}
        tensorstore.open(spec, create=True, **about).result().write(values).result()


@pytest.mark.parametrize("packed", (True, False))
def test_the_last_step_of_a_checkpoint_is_scanned(tmp_path, packed):
    """Named as in the state tree, from the highest step, in either layout."""
    tensorstore = pytest.importorskip("tensorstore")
    import ml_dtypes

    variance = "non_trainable_variables.model.bn.moving_variance"
    good = {variance: np.ones(4, np.float32)}
    bad = {
        variance: np.array([1.0, np.nan, -1.0, 1.0], np.float32),
        "trainable_variables.model.head.kernel": np.full((300, 5), np.inf, ml_dtypes.bfloat16),
        "optimizer_variables.adam.iteration": np.array(3, np.int32),
    }
    write(tensorstore, tmp_path / "run" / "9" / "pytree", good, packed)
    write(tensorstore, tmp_path / "run" / "10" / "pytree", bad, packed)
    report = scan(tmp_path / "run")
    assert report.kind == "orbax"
    assert "10/pytree" in report.notes[0]
    found = {entry.path: [problem.code for problem in entry.problems] for entry in report.bad}
    assert found == {
        "model/bn/moving_variance": ["nan", "negative_variance"],
        "model/head/kernel": ["inf"],
    }
    assert scan(tmp_path / "run" / "9").ok
    with pytest.raises(FileFormatError, match="repair the model"):
        repair(tmp_path / "run", weights="zeros")


def test_checkpoints_of_keras_are_read(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    code = (
        "import sys, keras, numpy as np\nlayers = keras.layers\n"
        "stack = [keras.Input((3,)), layers.BatchNormalization(name='bn'), layers.Dense(1)]\n"
        "model = keras.Sequential(stack, name='m')\n"
        "model.compile('adam', 'mse')\n"
        "save = keras.callbacks.OrbaxCheckpoint(sys.argv[1], save_freq='epoch')\n"
        "model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0, callbacks=[save])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    subprocess.run(command, check=True, capture_output=True)
    roles = {entry.path: entry.role for entry in scan(tmp_path / "run").variables}
    assert roles["m/bn/moving_variance"] == "statistics"
    assert roles["m/bn/gamma"] == "weight"
    assert roles["optimizer/adam/m_bn_gamma_velocity"] == "slot"
