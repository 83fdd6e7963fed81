"""The repair of a live model: each bad array is replaced at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._backends.shared.step_cache import forget_step
from keras_nanguard._core.plain_values import first_line
from keras_nanguard._files import isolated
from keras_nanguard._files.formats.contents import ModelArray
from keras_nanguard._files.formats.npz import opened_arrays
from keras_nanguard._files.live import live_contents, numbered_paths
from keras_nanguard._files.repair_arrays import NotRepaired, Repair, RepairOptions, by_name
from keras_nanguard._files.reports import RepairReport
from keras_nanguard._files.scan import scan_contents
from keras_nanguard._keras import (
    compiled as keras_compiled,
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)


def repair_model(model: Any, source: Any, options: RepairOptions) -> RepairReport:
    """Replace the bad values of a model's variables; the source is a model, a file or `None`."""
    contents = live_contents(model)
    before = scan_contents(contents, options.limits)
    options.refuse_no_match(before)

    starts = cache(keras_optimizers.first_values)

    def initial(array: Any) -> NDArray[Any]:
        try:
            return np.broadcast_to(first(array), array.shape)
        except NotRepaired:
            raise
        except Exception as error:  # classes of the user raise anything
            what, remedy = "its initializer could not be evaluated", ""
            if array.who.role == "slot":
                what = "no optimizer can be made like this one"
                remedy = ": give its class a get_config with its arguments"
            raise NotRepaired(f"{what} ({first_line(error)}){remedy}") from error

    def first(array: Any) -> NDArray[Any]:
        if array.who.role != "slot":
            start = keras_layers.initial_value(model, array.variable)
            if start is None:
                raise NotRepaired(f"its initializer is not known ({array.who.name})")
            return start
        new = starts(array.owner).get(id(array.variable))
        if new is None:
            raise NotRepaired("a new optimizer of this configuration has other slots")
        return keras_variables.read(new)

    def replace(array: Any, values: NDArray[Any]) -> None:
        array.variable.assign(np.array(values))

    pairs = zip(before.variables, contents.arrays, strict=True)
    with _good_arrays(source, model, [array for entry, array in pairs if entry.bad]) as good:
        changes = tuple(Repair(options, contents, good, initial, replace).changes(before))
    changed = not options.dry_run and any(change.status == "done" for change in changes)
    if changed and keras_layers.use_written_values(model):
        keras_compiled.make_again(model)
        forget_step(model)
    after = None if options.dry_run else scan_contents(contents, options.limits)
    return RepairReport(before.source, None, None, options.dry_run, changes, before, after)


@contextmanager
def _good_arrays(source: Any, model: Any, bad: Sequence[Any]) -> Iterator[Mapping[Any, ModelArray]]:
    """Yield the arrays of a source by path; of a file only those of these variables of a model."""
    if source is None:
        yield {}
    elif not isinstance(source, (str, os.PathLike)):
        yield by_name(live_contents(source))
    else:
        path = os.fsdecode(source)
        with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
            copy = os.path.join(folder, "values.npz")
            numbered = numbered_paths(model)
            paths = {a.who.path: [a.who.path, *numbered.get(id(a.variable), ())] for a in bad}
            names = [name for known in paths.values() for name in known]
            found = isolated.run_in_subprocess("values", path, names=names, output=copy)
            unread = {name: ModelArray(name, unread=reason) for name, reason in found.items()}
            with opened_arrays(copy) as stored:
                good = stored | unread
                found_by = {p: [good[n] for n in known if n in good] for p, known in paths.items()}
                yield {path: arrays[0] for path, arrays in found_by.items() if arrays}
