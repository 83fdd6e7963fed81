"""Repairs a live model variable by variable. Whoever holds the model has imported its backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.live import LiveVariable, live_variables, optimizers
from keras_nanguard._files.mend import Change, Choices, bad_values, mended

__all__ = ["model_arrays", "repair_model"]


def model_arrays(model: Any) -> Mapping[str, Callable[[], NDArray[Any]]]:
    """Return a function for each variable of a model, by path, that reads its value."""
    return {live.identity.path: live.read for live in reversed(live_variables(model))}


def repair_model(
    model: Any, bad: Iterable[str], choices: Choices, donors: Callable[[str], NDArray[Any] | str], dry_run: bool
) -> list[Change]:
    """Replace the bad values of a model's variables.

    Args:
        model: a built model.
        bad: paths of the bad variables.
        choices: how each role is repaired.
        donors: gives the good value of a variable by its path, or the reason why there is none.
        dry_run: change nothing.

    Returns:
        What was done, or would be.
    """
    from keras_nanguard._keras import layers as keras_layers  # imports Keras, which whoever holds a model has imported

    wanted, changes, reset = set(bad), [], False
    for live in live_variables(model):
        if live.identity.path not in wanted:
            continue
        if live.identity.role == "slot" and choices.slots == "reset":
            reset = True
            continue
        change, values = _one(model, live, choices, donors, keras_layers.initial_value)
        changes.append(change)
        if values is not None and not dry_run:
            live.variable.assign(values)
    return changes + (_reset_slots(model, wanted, dry_run) if reset else [])


def _one(
    model: Any,
    live: LiveVariable,
    choices: Choices,
    donors: Callable[[str], NDArray[Any] | str],
    initial_value: Callable[..., NDArray[Any]],
) -> tuple[Change, NDArray[Any] | None]:
    who, method = live.identity, choices.method(live.identity.role)
    values = live.read()
    bad = bad_values(values, who.name, who.role, who.layer_class, choices)
    count = int(bad.sum())
    new: NDArray[Any] | str = "no single value is at fault"
    if count:
        first = initial_value(model, live.variable) if method == "initial" else ""
        donor = donors(who.path) if method == "source" else ""
        if isinstance(donor, np.ndarray) and donor.shape != values.shape:
            donor = f"the source has the shape {donor.shape} there"
        new = mended(values, bad, method, first, donor, choices.remedy(who.role))
    if isinstance(new, str):
        return Change(who.path, live.keras_path, method, "skipped", new, count), None
    if bad_values(new, who.name, who.role, who.layer_class, choices).any():
        return Change(who.path, live.keras_path, method, "skipped", "the new values are bad too", count), None
    detail = f"{count} of {bad.size} values replaced ({method})"
    return Change(who.path, live.keras_path, method, "done", detail, count), new


def _reset_slots(model: Any, wanted: set[str], dry_run: bool) -> list[Change]:
    """Give every optimizer that holds a bad slot the slots that a fresh one of the same configuration has.

    Step counts and learning rates stay (a rate that is itself bad comes from the configuration); averages of the
    weights start from the weights.
    """
    from keras_nanguard._keras import optimizers as keras_optimizers  # imports Keras, see above

    changes = []
    for name, optimizer in optimizers(model):
        paths = {f"{name}/{variable.path}": variable for variable in optimizer.variables}
        if not wanted & set(paths):
            continue
        fresh = keras_optimizers.fresh_like(optimizer)
        averages = {id(average): weight for average, weight in keras_optimizers.averages_of(optimizer)}
        for (path, variable), start in zip(paths.items(), fresh.variables, strict=True):
            if variable.name in ("iteration", "learning_rate") and path not in wanted:
                continue
            first = averages.get(id(variable), start)
            if not dry_run:
                variable.assign(first.numpy() if hasattr(first, "numpy") else first)
            changes.append(Change(path, variable.path, "reset", "done", "set to what the optimizer starts with"))
    return changes
