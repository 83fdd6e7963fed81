"""`recalibrate`: re-estimates BatchNormalization statistics from data; nothing else in the model
changes.

The method is PreciseBN (Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021): every batch
passes through the model with each BatchNormalization using that batch's own mean and variance, and
the population's follow from the batches' by the law of total variance, merged one batch at a time
in float64 (Chan, Golub and LeVeque, 1983). So for a layer that sees the data itself the result is
mean and variance of all of the data, whatever the size of the batches.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import GuardError, expected, no_model
from keras_nanguard._files.live import LiveVariable, is_model, live_variables
from keras_nanguard._keras.overrides import Overrides

__all__ = ["RecalibrateReport", "Recalibrated", "recalibrate"]

FORMAT = 1
"""Version of the JSON format of a `RecalibrateReport`."""


@dataclass(frozen=True, slots=True)
class Recalibrated:
    """One layer whose statistics were re-estimated.

    Attributes:
        path: names of its outer layers and its own, joined by `/`.
        mean_moved: largest change of a moving mean, or `None` if the old one was not finite.
        variance_ratio: largest ratio between the new and an old variance or its inverse, or `None`
            likewise.
        samples: number of values per channel.
    """

    path: str
    mean_moved: float | None
    variance_ratio: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class RecalibrateReport:
    """The result of `recalibrate`.

    Attributes:
        model: name of the model.
        batches: number of batches.
        layers: the layers, in the order of the model.
    """

    model: str
    batches: int
    layers: tuple[Recalibrated, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with a format version."""
        return {
            "format": FORMAT,
            **asdict(self),
            "layers": [asdict(layer) for layer in self.layers],
        }

    def __repr__(self) -> str:
        return (
            f"RecalibrateReport({self.model!r}, {len(self.layers)} layers, {self.batches} batches)"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {len(self.layers)} BatchNormalization layers from {self.batches} "
            "batches."
        ]
        for layer in self.layers:
            moved = (
                "not finite before"
                if layer.mean_moved is None
                else f"mean changed by up to {layer.mean_moved:.4g}"
            )
            ratio = (
                ""
                if layer.variance_ratio is None
                else f", variance by up to x{layer.variance_ratio:.4g}"
            )
            lines.append(f"  {layer.path}: {moved}{ratio}, {layer.samples} values per channel")
        return "\n".join(lines)


def recalibrate(
    model: Any, x: Any, *, steps: int | None = None, batch_size: int = 32, only: Sequence[str] = ()
) -> RecalibrateReport:
    """Re-estimate the moving statistics of BatchNormalization from data run through the model.

    Weights, optimizer, metrics, seeds, states and all other variables stay bit-identical. Dropout
    and noise are off. Frozen layers are re-estimated, too, unless `only` excludes them. If an error
    occurs, the old statistics are restored.

    Args:
        model: a built Keras model; nested models are included.
        x: arrays as `fit` takes them (no targets), or an iterable of batches (a `tf.data.Dataset`,
            a `PyDataset`, a generator); if a batch is a tuple, its first element is used.
        steps: number of batches to run; all by default.
        batch_size: size of the batches into which arrays are split.
        only: shell patterns; only BatchNormalization layers whose path or name matches one are
            re-estimated.

    Returns:
        The report.

    Raises:
        GuardError: if the model has no such layer, the data is empty, a number is not above 0, or
            the input of a layer is not finite.

    Example:

        recalibrate(model, x_train, steps=50)
    """
    if not is_model(model):
        raise no_model(model, "recalibrate {path} --data FILE")
    for name, count in (("steps", steps), ("batch_size", batch_size)):
        if count is not None and count < 1:
            raise GuardError(
                expected(f"{name} above 0", f"{name}={count!r}", "Leave it out for the default.")
            )
    layers = _batchnorms(model, only)
    if not layers:
        raise GuardError(
            expected(
                "a model with BatchNormalization",
                f"model={model.name}",
                "There is nothing to estimate.",
            )
        )
    estimates = {path: _Estimate(layer) for path, layer in layers.items()}
    others = [live for live in live_variables(model) if _may_change(live, estimates.values())]
    preserved = [(live.variable, live.read()) for live in others]
    done = 0
    try:
        with ExitStack() as stack:
            for path, estimate in estimates.items():
                stack.enter_context(_watched(path, estimate))
            for batch in itertools.islice(_batches(x, batch_size), steps):
                _forward(model, batch)
                done += 1
        if not done:
            raise GuardError(
                expected("at least one batch", "no data", "Pass arrays or an iterable of batches.")
            )
        found = tuple(
            estimate.report(path) for path, estimate in estimates.items() if estimate.count
        )
        for estimate in estimates.values():
            estimate.write()
    except BaseException:
        for estimate in estimates.values():
            estimate.restore()
        raise
    finally:
        for variable, value in preserved:
            variable.assign(value)
    return RecalibrateReport(str(model.name), done, found)


class _Estimate:
    """Mean and variance of one layer's inputs, merged batch by batch.

    With `n, m, s` so far (count, mean, sum of squared deviations) and `k, a, v` of a batch (count,
    mean, variance): `d = a - m`, `m += d k / (n + k)`, `s += v k + d**2 n k / (n + k)`, `n += k`.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        self.count = 0
        self.mean: NDArray[Any] = np.zeros(1)
        self._deviations: NDArray[Any] = np.zeros(1)
        self._old = [(variable, np.array(variable.numpy())) for variable in self.variables()]

    def variables(self) -> list[Any]:
        """Return the moving statistics of the layer."""
        names = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
        found = [getattr(self.layer, name, None) for name in names]
        return [variable for variable in found if variable is not None]

    @property
    def variance(self) -> NDArray[Any]:
        """Variance of all batches so far."""
        return self._deviations / max(1, self.count)

    def merge(self, mean: NDArray[Any], variance: NDArray[Any], count: int) -> None:
        """Merge the statistics of one batch, with `count` values per channel."""
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self._deviations = (
            self._deviations + variance * count + delta**2 * (self.count * count / total)
        )
        self.count = total

    def assign(self, mean: Any, variance: Any) -> None:
        """Assign statistics to the layer."""
        for variable in self.variables():
            name = str(variable.name)
            value = (
                mean
                if name.endswith("mean")
                else variance
                if name.endswith("variance")
                else variance**0.5
            )
            variable.assign(value)

    def write(self) -> None:
        """Assign the estimate to the layer; a layer that was never called keeps its statistics."""
        if self.count:
            self.assign(self.mean.astype(np.float32), self.variance.astype(np.float32))
        else:
            self.restore()

    def restore(self) -> None:
        """Restore the old statistics of the layer."""
        for variable, value in self._old:
            variable.assign(value)

    def report(self, path: str) -> Recalibrated:
        """Return the changes of the layer's statistics.

        Raises:
            GuardError: if the estimate is not finite.
        """
        if not (np.isfinite(self.mean).all() and np.isfinite(self.variance).all()):
            raise GuardError(
                expected(
                    "finite inputs to every BatchNormalization",
                    f"NaN or Inf at {path}",
                    "Scan the model and the data; the old statistics were restored.",
                )
            )
        old = {str(variable.name): value.astype(np.float64) for variable, value in self._old}
        mean, variance = old["moving_mean"], old["moving_variance"]
        if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
            return Recalibrated(path, None, None, self.count)
        smallest = float(self.layer.epsilon)
        ratio = np.maximum(self.variance, smallest) / np.maximum(variance, smallest)
        moved = float(np.abs(self.mean - mean).max(initial=0.0))
        return Recalibrated(
            path, moved, float(np.maximum(ratio, 1 / ratio).max(initial=1.0)), self.count
        )


@contextmanager
def _watched(path: str, estimate: _Estimate) -> Iterator[None]:
    """Make a layer use the statistics of each batch and add them to its estimate, inside the
    context."""
    import keras

    layer, original = estimate.layer, estimate.layer.call

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        values = keras.ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        axis = layer.axis % len(values.shape)
        mean, variance, count = _moments(keras.ops, values, axis, mask)
        try:
            found = [
                np.asarray(keras.ops.convert_to_numpy(value), np.float64)
                for value in (mean, variance)
            ]
        except Exception as error:
            message = expected(
                "a model that runs eagerly",
                f"{path} within a compiled function",
                "Undo the compilation.",
            )
            raise GuardError(message) from error
        estimate.merge(found[0], found[1], count)
        estimate.assign(mean, variance)
        return original(inputs, training=False, mask=mask)

    with Overrides() as overrides:
        overrides.set(layer, "call", call)
        yield


def _moments(ops: Any, values: Any, axis: int, mask: Any) -> tuple[Any, Any, int]:
    """Return mean and variance per channel, and the number of values per channel; masked positions
    are ignored.

    In two passes: `keras.ops.moments` subtracts two means on JAX and PyTorch, and loses small
    variances.
    """
    axes = [place for place in range(len(values.shape)) if place != axis]
    if mask is None:
        mean = ops.mean(values, axis=axes, keepdims=True)
        variance = ops.mean(ops.square(values - mean), axis=axes)
        return (
            ops.reshape(mean, (-1,)),
            variance,
            int(np.prod([int(values.shape[place]) for place in axes])),
        )
    weights = ops.expand_dims(ops.cast(mask, values.dtype), axis)
    share = ops.broadcast_to(weights, values.shape)
    total = ops.maximum(ops.sum(share, axis=axes), 1e-12)
    mean = ops.sum(ops.where(share > 0, values, 0.0), axis=axes) / total
    shape = [1] * len(values.shape)
    shape[axis] = -1
    deviations = ops.where(share > 0, ops.square(values - ops.reshape(mean, shape)), 0.0)
    count = int(np.asarray(ops.convert_to_numpy(total)).max())
    return mean, ops.sum(deviations, axis=axes) / total, max(1, count)


def _forward(model: Any, batch: Any) -> None:
    from keras_nanguard._backends import current

    with current.host().without_gradients():
        model(batch, training=False)


def _batchnorms(model: Any, only: Sequence[str]) -> dict[str, Any]:
    """Return the built BatchNormalization layers by the path of their names."""
    found: dict[str, Any] = {}
    for live in live_variables(model):
        if live.identity.name == "moving_variance" and hasattr(live.layer, "moving_mean"):
            found[live.identity.layer] = live.layer
    wanted = {
        path: layer
        for path, layer in found.items()
        if not only
        or any(fnmatch.fnmatchcase(name, one) for name in (path, str(layer.name)) for one in only)
    }
    return wanted


def _may_change(live: LiveVariable, estimates: Iterable[_Estimate]) -> bool:
    """Whether running the model may change a variable that is not re-estimated: a seed, a state, a
    counter."""
    estimated = {id(variable) for estimate in estimates for variable in estimate.variables()}
    if id(live.variable) in estimated or live.identity.role == "slot":
        return False
    return not getattr(live.variable, "trainable", False)


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches of inputs from arrays, or from an iterable of batches."""
    import keras

    arrays = keras.tree.flatten(data)
    if arrays and all(hasattr(array, "shape") and hasattr(array, "dtype") for array in arrays):
        length = min(int(array.shape[0]) for array in arrays)
        for start in range(0, length, batch_size):
            stop = min(start + batch_size, length)
            yield keras.tree.map_structure(lambda array, part=slice(start, stop): array[part], data)
        return
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    source = (data[index] for index in range(len(data))) if indexed else iter(data)
    for batch in source:
        yield batch[0] if isinstance(batch, tuple) else batch
