"""The first recipes of each target, from files of a run on bad data and of its model."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from campaigns import fuzz_files as made
from campaigns.fuzz_recipes import Recipe
from keras_nanguard._policy.policy import PRESETS

__all__ = ["load", "run_of", "save", "trained"]

OUTSIDE = "../../outside/secret"
"""The path out of the folder of an input, to files that exist."""


def trained(folder: Path) -> None:
    """Train a small model on data with a NaN and with values that make it diverge, on the current
    backend, and keep all written files.
    """
    import keras

    from keras_nanguard import NanGuard

    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2, name="head")]
    model = keras.Sequential(layers, name="net")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = np.ones((64, 3), np.float32), np.zeros((64, 2), np.float32)
    x[41, 1] = np.nan
    guard = NanGuard(directory=folder, verbose=0, snapshot={"storage": "disk", "every": 4, "verify_after": 2, "keep": 2})
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[guard])
    model.save(folder / "model.keras")
    model.save(folder / "model.h5")
    model.save_weights(folder / "model.weights.h5")
    with contextlib.suppress(TypeError, ValueError):  # this Keras has no shards
        model.save_weights(folder / "sharded.weights.json", max_shard_size=1e-7)


def run_of(model: Any) -> Any:
    """Return a run of a model that has not begun."""
    from keras_nanguard._fit.log import GuardLog
    from keras_nanguard._fit.run import Run
    from keras_nanguard._policy.policy import Policy

    return Run(model, Policy.load("recover"), GuardLog(1, None), None, {}, None, None)


def save(run: Path, folder: Path) -> None:
    """Write the recipes of all targets from the files of `trained`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {**_policies(), **_run(run), **_models(run), "orbax": _orbax(folder / "checkpoint")}
    for name, recipes in found.items():
        (folder / f"{name}.json").write_text(json.dumps(recipes))


def load(folder: Path, target: str) -> list[Recipe]:
    """Return the first recipes of a target."""
    recipes: list[Recipe] = json.loads((folder / f"{target}.json").read_text())
    return recipes


def _policies() -> dict[str, list[Recipe]]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    import keras_nanguard

    folder = Path(keras_nanguard.__file__).parent / "policies"
    presets = [tomllib.loads((folder / f"{name}.toml").read_text("utf-8")) for name in PRESETS if (folder / f"{name}.toml").is_file()]
    own = {
        "version": 2,
        "preset": "recover",
        "escalation": ["skip", ["rollback", {"lower_lr": {"factor": 0.5}}], "stop"],
        "snapshot": {"every": 50, "keep": 3, "storage": "disk"},
        "loss_scale": {"floor": 1.0, "streak": 3, "action": "off"},
        "limits": [{"site": "statistics", "layer": "post_bn*", "max_abs": 1e3}],
        "rules": [
            {
                "name": "mine",
                "site": ["loss", "gradients"],
                "kind": "nonfinite",
                "layer": ["head*"],
                "after": 3,
                "do": [{"lower_lr": {"factor": 0.5}}, "skip"],
            }
        ],
    }
    recipes: list[Recipe] = [{"tree": document} for document in (*presets, own)]
    return {f"policy-{word}": recipes for word in ("toml", "json", "yaml")}


def _run(run: Path) -> dict[str, list[Recipe]]:
    recording = made.read_sqlite(run / "recording.sqlite")
    bundles = {path.name: _files(path) for path in sorted((run / "incidents").iterdir())}
    first = next(iter(bundles.values()))
    linked = [
        {**first, "layers.txt": {"link": f"{up}{OUTSIDE}.txt"}, "batch.npz": {"link": f"{up}{OUTSIDE}.npz"}, "model.json": {"link": "fifo"}}
        for up in ("../", "../../../")
    ]
    hidden = {**first, "batch.npz": {"keras": {"weights": {"nodes": []}}}}
    snapshots = {path.name: _files(path) for path in sorted((run / "snapshots").iterdir()) if path.is_dir()}
    snapshots["guard_state.json"] = json.loads((run / "snapshots" / "guard_state.json").read_text())
    whole = {"recording": recording, "bundles": bundles}
    return {
        "recording": [{"tree": recording}, {"tree": {**recording, "encoding": "UTF-16le"}}, *_beside(recording)],
        "run": [
            {"tree": whole},
            {"tree": {"bundles": {"incident-00000005-00": linked[1]}, "links": {"recording.sqlite": "fifo"}}},
        ],
        "bundle": [{"tree": bundle} for bundle in bundles.values()] + [{"tree": linked[0]}, {"tree": hidden}],
        "snapshots": [{"tree": snapshots}],
    }


def _beside(recording: dict[str, Any]) -> list[Recipe]:
    """Return recordings with a file next to them that refers to files outside of their folder."""
    secret = f"{OUTSIDE}.txt"
    return [{"tree": {**recording, "beside": beside}} for beside in ({"-journal": {"names": secret}}, {"-wal": secret, "-shm": secret})]


def _files(folder: Path) -> dict[str, Any]:
    """Return the files of a folder as trees, first those whose bytes are the most useful to patch.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir(), key=lambda path: (path.suffix != ".npz", path.name)):
        if path.suffix == ".npz":
            found[path.name] = made.read_npz(path)
        elif path.suffix == ".h5":
            found[path.name] = made.read_hdf5(path)
        elif path.suffix == ".json":
            found[path.name] = json.loads(path.read_text("utf-8"))
        elif path.name == "layers.txt":
            found[path.name] = path.read_text("utf-8")
    return found


def _models(run: Path) -> dict[str, list[Recipe]]:
    import zipfile

    weights, legacy = made.read_hdf5(run / "model.weights.h5"), made.read_hdf5(run / "model.h5")
    with zipfile.ZipFile(run / "model.keras") as archive:
        config = json.loads(archive.read("config.json"))
    keras = {"config": config, "weights": weights, "more": [{"name": "metadata.json", "data": "{}"}]}
    odd = [
        {"path": "a/vars/0", "kind": "external", "file": f"{OUTSIDE}.h5", "target": "secret"},
        {"path": "b/vars/0", "kind": "virtual", "shape": [4], "dtype": "f8", "file": f"{OUTSIDE}.h5", "target": "secret"},
        {"path": "c/vars/0", "kind": "stored", "shape": [4], "dtype": "f8", "file": f"{OUTSIDE}.txt"},
        {"path": "d/vars/0", "kind": "soft", "target": "/a/vars/0"},
        {"path": "e/vars/0", "shape": [9, 7], "dtype": "f4", "chunks": [4, 4], "packed": "gzip", "shuffle": True, "data": [1.0]},
        {"path": "f/vars/0", "shape": [1 << 40], "dtype": "f4", "chunks": [1 << 20], "packed": "gzip", "fill": 1.0},
        {"path": "g/vars/0", "shape": [3], "dtype": "text", "data": ["a"]},
        {"path": "h/vars/0", "shape": [3], "dtype": "vlen"},
        {"path": "i/vars/0", "shape": [2], "dtype": "V2", "attrs": {"dtype": "bfloat16"}},
        {"path": "j", "kind": "hard", "target": "/e"},
        {"path": "k", "kind": "type", "dtype": "f4"},
    ]
    arrays = [
        {"name": "a/kernel.npy", "descr": "<f4", "shape": [2, 2], "body": "0000c07f" * 4},
        {"name": "b.npy", "descr": "|O", "shape": [1], "body": "80"},
        {"name": "c.npy", "descr": "<f2", "fortran": True, "shape": [2, 3], "body": "003c" * 6, "deflated": True, "version": 2},
        {"name": "d.npy", "descr": "<f8", "shape": [1 << 13], "body": {"fill": 0, "n": 1 << 16}, "deflated": True, "lie": {}},
        {"name": "e.npy", "header": "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", "body": "0000803f" * 2},
    ]
    index = {"metadata": {"total_size": 1e-7}, "weight_map": {"/layers/dense/vars": ["model_00000.weights.h5"]}}
    return {
        "npz": [{"tree": arrays}],
        "keras": [
            {"tree": keras},
            {"tree": {**keras, "deflated": True, "lies": {}}},
            {"tree": {**keras, "unzipped": True, "links": {"up": "../../..", "pipe": "fifo"}}},
        ],
        "weights": [{"tree": weights}, {"tree": legacy}, {"tree": {"attrs": {}, "nodes": odd}}],
        "sharded": [{"tree": {"index": index, "shards": {"model_00000.weights.h5": weights, "model_00001.weights.h5": weights}}}],
    }


def _orbax(folder: Path) -> list[Recipe]:
    """Return checkpoints in each layout of Orbax; none if TensorStore is not installed."""
    try:
        import tensorstore
    except ImportError:
        return []
    recipes: list[Recipe] = []
    for number, (driver, packed) in enumerate((("zarr3", True), ("zarr3", False), ("zarr", False))):
        root = folder / str(number)
        root.mkdir(parents=True, exist_ok=True)
        store = {"driver": "ocdbt", "base": f"file://{root}/"} if packed else {"driver": "file", "path": f"{root}/"}
        for name, values in (
            ("trainable_variables.head.kernel", np.full((3, 2), np.nan, "f4")),
            ("optimizer_variables.0", np.array(3, "i4")),
        ):
            spec = {
                "driver": driver,
                "kvstore": {**store, "path": f"{store.get('path', '')}{name}/"},
                "delete_existing": True,
                "create": True,
            }
            tensorstore.open(spec, dtype=values.dtype.name, shape=list(values.shape)).result().write(values).result()
        files = {str(path.relative_to(root)): _content(path) for path in sorted(root.rglob("*")) if path.is_file()}
        recipes.append({"tree": {"metadata": {"use_ocdbt": packed, "use_zarr3": driver == "zarr3"}, "files": files}})
    return recipes


def _content(path: Path) -> Any:
    data = path.read_bytes()
    try:
        return json.loads(data)
    except ValueError:
        return {"hex": data.hex()}
