"""Repair of a live model, variable by variable. The caller has imported the backend of the
model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from keras_nanguard._files import reading
from keras_nanguard._files.live import live_variables, optimizers
from keras_nanguard._files.opening import opened_arrays
from keras_nanguard._files.problems import RepairOptions
from keras_nanguard._files.repair_stored import Values, repaired
from keras_nanguard._files.reports import Change, RepairReport
from keras_nanguard._files.scanner import scan_model


def repair_model(model: Any, source: Any, options: RepairOptions) -> RepairReport:
    """Replace the bad values of a model's variables; the source is a model, a file or `None`."""
    before = scan_model(model, options.limits)
    wanted = {one.path for one in before.bad if options.selects(one.path, one.location, one.layer)}
    changes = _changes(model, wanted, _values_of(source, wanted), options)
    after = None if options.dry_run else scan_model(model, options.limits)
    return RepairReport(before.source, None, None, options.dry_run, tuple(changes), before, after)


def _values_of(source: Any, wanted: Iterable[str]) -> dict[str, Callable[[], Values]]:
    """Return a function for each variable of the source that is wanted and found, by its path."""
    if source is None:
        return {}
    if not isinstance(source, (str, os.PathLike)):
        return {live.identity.path: live.read for live in reversed(live_variables(source))}
    with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
        copy = os.path.join(folder, "values.npz")
        reading.ask("values", os.fsdecode(source), names=sorted(wanted), output=copy)
        with opened_arrays(copy) as stored:
            found = {name: array.read() for name, array in stored.items()}
    return {path: partial(found.__getitem__, path) for path in found}


def _changes(
    model: Any, wanted: set[str], source: dict[str, Callable[[], Values]], options: RepairOptions
) -> list[Change]:
    from keras_nanguard._keras import layers as keras_layers  # imports Keras

    changes, reset = [], False
    for live in live_variables(model):
        path = live.identity.path
        if path not in wanted:
            continue
        if live.identity.role == "slot" and options.slots == "reset":
            reset = True
            continue
        change, values = repaired(
            live.identity,
            live.keras_path,
            live.read(),
            options,
            partial(keras_layers.initial_value, model, live.variable),
            source.get(path, lambda: "the source has no such variable"),
        )
        changes.append(change)
        if values is not None and not options.dry_run:
            live.variable.assign(values)
    return changes + (_reset_slots(model, wanted, options.dry_run) if reset else [])


def _reset_slots(model: Any, wanted: set[str], dry_run: bool) -> list[Change]:
    """Reset every optimizer with a bad slot to the slots of a new one with the same configuration.

    Step counts and learning rates stay (a bad learning rate is replaced by that of the
    configuration); moving averages of the weights are reset to the weights.
    """
    from keras_nanguard._keras import optimizers as keras_optimizers  # imports Keras

    changes = []
    for name, optimizer in optimizers(model):
        paths = {f"{name}/{variable.path}": variable for variable in optimizer.variables}
        if not wanted & set(paths):
            continue
        fresh = keras_optimizers.fresh_like(optimizer)
        averaged = {id(mean): weight for mean, weight in keras_optimizers.averages_of(optimizer)}
        for (path, variable), start in zip(paths.items(), fresh.variables, strict=True):
            if variable.name in ("iteration", "learning_rate") and path not in wanted:
                continue
            first = averaged.get(id(variable), start)
            if not dry_run:
                variable.assign(first.numpy() if hasattr(first, "numpy") else first)
            changes.append(Change(path, variable.path, "reset", "done", "set to its initial value"))
    return changes
