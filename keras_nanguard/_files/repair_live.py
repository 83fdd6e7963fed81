"""The repair of a live model: each bad array is replaced at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files import isolated
from keras_nanguard._files.formats.contents import Contents, ModelArray
from keras_nanguard._files.formats.npz import opened_arrays
from keras_nanguard._files.live import live_contents
from keras_nanguard._files.repair_arrays import Repair, Values, by_name
from keras_nanguard._files.repair_report import RepairOptions, RepairReport
from keras_nanguard._files.scan import scan_contents
from keras_nanguard._files.scan_report import ScanReport
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)


def repair_model(model: Any, source: Any, options: RepairOptions) -> RepairReport:
    """Replace the bad values of a model's variables; the source is a model, a file or `None`."""
    contents = live_contents(model)
    before = scan_contents(contents, options.limits)
    options.refuse_no_match(before)
    with _good_arrays(source, before) as good:
        changes = tuple(LiveRepair(model, contents, options, good).changes(before))
    after = None if options.dry_run else scan_contents(contents, options.limits)
    return RepairReport(before.source, None, None, options.dry_run, changes, before, after)


@contextmanager
def _good_arrays(source: Any, before: ScanReport) -> Iterator[Mapping[str, ModelArray]]:
    """Yield the arrays of a source by path; of a file only those that are bad in the model."""
    if source is None:
        yield {}
    elif not isinstance(source, (str, os.PathLike)):
        yield by_name(live_contents(source))
    else:
        names = [entry.path for entry in before.bad]
        with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
            copy = os.path.join(folder, "values.npz")
            isolated.ask("values", os.fsdecode(source), names=names, output=copy)
            with opened_arrays(copy) as stored:
                yield stored


class LiveRepair(Repair):
    """The repair of a live model: each array is replaced at once.

    Args:
        model: the model.
        contents, options, good: see `Repair`.
    """

    def __init__(
        self,
        model: Any,
        contents: Contents,
        options: RepairOptions,
        good: Mapping[str, ModelArray],
    ):
        super().__init__(contents, options, good)
        self._model = model
        self._starts: dict[int, dict[int, Any]] = {}

    def replace(self, array: Any, values: NDArray[Any]) -> None:
        """Assign the values to the variable."""
        array.variable.assign(np.array(values))

    def initial(self, array: Any) -> Values:
        """Return a value of the layer's initializer; for a slot the one in a new optimizer with the
        same configuration, and for a moving average of a weight that weight."""
        if array.who.role != "slot":
            return keras_layers.initial_value(self._model, array.variable)
        optimizer = array.owner
        if id(optimizer) not in self._starts:
            fresh = keras_optimizers.fresh_like(optimizer).variables
            starts = {id(v): start for v, start in zip(optimizer.variables, fresh, strict=True)}
            averaged = {id(mean): w for mean, w in keras_optimizers.averages_of(optimizer)}
            self._starts[id(optimizer)] = starts | averaged
        return keras_variables.read(self._starts[id(optimizer)][id(array.variable)])
