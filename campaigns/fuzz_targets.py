"""The targets: for each kind of file, how it is written from a recipe, and how the library uses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from campaigns import fuzz_models as models, fuzz_runs as runs
from campaigns.fuzz_folders import command
from campaigns.fuzz_recipes import Recipe, json_text, toml_text, yaml_text

__all__ = ["TARGETS", "Target", "with_command"]


@dataclass(frozen=True)
class Target:
    """One kind of file.

    Attributes:
        name: its name.
        format: the format.
        reader: its readers, in words.
        modules: the modules whose lines are counted, by the beginning of their names.
        write: writes a recipe into an empty folder and returns the path for the library.
        look: uses the path as the library uses such a file.
        command: runs the commands that take such a file.
        raw: whether it is a text.
    """

    name: str
    format: str
    reader: str
    modules: tuple[str, ...]
    write: Callable[[Recipe, Path], Path]
    look: Callable[[Path], None]
    command: Callable[[Path], None]
    raw: bool = False


def no_command(path: Path) -> None:
    """Run nothing: no command reads it, or only through a model."""


_FILES = (
    *("keras_nanguard._files.scan", "keras_nanguard._files.formats.opening", "keras_nanguard._files.formats.npz"),
    *("keras_nanguard._files.formats.contents", "keras_nanguard._files.formats.limits", "keras_nanguard._files.formats.names"),
)
_POLICY = (
    "keras_nanguard._policy.documents",
    "keras_nanguard._policy.records",
    "keras_nanguard._policy.actions",
)
_REPORT = ("keras_nanguard._report.", "keras_nanguard._core.incident", "keras_nanguard._core.json_records")

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *(
            Target(
                f"policy-{word}",
                word.upper(),
                "`Policy.load`, `check-policy`",
                (*_POLICY, "keras_nanguard._policy.policy"),
                write,
                runs.look_policy,
                lambda path: command("check-policy", path) and None,
                raw=True,
            )
            for word, write in (
                ("toml", runs.policy_as(".toml", toml_text)),
                ("json", runs.policy_as(".json", json_text)),
                ("yaml", runs.policy_as(".yaml", yaml_text)),
            )
        ),
        Target(
            "recording",
            "`recording.sqlite`",
            "`Recording.read`, `report`, `watch`, a resumed run",
            ("keras_nanguard._recording.", "keras_nanguard._report."),
            runs.recording_at,
            runs.look_recording,
            runs.report_commands,
        ),
        Target(
            "run",
            "directory of a run",
            "`report`, the page, `watch`",
            (*_REPORT, "keras_nanguard._recording."),
            runs.directory,
            runs.look_directory,
            runs.report_commands,
        ),
        Target(
            "bundle",
            "bundle of an incident",
            "`replay`, the page",
            (
                "keras_nanguard._files.bundles",
                "keras_nanguard._report.cards",
                "keras_nanguard._core.incident",
                "keras_nanguard._core.json_records",
                "keras_nanguard._files.formats.npz",
            ),
            runs.bundle_at,
            runs.look_bundle,
            lambda path: None,
        ),
        Target(
            "snapshots",
            "`snapshots/`",
            "`NanGuard(resume=True)`",
            (
                "keras_nanguard._fit.snapshot_files",
                "keras_nanguard._fit.resume",
                "keras_nanguard._fit.recovery",
                "keras_nanguard._policy.decide",
            ),
            runs.snapshots,
            runs.look_snapshots,
            no_command,
        ),
        Target(
            "npz",
            "`.npz`",
            "`scan`, `repair`",
            _FILES,
            models.npz,
            models.look_model,
            models.model_commands,
        ),
        Target(
            "keras",
            "`.keras`, and its folder",
            "`scan`, `repair`",
            (*_FILES, "keras_nanguard._files.formats.hdf5", "keras_nanguard._files.formats.names"),
            models.keras_file,
            models.look_model,
            models.model_commands,
        ),
        Target(
            "weights",
            "`.weights.h5`, legacy `.h5`",
            "`scan`, `repair`",
            (*_FILES, "keras_nanguard._files.formats.hdf5"),
            models.weights,
            models.look_model,
            models.model_commands,
        ),
        Target(
            "sharded",
            "`.weights.json` with shards",
            "`scan`, `repair`",
            (*_FILES, "keras_nanguard._files.formats.hdf5"),
            models.sharded,
            models.look_model,
            models.model_commands,
        ),
        Target(
            "orbax",
            "Orbax checkpoint",
            "`scan`",
            (*_FILES, "keras_nanguard._files.formats.orbax"),
            models.orbax,
            models.look_model,
            models.model_commands,
        ),
    )
}
"""All targets by name."""


def with_command(recipe: Recipe) -> bool:
    """Whether the commands are also run on an input: for one of 32."""
    return hashlib.sha256(json.dumps(recipe).encode()).digest()[0] % 32 == 0
