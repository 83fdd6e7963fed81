"""An incident on disk: one folder from which the bad step can be replayed on any machine.

    incidents/
      incident-000012-00/
        incident.json     the incident, as `Incident.to_dict` gives it
        bundle.json       the contents of the other files: structure of the batch, paths of the
                          variables, versions, mode
        batch.npz         the arrays of the batch
        state.npz         every variable before the step: weights, statistics, seeds, slots, loss
                          scale, rates
        start.npz         the same in an earlier snapshot, if training had diverged
        before.npz        the remembered batches of the steps between that snapshot and the bad step
        model.json        the model's configuration, if it has one
        layers.txt        the table of layers
        README.md         a description of the incident
        reproduce.py      runs the step again

Arrays are plain `.npy` in an uncompressed zip, without pickle. A folder is written under a
temporary name and renamed. Reading trusts nothing: names are fixed and links are not followed, so
no path leads out of the folder; sizes are checked before anything is unpacked; objects are never
unpickled; Keras' safe mode refuses a model with Python code in its configuration.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import atomic_files, plain_arrays, plain_json
from keras_nanguard._core.errors import BundleError, FileFormatError, expected
from keras_nanguard._core.evidence import Evidence, Growth
from keras_nanguard._core.incident import Diagnosis, Incident, stored
from keras_nanguard._core.plain_text import markdown_text, plain_text
from keras_nanguard._diagnose.guarded_run import GuardedRun
from keras_nanguard._diagnose.words import table
from keras_nanguard._files.opening import opened_arrays
from keras_nanguard._files.stored import MAX_UNBACKED, PARSE_ERRORS
from keras_nanguard._keras import spread_arrays, variables as keras_variables

__all__ = ["FORMAT", "Bundle", "read", "write"]

FORMAT = 1
"""Number of the form of `bundle.json`."""

FOLDER = "incidents"

MAX_BUNDLES = 12
"""Bundles that are kept in one directory; the oldest goes first."""

MAX_BYTES = 1 << 30
"""Bytes of arrays in one bundle. What does not fit is omitted and reported: the start first, then
the state.
"""

MAX_JSON = 64 << 20


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle.

    Attributes:
        path: its folder.
        incident: the incident.
        about: the content of `bundle.json`.
        batch: the arguments of the step.
        state: values of the variables before the step by path; empty if they were omitted.
        start: the same in the snapshot from which `before` starts.
        before: the arguments of the steps before it, oldest first.
        growth: the course of loss, gradient norm and weights before it.
        model: the model's configuration as JSON text, `""` if it has none.
    """

    path: Path
    incident: Incident
    about: Mapping[str, Any]
    batch: Any
    state: Sequence[tuple[str, np.ndarray[Any, Any]]]
    start: Sequence[tuple[str, np.ndarray[Any, Any]]]
    before: Sequence[Any]
    growth: Growth
    model: str


def write(
    directory: str | Path,
    run: GuardedRun,
    incident: Incident,
    batch: Any,
    evidence: Evidence,
    mode: str,
) -> str:
    """Write a bundle and return its path.

    Args:
        directory: the guard's directory.
        run: the run, whose state is the one before the step.
        incident: the incident with its diagnosis.
        batch: the arguments of the step.
        evidence: the evidence of the diagnosis.
        mode: how the step was compiled.
    """
    folder = Path(directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = _free_path(folder, incident.step)
    with atomic_files.beside(path) as unfinished:
        unfinished.mkdir()
        _fill(unfinished, run, incident.with_(bundle=str(path)), batch, evidence, mode)
    _drop_oldest(folder, path)
    return str(path)


def _free_path(folder: Path, step: int) -> Path:
    for number in range(10_000):
        path = folder / f"incident-{step:08d}-{number:02d}"
        if not path.exists():
            return path
    raise BundleError(f"{folder} has too many bundles of step {step}.")


def _drop_oldest(folder: Path, newest: Path) -> None:
    """Remove the oldest bundles if there are too many. `newest` is kept even if the clock was set
    back.
    """
    times = {path: path.stat().st_mtime_ns for path in folder.glob("incident-*") if path.is_dir()}
    latest = max((time for path, time in times.items() if path != newest), default=0)
    if times[newest] <= latest:
        times[newest] = latest + 1_000_000
        os.utime(newest, ns=(times[newest], times[newest]))
    for path in sorted(times, key=lambda path: (times[path], path.name))[:-MAX_BUNDLES]:
        shutil.rmtree(path, ignore_errors=True)


def _fill(
    folder: Path, run: GuardedRun, incident: Incident, batch: Any, evidence: Evidence, mode: str
) -> None:
    variables = [v for v in run.train_state().everything if str(v.dtype) != "string"]
    structure, arrays = _flattened(batch)
    state = [keras_variables.view(v) for v in variables]
    left = MAX_BYTES - _save(folder / "batch.npz", arrays)
    fits, before, notes = sum(a.nbytes for a in state) <= left, None, []
    if fits:
        left -= _save(folder / "state.npz", state)
        cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
        if cause in ("divergence", "input_scale"):
            before = _save_approach(folder, run, variables, state, left)
    else:
        notes.append(
            "The state was too large for the bundle; give replay a model with the weights before"
            " the step."
        )
    model = _configuration(run.model)
    about = {
        "format": FORMAT,
        "batch": structure,
        "dtypes": [a.dtype.name for a in arrays],
        "state": [_described(v) for v in variables] if fits else [],
        "before": before,
        "growth": plain_json.plain(asdict(evidence.growth)),
        "mode": mode,
        "saving": bool(run.transaction.keeps_undo),
        "steps_per_execution": int(getattr(run.model, "steps_per_execution", 1) or 1),
        "trainer": hasattr(run.model, "train_step") and run.transaction.model is not None,
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
        "layers.txt": table(evidence.table) + "\n",
        "README.md": _readme(incident, about),
        "reproduce.py": _REPRODUCE,
    }
    for name, text in texts.items():
        if text:
            (folder / name).write_text(text, encoding="utf-8")


def _save_approach(
    folder: Path, run: GuardedRun, variables: Sequence[Any], state: Sequence[Any], left: int
) -> Any:
    """Write an earlier state and the batches since. Return their description for `bundle.json`, or
    `None` if they do not fit.
    """
    approach = run.recent.approach(run.ring.snapshots, run.transaction.batch)
    snapshot = approach.snapshot if approach is not None else run.ring.oldest()
    if snapshot is None or not run.ring.at_hand(snapshot):
        return None
    then = [snapshot.value(v) for v in variables]
    start = [now if old is None else old for old, now in zip(then, state)]
    structure, arrays = _flattened(approach.batches if approach is not None else ())
    if sum(a.nbytes for a in (*start, *arrays)) > left:
        return None
    _save(folder / "start.npz", start)
    _save(folder / "before.npz", arrays)
    return {
        "snapshot": snapshot.step,
        "steps": list(approach.steps) if approach is not None else [],
        "exact": approach is not None and approach.exact,
        "batches": structure,
        "dtypes": [a.dtype.name for a in arrays],
    }


def _described(variable: Any) -> dict[str, Any]:
    shape = [int(n) for n in variable.shape]
    return {"path": str(variable.path), "dtype": str(variable.dtype), "shape": shape}


def _flattened(value: Any) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Return the structure of nested data, arrays by number, and the arrays."""
    arrays: list[np.ndarray[Any, Any]] = []

    def describe(item: Any) -> Any:
        if item is None:
            return None
        if isinstance(item, dict):
            return {"dict": {str(key): describe(child) for key, child in item.items()}}
        if isinstance(item, (list, tuple)):
            kind = "tuple" if isinstance(item, tuple) else "list"
            return {kind: [describe(child) for child in item]}
        array = spread_arrays.as_array(item)
        if array.dtype.kind == "O" or not hasattr(array, "dtype"):
            return {"left_out": str(getattr(item, "dtype", type(item).__name__))}
        arrays.append(array)
        return len(arrays) - 1

    return describe(value), arrays


def _save(path: Path, arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    """Write arrays by number; return their bytes."""
    plain_arrays.save_arrays(path, {str(number): array for number, array in enumerate(arrays)})
    return sum(a.nbytes for a in arrays)


def _configuration(model: Any) -> str:
    try:
        return str(model.to_json())
    except Exception:  # noqa: BLE001  a model of the user's own need not have a configuration
        return ""


def _readme(incident: Incident, about: Mapping[str, Any]) -> str:
    d = incident.diagnosis or Diagnosis()
    place = f" in {markdown_text(d.culprit)}" if d.culprit else ""
    rows = f"Rows of the batch: {', '.join(map(str, d.samples[:20]))}." if d.samples else ""
    run = f"    python reproduce.py\n\nor\n\n    keras-nanguard replay {incident.bundle}"
    model = "The model has no configuration that can be saved. Pass it with `--model file.keras`."
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = (
        f"# {incident.moment.capitalize()}",
        f"Cause: **{d.cause}**{place}.",
        rows,
        *("Seen:", "\n".join(f"- {markdown_text(text)}" for text in d.evidence)),
        *("Do:", "\n".join(f"- {markdown_text(text)}" for text in d.advice)),
        *("Run the step again:", run),
        "" if about["model"]["config"] else model,
        *map(markdown_text, about["notes"]),
        f"Written by {versions}.",
    )
    return "\n\n".join(filter(None, parts)) + "\n"


_REPRODUCE = '''"""Runs the bad step of this bundle again and prints what every layer gave.

    python reproduce.py [MODEL.keras]
"""

import pathlib
import sys

from keras_nanguard import replay

# Classes and functions of your own that the model is made of: import them, and name them here.
# {"Block": Block}
custom_objects = {}

model = sys.argv[1] if len(sys.argv) > 1 else None
print(replay(pathlib.Path(__file__).parent, model, custom_objects=custom_objects))
'''


def read(path: str | Path | None) -> Bundle:
    """Read a bundle.

    Raises:
        BundleError: if it is not a bundle, missing, of a newer format, damaged or hostile.
    """
    folder, what = Path(path or ""), "the folder of an incident"
    if path is None or not folder.exists():
        received = "None" if path is None else f"{str(path)!r}, which does not exist"
        kept = f"a directory keeps the newest {MAX_BUNDLES}"
        raise _refused(what, received, f"Pass Incident.bundle of a diagnosed incident; {kept}.")
    if not (folder / "bundle.json").is_file():
        raise _refused(what, repr(str(path)), "It contains bundle.json; see Incident.bundle.")
    try:
        return _read(folder)
    except BundleError:
        raise
    except (FileFormatError, *PARSE_ERRORS) as error:
        reason = f"{type(error).__name__}: {plain_text(error)}"
        raise BundleError(f"The bundle {str(path)!r} cannot be read: {reason}") from error


def _refused(what: str, received: object, remedy: str = "The file is damaged.") -> BundleError:
    return BundleError(expected(what, received, remedy))


def _read(folder: Path) -> Bundle:
    about = _json(folder / "bundle.json")
    if about.get("format") != FORMAT:
        received = plain_text(f"format={about.get('format')!r}")
        raise _refused(f"a bundle of format {FORMAT}", received, "Update.")
    arrays = _load(folder / "batch.npz", about["dtypes"])
    entries = [(str(e["path"]), str(e["dtype"])) for e in about["state"]]
    before, way = about.get("before"), folder / "before.npz"
    batches: Sequence[Any] = ()
    if before and way.exists():
        batches = _packed(before["batches"], _load(way, before["dtypes"]))
    model = folder / "model.json"
    return Bundle(
        folder,
        Incident.from_dict(_json(folder / "incident.json")),
        about,
        _packed(about["batch"], arrays),
        _variables(folder / "state.npz", entries),
        _variables(folder / "start.npz", entries),
        batches,
        stored(Growth, about["growth"]),
        _regular(model, MAX_JSON).read_text(encoding="utf-8") if model.exists() else "",
    )


def _regular(path: Path, max_bytes: int) -> Path:
    """Return the path of a file of moderate size that is in the folder itself.

    Raises:
        BundleError: if it is missing, too large, a link, or no file.
    """
    if path.is_symlink():
        remedy = "Replace it by the file itself."
        raise BundleError(f"{path.name} is a link, which is not followed. {remedy}")
    if not path.is_file():
        raise BundleError(f"{path.name} is missing, or not a file.")
    if (size := path.stat().st_size) > max_bytes:
        raise BundleError(f"{path.name} has {size} bytes, more than a bundle may have.")
    return path


def _json(path: Path) -> dict[str, Any]:
    value = plain_json.loads(_regular(path, MAX_JSON).read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise _refused(f"an object in {path.name}", type(value).__name__)
    return value


def _variables(
    path: Path, entries: Sequence[tuple[str, str]]
) -> list[tuple[str, np.ndarray[Any, Any]]]:
    if not path.exists():
        return []
    arrays = _load(path, [dtype for _, dtype in entries])
    if len(arrays) != len(entries):
        raise _refused(f"{len(entries)} arrays in {path.name}", len(arrays))
    return [(name, array) for (name, _), array in zip(entries, arrays)]


def _load(path: Path, dtypes: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a file, none of which is unpickled or larger than a bundle may be."""
    _regular(path, 2 * MAX_BYTES)
    if not dtypes:
        return []
    with opened_arrays(path) as found:
        if sum(array.nbytes for array in found.values()) > 2 * MAX_BYTES:
            raise BundleError(f"{path.name} unpacks to more than a bundle may have.")
        if sum(array.unbacked for array in found.values()) > MAX_UNBACKED:
            raise BundleError(f"{path.name} unpacks to far more data than it stores.")
        arrays = [found[str(number)].read() for number in range(len(found))]
    return [plain_arrays.typed(array, name) for array, name in zip(arrays, dtypes)]


def _packed(structure: Any, arrays: Sequence[np.ndarray[Any, Any]], depth: int = 0) -> Any:
    if depth > 32:
        raise BundleError("The batch of the bundle is nested too deeply.")
    if structure is None:
        return None
    if isinstance(structure, int):
        return arrays[structure]
    if "dict" in structure:
        return {key: _packed(child, arrays, depth + 1) for key, child in structure["dict"].items()}
    for kind, make in (("tuple", tuple), ("list", list)):
        if kind in structure:
            return make(_packed(child, arrays, depth + 1) for child in structure[kind])
    left_out = structure.get("left_out")
    raise BundleError(f"An array of the batch was omitted from the bundle: {left_out}.")
