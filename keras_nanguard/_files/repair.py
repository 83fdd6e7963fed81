"""`repair`: replaces the bad values of a live model or of a file, and reports every change and
every omission. Imports no backend."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import GuardError, as_words, expected
from keras_nanguard._core.finiteness import widen
from keras_nanguard._files import isolated
from keras_nanguard._files.problems import STATISTICS_LIMIT, Limits
from keras_nanguard._files.repair_arrays import RepairOptions
from keras_nanguard._files.reports import Change, RepairReport, report_of

_ENDINGS = (".weights.h5", ".keras", ".h5", ".npz", ".hdf5")


def repair(
    model_or_path: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    statistics: str | None = None,
    weights: str | None = None,
    slots: str | None = None,
    source: Any = None,
    only: Sequence[str] = (),
    limit: float | None = None,
    statistics_limit: float | None = None,
    in_place: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
) -> RepairReport:
    """Replace the bad values of a live model or of a file, and nothing else.

    A value is bad if it is NaN or infinite, exceeds a limit, or is a negative variance. Healthy
    values stay bit-identical. A new file is written next to the old one, with its permissions. It
    gets its name only after it was read back and checked.

    Args:
        model_or_path: a built Keras model, which is changed, or the path of a file, which is not.
        output: path of the new file, with the extension of the old one; by default `model.keras`
            gives `model.repaired.keras`.
        statistics: `"initial"` (bad values are replaced by initial values: mean 0, variance 1),
            `"source"` or `"keep"`. By default `"source"` if there is one, else `"initial"`.
        weights: `"initial"` (drawn by the layer's initializer; of a file only constants, others are
            skipped), `"zeros"`, `"ones"`, `"source"` or `"keep"`. By default `"source"` if there is
            one, else `"keep"`.
        slots: `"reset"` (if an optimizer has a bad slot, all its slots are reset; its step count
            and learning rate do not change), `"source"` or `"keep"`. By default `"reset"`.
        source: a good model or file, from which whole variables are taken.
        only: shell pattern or patterns; only variables whose path or location matches one are
            repaired.
        limit: magnitude above which any value is bad.
        statistics_limit: magnitude above which a moving statistic is bad.
        in_place: replace the file, and keep the old one as `<path>.bak`. If it is a symbolic link,
            the target is replaced.
        dry_run: report what would be done, and write nothing.
        overwrite: allow `output` to exist.

    Returns:
        The report: every change, every variable that was not changed and why, and the scans before
        and after.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
        GuardError: if an argument is invalid, the arguments contradict each other, no variable
            matches `only`, or the output exists.
        OSError: if the output, or a temporary file, cannot be written.

    Example:

        report = repair("model.keras", weights="zeros")
        print(report)
    """
    auto = "source" if source is not None else None
    if source is None and "source" in (statistics, weights, slots):
        remedy = "Pass a good model or file."
        raise GuardError(expected("a source to take values from", "source=None", remedy))
    bound = STATISTICS_LIMIT if statistics_limit is None else statistics_limit
    options = RepairOptions(
        statistics or auto or "initial",
        weights or auto or "keep",
        slots or "reset",
        Limits(limit, bound),
        only=as_words(only, "only"),
        dry_run=dry_run,
    )
    if isinstance(model_or_path, (str, os.PathLike)):
        path, named = os.fsdecode(model_or_path), None if output is None else os.fsdecode(output)
        final = checked_output(path, named, in_place=in_place, overwrite=overwrite or dry_run)
        return _repair_file(path, final, source, options)
    if output is not None or in_place:
        remedy = "Save the repaired model yourself."
        raise GuardError(expected("a path, to write a file", "a model", remedy))
    from keras_nanguard._files.repair_live import repair_model  # imports Keras

    return repair_model(model_or_path, source, options)


def _repair_file(path: str, output: str, source: Any, options: RepairOptions) -> RepairReport:
    """Replace the bad values of a file: a temporary file is written, scanned, and then renamed to
    the absolute path `output`, which may be that of the file."""
    # Through links that the user named: the target of a link is replaced, and the link stays.
    final = os.path.realpath(output) if os.path.isfile(output) else output
    scratch = os.path.join(os.path.dirname(final), f".nanguard-{uuid.uuid4().hex}")
    backup = after = None
    try:
        with _stored(source) as good:
            files: dict[str, Any] = {"source": good, "scratch": scratch, "output": final}
            found = isolated.run_in_subprocess("repair", path, options=asdict(options), **files)
        before = report_of(found["before"])
        options.refuse_no_match(before)
        if found["after"]:
            after = report_of(found["after"])
            backup = _backup(final) if os.path.abspath(path) == output else None
            atomic_files.publish(Path(scratch, os.path.basename(final)), Path(final))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
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
    from keras_nanguard._files.live import live_arrays, numbered_paths

    found, numbered = live_arrays(source), numbered_paths(source)
    named = [(live, [live.who.path, *numbered.get(id(live.variable), ())]) for live in found]
    counts = Counter(path for _, paths in named for path in paths)
    values = {}
    for live, paths in named:
        if single := [path for path in paths if counts[path] == 1]:
            values.update(dict.fromkeys(single, widen(live.read())))
    with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
        path = os.path.join(folder, "source.npz")
        atomic_files.save_arrays(Path(path), values)
        yield path if values else None  # an archive without arrays could be of any format


def checked_output(
    path: str, output: str | None, *, overwrite: bool, in_place: bool = False, extension: str = ""
) -> str:
    """Return the absolute path of the new file.

    Args:
        path: the old file.
        output: path of the new file, by default `model.repaired.keras` next to `model.keras`.
        in_place: replace the old file.
        overwrite: allow the output to exist.
        extension: extension of the new file, by default that of the old one, as Keras chooses the
            format of a file by its extension.

    Raises:
        GuardError: if it exists, is a folder or a device, has no folder or another extension, is
            the old file (also through a link), or `in_place` was given, too.
    """
    if in_place and output is not None:
        what, received = "either a repair in place or an output", f"both, output={output!r}"
        raise GuardError(expected(what, received, "Leave one out."))
    whole = os.path.abspath(path)
    if in_place:
        return whole
    ending = next((ending for ending in _ENDINGS if whole.endswith(ending)), "")
    wanted = extension or ending
    default = f"{whole.removesuffix(ending)}.repaired{wanted}"
    final = os.path.abspath(default if output is None else output)
    exists, is_file = os.path.exists(final), os.path.isfile(final)
    folder, same = os.path.dirname(final), os.path.realpath(final) == os.path.realpath(path)
    for wrong, what, remedy in (
        (same, "another output", "Name another one."),
        (exists and not is_file, "an output that is a file", "Name another one."),
        (exists and not overwrite, "a new output", "It exists: name another one, or overwrite it."),
        (not os.path.isdir(folder), "an existing folder", f"Create the folder {folder} first."),
        (not final.endswith(wanted), f"an output that ends in {wanted}", "Name another one."),
    ):
        if wrong:
            raise GuardError(expected(what, f"output={final!r}", remedy))
    return final


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
