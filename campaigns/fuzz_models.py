"""The uses of model files: each kind is written from a recipe and given to all of its readers."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from campaigns import fuzz_files as made
from campaigns.fuzz_folders import chosen, command, file_name, link, not_from_outside, sized
from campaigns.fuzz_oracles import check_printed
from campaigns.fuzz_recipes import Recipe, json_text, patched
from keras_nanguard._core.errors import NanGuardError

__all__ = ["keras_bytes", "keras_file", "look_model", "model_commands", "npz", "orbax", "sharded", "weights"]


@contextmanager
def _here() -> Iterator[None]:
    """Read in this process instead of a worker, to measure coverage, time and memory."""
    from keras_nanguard._core.errors import FileFormatError
    from keras_nanguard._files import isolated, worker

    def within(task: str, path: str, progress: Any = None, **details: Any) -> dict[str, Any]:
        request = {"task": task, "path": path, "details": details}
        found: dict[str, Any] = json.loads(json.dumps(worker.answer(request, progress or (lambda done, total: None))))
        if "answer" not in found:
            raise FileFormatError(str(found.get("refused", found)))
        answer: dict[str, Any] = found["answer"]
        return answer

    before, isolated.run_in_subprocess = isolated.run_in_subprocess, within  # type: ignore[assignment]
    try:
        yield
    finally:
        isolated.run_in_subprocess = before


def look_model(path: Path) -> None:
    """Scan a model file, print the report, list its names, and read its arrays."""
    from rich.console import Console

    from keras_nanguard._files.formats.opening import opened
    from keras_nanguard._files.loading import model_names
    from keras_nanguard._files.scan import scan

    with _here():
        report = scan(path)
        screen = io.StringIO()
        Console(file=screen, width=200, force_terminal=False).print(report)
        for shown in (str(report), repr(report), screen.getvalue(), json.dumps(report.to_dict(), allow_nan=False)):
            check_printed(shown, "scan")
        if not chosen(path, 3):
            return
        check_printed(repr(model_names(path)), "names")
    with opened(path) as contents:
        for array in contents.arrays[:50]:
            with contextlib.suppress(NanGuardError):
                not_from_outside(array.read())


def model_commands(path: Path) -> None:
    command("scan", path)
    command("scan", path, "--json")
    command("repair", path, "-o", path.parent / f"out{path.suffix}", "--weights", "zeros", "--overwrite")
    command("check-policy", "recover", "--model", path)
    command("repair", path, "--in-place", "--statistics", "initial", "--weights", "zeros")


def npz(recipe: Recipe, folder: Path) -> Path:
    return sized(folder / "arrays.npz", made.npz(recipe["tree"]), recipe)


def keras_bytes(tree: Any) -> bytes:
    tree = tree if isinstance(tree, dict) else {}
    members: list[Any] = [{"name": "config.json", "data": json_text(tree.get("config")).encode("utf-8", "surrogatepass"), "deflated": True}]
    weights = tree.get("weights")
    lies = tree["lies"] if isinstance(tree.get("lies"), dict) else {}
    members.append({"name": "model.weights.h5", "data": made.hdf5(weights), "deflated": bool(tree.get("deflated")), "lie": lies})
    return made.archive([*members, *(tree["more"] if isinstance(tree.get("more"), list) else [])])


def keras_file(recipe: Recipe, folder: Path) -> Path:
    tree = recipe["tree"]
    if isinstance(tree, dict) and tree.get("unzipped"):
        (folder / "model").mkdir()
        sized(folder / "model" / "model.weights.h5", made.hdf5(tree.get("weights")), recipe)
        (folder / "model" / "config.json").write_text(json_text(tree.get("config")), "utf-8", "surrogatepass")
        for name, target in tree["links"].items() if isinstance(tree.get("links"), dict) else ():
            link(folder / "model" / file_name(name), str(target))
        return folder / "model"
    return sized(folder / "model.keras", keras_bytes(tree), recipe)


def weights(recipe: Recipe, folder: Path) -> Path:
    return sized(folder / "model.weights.h5", made.hdf5(recipe["tree"]), recipe)


def sharded(recipe: Recipe, folder: Path) -> Path:
    tree = recipe["tree"] if isinstance(recipe["tree"], dict) else {}
    for name, shard in tree.get("shards", {}).items() if isinstance(tree.get("shards"), dict) else ():
        (folder / file_name(name)).write_bytes(made.hdf5(shard))
    return sized(folder / "model.weights.json", json_text(tree.get("index")).encode("utf-8", "surrogatepass"), recipe)


def orbax(recipe: Recipe, folder: Path) -> Path:
    tree = recipe["tree"] if isinstance(recipe["tree"], dict) else {}
    root = folder / "run" / "3" / "pytree"
    root.mkdir(parents=True)
    (root / "_METADATA").write_text(json_text(tree.get("metadata")), "utf-8", "surrogatepass")
    files: Mapping[str, Any] = tree["files"] if isinstance(tree.get("files"), dict) else {}
    for number, (name, content) in enumerate(files.items()):
        path = root.joinpath(*(file_name(part) for part in name.split("/")[:6]))
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            data = (
                made.data_of(content["hex"], 0)
                if isinstance(content, dict) and "hex" in content
                else json_text(content).encode("utf-8", "surrogatepass")
            )
            path.write_bytes(patched(data, recipe.get("patch")) if number == 0 else data)
    return folder / "run"
