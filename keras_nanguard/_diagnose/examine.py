"""`diagnose`: examines a model on one batch without training it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import no_model, require_keras_3
from keras_nanguard._core.evidence import Evidence, LayerRow
from keras_nanguard._core.incident import Diagnosis
from keras_nanguard._diagnose.conclude import conclude
from keras_nanguard._diagnose.facts import optimizer_facts, roles
from keras_nanguard._diagnose.precision import in_float32, lowest
from keras_nanguard._diagnose.trials import Trials, with_names
from keras_nanguard._diagnose.words import table
from keras_nanguard._files.stored import plain_text
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

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
        known = d.cause != "unknown"
        seen = [f"  evidence: {text}" for text in d.evidence]
        if self.error and known:
            seen.append(f"  evidence: {self.error[0].upper()}{self.error[1:]}.")
        advice = [] if self.healthy else [f"  advice:   {text}" for text in d.advice]
        what = "Nothing bad was found." if self.healthy else d.headline
        if self.error and not known:
            what = f"No diagnosis is possible: {self.error}."
        inference, training = table(self.inference), table(self.training)
        tables = ["", "In inference mode:", inference, "", "In training mode:", training]
        return "\n".join([what, *seen, *advice, *tables])


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
        The result. `print` shows it as text.

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
    args = tuple(part for part in (x, y, sample_weight) if part is not None)
    return _Examiner(model, (args,), trains=y is not None).examined()


def _tensor(value: Any) -> Any:
    return None if value is None else keras.ops.convert_to_tensor(value)


class _Examiner:
    """One examination of one model on one batch."""

    def __init__(self, model: Any, batch: Any, trains: bool):
        self.model, self.batch = model, batch
        self.train_state = TrainState.of(model)
        self.optimizers = list(self.train_state.optimizers)
        self.trains = trains and bool(getattr(model, "compiled", False)) and bool(self.optimizers)
        self.step = ReplayableStep.of(model, self.optimizers)
        self.outputs: Any = None
        self.far: list[str] = []

    def examined(self) -> Examination:
        inference, training = self._forward(False), self._forward(True)
        step = self._train_step() if self.trains else ReplayResult()
        runs = {
            "the forward pass in inference mode": inference,
            "the forward pass in training mode": training,
            "a train step": step,
        }
        failed = (f"{what} raised {_plain(run.error)}" for what, run in runs.items() if run.error)
        error = next(failed, "")
        evidence = self._evidence(inference, training, step)
        found = conclude(evidence)
        if found.cause == "unknown" and evidence.replay_error:
            found = replace(found, advice=(self._what_it_takes(),))
        elif not (evidence.first or evidence.state or self.far or error):
            found = replace(found, advice=())
        result = step.word if self.trains else ""
        return Examination(found, inference.rows, training.rows, result, error)

    def _what_it_takes(self) -> str:
        taken = [tuple(tensor.shape) for tensor in getattr(self.model, "inputs", None) or ()]
        shapes = f": the model takes x of shape {', '.join(map(str, taken))}" if taken else ""
        return f"Pass one batch, x and y as for fit{shapes}."

    def _evidence(
        self, inference: ReplayResult, training: ReplayResult, step: ReplayResult
    ) -> Evidence:
        """Return the evidence of the first run that is not finite, and of the model's state."""
        bad = (run for run in (inference, training, step) if not run.finite)
        shown = next(bad, step if self.trains else inference)
        state = tuple(self._bad_state())
        sites = ["predictions:nonfinite"] if not inference.finite or state else []
        sites += ["statistics:out_of_range"] if self.far else []
        path = self.far[0].split()[0] if self.far else ""
        if not inference.finite and training.finite and not state:
            path = inference.first_path
        trials = Trials(
            self.step,
            self.batch,
            Evidence(
                refused=False,
                sites=tuple(sites),
                state=state,
                first_path=path,
                low_precision=lowest(self.model),
                inference="" if inference.error else inference.word,
                training="" if training.error else training.word,
                rows=shown.origin.rows if shown.origin is not None else (),
                optimizers=optimizer_facts([o for o in self.optimizers if o.built]),
                notes=tuple(self.far),
            ),
        )
        trials.look_at_batch()
        trials.look_at_targets()
        trials.note(shown, "" if shown.finite else "replay")
        found = trials.evidence
        if found.inputs_bad and 0 < len(found.rows) < found.count:
            rest = self._forward(False, batches.without(self.batch, found.rows))
            trials.add(without_rows="finite" if rest.finite else "bad")
        if found.low_precision and shown.first:
            trials.add(float32=self._in_float32(shown is step))
        return with_names(trials.evidence, self.model)

    def _bad_state(self) -> Iterator[tuple[str, str]]:
        """Yield path and role of each variable that is not finite."""
        state, role_of = self.train_state, roles(self.train_state)
        for v in (*state.trainable, *state.statistics, *state.slots):
            if not finiteness.is_finite(keras_variables.view(v)):
                yield v.path, role_of.get(v.path, "weights")

    def _train_step(self) -> ReplayResult:
        if self.outputs is not None:
            keras_losses.build_losses(self.model, self.batch[0][1], self.outputs)
        return self.step.run(self.batch, observe=True, update=True)

    def _in_float32(self, step: bool) -> str:
        with in_float32(self.model, self.step.variables(), self.optimizers):
            if step:
                return self.step.run(self.batch, update=True).word
            finite = all(self._forward(mode).finite for mode in (False, True))
            return "finite" if finite else "bad"

    def _forward(self, training: bool, batch: Any = None) -> ReplayResult:
        """Run the forward pass once in one mode.

        A pass in training mode also leaves sentences about wrong moving statistics in `far`.
        """
        norms = keras_layers.batchnorms(self.model) if training else []
        before = [_moments(layer) for layer in norms]

        def body(data: Any) -> Any:
            for layer in norms:  # training mode does not read their statistics, and adds to them
                keras_variables.write(layer.moving_mean, np.zeros(layer.moving_mean.shape))
                keras_variables.write(layer.moving_variance, np.zeros(layer.moving_variance.shape))
            outputs = self.model(data[0], **keras_layers.mode(self.model, training))
            if training:
                self.far = [text for layer, old in zip(norms, before) for text in _far(layer, old)]
            self.outputs = outputs
            return outputs

        step = ReplayableStep(body, self.model, self.optimizers, losses=_float_arrays)
        run = step.run(self.batch if batch is None else batch, observe=True)
        bad = run.first == "loss"  # the outputs, in place of losses
        place = run.origin.culprit if bad and run.origin is not None else ""
        return replace(run, first="outputs" if bad else "", first_path=place)


def _float_arrays(outputs: Any) -> list[Any]:
    return [
        t
        for t in keras.tree.flatten(outputs)
        if finiteness.is_float(keras.backend.standardize_dtype(t.dtype))
    ]


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
        f"{layer.moving_variance.path} is far from the statistics of the batch in"
        f" {int(wrong.sum())} of {wrong.size} channels. Channel {worst} has moving mean"
        f" {mean[worst]:.3g} and variance {variance[worst]:.3g}; the batch has"
        f" {own_mean[worst]:.3g} and {own_variance[worst]:.3g}."
    ]
