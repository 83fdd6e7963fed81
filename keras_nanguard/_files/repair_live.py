"""The repair of a live model: each bad array is replaced at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.live import live_contents
from keras_nanguard._files.repair_arrays import Repair, by_name
from keras_nanguard._files.repair_options import RepairOptions
from keras_nanguard._files.reports import RepairReport
from keras_nanguard._files.scan import scan_contents
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)


def repair_model(model: Any, source: Any, options: RepairOptions) -> RepairReport:
    """Replace the bad values of a model's variables; the source is a good model or `None`."""
    contents = live_contents(model)
    before = scan_contents(contents, options.limits)
    options.refuse_no_match(before)

    @cache
    def starts(optimizer: Any) -> dict[int, Any]:
        """Return where each slot starts, by `id`: as in a new optimizer with the same
        configuration, and a moving average of a weight at that weight."""
        fresh = keras_optimizers.fresh_like(optimizer).variables
        averages = keras_optimizers.averages_of(optimizer)
        pairs = (*zip(optimizer.variables, fresh, strict=True), *averages)
        return {id(variable): start for variable, start in pairs}

    def initial(array: Any) -> NDArray[Any]:
        if array.who.role != "slot":
            return keras_layers.initial_value(model, array.variable)
        return keras_variables.read(starts(array.owner)[id(array.variable)])

    def replace(array: Any, values: NDArray[Any]) -> None:
        array.variable.assign(np.array(values))

    good = {} if source is None else by_name(live_contents(source))
    changes = tuple(Repair(contents, options, good, initial, replace).changes(before))
    after = None if options.dry_run else scan_contents(contents, options.limits)
    return RepairReport(before.source, None, None, options.dry_run, changes, before, after)
