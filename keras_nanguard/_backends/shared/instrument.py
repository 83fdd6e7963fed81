"""Records the calls of layers and losses of a model during one replay.

The `call` of every layer, operation of a functional model and loss is overridden on the instance.
So it is always known which of them is running, and every call adds a row to a table. A probe on its
inputs and outputs, an identity with its own gradient, shows which layer the backward pass is in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import COMPILE_LOSS, LayerRow
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import Overrides

LAYER, LOSS, REGULARIZER = "layer", "loss", "regularizer"
"""Kinds of calls."""

CALLS = 4
"""Maximum number of calls of one layer with their own rows (the cell of an RNN runs once per time
step).
"""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a layer, loss or regularizer: inputs, outputs, and the gradients that came
    back.
    """

    path: str
    layer_class: str
    parent: Call | None
    role: str
    outer_phase: str = ""
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients_out: list[Any] = field(default_factory=list)
    gradients_in: list[Any] = field(default_factory=list)
    finished: int = -1

    @property
    def loss(self) -> bool:
        """Whether it is the call of a loss."""
        return self.role == LOSS

    @property
    def phase(self) -> str:
        """The phase of a step to which it belongs."""
        return "forward" if self.role == LAYER else self.role


class Instrument:
    """Context in which the calls of a model's layers and losses are recorded.

    Args:
        model: the model.
        origins: the tracker of bad values, which receives the running layers; or `None`.
        keep: whether to keep the tensors of each call (which a compiled run has to return) instead
            of statistics.

    Attributes:
        calls: the calls in the order in which they ended.
        rows: the table of layers, empty with `keep`.
        sample_losses: the result of each loss before its reduction, by name, empty with `keep`.
    """

    def __init__(self, model: Any, origins: Any = None, keep: bool = False):
        self.model, self.origins, self.keep = model, origins, keep
        self.calls: list[Call] = []
        self.rows: list[LayerRow] = []
        self.sample_losses: list[tuple[str, Any]] = []
        self._stack: list[Call] = []
        self._counts: dict[int, int] = {}
        self._overrides = Overrides()

    def __enter__(self) -> Instrument:
        for target, name, role in self._targets():
            self._overrides.set(target, name, self._watching(target, getattr(target, name), role))
        self._begin()
        return self

    def __exit__(self, *details: Any) -> None:
        self._end()
        self._overrides.give_back()

    def _targets(self) -> list[tuple[Any, str, str]]:
        """Return the overridden methods: `(target, attribute, role)`."""
        watched: dict[int, tuple[Any, str, str]] = {}
        layers = keras_layers.layers_of(self.model)
        for layer in (*layers, *keras_layers.operations_of(self.model)):
            watched[id(layer)] = (layer, "call", LAYER)
        for loss in keras_losses.losses_of(self.model):
            watched[id(loss)] = (loss, "call", LOSS)
        places = [*((layer, "activity_regularizer") for layer in layers)]
        places += [(variable, "regularizer") for variable in self.model.trainable_variables]
        penalties = [
            (target, name, REGULARIZER)
            for target, name in places
            if callable(getattr(target, name, None))
        ]
        return [*watched.values(), *penalties]

    def _begin(self) -> None:
        """Override the start of a backward pass in this thread with `differentiate`, if a backend
        has a call for it.
        """

    def _end(self) -> None:
        """Undo `_begin`."""

    def differentiate(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass. Its operations belong to no layer until a probe names one."""
        origins = self.origins
        if origins is None:
            return real(*args, **kwargs)
        before, origins.phase = origins.phase, "backward"
        frames, origins.frames = origins.frames, []
        try:
            return real(*args, **kwargs)
        finally:
            origins.phase, origins.frames = before, frames

    def _here(self) -> bool:
        """Whether a call belongs to the recorded run."""
        return True

    def _is_float(self, value: Any) -> bool:
        """Whether an object is a tensor that can be NaN."""
        raise NotImplementedError

    def tensor_of(self, variable: Any) -> Any:
        """Return the value of a variable of Keras as a tensor."""
        return keras.ops.convert_to_tensor(variable)

    def returned(self, tensors: Iterable[Any]) -> list[Any]:
        """Return those of these tensors that the recorded trace can return."""
        return list(tensors)

    def _identity(self, value: Any, passed: Callable[[Any], Any]) -> Any:
        """Return the value, with a gradient that goes through `passed`."""
        raise NotImplementedError

    def _watching(self, target: Any, real: Callable[..., Any], role: str) -> Callable[..., Any]:
        watched = (
            f"{REGULARIZER} {type(real).__name__}" if role == REGULARIZER else type(target).__name__
        )

        @functools.wraps(real, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._here():
                return real(*args, **kwargs)
            parent = self._stack[-1] if self._stack else None
            current = Call(self._path(target, role), watched, parent, role)
            number = self._counts[id(target)] = self._counts.get(id(target), 0) + 1
            self._push(current)
            try:
                args, kwargs = keras.tree.map_structure(
                    lambda t: self._taken_in(current, t), (args, kwargs)
                )
                outputs = real(*args, **kwargs)
                outputs = keras.tree.map_structure(lambda t: self._given_out(current, t), outputs)
            finally:
                self._pop(current)
            self._note(current, number)
            return outputs

        return call

    def _path(self, target: Any, role: str) -> str:
        if role == LOSS:
            return str(getattr(target, "name", "") or COMPILE_LOSS)
        if isinstance(target, keras.Variable):  # a weight with a regularizer
            return str(target.path)
        parent = next((c for c in reversed(self._stack) if not c.loss), None)
        return keras_layers.path_of(target, parent.path if parent is not None else None, self.model)

    def _push(self, call: Call) -> None:
        self._stack.append(call)
        if self.origins is not None:
            self.origins.frames.append((call.path, call.layer_class))
            call.outer_phase = self.origins.phase
            if self.origins.phase == "forward":
                self.origins.phase = call.phase

    def _pop(self, call: Call) -> None:
        self._stack.pop()
        if self.origins is not None:
            self.origins.frames.pop()
            if call.outer_phase == "forward" and self.origins.phase == call.phase:
                self.origins.phase = "forward"

    def _taken_in(self, call: Call, value: Any) -> Any:
        if isinstance(value, keras.Variable) and call.role == REGULARIZER:
            value = self.tensor_of(value)
        elif not self._is_float(value):
            return value
        call.inputs.append(value)
        if self.origins is not None:
            self.origins.entered((value,))
        return self._probe(call, value, call.gradients_in, False)

    def _given_out(self, call: Call, value: Any) -> Any:
        if not self._is_float(value):
            return value
        call.outputs.append(value)
        return self._probe(call, value, call.gradients_out, True)

    def _probe(self, call: Call, value: Any, gradients: list[Any], entering: bool) -> Any:
        """Return the value, with a gradient that is recorded when it passes."""
        origins, keep = self.origins, self.keep

        def passed(upstream: Any) -> Any:
            if origins is not None:
                origins.frames = _frames(call if entering else call.parent)
            if keep:
                gradients.append(upstream)
            return upstream

        return keras_layers.with_mask_of(value, self._identity(value, passed))

    def _note(self, call: Call, number: int) -> None:
        call.finished = len(self.calls)
        if self.keep:
            self.calls.append(call)
            return
        if call.role == REGULARIZER:
            return
        if call.loss and call.path != COMPILE_LOSS:
            self.sample_losses += [(call.path, keras_variables.dense(t)) for t in call.outputs]
        bad = not all(finiteness.is_finite(keras_variables.dense(t)) for t in call.outputs)
        if number <= CALLS or bad:
            finite = all(finiteness.is_finite(keras_variables.dense(t)) for t in call.inputs)
            if not call.loss and len(self.rows) < 5000:
                self.rows += [
                    layer_row(call.path, call.layer_class, keras_variables.dense(t), finite)
                    for t in call.outputs
                ]
        call.inputs, call.outputs = [], []


def _frames(call: Call | None) -> list[tuple[str, str]]:
    frames: list[tuple[str, str]] = []
    while call is not None:
        frames.insert(0, (call.path, call.layer_class))
        call = call.parent
    return frames


LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028235e38, "float64": 1.797e308}


def layer_row(
    path: str, layer_class: str, array: np.ndarray[Any, Any], inputs_finite: bool = True
) -> LayerRow:
    """Return the row of a table for one result of one layer."""
    name = array.dtype.name
    wide = finiteness.widen(array)
    finite = wide[np.isfinite(wide)] if not finiteness.is_finite(wide) else wide.ravel()
    nan = int(np.isnan(wide).sum()) if finite.size < wide.size else 0
    plus = int((wide == np.inf).sum()) if finite.size < wide.size else 0
    low, high = (
        (float(finite.min()), float(finite.max())) if finite.size else (float("nan"), float("nan"))
    )
    with np.errstate(all="ignore"):
        mean = float(finite.mean(dtype=np.float64)) if finite.size else float("nan")
    return LayerRow(
        path=path,
        layer_class=layer_class,
        dtype=name,
        shape=tuple(int(n) for n in array.shape),
        minimum=low,
        maximum=high,
        mean=mean,
        zeros=int(finite.size - np.count_nonzero(finite)),
        nan=nan,
        plus_inf=plus,
        minus_inf=int(wide.size - finite.size) - nan - plus,
        size=int(wide.size),
        share_of_range=max(abs(low), abs(high)) / LARGEST.get(name, float("inf"))
        if finite.size
        else float("nan"),
        inputs_finite=inputs_finite,
    )
