"""Planning of the repair of an open file: the replacement of each bad array, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.arrays import named_dtype
from keras_nanguard._files.config_tree import optimizer_settings
from keras_nanguard._files.initial_values import initial_value
from keras_nanguard._files.mend import Change, Choices, bad_values, repaired_values
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.stored import MAX_UNBACKED, Contents, StoredArray

__all__ = ["FileRepair"]

_ZERO_SLOTS = frozenset(("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "Lion", "Lamb", "Adadelta", "LossScaleOptimizer"))
"""Optimizers of Keras whose slots are all initialized with 0 (`keras.src.optimizers`; Adagrad, Ftrl and Nadam differ)."""


_INITIAL_SCALE = 2.0**15
"""Default initial scale of a `LossScaleOptimizer`."""


METHODS = {
    "initial": "set to initial values",
    "zeros": "set to 0",
    "ones": "set to 1",
    "source": "were bad: the variable was taken from the source",
}
"""What each method does, in words."""


class FileRepair:
    """The plan of the repair of one open file: for each array to replace, a function that returns the new values."""

    def __init__(
        self,
        contents: Contents,
        choices: Choices,
        donors: Callable[[str], NDArray[Any] | str],
        draw: np.random.Generator,
    ):
        self._arrays = {array.location: array for array in contents.arrays}
        self._identities = dict(zip(self._arrays, identities(contents), strict=True))
        self._config = contents.config
        self._choices, self._donors, self._draw = choices, donors, draw
        self._unbacked = 0
        self.replacements: dict[str, Callable[[], NDArray[Any]]] = {}

    def plan(self, bad: Iterable[str]) -> list[Change]:
        """Return the change of each bad location, and fill `replacements`."""
        changes, reset = [], False
        for location in bad:
            identity = self._identities[location]
            if identity.role == "slot" and self._choices.slots == "reset" and not self._arrays[location].unread:
                reset = True
            else:
                changes.append(self._change(self._arrays[location], identity))
        return changes + (self._reset_slots() if reset else [])

    def _change(self, array: StoredArray, identity: Identity) -> Change:
        method = self._choices.method(identity.role)
        if array.unread:
            return Change(identity.path, array.location, method, "skipped", f"not read: {array.unread}")
        if refusal := self._too_large(array):
            return Change(identity.path, array.location, method, "skipped", refusal)
        values = array.read()
        bad = self._bad(values, identity)
        count = int(bad.sum())
        new = self._new_values(values, bad, method, identity, array)
        if isinstance(new, str):
            return Change(identity.path, array.location, method, "skipped", new, count)
        if self._bad(new, identity).any():
            return Change(identity.path, array.location, method, "skipped", "the new values are bad too", count)
        self._replace(array, new)
        detail = f"{count} of {bad.size} values {METHODS[method]}"
        return Change(identity.path, array.location, method, "done", detail, count)

    def _bad(self, values: NDArray[Any], identity: Identity) -> NDArray[np.bool_]:
        return bad_values(values, identity.name, identity.role, identity.layer_class, self._choices)

    def _too_large(self, array: StoredArray) -> str:
        """Return why an array is not loaded and rewritten, if so: the file declares far more than it stores."""
        self._unbacked += array.unbacked
        if self._unbacked <= MAX_UNBACKED:
            return ""
        self._unbacked -= array.unbacked
        return f"it declares {array.nbytes} bytes and the file stores {array.stored}: load the model and repair that"

    def _new_values(
        self, values: NDArray[Any], bad: NDArray[np.bool_], method: str, identity: Identity, array: StoredArray
    ) -> NDArray[Any] | str:
        if not bad.any():
            return "no single value is bad"
        donor = self._donors(identity.path) if method == "source" else ""
        if isinstance(donor, np.ndarray) and donor.shape != values.shape:
            donor = f"the source has the shape {donor.shape} there"
        first: NDArray[Any] | str = ""
        if method == "initial":
            first = initial_value(identity.name, array.shape, identity.settings, self._draw)
        return repaired_values(values, bad, method, first, donor, self._choices.remedy(identity.role))

    def _replace(self, array: StoredArray, new: NDArray[Any]) -> None:
        ordered = np.asfortranarray(new) if array.order == "F" else np.ascontiguousarray(new)
        self.replacements[array.key] = lambda: ordered

    def _reset_slots(self) -> list[Change]:
        changes = []
        refusal = self._reset_refusal()
        scale = self._initial_scale()
        for location, identity in self._identities.items():
            array, name = self._arrays[location], identity.name.rpartition("/")[2]
            if identity.role != "slot" or not array.is_float or name == "learning_rate":
                continue
            if reason := refusal or array.unread or self._too_large(array):
                changes.append(Change(identity.path, location, "reset", "skipped", reason))
                continue
            value = scale if name == "dynamic_scale" else 0.0
            self.replacements[array.key] = partial(np.full, array.shape, value, named_dtype(array.dtype), array.order)
            changes.append(Change(identity.path, location, "reset", "done", f"set to {value:g}, the initial value"))
        return changes

    def _reset_refusal(self) -> str:
        settings = optimizer_settings(self._config)
        kind = settings.get("class_name")
        if kind not in _ZERO_SLOTS:
            named = kind or "(which the file does not name)"
            return f"the initial slots of the optimizer {named} are not known: reset those of the loaded model"
        if settings.get("use_ema"):
            return "the optimizer has moving averages of the weights, which must not become 0: reset the loaded model"
        return ""

    def _initial_scale(self) -> float:
        node: Any = self._config
        for key in ("compile_config", "optimizer", "config"):
            node = node.get(key) if isinstance(node, Mapping) else None
        given = node.get("initial_scale") if isinstance(node, Mapping) else None
        return float(given) if isinstance(given, (int, float)) and 0.0 < given < math.inf else _INITIAL_SCALE

