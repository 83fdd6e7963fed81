"""`repair`: replaces the bad values of a live model or of a file, and reports every change and every omission."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.notebook import block
from keras_nanguard._files.judge import STATISTICS_LIMIT
from keras_nanguard._files.mend import Change, Choices
from keras_nanguard._files.names import identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.repair_file import FileRepair
from keras_nanguard._files.repair_model import model_arrays, repair_model
from keras_nanguard._files.rewrite import backed_up, repaired_path, rewritten
from keras_nanguard._files.scan import scan
from keras_nanguard._files.scan_report import ScannedVariable, ScanReport
from keras_nanguard._files.stored import readable

__all__ = ["FORMAT", "RepairReport", "repair"]

FORMAT = 1
"""Version of the JSON format of a `RepairReport`."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of `repair`.

    Attributes:
        source: path of the file, or name of the model.
        output: path of the new file, or `None` for a model and if nothing was written.
        backup: path of the backup of the old file, if it was replaced.
        dry_run: whether nothing was changed.
        changes: one entry for each bad variable.
        before: the scan before.
        after: the scan after, or `None` if nothing was changed.
    """

    source: str
    output: str | None
    backup: str | None
    dry_run: bool
    changes: tuple[Change, ...]
    before: ScanReport
    after: ScanReport | None

    @property
    def clean(self) -> bool:
        """Whether no error or warning is left; for a dry run, whether there was none."""
        return (self.after or self.before).clean

    @property
    def done(self) -> tuple[Change, ...]:
        """The changes that were made (in a dry run: that would be made)."""
        return tuple(change for change in self.changes if change.status == "done")

    @property
    def skipped(self) -> tuple[Change, ...]:
        """The variables that were not changed, each with the reason."""
        return tuple(change for change in self.changes if change.status == "skipped")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version."""
        return {
            "format": FORMAT,
            "source": self.source,
            "output": self.output,
            "backup": self.backup,
            "dry_run": self.dry_run,
            "clean": self.clean,
            "changes": [asdict(change) for change in self.changes],
            "before": self.before.counts(),
            "after": self.after.counts() if self.after else None,
        }

    def closing(self) -> list[str]:
        """Return the last lines of the report: which file was written, and what is still bad."""
        lines = [] if self.changes else [f"{self.source}: nothing to repair."]
        if self.dry_run:
            lines.append("Dry run: nothing was written.")
        if self.output:
            lines.append(f"Written to {self.output}.")
        if self.backup:
            lines.append(f"The old file is {self.backup}.")
        left = self.after.bad if self.after else [] if self.dry_run else self.before.bad
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            lines.append(f"Still bad: {', '.join(entry.path for entry in left[:5])}{more}.")
        return lines

    def __repr__(self) -> str:
        return f"RepairReport({self.source!r}, {len(self.done)} done, {len(self.skipped)} skipped)"

    def _repr_html_(self) -> str:
        title = f"{self.source}: {len(self.done)} repaired, {len(self.skipped)} left alone"
        rows = [(change.path, change.status, change.detail) for change in self.changes]
        return block(title, self.closing(), ("variable", "", "what was done"), rows, self.clean)

    def __str__(self) -> str:
        listed = [f"{change.status} {change.path}: {change.detail}" for change in self.changes]
        return "\n".join([*listed, *self.closing()])


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
    seed: int | None = None,
) -> RepairReport:
    """Replace the bad values of a live model or of a file, and nothing else.

    A value is bad if it is NaN or infinite, exceeds a limit, or is a negative variance. Healthy values
    stay bit-identical. A new file is written next to the old one and checked before it gets its name.

    Args:
        model_or_path: a built Keras model, which is changed, or the path of a file, which is not.
        output: path of the new file; by default `model.keras` gives `model.repaired.keras`.
        statistics: `"initial"` (bad values are replaced by initial values: mean 0, variance 1), `"source"` or
            `"keep"`. By default `"source"` if there is one, else `"initial"`.
        weights: `"initial"` (drawn by the layer's initializer), `"zeros"`, `"ones"`, `"source"` or `"keep"`. By default
            `"source"` if there is one, else `"keep"`: a weight is not invented unless requested.
        slots: `"reset"` (all slots of an optimizer with a bad one are reset; its step count and learning rate stay),
            `"source"` or `"keep"`. By default `"reset"`.
        source: a good model or file, from which whole variables are taken.
        only: shell patterns; only variables whose path or location matches one are repaired.
        limit: magnitude above which any value is bad.
        statistics_limit: magnitude above which a moving statistic is bad.
        in_place: replace the file, and keep the old one as `<path>.bak`.
        dry_run: report what would be done, and write nothing.
        overwrite: allow `output` to exist.
        seed: seed for the random initial values of a file.

    Returns:
        The report: every change, every variable that was not changed and why, and the scans before and after.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
        GuardError: if the arguments contradict each other, or the output exists.

    Example:

        report = repair("model.keras", weights="zeros")
        print(report)
    """
    auto = "source" if source is not None else None
    choices = Choices(
        statistics or auto or "initial",
        weights or auto or "keep",
        slots or "reset",
        STATISTICS_LIMIT if statistics_limit is None else statistics_limit,
        limit,
    )
    if source is None and "source" in (statistics, weights, slots):
        raise GuardError(expected("a source to take values from", "source=None", "Name a good model or file."))
    donors = _donors(source)
    if not isinstance(model_or_path, (str, os.PathLike)):
        if output is not None or in_place:
            raise GuardError(expected("a path, to write a file", "a model", "Save the repaired model yourself."))
        return _live(model_or_path, choices, donors, only, dry_run)
    path = os.fspath(model_or_path)
    final = _final_name(path, output, in_place, overwrite, dry_run)
    return _file(path, final, choices, donors, only, dry_run, np.random.default_rng(seed))


def _live(model: Any, choices: Choices, donors: Callable[[str], NDArray[Any] | str], only: Sequence[str], dry_run: bool) -> RepairReport:
    before = scan(model, **choices.limits)
    bad = [entry.path for entry in before.bad if _selected(entry, only)]
    changes = repair_model(model, bad, choices, donors, dry_run)
    after = None if dry_run else scan(model, **choices.limits)
    return RepairReport(before.source, None, None, dry_run, tuple(changes), before, after)


def _final_name(path: str, output: str | os.PathLike[str] | None, in_place: bool, overwrite: bool, dry_run: bool) -> str:
    if in_place and output is not None:
        raise GuardError(expected("either in_place=True or an output", f"both, output={os.fspath(output)!r}", "Drop one."))
    final = path if in_place else os.fspath(output) if output is not None else repaired_path(path)
    if not in_place and os.path.abspath(final) == os.path.abspath(path):
        raise GuardError(expected("another output", f"output={final!r}", "Pass in_place=True to replace the file."))
    if not in_place and not overwrite and not dry_run and os.path.exists(final):
        raise GuardError(expected("an output that does not exist", f"output={final!r}", "Pass overwrite=True."))
    return os.path.abspath(final)


def _file(
    path: str,
    final: str,
    choices: Choices,
    donors: Callable[[str], NDArray[Any] | str],
    only: Sequence[str],
    dry_run: bool,
    draw: np.random.Generator,
) -> RepairReport:
    before = scan(path, **choices.limits)
    in_place = os.path.abspath(path) == final
    output = backup = after = None
    with readable(path), opened(path) as contents:
        work = FileRepair(contents, choices, donors, draw)
        changes = work.plan([entry.location for entry in before.bad if _selected(entry, only)])
        if work.replacements and not dry_run:
            with rewritten(path, final, contents.kind, work.replacements) as target:
                after = scan(target, **choices.limits)
                backup = backed_up(path, contents.kind) if in_place else None
            output = final
    return RepairReport(before.source, output, backup, dry_run, tuple(changes), before, after)


def _selected(entry: ScannedVariable, only: Sequence[str]) -> bool:
    names = (entry.path, entry.location, entry.layer)
    return not only or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in only)


def _donors(source: Any) -> Callable[[str], NDArray[Any] | str]:
    """Return a function that returns the good value of a variable by its path, or the reason why there is none."""
    if source is None:
        return lambda path: "no source was given"
    if isinstance(source, (str, os.PathLike)):
        scan(source)  # in a child process: checks that the file can be read before it is opened in this process
        return partial(_stored_donor, os.fspath(source))
    values = model_arrays(source)
    return lambda path: values[path]() if path in values else "the source has no such variable"


def _stored_donor(source: str, path: str) -> NDArray[Any] | str:
    with opened(source) as contents:
        for array, identity in zip(contents.arrays, identities(contents), strict=True):
            if path in (identity.path, array.location) and not array.unread:
                return array.read()
    return "the source has no such variable"
