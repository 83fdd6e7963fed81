"""Live models: their variables as arrays, the repair of these, and loading. Keras is imported only
with a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError, GuardError, expected
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files import isolated
from keras_nanguard._files.formats.contents import (
    Contents,
    Identity,
    ModelArray,
    float_name,
    named_dtype,
)
from keras_nanguard._files.formats.hdf5 import SIGNATURE
from keras_nanguard._files.formats.limits import first_line, readable
from keras_nanguard._files.formats.names import role_of
from keras_nanguard._files.formats.npz import opened_arrays
from keras_nanguard._files.repair_report import RepairOptions
from keras_nanguard._files.repairs import Repair, Values


@dataclass(slots=True)
class LiveArray(ModelArray):
    """The value of one variable of a live model.

    Attributes:
        variable: the variable.
        owner: the layer or optimizer that owns it.
    """

    variable: Any = None
    owner: Any = None


def is_model(thing: Any) -> bool:
    """Return whether an object is a model or a layer, by its attributes; a class is not."""
    attributes = ("variables", "trainable_variables", "name")
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in attributes)


def live_contents(model: Any) -> Contents:
    """Return a model with the arrays of `live_arrays`."""
    return Contents("model", list(live_arrays(model)), source=str(model.name))


def live_arrays(model: Any) -> list[LiveArray]:
    """Return every variable of a model once: layers in the order of the model, then optimizers,
    then metrics.

    Args:
        model: a built Keras model or layer.

    Returns:
        The variables, nested models included, and the states of stateful recurrent layers.

    Raises:
        GuardError: if it is not a model, or has never been built.
    """
    if not is_model(model):
        remedy = "Pass a model or the path of a file."
        raise GuardError(expected("a Keras model", type(model).__name__, remedy))
    if not getattr(model, "built", True):
        remedy = "Call it on data once, or call build() with input shapes."
        raise GuardError(expected("a built model", f"model={model.name}", remedy))
    metrics = getattr(model, "metrics_variables", ())
    of_metrics = {id(variable) for variable in metrics}
    found = [live for live in _of_layers(model) if id(live.variable) not in of_metrics]
    for name, optimizer in _named_optimizers(model):
        for variable in optimizer.variables:
            who = Identity(name, _path(variable), "slot", "Optimizer")
            found.append(_live(who, who.name, variable, optimizer))
    for variable in metrics:
        who = Identity("metrics", _path(variable), "other", "Metric")
        found.append(_live(who, who.name, variable, model))
    unique: dict[int, LiveArray] = {}
    for live in found:
        unique.setdefault(id(live.variable), live)
    return list(unique.values())


def _live(who: Identity, location: str, variable: Any, owner: Any) -> LiveArray:
    dtype = str(getattr(variable.dtype, "name", variable.dtype))
    kind = named_dtype(dtype)
    return LiveArray(
        location,
        dtype,
        tuple(int(length) for length in variable.shape),
        is_float=kind is not None and float_name(kind) is not None,
        pieces=lambda: (_value(variable),),
        whole=partial(_value, variable),
        who=who,
        variable=variable,
        owner=owner,
    )


def _value(variable: Any) -> NDArray[Any]:
    """Return a copy of the value of a variable."""
    if hasattr(variable, "detach"):  # a torch tensor, such as the states of a stateful layer
        variable = variable.detach().cpu()
    return np.array(variable.numpy() if hasattr(variable, "numpy") else variable)


def _named_optimizers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers of a model, each with its attribute; after a dot the number of one in a
    list, a tuple or a dict. A GAN has more than one."""
    from keras_nanguard._keras.optimizers import find_optimizers
    from keras_nanguard._keras.variables import flat

    places: dict[int, str] = {}
    for name, value in [*vars(model).items(), ("optimizer", getattr(model, "optimizer", None))]:
        items = list(flat(value))
        for number, item in enumerate(items):
            own = name.lstrip("_") if item is value else f"{name.lstrip('_')}.{number}"
            places[id(item)] = own
    for optimizer in find_optimizers(model):
        yield places[id(optimizer)], optimizer


def _of_layers(model: Any) -> Iterator[LiveArray]:
    from keras_nanguard._keras import layers as keras_layers

    for outer, layer in [((), model), *keras_layers.walk(model)]:
        within = keras_layers.children(layer)
        inner = {id(variable) for child in within for variable in child.variables}
        path, kind = "/".join(outer) or str(layer.name), type(layer).__name__
        settings = {"dtype": getattr(layer, "compute_dtype", "")}
        for variable in layer.variables:
            if id(variable) not in inner:
                name = str(variable.name)
                role = "weight" if variable.trainable else role_of(name, kind)
                who = Identity(path, name, role, kind, settings)
                yield _live(who, _path(variable), variable, layer)
        for place, state in enumerate(keras_layers.recurrent_states(layer)):
            who = Identity(path, f"states/{place}", "other", kind, settings)
            yield _live(who, who.path, state, layer)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


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
        from keras_nanguard._keras import (  # imports Keras
            layers as keras_layers,
            optimizers as keras_optimizers,
            variables as keras_variables,
        )

        if array.who.role != "slot":
            return keras_layers.initial_value(self._model, array.variable)
        optimizer = array.owner
        if id(optimizer) not in self._starts:
            fresh = keras_optimizers.fresh_like(optimizer).variables
            starts = {id(v): start for v, start in zip(optimizer.variables, fresh, strict=True)}
            averaged = {id(mean): w for mean, w in keras_optimizers.averages_of(optimizer)}
            self._starts[id(optimizer)] = starts | averaged
        return keras_variables.read(self._starts[id(optimizer)][id(array.variable)])


# Loading of models and data, for the commands that need a live model


def load_model(path: str) -> Any:
    """Load a model.

    Args:
        path: a `.keras` or legacy `.h5` file of a whole model.

    Returns:
        The model, compiled if the file has a compile configuration.

    Raises:
        FileFormatError: if it cannot be loaded; code in a file (a Lambda layer) is never executed.
    """
    shown = plain_text(path)
    if not os.path.exists(path):
        remedy = "There is no such file."
        raise FileFormatError(expected("a model file", f"path={shown!r}", remedy))
    if not (os.path.isfile(path) or os.path.isdir(path)):  # a pipe would block
        received = f"{shown}, which is not a file"
        raise FileFormatError(expected("a model file", received, "Pass a model file."))
    refuse_code_in_hdf5(path)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    try:
        return keras.models.load_model(path, safe_mode=True)
    except Exception as error:  # Keras and its backend raise anything on a foreign file
        reason = first_line(error)
        raise FileFormatError(f"{shown} cannot be loaded as a model: {reason}.") from error


def refuse_code_in_hdf5(path: str) -> None:
    """Raise a `FileFormatError` for a legacy `.h5` file with a Lambda layer: Keras 3.6, for one,
    runs its code in safe mode, too."""
    if not os.path.isfile(path):
        return
    with readable(path), open(path, "rb") as file:
        if file.read(len(SIGNATURE)) != SIGNATURE:
            return
    config = isolated.ask("names", path)["config"]
    refused = f"{plain_text(path)} cannot be loaded as a model"
    if config is None:
        raise FileFormatError(f"{refused}: it has no configuration.")
    nodes = [config]
    for node in nodes:  # which grows
        known = node if isinstance(node, dict) else {}
        words = [known.get(key) for key in ("class_name", "registered_name", "function_type")]
        if any("lambda" in str(word).lower() for word in words):
            reason = "it has a Lambda layer, which is code and never runs"
            raise FileFormatError(f"{refused}: {reason}.")
        nodes += node if isinstance(node, list) else known.values()


def data_arrays(path: str) -> tuple[Any, Any]:
    """Load inputs and targets from an `.npz` or `.npy` file; nothing pickled is loaded.

    Args:
        path: an `.npy` file with the inputs, or an `.npz` file: `x` and `y` are inputs and targets,
            and if there is no `x`, all arrays except `y` are inputs by name.

    Returns:
        Inputs and targets; the latter may be `None`.

    Raises:
        FileFormatError: if the file cannot be read.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        received = f"{plain_text(path)}, which is not a file"
        raise FileFormatError(expected("an .npz or .npy file", received, "Name another file."))
    with readable(path):
        with open(path, "rb") as file:
            is_archive = file.read(2) == b"PK"
        if is_archive:
            with opened_arrays(path) as stored:
                arrays = {name: array.read() for name, array in stored.items()}
        else:  # mapped into memory, it cannot declare more than it contains
            arrays = {"x": np.array(np.load(path, mmap_mode="r", allow_pickle=False))}
    _refuse_no_data(arrays, path)
    targets = arrays.pop("y", None)
    if not arrays:
        received = f"{plain_text(path)} without one"
        remedy = "Save the inputs under the name x."
        raise FileFormatError(expected("an array with inputs", received, remedy))
    if "x" in arrays or len(arrays) == 1:
        return arrays.get("x", next(iter(arrays.values()))), targets
    return arrays, targets


def _refuse_no_data(arrays: Mapping[str, NDArray[Any]], path: str) -> None:
    """Raise a `FileFormatError` for arrays that are not numeric, have no rows, or differ in their
    number of rows."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc" or not array.ndim or not len(array):
            what = "arrays of numbers with at least one row"
            received = f"{plain_text(name)} of {array.dtype} and shape {array.shape}"
            in_file = f"{received} in {plain_text(path)}"
            raise FileFormatError(expected(what, in_file, "Check the data."))
    if len({len(array) for array in arrays.values()}) > 1:
        what = "arrays with the same number of rows"
        lengths = ", ".join(f"{plain_text(name)} with {len(a)}" for name, a in arrays.items())
        in_file = f"{lengths} in {plain_text(path)}"
        raise FileFormatError(expected(what, in_file, "Check the data."))


def first_rows(data: Any, count: int) -> Any:
    """Return the first rows of an array, or of every array of a dict; `None` for `None`."""
    if isinstance(data, dict):
        return {name: array[:count] for name, array in data.items()}
    return None if data is None else data[:count]
