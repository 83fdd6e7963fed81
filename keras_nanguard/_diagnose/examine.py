"""`diagnose`: examines a model on one batch without training it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import (
    ReplayableStep,
    ReplayResult,
    origins_of,
    preserved,
)
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import no_model, require_keras_3
from keras_nanguard._core.evidence import Evidence, LayerRow
from keras_nanguard._core.incident import Diagnosis
from keras_nanguard._diagnose.causes import Conclusion, decide
from keras_nanguard._diagnose.conclude import advice
from keras_nanguard._diagnose.facts import optimizer_facts, target_fault
from keras_nanguard._diagnose.precision import in_float32, lowest
from keras_nanguard._diagnose.trials import with_names
from keras_nanguard._diagnose.words import sentences, table
from keras_nanguard._files.stored import plain_text
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

__all__ = ["FORMAT", "Examination", "diagnose"]

FORMAT = 1
"""Version of the JSON format of an `Examination`."""

MAX_VARIANCE_RATIO = 1e3
"""Factor between a moving variance and that of the batch above which the moving variance is
wrong.
"""

MAX_MEAN_DEVIATIONS = 30.0
"""Distance between a moving mean and that of the batch, in standard deviations, above which the
moving mean is wrong.
"""


@dataclass(frozen=True)
class Examination:
    """The result of `diagnose`.

    Attributes:
        diagnosis: cause, culprit, rows, evidence and advice; cause `unknown` with no culprit if
            nothing is wrong.
        inference: one row per layer call in inference mode.
        training: the same in training mode.
        step: result of a train step on the batch: `"finite"`, `"bad"`, `"failed"`, or `""` if none
            was run.
        error: what could not be run, and the exception that it raised; `""` if everything could.
    """

    diagnosis: Diagnosis
    inference: tuple[LayerRow, ...]
    training: tuple[LayerRow, ...]
    step: str = ""
    error: str = ""

    @property
    def healthy(self) -> bool:
        """Whether outputs in both modes and the train step are finite, and no moving statistics are
        wrong.

        A model that could not be run is not healthy.
        """
        bad = self.first_bad("inference") or self.first_bad("training") or self.step == "bad"
        return self.diagnosis.cause == "unknown" and not (bad or self.error)

    def first_bad(self, mode: str) -> str:
        """Return the path of the first layer whose output is not finite in this mode, `""` if all
        are finite.
        """
        return next((row.path for row in getattr(self, mode) if not row.finite), "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"format": FORMAT, **asdict(self)}

    def __repr__(self) -> str:
        return f"Examination(healthy={self.healthy}, {self.diagnosis!r})"

    def __str__(self) -> str:
        d = self.diagnosis
        what = "Nothing bad was found." if self.healthy else d.headline
        if self.error and d.cause == "unknown":
            what = f"No diagnosis is possible: {self.error}."
        lines = [what, *(f"  seen: {text}" for text in d.evidence)]
        lines += (
            [f"  seen: {self.error[0].upper()}{self.error[1:]}."]
            if self.error and d.cause != "unknown"
            else []
        )
        lines += [f"  do:   {text}" for text in d.advice] if not self.healthy else []
        tables = [
            "",
            "In inference mode:",
            table(self.inference),
            "",
            "In training mode:",
            table(self.training),
        ]
        return "\n".join([*lines, *tables])


@np.errstate(all="ignore")  # the data is not finite
def diagnose(model: Any, x: Any, y: Any = None, sample_weight: Any = None) -> Examination:
    """Find the first layer with a bad output on a batch, and the cause.

    The model runs in inference and in training mode.

    The model is not changed: weights, statistics, optimizer and seeds are the same afterwards.

    Args:
        model: a built Keras model.
        x: one batch of inputs, as for `model.predict`.
        y: targets; if given, and if the model is compiled, a train step is run, too.
        sample_weight: weights of the rows.

    Returns:
        The result; print it.

    Raises:
        GuardError: if `model` is not a Keras model.

    Example:

    ```python
    print(keras_nanguard.diagnose(model, x[:32], y[:32]))
    ```
    """
    require_keras_3(model)
    if not isinstance(model, keras.Model):
        raise no_model(model, "diagnose {path} --data FILE")
    x, y, sample_weight = (
        keras.tree.map_structure(_tensor, part) for part in (x, y, sample_weight)
    )
    return _Examiner(model, x, y, sample_weight).examined()


def _tensor(value: Any) -> Any:
    return None if value is None else keras.ops.convert_to_tensor(value)


class _Examiner:
    """One examination of one model."""

    def __init__(self, model: Any, x: Any, y: Any = None, sample_weight: Any = None):
        self.model, self.x, self.y = model, x, y
        self.outputs: Any = None
        self.batch = (tuple(part for part in (x, y, sample_weight) if part is not None),)
        self.train_state = TrainState.of(model)
        self.trains = (
            y is not None
            and bool(getattr(model, "compiled", False))
            and bool(self.train_state.optimizers)
        )

    def examined(self) -> Examination:
        roles = {id(v): "weights" for v in self.train_state.trainable} | {
            id(v): "slots" for v in self.train_state.slots
        }
        state = [
            (
                v.path,
                roles.get(id(v), "statistics" if keras_variables.is_statistic(v) else "weights"),
            )
            for v in (
                *self.train_state.trainable,
                *self.train_state.statistics,
                *self.train_state.slots,
            )
            if not finiteness.is_finite(keras_variables.view(v))
        ]
        inference, _ = self._forward(False)
        training, far = self._forward(True)
        step = self._step()
        evidence = self._evidence(state, inference, training, far, step)
        verdict, error = decide(evidence), self._error(inference, training, step)
        found = Diagnosis(
            verdict.cause,
            verdict.culprit,
            verdict.samples,
            sentences(evidence, verdict),
            (
                self._advice(evidence, verdict)
                if evidence.first or evidence.state or far or error
                else ()
            ),
            verdict.confidence,
            verdict.because == "rescaled",
        )
        return Examination(
            found, inference.rows, training.rows, step.word if step is not None else "", error
        )

    def _error(
        self, inference: ReplayResult, training: ReplayResult, step: ReplayResult | None
    ) -> str:
        """Return which of the runs raised an exception, and the exception: the first of them."""
        runs = {
            "the forward pass in inference mode": inference,
            "the forward pass in training mode": training,
            "a train step": step,
        }
        failed = [
            f"{what} raised {_plain(run.error)}"
            for what, run in runs.items()
            if run is not None and run.error
        ]
        return failed[0] if failed else ""

    def _advice(self, evidence: Evidence, verdict: Conclusion) -> tuple[str, ...]:
        if verdict.cause != "unknown" or not evidence.replay_error:
            return advice(evidence, verdict)
        taken = [tuple(tensor.shape) for tensor in getattr(self.model, "inputs", None) or ()]
        shapes = f": the model takes x of shape {', '.join(map(str, taken))}" if taken else ""
        return (f"Pass one batch, x and y as for fit{shapes}.",)

    def _evidence(
        self,
        state: Sequence[tuple[str, str]],
        inference: ReplayResult,
        training: ReplayResult,
        far: Sequence[str],
        step: ReplayResult | None,
    ) -> Evidence:
        shown = (
            inference
            if not inference.finite
            else training
            if not training.finite
            else step or inference
        )
        only = not inference.finite and training.finite
        sites = ["predictions:nonfinite"] if not inference.finite or state else []
        sites += ["statistics:out_of_range"] if far else []
        first = inference.first_path if only and not state else (far[0].split()[0] if far else "")
        evidence = Evidence(
            refused=False,
            sites=tuple(sites),
            state=tuple(state),
            inputs_bad=batches.bad(self.batch, ("inputs",)),
            targets_bad=batches.bad(self.batch, ("targets", "sample_weight")),
            inputs=batches.spreads(self.batch, "inputs"),
            targets=batches.spreads(self.batch, "targets"),
            target_fault=self._target_fault(),
            replay=shown.word if shown.first or shown.error else "",
            replay_error=shown.error,
            first=shown.first,
            first_path=shown.first_path or first,
            origin=shown.origin,
            low_precision=lowest(self.model),
            inference="" if inference.error else "finite" if inference.finite else "bad",
            training="" if training.error else "finite" if training.finite else "bad",
            rows=shown.origin.rows if shown.origin is not None else (),
            optimizers=optimizer_facts([o for o in self.train_state.optimizers if o.built]),
            table=shown.rows,
            notes=tuple(far),
        )
        if evidence.inputs_bad and 0 < len(evidence.rows) < batches.row_count(self.batch):
            rest = _Examiner(self.model, *batches.without(self.batch, evidence.rows)[0])
            evidence = replace(
                evidence, without_rows="finite" if rest._forward(False)[0].finite else "bad"
            )
        if evidence.low_precision and shown.first:
            evidence = replace(evidence, float32=self._in_float32(shown is step))
        return with_names(evidence, self.model)

    def _target_fault(self) -> Any:
        targets = [part.array for part in batches.parts(self.batch) if part.role == "targets"]
        widths = [
            int(shape[-1] or 0) if shape else 0 for shape in keras_layers.output_shapes(self.model)
        ]
        return target_fault(self.model, targets, widths)

    def _step(self) -> ReplayResult | None:
        """Run a train step on the batch."""
        if not self.trains:
            return None
        if self.outputs is not None:
            keras_losses.build_losses(self.model, self.y, self.outputs)
        return self._as_step().run(self.batch, observe=True, update=True)

    def _as_step(self) -> ReplayableStep:
        return ReplayableStep.of(self.model, self.train_state.optimizers)

    def _in_float32(self, step: bool) -> str:
        variables = [
            *self.train_state.everything,
            *self.train_state.metrics,
            *self.train_state.unlisted,
        ]
        with in_float32(self.model, variables, list(self.train_state.optimizers)):
            if step:
                return self._as_step().run(self.batch, update=True).word
            return (
                "finite" if all(self._forward(mode)[0].finite for mode in (False, True)) else "bad"
            )

    def _forward(self, training: bool) -> tuple[ReplayResult, list[str]]:
        """Run the forward pass once in one mode; return its result, and sentences about wrong
        moving statistics.
        """
        origins = origins_of(self.batch, self.train_state.everything)
        instrument = current.replay().Instrument(self.model, origins)
        layers = [layer for layer in keras_layers.batchnorms(self.model) if layer.built]
        before = [_moments(layer) for layer in layers]
        with preserved(
            [*self.train_state.everything, *self.train_state.metrics, *self.train_state.unlisted],
            self.model,
        ):
            for layer in (
                layers if training else ()
            ):  # a pass in training mode does not read them, and adds to them
                keras_variables.write(layer.moving_mean, np.zeros(layer.moving_mean.shape))
                keras_variables.write(layer.moving_variance, np.zeros(layer.moving_variance.shape))
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(instrument)
                    stack.enter_context(origins)
                    outputs = self.model(self.x, **keras_layers.mode(self.model, training))
                    self.outputs = outputs
            except Exception as error:  # noqa: BLE001  whatever the user's model raises is evidence, not a crash
                return (
                    ReplayResult(
                        error=f"{type(error).__name__}: {error}", rows=tuple(instrument.rows)
                    ),
                    [],
                )
            far = (
                [text for layer, old in zip(layers, before) for text in _far(layer, old)]
                if training
                else []
            )
        bad = [
            t
            for t in keras.tree.flatten(outputs)
            if not finiteness.is_finite(keras_variables.dense(t))
        ]
        origin = next((b for b in map(origins.of, bad) if b is not None), None)
        named = origin.culprit if origin is not None else ""
        return (
            ReplayResult(
                first="outputs" if bad else "",
                first_path=named,
                origin=origin,
                rows=tuple(instrument.rows),
            ),
            far,
        )


def _plain(error: str) -> str:
    """Return the text of an exception on one line, without the colors and the arguments that Keras
    adds.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", error).partition("Arguments received by")[0]
    return plain_text(" ".join(text.split())).rstrip(".")


def _moments(layer: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    mean, variance = (
        keras_variables.read(layer.moving_mean),
        keras_variables.read(layer.moving_variance),
    )
    return mean.astype(np.float64), variance.astype(np.float64)


def _far(layer: Any, before: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> list[str]:
    """Return a sentence if the moving statistics are far from those of the batch.

    A pass in training mode has just added the statistics of the batch to zeros.
    """
    share = 1.0 - float(layer.momentum)
    (mean, variance), (own_mean, own_variance) = before, _moments(layer)
    if share <= 0.0 or not layer.trainable or not own_variance.any():
        return []
    own_mean, own_variance = own_mean / share, np.maximum(own_variance / share, 1e-12)
    with np.errstate(all="ignore"):
        ratio = np.maximum(variance, 1e-12) / own_variance
        away = np.abs(mean - own_mean) / np.sqrt(np.maximum(own_variance, layer.epsilon))
    collapsed = (ratio < 1 / MAX_VARIANCE_RATIO) & (
        own_variance > MAX_VARIANCE_RATIO * layer.epsilon
    )
    wrong = (ratio > MAX_VARIANCE_RATIO) | collapsed | (away > MAX_MEAN_DEVIATIONS)
    if not wrong.any():
        return []
    worst = int(np.argmax(np.where(wrong, np.abs(np.log(np.maximum(ratio, 1e-30))) + away, 0.0)))
    return [
        f"{layer.moving_variance.path} is far from the statistics of the batch: channel {worst} has"
        f" moving mean {mean[worst]:.3g} and variance {variance[worst]:.3g}, the batch"
        f" {own_mean[worst]:.3g} and {own_variance[worst]:.3g} ({int(wrong.sum())} of {wrong.size}"
        " channels)."
    ]
