"""Repair of a file: a temporary file is written, scanned, and then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._files import reading
from keras_nanguard._files.repair_options import RepairOptions
from keras_nanguard._files.reports import Change, RepairReport
from keras_nanguard._files.scan import report_of

__all__ = ["checked_output", "repair_file", "repaired_path"]

_ENDINGS = (".weights.h5", ".keras", ".h5", ".npz", ".hdf5")


def repair_file(path: str, output: str, source: Any, options: RepairOptions) -> RepairReport:
    """Replace the bad values of a file.

    Args:
        path: the file.
        output: absolute path of the new file; that of the old one replaces it.
        source: a good model or file, or `None`.
        options: how each role is repaired.

    Returns:
        The report.
    """
    # Through links that the user named: the target of a link is replaced, and the link stays.
    final = os.path.realpath(output) if os.path.isfile(output) else output
    scratch = os.path.join(os.path.dirname(final), f".nanguard-{uuid.uuid4().hex}")
    backup = after = None
    try:
        with _stored(source) as good:
            found = reading.ask(
                "repair",
                path,
                options=asdict(options),
                source=good,
                scratch=scratch,
                output=final,
            )
        if found["after"]:
            after = report_of(final, found["after"])
            backup = _backup(final) if os.path.abspath(path) == output else None
            atomic_files.publish(Path(scratch, os.path.basename(final)), Path(final))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    before = report_of(path, found["before"])
    changes = tuple(Change(**change) for change in found["changes"])
    written = final if after else None
    return RepairReport(before.source, written, backup, options.dry_run, changes, before, after)


@contextmanager
def _stored(source: Any) -> Iterator[str | None]:
    """Yield the path of a file with the values of the source: its own, or one with those of a live
    model."""
    if source is None or isinstance(source, (str, os.PathLike)):
        yield None if source is None else os.fsdecode(source)
        return
    from keras_nanguard._files.live import live_variables
    from keras_nanguard._files.repair_stored import write_values

    values = {live.identity.path: live.read for live in reversed(live_variables(source))}
    with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
        write_values(path := os.path.join(folder, "source.npz"), values)
        yield path


def checked_output(path: str, output: str | None, *, in_place: bool, overwrite: bool) -> str:
    """Return the absolute path of the new file.

    Raises:
        GuardError: if it exists, is a folder or a device, has no folder, is the old file (also
            through a link), or `in_place` was given, too.
    """
    if in_place and output is not None:
        received = f"both, output={output!r}"
        raise GuardError(expected("either in_place=True or an output", received, "Drop one."))
    if in_place:
        return os.path.abspath(path)
    final = os.path.abspath(repaired_path(path) if output is None else output)
    if os.path.realpath(final) == os.path.realpath(path):
        remedy = "Pass in_place=True to replace the file."
        raise GuardError(expected("another output", f"output={output!r}", remedy))
    exists = os.path.exists(final)
    if exists and not os.path.isfile(final):
        remedy = "Name another one."
        raise GuardError(expected("an output that is a file", f"output={final!r}", remedy))
    if exists and not overwrite:
        remedy = "Pass overwrite=True."
        raise GuardError(expected("an output that does not exist", f"output={final!r}", remedy))
    if not os.path.isdir(folder := os.path.dirname(final)):
        remedy = f"Create the folder {folder} first."
        raise GuardError(expected("an existing folder", f"output={final!r}", remedy))
    return final


def repaired_path(path: str) -> str:
    """Return the name of the repaired copy of a file: `model.keras` gives
    `model.repaired.keras`."""
    path = os.path.abspath(path)
    ending = next((ending for ending in _ENDINGS if path.endswith(ending)), "")
    return f"{path.removesuffix(ending)}.repaired{ending}"


def _backup(path: str) -> str:
    """Back up a file as `<path>.bak`, or with the next free number, and return that path."""
    number, backup = 0, f"{path}.bak"
    while os.path.lexists(backup):
        number += 1
        backup = f"{path}.bak{number}"
    try:
        os.link(path, backup)
    except OSError:
        shutil.copy2(path, backup)
    return backup
