"""Repair of a file: a new one is written beside it, scanned, and then gets its name."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._files import reading
from keras_nanguard._files.repair_options import RepairOptions
from keras_nanguard._files.reports import Change, RepairReport, ScannedVariable
from keras_nanguard._files.scan import scan

__all__ = ["checked_output", "repair_file", "repaired_path"]


def repair_file(path: str, output: str, source: Any, options: RepairOptions) -> RepairReport:
    """Replace the bad values of a file.

    Args:
        path: the file.
        output: path of the new file; that of the old one replaces it.
        source: a good model or file, or `None`.
        options: how each role is repaired.

    Returns:
        The report.
    """
    with reading.one_worker():
        before = scan(path, **options.limits)
        bad = options.selected(before.bad)
        if not bad:
            return RepairReport(before.source, None, None, options.dry_run, (), before, None)
        in_place = os.path.abspath(path) == output
        final = (
            os.path.realpath(output) if os.path.isfile(output) else output
        )  # through links that the user named
        scratch = os.path.join(os.path.dirname(final), f".nanguard-{uuid.uuid4().hex}")
        backup = after = None
        try:
            with _stored(source, bad) as donor:
                found = reading.ask(
                    "repair",
                    path,
                    bad=[entry.location for entry in bad],
                    options=asdict(options),
                    source=donor,
                    scratch=scratch,
                    output=final,
                )
            if found["written"]:
                after = scan(os.path.join(scratch, os.path.basename(final)), **options.limits)
                backup = _backed_up(path, final, found["kind"]) if in_place else None
                _publish_all(scratch, final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    changes = tuple(Change(**change) for change in found["changes"])
    written = final if found["written"] else None
    return RepairReport(before.source, written, backup, options.dry_run, changes, before, after)


@contextmanager
def _stored(source: Any, bad: Sequence[ScannedVariable]) -> Iterator[str | None]:
    """Yield the path of a file with the values of the source: its own, or one with those of a live
    model."""
    if source is None or isinstance(source, (str, os.PathLike)):
        yield None if source is None else os.fsdecode(source)
        return
    from keras_nanguard._files.live import live_variables
    from keras_nanguard._files.repair_stored import write_values

    paths = {entry.path for entry in bad}
    values = {
        live.identity.path: live.read
        for live in reversed(live_variables(source))
        if live.identity.path in paths
    }
    with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
        write_values(path := os.path.join(folder, "source.npz"), values)
        yield path


def checked_output(path: str, output: str | None, *, in_place: bool, overwrite: bool) -> str:
    """Return the absolute path of the new file.

    Raises:
        GuardError: if it exists, has no folder, is the old file, or `in_place` was given, too.
    """
    if in_place and output is not None:
        raise GuardError(
            expected("either in_place=True or an output", f"both, output={output!r}", "Drop one.")
        )
    final = os.path.abspath(
        path if in_place else output if output is not None else repaired_path(path)
    )
    if not in_place and final == os.path.abspath(path):
        raise GuardError(
            expected(
                "another output", f"output={output!r}", "Pass in_place=True to replace the file."
            )
        )
    if not in_place and not overwrite and os.path.exists(final):
        raise GuardError(
            expected("an output that does not exist", f"output={final!r}", "Pass overwrite=True.")
        )
    folder = os.path.dirname(final)
    if not os.path.isdir(folder):
        raise GuardError(
            expected(
                "an existing folder", f"output={final!r}", f"Create the folder {folder} first."
            )
        )
    return final


def repaired_path(path: str) -> str:
    """Return the name of the repaired copy of a file: `model.keras` gives
    `model.repaired.keras`."""
    folder, name = os.path.split(os.path.abspath(path))
    for ending in (".weights.h5", ".weights.json", ".keras", ".h5", ".npz", ".hdf5"):
        if name.endswith(ending):
            return os.path.join(folder, f"{name.removesuffix(ending)}.repaired{ending}")
    return os.path.join(folder, f"{name}.repaired")


def _backed_up(path: str, final: str, kind: str) -> str:
    """Back up the old file as `<path>.bak`, or with the next free number, and return that path; of
    shards back up all."""
    if kind == "sharded":
        from keras_nanguard._files.opening import shard_names

        for name in shard_names(path):
            _backup(os.path.join(os.path.dirname(final), name))
    return _backup(final)


def _backup(path: str) -> str:
    number, backup = 0, f"{path}.bak"
    while os.path.lexists(backup):
        number += 1
        backup = f"{path}.bak{number}"
    if os.path.isdir(path):
        shutil.copytree(path, backup, symlinks=True)
        return backup
    try:
        os.link(path, backup)
    except OSError:
        shutil.copy2(path, backup)
    return backup


def _publish_all(scratch: str, final: str) -> None:
    """Give every new file its final name, the named one last: of shards the index."""
    for name in sorted(os.listdir(scratch), key=lambda name: name == os.path.basename(final)):
        _publish(os.path.join(scratch, name), os.path.join(os.path.dirname(final), name))


def _publish(new: str, final: str) -> None:
    links = os.path.islink(new) or os.path.islink(
        final
    )  # what a link in a folder leads to is not of this model
    if os.path.isdir(final) and os.path.isdir(new) and not links:
        for name in os.listdir(new):
            _publish(os.path.join(new, name), os.path.join(final, name))
    else:
        atomic_files.publish(Path(new), Path(final))
