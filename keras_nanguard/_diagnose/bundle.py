"""An incident on disk: one folder from which the bad step can be replayed on any machine.

    incidents/
      incident-00000012-00/
        incident.json     the incident, as `Incident.to_dict` gives it
        bundle.json       the contents of the other files: structure of the batch, names of the
                          inputs, paths of the variables, versions, mode
        batch.npz         the arrays of the batch
        state.npz         every variable before the step: weights, statistics, seeds, slots, loss
                          scale, rates
        start.npz         the same before the first step, if training had diverged
        model.json        the model's configuration, if it has one
        layers.txt        the table of layers
        README.txt        the diagnosis, and the command that replays the step

Arrays are plain `.npy` in an uncompressed zip, without pickle. A folder is written under a
temporary name and renamed. `_files/bundles.py` reads it.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keras_nanguard._backends import current
from keras_nanguard._core import atomic_files, plain_values
from keras_nanguard._core.finiteness import Array
from keras_nanguard._core.incident import BUNDLES, Diagnosis, Incident
from keras_nanguard._core.literals import causes_with
from keras_nanguard._core.plain_values import one_line
from keras_nanguard._diagnose.evidence import Evidence
from keras_nanguard._diagnose.gathering import RunView
from keras_nanguard._diagnose.sentences import layer_table
from keras_nanguard._files import bundles
from keras_nanguard._files.formats.limits import MAX_JSON
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    variables as keras_variables,
)


def write(run: RunView, incident: Incident, batch: Any, evidence: Evidence) -> str:
    """Write a bundle into the guard's directory and return its path, relative if the user gave a
    relative directory.

    Args:
        run: the run, whose state is the one before the step.
        batch: the arguments of the step.
    """
    folder = Path(run.directory or "") / BUNDLES
    folder.mkdir(parents=True, exist_ok=True)
    path = _free_path(folder, incident.step)
    shown = str(Path(run.shown or "") / BUNDLES / path.name)
    with atomic_files.beside(path) as unfinished:
        unfinished.mkdir()
        _fill(unfinished, run, incident.with_(bundle=shown), batch, evidence)
    _drop_oldest(folder, path)
    return shown


def _free_path(folder: Path, step: int) -> Path:
    paths = (folder / f"incident-{step:08d}-{number:02d}" for number in itertools.count())
    return next(path for path in paths if not path.exists())


def _drop_oldest(folder: Path, newest: Path) -> None:
    """Remove the oldest bundles if there are too many, but never the newest."""
    others = [path for path in folder.glob("incident-*") if path.is_dir() and path != newest]
    others.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in others[: max(len(others) + 1 - bundles.MAX_BUNDLES, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _fill(folder: Path, run: RunView, incident: Incident, batch: Any, evidence: Evidence) -> None:
    structure, arrays = _flatten(batch)
    notes = []
    if sum(a.nbytes for a in arrays) > 2 * bundles.MAX_BYTES:  # more than is read
        structure, arrays = {"left_out": "the whole batch is too large"}, []
        notes.append("The batch was too large for the bundle: the step cannot be run again.")
    left = bundles.MAX_BYTES - _save(folder / "batch.npz", arrays)
    variables = _save_state(folder, run, incident, left)
    if variables is None:
        without = "give replay a model with the weights before the step."
        notes.append(f"The state was too large for the bundle; {without}")
    model = _configuration(run.model)
    about = {
        "format": bundles.FORMAT,
        "batch": structure,
        "inputs": list(keras_layers.input_names(run.model)),
        "dtypes": [a.dtype.name for a in arrays],
        "state": [
            {"path": str(v.path), "dtype": str(v.dtype), "shape": [int(n) for n in v.shape]}
            for v in variables or ()
        ],
        "growth": plain_values.plain(asdict(evidence.growth)),
        "mode": evidence.mode,
        "saving": bool(run.access.transaction.learned.updates_first),
        "model": {
            "class": type(run.model).__name__,
            "name": str(run.model.name),
            "config": bool(model),
        },
        "versions": current.versions(),
        "notes": notes,
    }
    texts = {
        "bundle.json": json.dumps(about, indent=1, allow_nan=False),
        "incident.json": incident.to_json(),
        "model.json": model,
        "layers.txt": layer_table(evidence.replay.table) + "\n",
        "README.txt": _readme(incident, about),
    }
    for name, text in texts.items():
        if text:
            atomic_files.write_text(folder / name, text)


def _save_state(folder: Path, run: RunView, incident: Incident, left: int) -> Sequence[Any] | None:
    """Write the state before the step, unless it is larger than `left` bytes, and, if training had
    diverged, the one before the first step. Returns the variables of the written state.
    """
    variables = [v for v in run.train_state().everything if str(v.dtype) != "string"]
    state = [keras_variables.view(v) for v in variables]
    if sum(a.nbytes for a in state) > left:
        return None
    left -= _save(folder / "state.npz", state)
    cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
    start = run.ring.start
    if cause in causes_with("start") and start is not None and start.is_whole():
        first = [start.value(v) for v in variables]
        first = [now if old is None else old for old, now in zip(first, state)]
        if sum(a.nbytes for a in first) <= left:
            _save(folder / "start.npz", first)
    return variables


def _flatten(value: Any) -> tuple[Any, list[Array]]:
    """Return the structure of nested data, arrays by number, and the arrays."""
    arrays: list[Array] = []

    def describe(item: Any) -> Any:
        if item is None:
            return None
        if isinstance(item, dict):
            return {"dict": {str(key): describe(child) for key, child in item.items()}}
        if isinstance(item, (list, tuple)):
            kind = "tuple" if isinstance(item, tuple) else "list"
            return {kind: [describe(child) for child in item]}
        array = keras_arrays.as_array(item)
        if array.dtype.kind == "O":
            return {"left_out": str(getattr(item, "dtype", type(item).__name__))}
        arrays.append(array)
        return len(arrays) - 1

    return describe(value), arrays


def _save(path: Path, arrays: Sequence[Array]) -> int:
    """Write arrays by number; return their bytes."""
    atomic_files.save_arrays(path, {str(number): array for number, array in enumerate(arrays)})
    return sum(a.nbytes for a in arrays)


def _configuration(model: Any) -> str:
    """Return the configuration of a model, `""` if it has none, or one too large to be read."""
    try:
        text = str(model.to_json())
        return text if len(text.encode()) <= MAX_JSON else ""
    except Exception:  # noqa: BLE001  a custom model need not have a configuration
        return ""


def _readme(incident: Incident, about: Mapping[str, Any]) -> str:
    """Return the incident as plain text, and how to replay it."""
    found = incident.diagnosis or Diagnosis()
    evidence = (f"evidence: {text}" for text in found.evidence)
    advice = (f"advice: {text}" for text in found.advice)
    model = "" if about["model"]["config"] else " --model MODEL.keras"
    replay = f"Replay it with: keras-nanguard replay {incident.bundle}{model}"
    title = incident.moment.capitalize()
    lines = (title, found.headline, *evidence, *advice, *about["notes"], replay)
    return "\n".join(map(one_line, lines)) + "\n"
