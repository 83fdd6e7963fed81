"""`recalibrate`: re-estimates BatchNormalization statistics from data; nothing else in the model
changes.

The method is PreciseBN (Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021): every batch
passes through the model with each BatchNormalization using that batch's own mean and variance, and
the population's follow from the batches' by the law of total variance, in float64. For a layer
whose input is the data, the result is therefore the mean and variance of all data, regardless of
the size of the batches.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from keras_nanguard._backends import current
from keras_nanguard._core.errors import GuardError, as_words, expected, no_model, require_count
from keras_nanguard._core.variable_names import MOVING, selected
from keras_nanguard._files.live import LiveArray, is_model, live_arrays
from keras_nanguard._files.reports import Recalibrated, RecalibrateReport
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.all_or_none import finish, write_all
from keras_nanguard._keras.overrides import Overrides


def recalibrate(
    model: Any, x: Any, *, steps: int | None = None, batch_size: int = 32, only: Sequence[str] = ()
) -> RecalibrateReport:
    """Re-estimate the moving statistics of BatchNormalization from data run through the model.

    All other variables (weights, optimizer, metrics, seeds, layer states) stay bit-identical.
    Dropout and noise are off. Frozen layers are re-estimated, too, unless `only` excludes them. If
    an error occurs, the old statistics are restored.

    Args:
        model: a built Keras model; nested models are included.
        x: arrays as `fit` takes them (no targets), or an iterable of batches (a `tf.data.Dataset`,
            a `PyDataset`, a `DataLoader`, a generator, a list of tuples, lists or dicts). As in
            `fit`, the first element of a tuple or list is the inputs.
        steps: number of batches to run; all by default.
        batch_size: size of the batches into which arrays are split.
        only: shell pattern or patterns; only BatchNormalization layers whose path or name matches
            one are re-estimated.

    Returns:
        The report.

    Raises:
        GuardError: if the model has no such layer, the data is empty or neither arrays of the same
            length nor an iterable, `steps` or `batch_size` is no whole number above 0, or the input
            of a layer is not finite or has only one value per channel.

    Example:

        recalibrate(model, x_train, steps=50)
    """
    if not is_model(model):
        raise no_model(model, "recalibrate {path} --data FILE")
    require_count("batch_size", batch_size)
    if steps is not None:
        require_count("steps", steps)
        steps = min(steps, sys.maxsize)
    layers = _batchnorms(live_arrays(model), as_words(only, "only"), f"model={model.name}")
    report, pairs = estimated(model, layers, itertools.islice(_batches(x, batch_size), steps))
    write_all(pairs)
    return report


def estimated(
    model: Any, layers: Iterable[Any], batches: Iterable[Any]
) -> tuple[RecalibrateReport, list[tuple[Any, Any]]]:
    """Estimate the moving statistics of layers of a model. Nothing is changed.

    Args:
        layers: built BatchNormalization layers.
        batches: inputs of the model.

    Returns:
        The report, and `(variable, value)` for each statistic of the layers that were called.

    Raises:
        GuardError: if there is no batch, or the input of a layer is not finite or has only one
            value per channel.
    """
    arrays = live_arrays(model)
    paths = {id(array.owner): array.who.layer for array in arrays}
    estimates = [_Estimate(paths[id(layer)], layer) for layer in layers]
    done = _run(model, batches, estimates, arrays)
    if not done:
        remedy = "Pass arrays or an iterable of batches."
        raise GuardError(expected("at least one batch", "no data", remedy))
    called = [one for one in estimates if one.count]
    report = RecalibrateReport(str(model.name), done, tuple(one.report() for one in called))
    return report, [pair for one in called for pair in one.result()]


def _run(
    model: Any,
    batches: Iterable[Any],
    estimates: Sequence[_Estimate],
    arrays: Sequence[LiveArray],
) -> int:
    """Run the model on each batch, with every layer that is estimated watched; return the number of
    batches. Everything that running the model changes is restored: statistics, seeds, states and
    counters.
    """
    fixed = (a.who.role == "slot" or getattr(a.variable, "trainable", False) for a in arrays)
    restorers = [keras_variables.restorer(a.variable) for a, one in zip(arrays, fixed) if not one]
    done = 0
    try:
        with Overrides() as overrides:
            for estimate in estimates:
                overrides.set(estimate.layer, "call", _watched_call(estimate))
            for batch in batches:
                with current.host().without_gradients():
                    model(batch, training=False)
                done += 1
    finally:
        finish(restorers)
    return done


class _Estimate:
    """Mean and variance of one layer's inputs, from sums over the batches.

    Args:
        path: names of its outer layers and its own, joined by `/`.
    """

    def __init__(self, path: str, layer: Any):
        self.path, self.layer = path, layer
        self.count = 0
        self._sum: NDArray[Any] = np.zeros(1)
        self._squares: NDArray[Any] = np.zeros(1)
        old = map(keras_variables.read, (layer.moving_mean, layer.moving_variance))
        self._old = [array.astype(np.float64) for array in old]

    def add(self, mean: NDArray[Any], variance: NDArray[Any], count: int) -> None:
        """Add the statistics of one batch, with `count` values per channel."""
        self.count += count
        self._sum = self._sum + count * mean
        self._squares = self._squares + count * (variance + mean**2)

    def pairs(self, mean: Any, variance: Any) -> list[tuple[Any, Any]]:
        """Return `(variable, value)` for each statistic of the layer."""
        values = {"mean": mean, "variance": variance, "stddev": variance**0.5}
        variables = ((name, getattr(self.layer, name, None)) for name in MOVING)
        return [(v, values[name.rpartition("_")[2]]) for name, v in variables if v is not None]

    @property
    def _estimated(self) -> tuple[NDArray[Any], NDArray[Any]]:
        mean = self._sum / self.count
        return mean, np.maximum(self._squares / self.count - mean**2, 0.0)

    def result(self) -> list[tuple[Any, Any]]:
        """Return the pairs of the estimate."""
        mean, variance = self._estimated
        return self.pairs(mean.astype(np.float32), variance.astype(np.float32))

    def report(self) -> Recalibrated:
        """Return the changes of the layer's statistics.

        Raises:
            GuardError: if the estimate is not finite, or of one value, whose variance would be 0.
        """
        new_mean, new_variance = self._estimated
        finite = np.isfinite(new_mean).all() and np.isfinite(new_variance).all()
        if self.count < 2 or not finite:
            what = "finite inputs to every BatchNormalization, two values per channel or more"
            received = f"{'NaN or Inf' if self.count > 1 else 'one value'} at {self.path}"
            remedy = "Scan the model and the data, or pass more; the old statistics were restored."
            raise GuardError(expected(what, received, remedy))
        mean, variance = self._old
        if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
            return Recalibrated(self.path, None, None, self.count)
        smallest = float(self.layer.epsilon)
        ratio = np.maximum(new_variance, smallest) / np.maximum(variance, smallest)
        largest = float(np.maximum(ratio, 1 / ratio).max(initial=1.0))
        moved = float(np.abs(new_mean - mean).max(initial=0.0))
        return Recalibrated(self.path, moved, largest, self.count)


def _watched_call(estimate: _Estimate) -> Callable[..., Any]:
    """Return a `call` for a layer that uses the statistics of each batch and adds them to its
    estimate."""
    layer, original = estimate.layer, estimate.layer.call

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        values = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        mean, variance, count = _moments(values, layer.axis % len(values.shape), mask)
        try:
            found = [ops.convert_to_numpy(v).astype(np.float64) for v in (mean, variance)]
        except Exception as error:
            received = f"{estimate.path} within a compiled function"
            remedy = "Undo the compilation."
            raise GuardError(expected("a model that runs eagerly", received, remedy)) from error
        if count:
            estimate.add(found[0], found[1], count)
        for variable, value in estimate.pairs(mean, variance):
            variable.assign(value)
        return original(inputs, training=False, mask=mask)

    return call


def _moments(values: Any, axis: int, mask: Any) -> tuple[Any, Any, int]:
    """Return mean and variance per channel, and the number of values per channel; masked positions
    are ignored.

    In two passes: `keras.ops.moments` subtracts two means on JAX and PyTorch, and loses small
    variances.
    """
    axes = [place for place in range(len(values.shape)) if place != axis]
    counted = ops.ones_like(values, dtype="bool")
    if mask is not None:
        counted = ops.logical_and(counted, ops.expand_dims(ops.cast(mask, "bool"), axis))
    total = ops.sum(ops.cast(counted, "float32"), axis=axes, keepdims=True)
    count = int(ops.convert_to_numpy(total).max())
    total = ops.cast(ops.maximum(total, 1.0), values.dtype)
    mean = ops.sum(ops.where(counted, values, 0.0), axis=axes, keepdims=True) / total
    deviations = ops.where(counted, ops.square(values - mean), 0.0)
    variance = ops.sum(deviations, axis=axes, keepdims=True) / total
    return ops.reshape(mean, (-1,)), ops.reshape(variance, (-1,)), count


def _batchnorms(arrays: Sequence[LiveArray], only: tuple[str, ...], model: str) -> list[Any]:
    """Return the built BatchNormalization layers.

    Raises:
        GuardError: if there is none that matches `only`; it names `model`.
    """
    found: list[Any] = []
    for array in arrays:
        path, layer = array.who.layer, array.owner
        wanted = selected(only, path, str(getattr(layer, "name", "")))
        if wanted and array.who.name == "moving_variance" and hasattr(layer, "moving_mean"):
            found.append(layer)
    if not found:
        what, remedy = "a model with BatchNormalization", "There is nothing to estimate."
        if only:
            what, model = f"{what} that matches a pattern", f"{model} and only={list(only)!r}"
        raise GuardError(expected(what, model, remedy))
    return found


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches of inputs from arrays, or from an iterable of batches."""
    data = data.to_numpy() if hasattr(data, "to_numpy") else data  # a table of pandas
    arrays, listed = keras.tree.flatten(data), isinstance(data, (list, tuple))
    are_batches = listed and all(isinstance(item, (list, tuple, dict)) for item in data)
    are_arrays = all(hasattr(array, "shape") and hasattr(array, "dtype") for array in arrays)
    are_rows = bool(arrays) and are_arrays and not are_batches
    scalar = are_rows and any(array.shape == () for array in arrays)
    if are_rows and not scalar:
        length, *others = {int(array.shape[0]) for array in arrays}
        if others:
            what, received = "arrays with the same number of rows", f"{(length, *others)} rows"
            raise GuardError(expected(what, received, "Check the data."))
        for start in range(0, length, batch_size):
            part = slice(start, start + batch_size)
            yield keras.tree.map_structure(lambda array, part=part: array[part], data)
        return
    iterable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if isinstance(data, (str, bytes, dict, type)) or not iterable or scalar:
        what, kind = "arrays or an iterable of batches", type(data).__name__
        received = data.__name__ if isinstance(data, type) else f"an object of class {kind}"
        raise GuardError(expected(what, received, "Pass the inputs as for fit."))
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    source = (data[index] for index in range(len(data))) if indexed else iter(data)
    for batch in source:
        yield keras.utils.unpack_x_y_sample_weight(batch)[0]
