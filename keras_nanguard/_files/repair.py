"""`repair`: replaces the bad values of a live model or of a file, and reports every change and
every omission."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._files.problems import STATISTICS_LIMIT, Limits
from keras_nanguard._files.repair_file import checked_output, repair_file
from keras_nanguard._files.repair_options import RepairOptions
from keras_nanguard._files.reports import RepairReport

__all__ = ["repair"]


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

    A value is bad if it is NaN or infinite, exceeds a limit, or is a negative variance. Healthy
    values stay bit-identical. A new file is written next to the old one, with its permissions, and
    checked before it gets its name.

    Args:
        model_or_path: a built Keras model, which is changed, or the path of a file, which is not.
        output: path of the new file; by default `model.keras` gives `model.repaired.keras`.
        statistics: `"initial"` (bad values are replaced by initial values: mean 0, variance 1),
            `"source"` or `"keep"`. By default `"source"` if there is one, else `"initial"`.
        weights: `"initial"` (drawn by the layer's initializer), `"zeros"`, `"ones"`, `"source"` or
            `"keep"`. By default `"source"` if there is one, else `"keep"`: a weight is not invented
            unless requested.
        slots: `"reset"` (all slots of an optimizer with a bad one are reset; its step count and
            learning rate stay), `"source"` or `"keep"`. By default `"reset"`.
        source: a good model or file, from which whole variables are taken.
        only: shell patterns; only variables whose path or location matches one are repaired.
        limit: magnitude above which any value is bad.
        statistics_limit: magnitude above which a moving statistic is bad.
        in_place: replace the file, and keep the old one as `<path>.bak`. If it is a symbolic link,
            the target is replaced.
        dry_run: report what would be done, and write nothing.
        overwrite: allow `output` to exist.
        seed: seed for the random initial values of a file.

    Returns:
        The report: every change, every variable that was not changed and why, and the scans before
        and after.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
        GuardError: if the arguments contradict each other, or the output exists.
        OSError: if the output cannot be written.

    Example:

        report = repair("model.keras", weights="zeros")
        print(report)
    """
    auto = "source" if source is not None else None
    if source is None and "source" in (statistics, weights, slots):
        remedy = "Name a good model or file."
        raise GuardError(expected("a source to take values from", "source=None", remedy))
    bound = STATISTICS_LIMIT if statistics_limit is None else statistics_limit
    options = RepairOptions(
        statistics or auto or "initial",
        weights or auto or "keep",
        slots or "reset",
        Limits(limit, bound),
        only=tuple(only),
        dry_run=dry_run,
        seed=seed,
    )
    if isinstance(model_or_path, (str, os.PathLike)):
        path, named = os.fsdecode(model_or_path), None if output is None else os.fsdecode(output)
        final = checked_output(path, named, in_place=in_place, overwrite=overwrite or dry_run)
        return repair_file(path, final, source, options)
    if output is not None or in_place:
        remedy = "Save the repaired model yourself."
        raise GuardError(expected("a path, to write a file", "a model", remedy))
    from keras_nanguard._files.repair_model import repair_model

    return repair_model(model_or_path, source, options)
