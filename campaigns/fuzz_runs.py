"""The uses of the files of a run: policies, incidents, recordings, bundles, snapshots."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns import fuzz_files as made
from campaigns.fuzz_folders import chosen, command, file_name, link, not_from_outside, sized
from campaigns.fuzz_models import keras_bytes
from campaigns.fuzz_oracles import Wrong, check_page, check_printed
from campaigns.fuzz_recipes import Recipe, json_text, patched
from keras_nanguard._core.errors import NanGuardError

__all__ = [
    "bundle_at",
    "directory",
    "look_bundle",
    "look_directory",
    "look_policy",
    "look_recording",
    "look_snapshots",
    "policy_as",
    "recording_at",
    "report_commands",
    "snapshots",
    "warmed_up",
]

# Policies


def policy_as(suffix: str, text: Callable[[Any], str]) -> Callable[[Recipe, Path], Path]:
    def write(recipe: Recipe, folder: Path) -> Path:
        return sized(folder / f"policy{suffix}", text(recipe["tree"]).encode("utf-8", "surrogatepass"), recipe)

    return write


def look_policy(path: Path) -> None:
    """Read, print, and read the printed policy again."""
    from keras_nanguard._policy.policy import Policy
    from keras_nanguard._policy.warnings import warnings_about

    policy = Policy.load(path)
    text = policy.to_toml()
    for shown in (text, "\n".join(warnings_about(policy)), repr(policy)):
        check_printed(shown, "policy")
    again = path.with_name("again.toml")
    again.write_text(text, "utf-8")
    if len(text) < 60_000 and Policy.load(again) != policy:
        raise Wrong("a policy that is printed and read again is another one")


# Recordings, directories of runs


@functools.cache
def _plain_page() -> str:
    from keras_nanguard._core.incident import Diagnosis, Finding, Incident
    from keras_nanguard._report import html
    from keras_nanguard._report.reported_run import ReportedRun

    found = Incident(1, 0, 1, (Finding("loss"),), diagnosis=Diagnosis("unknown"))
    return html.page(ReportedRun([found]))


def warmed_up() -> None:
    """Load everything that is loaded on first use: templates of pages, and the character tables for
    printing.
    """
    from rich.console import Console

    from keras_nanguard._report import compare
    from keras_nanguard._report.reported_run import ReportedRun

    Console(file=io.StringIO(), width=20).print("\N{CJK UNIFIED IDEOGRAPH-754C} :smile: [bold]x[/]")
    compare.page([ReportedRun(name="a")])
    _plain_page()


def _shown_incidents(path: Path) -> None:
    from rich.console import Console

    from keras_nanguard._report import closing_table, compare, console, dashboard, files, html
    from keras_nanguard._report.reported_run import ReportedRun

    run = files.read(path)
    incidents = run.incidents
    check_printed("\n".join(console.incident_line(incident) for incident in incidents), "lines")
    check_page(html.page(run), _plain_page())
    for incident in incidents[:20]:
        if type(incident).from_dict(json.loads(incident.to_json())) is None:
            raise Wrong("an incident that is written is not read again")
        repr(incident)
    if not chosen(path, 4):
        return
    runs = [run, ReportedRun((), run.recording, name="b")]
    check_printed(compare.text(runs), "comparison")
    check_page(compare.page(runs), _plain_page())
    screen = io.StringIO()
    Console(file=screen, width=100, force_terminal=False).print(dashboard.frame(run, 100))
    check_printed(screen.getvalue(), "watch")
    check_printed(closing_table.table_text(incidents, run.summary), "table")


def recording_at(recipe: Recipe, folder: Path) -> Path:
    path = sized(folder / "recording.sqlite", made.sqlite(recipe["tree"]), recipe)
    beside = recipe["tree"].get("beside") if isinstance(recipe["tree"], dict) else None
    for ending, content in beside.items() if isinstance(beside, dict) else ():
        other = folder / file_name(f"recording.sqlite{ending}")
        if isinstance(content, dict) and "names" in content:
            name = os.fsencode(os.path.abspath(folder / str(content["names"]).replace("\0", "")))
            other.write_bytes(patched(made.journal(name, path.stat().st_size), content.get("patch")))
        elif isinstance(content, str):
            link(other, content)
    return path


def look_recording(path: Path) -> None:
    """Read a recording, show it in every form, and continue a run from it."""
    from keras_nanguard._recording.database import MEASURED
    from keras_nanguard._recording.recording import Recording

    try:
        recording = Recording.read(path)
        repr(recording)
        for name in MEASURED:
            recording.series(name, 50)
        with contextlib.suppress(NanGuardError):
            _shown_incidents(path)
    finally:
        if chosen(path, 4):
            _go_on(path)


def _go_on(path: Path) -> None:
    """Record a few more steps, as a resumed run does."""
    from keras_nanguard._recording.database import COMMITTED, REFUSED
    from keras_nanguard._recording.recorder import Recorder

    recorder = Recorder()
    recorder.begin({"model": "net"}, scaled=True, path=path, resumed=3)
    try:
        for step in range(3):
            recorder.push(step, 1.0, 0.5, 1.0, REFUSED if step == 1 else COMMITTED)
        recorder.undo(1)
        recorder.epoch_means(0)
        check_printed(recorder.problem(), "problem of a recorder")
    finally:
        recorder.end("finished", 3, 0)


def directory(recipe: Recipe, folder: Path) -> Path:
    tree = recipe["tree"] if isinstance(recipe["tree"], dict) else {}
    run = folder / "run"
    run.mkdir()
    if "recording" in tree:
        recording_at({"tree": tree["recording"], "patch": recipe.get("patch")}, run)
    bundles = tree.get("bundles")
    for name, bundle in bundles.items() if isinstance(bundles, dict) else ():
        _fill_bundle(bundle, run / "incidents" / file_name(name))
    for name, target in tree.get("links", {}).items() if isinstance(tree.get("links"), dict) else ():
        link(run / file_name(name), str(target))
    return run


def look_directory(path: Path) -> None:
    """Read the directory of a run, and create its page with the rows of its bundles."""
    _shown_incidents(path)


def report_commands(path: Path) -> None:
    command("report", path)
    command("report", path, "--json")
    command("report", path, "-o", path.parent / "page.html")
    command("report", path, path, path.parent / "missing")
    command("watch", path if path.is_dir() else path.parent, "--once")


# Bundles


def _fill_bundle(tree: Any, folder: Path, patch: Any = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = tree if isinstance(tree, dict) else {}
    for number, (name, content) in enumerate(files.items()):
        path = folder / file_name(name)
        if isinstance(content, dict) and "link" in content:
            link(path, str(content["link"]))
        elif isinstance(content, dict) and "keras" in content:
            path.write_bytes(keras_bytes(content["keras"]))
        elif name.endswith(".npz"):
            path.write_bytes(patched(made.npz(content), patch if number == 0 else None))
        elif name.endswith(".json"):
            path.write_text(json_text(content), "utf-8", "surrogatepass")
        else:
            path.write_text(str(content), "utf-8", "surrogatepass")


def bundle_at(recipe: Recipe, folder: Path) -> Path:
    _fill_bundle(recipe["tree"], folder / "incident-00000007-00", recipe.get("patch"))
    return folder / "incident-00000007-00"


def look_bundle(path: Path) -> None:
    """Read a bundle, and show its rows."""
    from keras_nanguard._files import bundles
    from keras_nanguard._report import cards

    cards.batch_rows(path, (0, 1, 5), "x")
    cards.layer_table(path)
    found = bundles.read(path)
    for _, array in (*found.state, *found.start):
        not_from_outside(array)


# Snapshots


def snapshots(recipe: Recipe, folder: Path) -> Path:
    tree = recipe["tree"] if isinstance(recipe["tree"], dict) else {}
    root = folder / "snapshots"
    root.mkdir()
    for name, snapshot in tree.items():
        if name == "guard_state.json":
            (root / name).write_text(_signed(snapshot), "utf-8", "surrogatepass")
        elif isinstance(snapshot, dict):
            inner = root / file_name(name)
            inner.mkdir(exist_ok=True)
            about = snapshot.get("snapshot.json")
            if "state.npz" in snapshot:
                (inner / "state.npz").write_bytes(patched(made.npz(snapshot["state.npz"]), recipe.get("patch")))
            if isinstance(about, dict) and (inner / "state.npz").exists():
                about = {**about, "state": hashlib.sha256((inner / "state.npz").read_bytes()).hexdigest()}
            (inner / "snapshot.json").write_text(_signed(about), "utf-8", "surrogatepass")
    return folder


def _signed(tree: Any) -> str:
    """Return an object with the checksum of `write_json`, which an attacker can also compute."""
    text = json_text(tree)
    try:
        data = json.loads(text)
        data.pop("sha256", None)
        return json.dumps({**data, "sha256": hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text


@functools.cache
def _resumable() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def look_snapshots(path: Path) -> None:
    """Find the snapshot to resume from, and write its state into a model."""
    from campaigns.fuzz_seeds import run_of
    from keras_nanguard._fit import resume

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = resume.find(path, 10)
            if found is not None:
                check_printed(found.sentence(3), "sentence")
                run = run_of(_resumable())
                try:
                    found.restore(run)
                finally:
                    run.recovery.end()
        finally:
            for warning in caught:
                check_printed(str(warning.message), "warning")
