"""The half of `_state` that is seldom needed, for replays most of all: layers, losses, metrics and policies as Keras keeps them inside.

Together with `_state` the only file that knows names private to Keras; each function says which, and why there is no
public way. `tests/diagnosis/test_internals.py` fails when a release of Keras takes one of them away.
"""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import keras
import numpy as np

from keras_nanguard import _native, _state

__all__ = [
    "adds_losses",
    "begin_at",
    "exchange",
    "exchange_policy",
    "generator_state",
    "global_seed_variables",
    "know_twins",
    "loss_weights",
    "losses_by_output",
    "losses_of",
    "mode",
    "operations_of",
    "output_shapes",
    "path_of",
    "rate_before",
    "rising",
    "running_data",
    "running_spec",
    "set_generator_state",
    "snake_case",
    "states_of_own_layers",
    "symbolic_inputs",
    "trains_on_arrays",
    "with_mask_of",
]


def operations_of(model: Any) -> list[Any]:
    """Return the operations (`keras.ops.log(x)` on symbolic tensors) of all functional models within a model."""
    found = {}
    for layer in _state.layers_of(model):
        if isinstance(layer, keras.layers.Layer) and hasattr(layer, "operations"):
            for operation in layer.operations:
                if not isinstance(operation, keras.layers.Layer):
                    found[id(operation)] = operation
    return list(found.values())


def losses_of(model: Any) -> list[Any]:
    """Return the losses of a model: Keras' sum over those given to `compile`, each of them, and those it holds itself.

    `Trainer._compile_loss` and its `_flat_losses` are private; there is no public way from a compiled model to the loss
    objects that it calls.
    """
    compiled = getattr(model, "_compile_loss", None)
    found = [compiled] if compiled is not None else []
    entries = getattr(compiled, "_flat_losses", None) or getattr(compiled, "flat_losses", None) or ()  # Keras 3.6
    found += [loss for entry in entries if (loss := getattr(entry, "loss", entry)) is not None]
    for layer in _state.layers_of(model):
        for value in vars(layer).values():
            value = list(value.values()) if isinstance(value, dict) else value
            items = value if isinstance(value, (list, tuple)) else (value,)
            found += [item for item in items if isinstance(item, keras.losses.Loss)]
    return list({id(loss): loss for loss in found}.values())


def path_of(layer: Any, parent: str | None, model: Any) -> str:
    """Return the Keras path of a layer; one without weights has none, so it is named after the layer it runs in.

    Args:
        layer: a layer or an operation.
        parent: path of the layer it runs in, `None` where it runs in none.
        model: the outermost model, whose name is no part of the paths in a functional one.
    """
    path = getattr(layer, "path", None)
    if path:
        return str(path)
    if parent is None or (parent == path_of(model, None, model) and hasattr(model, "operations")):
        return str(layer.name)
    return f"{parent}/{layer.name}"


def with_mask_of(source: Any, tensor: Any) -> Any:
    """Return the tensor with the mask that Keras has put on another one (an attribute with private accessors)."""
    mask = keras.src.backend.get_keras_mask(source)
    if mask is not None:
        keras.src.backend.set_keras_mask(tensor, mask)
    return tensor


def global_seed_variables() -> list[Any]:
    """Return the state of the generator that Keras falls back to where no seed is given, if it exists already.

    `keras.src.random.seed_generator.global_seed_generator` makes it on first use and keeps it under this name.
    """
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    return [] if generator is None else [generator.state]


def exchange(target: Any, name: str, value: Any, undo: list[tuple[Any, str, Any]]) -> None:
    """Set an attribute past Keras' tracking, and note in `undo` what it was."""
    undo.append((target, name, getattr(target, name)))
    object.__setattr__(target, name, value)


def exchange_policy(layer: Any, policy: Any, instead_of: tuple[str, ...], undo: list[tuple[Any, str, Any]]) -> None:
    """Give a layer another dtype policy where it computes or stores in one of these dtypes.

    `Layer._dtype_policy` is private; the public setter would quantize, or write into a shared `DTypePolicyMap`.
    """
    policies = (getattr(layer, "compute_dtype", ""), getattr(layer, "variable_dtype", ""))
    if hasattr(layer, "_dtype_policy") and any(dtype in instead_of for dtype in policies):
        exchange(layer, "_dtype_policy", policy, undo)


def know_twins(optimizer: Any, twins: list[tuple[Any, Any]], undo: list[tuple[Any, str, Any]]) -> None:
    """Let an optimizer take the twin of a variable for the variable itself.

    `Optimizer._trainable_variables_indices` is private; it knows the variables by a key of the backend's own variables,
    and `apply` refuses any other.
    """
    for part in {id(o): o for o in (optimizer, _state.inner(optimizer))}.values():
        known = getattr(part, "_trainable_variables_indices", None)
        if isinstance(known, dict):
            keys = [(part._var_key(_native.unwrapped(old)), part._var_key(twin)) for old, twin in twins]
            more = {twin: known[old] for old, twin in keys if old in known}
            exchange(part, "_trainable_variables_indices", {**known, **more}, undo)


def rate_before(optimizer: Any) -> float:
    """Return the rate that the last step used: under a schedule the one at the iteration before this.

    `Optimizer._learning_rate` is private; the public property evaluates it at the iteration that comes next.
    """
    optimizer = _state.inner(optimizer)
    schedule = getattr(optimizer, "_learning_rate", None)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return _state.learning_rate(optimizer)
    return float(keras.ops.convert_to_numpy(schedule(optimizer.iterations.value - 1)))


def symbolic_inputs(model: Any) -> list[Any]:
    """Return the symbolic inputs of low dtype of all functional models within a model, which cast their inputs so.

    `KerasTensor._dtype` is private and `dtype` is read-only.
    """
    found = []
    for layer in _state.layers_of(model):
        for tensor in keras.tree.flatten(getattr(layer, "_inputs", None) or []):
            if isinstance(tensor, keras.KerasTensor) and str(tensor.dtype) in ("float16", "bfloat16"):
                found.append(tensor)
    return found


def losses_by_output(model: Any) -> list[tuple[str, Any]]:
    """Return `(name of the output, loss)` for each loss given to `compile` (see `losses_of`)."""
    compiled: Any = getattr(model, "_compile_loss", None)
    if hasattr(compiled, "flat_losses"):  # Keras before 3.8 or so
        names = compiled.inferred_output_names or compiled.output_names or ()
        pairs = itertools.zip_longest(names, compiled.flat_losses or ())
        return [(str(name or ""), loss) for name, loss in pairs if loss is not None]
    return [(str(e.name or ""), e.loss) for e in getattr(compiled, "_flat_losses", None) or () if e.loss is not None]


def loss_weights(model: Any) -> list[tuple[str, float]]:
    """Return the name of each loss given to `compile` that has a weight, and the weight (see `losses_of`)."""
    compiled: Any = getattr(model, "_compile_loss", None)
    if hasattr(compiled, "flat_losses"):  # Keras before 3.8 or so
        pairs = list(zip(compiled.flat_losses or (), compiled.flat_loss_weights or ()))
    else:
        pairs = [(e.loss, e.loss_weights) for e in getattr(compiled, "_flat_losses", None) or ()]
    return [(str(loss.name), float(weight)) for loss, weight in pairs if loss is not None and isinstance(weight, (int, float))]


def snake_case(name: str) -> str:
    """Return a class name as Keras turns it into the name of an object."""
    return str(keras.src.utils.naming.to_snake_case(name))


def output_shapes(model: Any) -> list[tuple[int | None, ...]]:
    """Return the shape of each output of a functional model; none for other models."""
    return [tuple(t.shape) for t in keras.tree.flatten(getattr(model, "outputs", None) or [])]


def mode(model: Any, training: bool) -> dict[str, bool]:
    """Return the arguments that call a model in training or inference mode, none where its `call` takes none."""
    return {"training": training} if getattr(model, "_call_has_training_arg", True) else {}


def adds_losses(model: Any) -> bool:
    """Whether a layer of the model adds a loss of its own, by `add_loss` or by an activity regularizer."""
    layers = _state.layers_of(model)
    return any(getattr(la, "_losses", None) or getattr(la, "activity_regularizer", None) for la in layers)


def generator_state() -> np.ndarray[Any, Any] | None:
    """Return the state of the generator that belongs to no variable and that layers draw from: PyTorch's, else `None`."""
    if keras.backend.backend() != "torch":
        return None
    return np.array(sys.modules["torch"].get_rng_state().numpy())


def set_generator_state(state: np.ndarray[Any, Any]) -> None:
    """Put it back; a state of another backend says nothing here."""
    if keras.backend.backend() == "torch":
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.from_numpy(np.array(state)))


def begin_at(model: Any, epoch: int | None) -> None:
    """Let `fit` begin with this epoch, as Keras' own `BackupAndRestore` does; `None` takes that back.

    It comes before an `initial_epoch` that `fit` is given. `Model._initial_epoch` is private, and the only way.
    """
    if epoch is not None:
        model._initial_epoch = _Epoch(epoch)
    elif isinstance(getattr(model, "_initial_epoch", None), _Epoch):
        model._initial_epoch = None


class _Epoch(int):
    """An epoch that counts as given also where it is 0: `fit` begins with `model._initial_epoch or initial_epoch`."""

    def __bool__(self) -> bool:
        return True


def running_data() -> Any:
    """Return the data adapter of the innermost `evaluate` or `predict` that runs, `None` where it can be read only once."""
    adapter = _adapter("evaluate", "predict")
    return None if "Generator" in type(adapter).__name__ else adapter


def running_spec() -> Any:
    """Return the `element_spec` of the data that the innermost `fit` trains on, `None` where it has none.

    `TFEpochIterator._distributed_dataset` is the `tf.data.Dataset` that it was given or has made.
    """
    iterator = _epoch_iterator("fit")
    return getattr(getattr(iterator, "_distributed_dataset", None), "element_spec", None)


def trains_on_arrays() -> bool:
    """Whether the innermost `fit` that runs takes its batches out of arrays, and not from code of the user's."""
    return type(_adapter("fit")).__name__ == "ArrayDataAdapter"


def _adapter(*calls: str) -> Any:
    """Return the data adapter of the innermost of these calls that runs."""
    return getattr(_epoch_iterator(*calls), "data_adapter", None)


def _epoch_iterator(*calls: str) -> Any:
    """Return the `EpochIterator` of the innermost of these calls that runs, `None` where there is none.

    Trainers keep it in a local variable, `epoch_iterator`, and tell callbacks nothing of it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in calls and "epoch_iterator" in frame.f_locals:
            return frame.f_locals["epoch_iterator"]
        frame = frame.f_back
    return None


def rising(model: Any) -> set[str]:
    """Return the names of the metrics that are to grow; `Metric._direction` says it, which Keras' own callbacks ask, too."""
    found = [part for metric in model.metrics for part in (getattr(metric, "metrics", None) or [metric])]
    return {str(metric.name) for metric in found if getattr(metric, "_direction", None) == "up"}


def states_of_own_layers(model: Any) -> set[int]:
    """Return the `id` of each variable that a layer of the user's own has made to be no weight, and of each buffer of PyTorch.

    Only those may be NaN on purpose: a frozen weight is a weight, and the states of Keras' own layers have to be numbers. Only
    `Layer._non_trainable_variables` tells them from frozen weights.
    """
    own = [layer for layer in _state.layers_of(model) if not type(layer).__module__.startswith("keras.")]
    found = {id(v) for layer in own for v in getattr(layer, "_non_trainable_variables", ())}
    native = [v for v in model.non_trainable_variables if not isinstance(v, _state.VARIABLE)]
    return found | {id(v) for v in native if type(v.value).__name__ != "Parameter"}
