"""Records the calls of layers and losses of a model during one replay.

The `call` of every layer, operation of a functional model and loss is overridden on the instance.
So it is always known which of them is running, and every call adds a row to a table. A probe on its
inputs and outputs, an identity with its own gradient, shows which layer the backward pass is in.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.origins import OriginTracker, bad_rows, operand
from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._core import finiteness
from keras_nanguard._core.observations import COMPILE_LOSS, Origin
from keras_nanguard._core.verdict import LayerRow
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    losses as keras_losses,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import Overrides

LAYER, LOSS, REGULARIZER = "layer", "loss", "regularizer"
"""Kinds of calls."""

CALLS, ROWS = 4, 5000
"""Maximum number of calls of one layer with their own rows (the cell of an RNN runs once per time
step), and of all rows.
"""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a layer, loss or regularizer: inputs, outputs, and the gradients that came back.

    `number` counts the calls of its target.
    """

    path: str
    layer_class: str
    parent: Call | None
    role: str
    number: int
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients_out: list[Any] = field(default_factory=list)
    gradients_in: list[Any] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """The phase of a step to which it belongs."""
        return "forward" if self.role == LAYER else self.role

    def rows(self) -> list[LayerRow]:
        """Return the row of each output in the table of layers."""
        finite = all_finite(self.inputs)
        arrays = map(keras_arrays.dense, self.outputs)
        return [layer_row(self.path, self.layer_class, array, finite) for array in arrays]


class LayerTable:
    """The table of layers (`rows`) of an eager run, and the result of each loss before its
    reduction, by name (`sample_losses`).
    """

    def __init__(self) -> None:
        self.rows: list[LayerRow] = []
        self.sample_losses: list[tuple[str, Any]] = []

    def ended(self, call: Call) -> None:
        """Record a call that has ended, and release its tensors."""
        if call.role == LOSS and call.path != COMPILE_LOSS:
            self.sample_losses += [(call.path, keras_arrays.dense(t)) for t in call.outputs]
        elif call.role == LAYER and (call.number <= CALLS or not all_finite(call.outputs)):
            self.rows += call.rows() if len(self.rows) < ROWS else []
        call.inputs, call.outputs = [], []


class Instrument(Overrides):
    """Context in which the calls of a model's layers and losses are recorded.

    Args:
        model: the model; `None` records nothing.
        ended: receives each call when it has ended.
        origins: the tracker of bad values, which receives the running layers. Without one, each
            call keeps the gradients that come back.
    """

    GRADIENTS: ThreadOverrides | None = None
    """Overrides the start of a backward pass with `backward`, if a backend has a call for it."""

    def __init__(
        self, model: Any, ended: Callable[[Call], None], origins: OriginTracker | None = None
    ):
        super().__init__()
        self.model, self.ended = model, ended
        self.origins, self._keeps_gradients = origins or OriginTracker(), origins is None
        self._stack: list[Call] = []
        self._counts: Counter[int] = Counter()

    def __enter__(self) -> Instrument:
        for target, name, role in self._targets():
            self.set(target, name, self._watching(target, getattr(target, name), role))
        self._begin()
        if self.GRADIENTS is not None:
            self.GRADIENTS.enter(self)
        return self

    def __exit__(self, *details: Any) -> None:
        if self.GRADIENTS is not None:
            self.GRADIENTS.leave(self)
        self.give_back()

    def _targets(self) -> list[tuple[Any, str, str]]:
        """Return the overridden methods: `(target, attribute, role)`."""
        if self.model is None:
            return []
        layers = keras_layers.layers_of(self.model)
        calls = [(o, "call", LAYER) for o in (*layers, *keras_layers.operations_of(self.model))]
        calls += [(loss, "call", LOSS) for loss in keras_losses.losses_of(self.model)]
        found = [*{id(call[0]): call for call in calls}.values()]
        found += [(layer, "activity_regularizer", REGULARIZER) for layer in layers]
        found += [(v, "regularizer", REGULARIZER) for v in self.model.trainable_variables]
        return [entry for entry in found if callable(getattr(entry[0], entry[1], None))]

    def _begin(self) -> None:
        """Store in which trace the run is."""

    def _here(self) -> bool:
        """Whether a call belongs to the recorded run."""
        return True

    def _is_float(self, value: Any) -> bool:
        """Whether an object is a tensor that can be NaN."""
        raise NotImplementedError

    def _plain(self, value: Any) -> Any:
        """Return the tensor that is recorded for a value."""
        return value

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
            self._counts[id(target)] += 1
            number = self._counts[id(target)]
            current = Call(self._path(target, role), watched, parent, role, number)
            with self._inside(current):
                args, kwargs = keras.tree.map_structure(
                    lambda t: self._taken_in(current, t), (args, kwargs)
                )
                outputs = real(*args, **kwargs)
                outputs = keras.tree.map_structure(lambda t: self._given_out(current, t), outputs)
            self.ended(current)
            return outputs

        return call

    def _path(self, target: Any, role: str) -> str:
        if role == LOSS:
            return str(getattr(target, "name", "") or COMPILE_LOSS)
        if isinstance(target, keras.Variable):  # a weight with a regularizer
            return str(target.path)
        parent = next((c for c in reversed(self._stack) if c.role != LOSS), None)
        return keras_layers.path_of(target, parent.path if parent is not None else None, self.model)

    @contextlib.contextmanager
    def _inside(self, call: Call) -> Iterator[None]:
        """Let a call be the innermost running one."""
        self._stack.append(call)
        try:
            with self.origins.in_call((call.path, call.layer_class), call.phase):
                yield
        finally:
            self._stack.pop()

    def _taken_in(self, call: Call, value: Any) -> Any:
        if keras_variables.is_variable(value) and call.role == REGULARIZER:
            value = self.tensor_of(value)
        elif not self._is_float(value):
            return value
        call.inputs.append(self._plain(value))
        self.origins.entered(self._plain(value))
        return self._probe(call, value, call.gradients_in, False)

    def _given_out(self, call: Call, value: Any) -> Any:
        if not self._is_float(value):
            return value
        call.outputs.append(self._plain(value))
        return self._probe(call, value, call.gradients_out, True)

    def _probe(self, call: Call, value: Any, gradients: list[Any], entering: bool) -> Any:
        """Return the value, with a gradient that is recorded when it passes."""

        def passed(upstream: Any) -> Any:
            self.origins.frames = _frames(call if entering else call.parent)
            if self._keeps_gradients:
                gradients.append(upstream)
            return upstream

        return keras_layers.with_mask_of(value, self._identity(value, passed))


def backward(
    real: Callable[..., Any], running: Sequence[Instrument], *args: Any, **kwargs: Any
) -> Any:
    """Run a backward pass: the override of the function that begins it."""
    with running[-1].origins.in_phase("backward"):
        return real(*args, **kwargs)


def _frames(call: Call | None) -> list[tuple[str, str]]:
    frames: list[tuple[str, str]] = []
    while call is not None:
        frames.insert(0, (call.path, call.layer_class))
        call = call.parent
    return frames


def layer_row(
    path: str, layer_class: str, array: np.ndarray[Any, Any], inputs_finite: bool = True
) -> LayerRow:
    """Return the row of a table for one result of one layer."""
    name, wide = array.dtype.name, finiteness.widen(array)
    nan, inf, size = finiteness.counts(wide)
    plus = int((wide == np.inf).sum()) if inf else 0
    finite = wide[np.isfinite(wide)] if nan or inf else wide.ravel()
    low = high = mean = share = math.nan
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        share = max(abs(low), abs(high)) / finiteness.float_limits(name)[1]
        with np.errstate(all="ignore"):
            mean = float(finite.mean(dtype=np.float64))
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
        minus_inf=inf - plus,
        size=size,
        share_of_range=share,
        inputs_finite=inputs_finite,
    )


def all_finite(tensors: Iterable[Any]) -> bool:
    """Whether every entry of these tensors is finite."""
    return all(finiteness.is_finite(keras_arrays.dense(t)) for t in tensors)


class CallOrigins:
    """The origins of bad values in a replay that has kept the tensors of each call: the first layer
    with finite inputs and a bad result.

    Args:
        gradients: each gradient with the path of its variable.
    """

    def __init__(
        self, calls: Sequence[Call], args: Sequence[Any], gradients: Sequence[tuple[Any, str]]
    ):
        self.calls, self.count = calls, batches.row_count(args)
        self.batch = [part for part in batches.parts(args) if not all_finite([part.value])]
        self.bad = [path for gradient, path in gradients if not all_finite([gradient])]

    def of(self, loss: Any, layer: str = "") -> Origin | None:
        """Return the first bad call of the forward pass, else this layer, else the loss."""
        for call in self.calls:
            if not all_finite(call.outputs) and all_finite(call.inputs):
                return self._origin(call, call.phase, call.outputs)
        if self.batch:
            return Origin(0, "batch", self.batch[0].path, "forward")
        for call in self.calls:
            if layer and call.path == layer:
                return self._origin(call, "forward", call.outputs)
        return Origin(0, "operation", "", "loss", culprit="loss")

    def written(self, variable: Any) -> Origin | None:
        """Return the origin of a bad statistic."""
        return self.of(None, variable.path.rpartition("/")[0])

    def of_gradient(self, gradient: Any) -> Origin | None:
        """Return the first call of the backward pass with a bad result of a finite gradient."""
        for call in reversed(self.calls):
            if not all_finite(call.gradients_in) and all_finite(call.gradients_out):
                return self._origin(call, "backward", call.gradients_in)
        for call in reversed(self.calls):
            own = any(path.startswith(f"{call.path}/") for path in self.bad)
            if own and call.role != LOSS and all_finite(call.gradients_out):
                return self._origin(call, "backward", call.gradients_out)
        return None

    def _origin(self, call: Call, phase: str, results: Sequence[Any]) -> Origin:
        arrays = [finiteness.widen(keras_arrays.dense(t)) for t in results]
        nan, inf, size = map(sum, zip((0, 0, 0), *map(finiteness.counts, arrays)))
        path = "" if call.path == COMPILE_LOSS else call.path
        rows = (bad_rows(array, self.count)[0] for array in arrays if self.count > 1)
        return Origin(
            order=self.calls.index(call),
            source="operation",
            op="",
            phase=phase,
            frames=(call.path,),
            culprit=path or "loss",
            layer_class=call.layer_class,
            nan=nan,
            inf=inf,
            size=size,
            operands=tuple(map(operand, call.inputs)),
            rows=next(filter(None, rows), ()),
        )
