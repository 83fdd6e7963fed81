"""The losses and metrics of a compiled model.

Private names of Keras:

- ``LossFunctionWrapper._fn_kwargs``: the options of a loss that wraps a function.
- ``Model._compile_metrics`` and its ``_user_metrics``: the metrics that were passed to `compile`.
- ``Model._compile_loss`` and its ``_flat_losses``; before Keras 3.8 or so its ``flat_losses``,
  ``inferred_output_names`` and ``output_names``.
- ``Metric._direction``: whether a metric should grow; the callbacks of Keras read it, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from keras_nanguard._core.variable_names import snake_case
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables

# Those of a model


def losses_by_output(model: Any) -> list[tuple[str, Any]]:
    """Return `(name of the output, loss)` for each loss given to `compile`."""
    compiled: Any = getattr(model, "_compile_loss", None)
    if hasattr(compiled, "flat_losses"):  # Keras before 3.8 or so
        names = compiled.inferred_output_names or compiled.output_names or ()
        found = list(itertools.zip_longest(names, compiled.flat_losses or ()))
    else:
        entries = getattr(compiled, "_flat_losses", None) or ()
        found = [(entry.name, entry.loss) for entry in entries]
    return [(str(name or ""), loss) for name, loss in found if loss is not None]


def losses_of(model: Any) -> tuple[Any, ...]:
    """Return the `CompileLoss` of a model, the losses given to `compile`, and those of layers."""
    compiled = getattr(model, "_compile_loss", None)
    found = [compiled] if compiled is not None else []
    found += [loss for _, loss in losses_by_output(model)]
    held = keras_layers.held_by(keras_layers.layers_of(model))
    found += [item for item in held if isinstance(item, keras.losses.Loss)]
    return keras_variables.unique(found)


def trains_by_compiled_loss(model: Any) -> bool:
    """Whether a model is trained by Keras' own train step on the loss that `compile` was given."""
    hooks = ("train_step", "compute_loss")
    compiled = isinstance(model, keras.Model) and getattr(model, "_compile_loss", None) is not None
    return compiled and not any(_overridden(type(model), name) for name in hooks)


def given_metrics(model: Any) -> Any:
    """Return the metrics that were passed to `compile`, or `None`."""
    return getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)


def with_inner(metrics: Iterable[Any]) -> Iterator[Any]:
    """Yield metrics, and those within the metrics of `compile`. In a custom metric the attribute
    `metrics` may be anything.
    """
    for metric in metrics:
        if isinstance(metric, keras.metrics.Metric):
            yield metric
            inner = getattr(metric, "metrics", None)
            if isinstance(inner, (list, tuple, dict)):
                yield from with_inner(keras_variables.flat(inner))


def directed(model: Any, direction: str) -> set[str]:
    """Return the names of the metrics that should grow (`"up"`) or shrink (`"down"`), if known."""
    metrics = with_inner(model.metrics)
    return {str(m.name) for m in metrics if getattr(m, "_direction", None) == direction}


# Building them as the first step does


def build_losses(model: Any, y: Any, y_pred: Any) -> None:
    """Build the losses given to `compile`, as the first step does: only then they have names."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is not None and not compiled.built:
        with contextlib.suppress(Exception):  # the step reports the fault of the targets
            compiled.build(y, y_pred)


def build_metrics(model: Any, targets: Any, output: Any) -> None:
    """Build the metrics that `compile` was given, as the first step does: then that step creates no
    variables. Does nothing if custom code decides what they receive, or if they do not fit; then
    the step builds them, or raises.

    Args:
        model: a model with one output.
        targets, output: its symbolic targets and output.
    """
    metrics, hooks = model._compile_metrics, ("call", "compute_loss", "compute_metrics")
    custom = any(name in vars(model) or _overridden(type(model), name) for name in hooks)
    if metrics is not None and not metrics.built and not custom:
        with contextlib.suppress(Exception):
            metrics.build(targets, output)


def _overridden(own: type, name: str) -> bool:
    """Whether a custom class, not of Keras or this library, defines a method."""
    definer = next(base for base in own.__mro__ if name in vars(base))
    return definer.__module__.partition(".")[0] not in ("keras", "keras_nanguard")


# One loss or metric

_FUNCTIONS = {
    n: getattr(keras.losses, snake_case(n), n) for n in dir(keras.losses) if n[0].isupper()
}
"""The functions of the classes in `keras.losses`, by the names of the classes."""


def class_of(loss: Any) -> str:
    """Return the name of the class of Keras that a loss or metric belongs to: `"KLDivergence"` for
    an instance of it or of a class derived from it, for `keras.losses.kl_divergence`, and for a
    partial or a wrapper of that function. A custom function or method, whatever its name, has none:
    `""`.
    """
    hooks = [name for name in ("__call__", "call", "update_state") if hasattr(loss, name)]
    is_object = isinstance(loss, (keras.losses.Loss, keras.metrics.Metric))
    if is_object and any(_overridden(type(loss), name) for name in hooks):
        return ""
    function = getattr(loss, "fn", loss)
    function = getattr(function, "func", function)  # of a partial
    named = next((name for name, own in _FUNCTIONS.items() if own is function), "")
    return named or keras_layers.class_of(loss)


def option_of(loss: Any, name: str) -> Any:
    """Return an option of a loss or metric, such as `from_logits`; `None` if it has none."""
    value = getattr(loss, name, None)
    if value is None:
        value = (getattr(loss, "_fn_kwargs", None) or {}).get(name)
    if value is None and isinstance(loss, functools.partial):
        value = loss.keywords.get(name)
    return value


def is_loss(value: Any) -> bool:
    """Whether a result of `compute_loss` is a loss: a custom one may return a tuple or a dict."""
    return isinstance(value, (int, float)) or bool(keras.ops.is_tensor(value))


def predicted(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `y_pred` of a call of `Model.compute_loss`, `None` if there is none."""
    names = ("x", "y", "y_pred", "sample_weight", "training")
    return {**dict(zip(names, args)), **kwargs}.get("y_pred")
