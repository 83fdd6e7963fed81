"""`diagnose`: examines a model on one batch without training it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import (
    GuardError,
    StateLostError,
    expected,
    no_model,
    require_keras_3,
)
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.plain_values import first_line, plain
from keras_nanguard._core.verdict import LayerRow
from keras_nanguard._diagnose.evidence import Evidence, TrialFacts
from keras_nanguard._diagnose.examination import Case, run_trials, tensors
from keras_nanguard._diagnose.explainer import diagnose_step
from keras_nanguard._diagnose.gathering import known_evidence
from keras_nanguard._diagnose.sentences import layer_table, raised
from keras_nanguard._files.recalibrate import estimated
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    losses as keras_losses,
    variables as keras_variables,
)
from keras_nanguard._keras.layers import named_outputs
from keras_nanguard._keras.train_state import TrainState

FORMAT = 1
"""Version of the JSON format of a `DiagnosisReport`."""

MAX_VARIANCE_RATIO = 1e3
"""Factor between a moving variance and that of the batch above which they are far apart. A batch
with a larger variance proves that the moving variance is wrong; one with a smaller variance may
have similar rows.
"""

MAX_SIMILARITY = 1e6
"""The same factor above which no similarity of rows explains a smaller variance of the batch."""

MIN_VALUES = 8
"""Number of values per channel from which their variance may be called too small: few values are
close together by chance.
"""

MAX_MEAN_DEVIATIONS = 30.0
"""Distance between a moving mean and that of the batch, in standard deviations, above which the
moving mean is wrong.
"""


@dataclass(frozen=True)
class DiagnosisReport:
    """The result of `diagnose`.

    Attributes:
        diagnosis: cause, culprit, rows, evidence and advice; cause `unknown` with no culprit if
            nothing is wrong.
        inference: one row per layer call in inference mode.
        training: the same in training mode.
        step: result of a train step on the batch: `"finite"`, `"bad"`, `"failed"`, or `""` if none
            was run.
    """

    diagnosis: Diagnosis
    inference: tuple[LayerRow, ...]
    training: tuple[LayerRow, ...]
    step: str = ""

    @property
    def ok(self) -> bool:
        """Whether outputs in both modes and the train step are finite, and no moving statistics are
        wrong.
        """
        bad = self.first_bad("inference") or self.first_bad("training") or self.step == "bad"
        return self.diagnosis.cause == "unknown" and not bad

    def first_bad(self, mode: str) -> str:
        """Return the path of the first layer whose output is not finite in this mode, `""` if all
        are finite.
        """
        return next((row.path for row in getattr(self, mode) if not row.finite), "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"format": FORMAT, **plain(asdict(self))}

    def __repr__(self) -> str:
        return f"DiagnosisReport(ok={self.ok}, {self.diagnosis!r})"

    def __str__(self) -> str:
        d = self.diagnosis
        seen = [f"  evidence: {text}" for text in d.evidence]
        advice = [] if self.ok else [f"  advice:   {text}" for text in d.advice]
        what = "Nothing bad was found." if self.ok else d.headline
        inference, training = layer_table(self.inference), layer_table(self.training)
        tables = ["", "In inference mode:", inference, "", "In training mode:", training]
        return "\n".join([what, *seen, *advice, *tables])


@np.errstate(all="ignore")  # the data is not finite
def diagnose(model: Any, x: Any, y: Any = None, sample_weight: Any = None) -> DiagnosisReport:
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
        GuardError: if `model` is not a Keras model, the batch cannot become tensors, or the model
            raises an exception on it whose cause is unknown.

    Example:

    ```python
    print(keras_nanguard.diagnose(model, x[:32], y[:32]))
    ```
    """
    require_keras_3(model)
    if not isinstance(model, keras.Model):
        raise no_model(model, "diagnose {path} --data FILE")
    try:
        data = tuple(map(tensors, (x, y, sample_weight)))
    except (TypeError, ValueError) as error:
        kinds = ", ".join(type(p).__name__ for p in (x, y, sample_weight))
        what, received = "x, y and sample_weight as arrays", f"{kinds} ({first_line(error)})"
        raise GuardError(expected(what, received, "Pass the arrays of one batch.")) from error
    return _examine(model, (data,), trains=y is not None)


class _Pass(NamedTuple):
    """One run on the batch: a forward pass in one mode, or a train step.

    Attributes:
        name: what ran, in words.
        step: the same, to be run again.
        run: its result; of a forward pass the site `"outputs"` is bad if an output is.
        outputs: the outputs of a forward pass, `None` if it raised.
    """

    name: str
    step: ReplayableStep
    run: ReplayResult
    outputs: Any = None


def _examine(model: Any, batch: Any, trains: bool) -> DiagnosisReport:
    """Run both modes and, if `trains` and if the model is compiled, a train step."""
    step = ReplayableStep.of(model, list(TrainState.of(model).optimizers))
    inference, training = (_forward(step, batch, mode) for mode in (False, True))
    trained = None
    if trains and getattr(model, "compiled", False) and step.optimizers:
        if training.outputs is not None:
            keras_losses.build_losses(model, batch[0][1], training.outputs)
        trained = _Pass("a train step", step, step.run(batch, observe=True, update=True))
    passes = [one for one in (inference, training, trained) if one is not None]
    bad = next((one for one in passes if not one.run.finite), None)
    evidence = _evidence(step, batch, inference, training, bad or trained or inference)
    found = diagnose_step(model, evidence, batch)
    failed = [f"{one.name} raised {raised(one.run.error)}" for one in passes if one.run.error]
    if found.cause == "unknown" and failed:
        remedy = "Pass one batch, x and y as for fit."
        raise GuardError(expected("data that the model accepts", failed[0], remedy))
    if found.cause == "unknown" and not (evidence.bad_site or evidence.state):
        found = replace(found, advice=())
    result = "" if trained is None else trained.run.word
    return DiagnosisReport(found, inference.run.rows, training.run.rows, result)


def _evidence(
    step: ReplayableStep, batch: Any, inference: _Pass, training: _Pass, shown: _Pass
) -> Evidence:
    """Return the evidence of one pass, with the results of both modes and the bad state."""
    far = [] if training.run.error else _far(step, batch[0][0])
    state, run = TrainState.of(step.model, step.optimizers), shown.run
    checked = (*state.trainable, *state.statistics, *state.slots)
    bad = [v.path for v in checked if not keras_variables.is_finite(v)]
    findings = [Finding("state", path=path) for path in bad]
    if not inference.run.finite or bad:
        path = inference.run.first_path if training.run.finite and not bad else ""
        findings.append(Finding("predictions", path=path))
    wrong = (one.path for one in far if one.wrong)
    findings += [Finding("statistics", "out_of_range", path) for path in list(wrong)[:1]]
    incident = Incident(0, 0, 0, tuple(findings), refused=False)
    evidence = replace(
        known_evidence(step.model, state, incident, batch),
        trials=TrialFacts(
            inference="" if inference.run.error else inference.run.word,
            training="" if training.run.error else training.run.word,
        ),
        notes=tuple(one.sentence for one in far),
    )
    if not run.outputs and training.outputs is not None:  # their width is the number of classes
        outputs = map(keras_arrays.dense, _arrays(training.outputs))
        run = replace(run, outputs=tuple(named_outputs(step.model, list(outputs))))
    case = Case(shown.step, batch, evidence).with_run(run, "" if run.finite else run.word)
    return run_trials(case).evidence


def _forward(step: ReplayableStep, batch: Any, training: bool) -> _Pass:
    """Run the forward pass of a step's model once in one mode."""
    model, seen = step.model, {}

    def body(data: Any) -> Any:
        seen["outputs"] = model(data[0], **keras_layers.mode(model, training))
        return seen["outputs"]

    forward = ReplayableStep(body, model, step.optimizers, losses=_float_arrays)
    run = forward.run(batch, observe=True)
    if run.first == "loss":  # the outputs, in place of losses
        place = "" if run.origin is None else run.origin.culprit
        run = replace(run, first="outputs", first_path=place)
    elif run.first:  # statistics that were bad before
        run = replace(run, first="", first_path="", origin=None)
    name = f"the forward pass in {'training' if training else 'inference'} mode"
    return _Pass(name, forward, run, seen.get("outputs"))


def _arrays(outputs: Any) -> list[Any]:
    return [output for output in keras.tree.flatten(outputs) if hasattr(output, "dtype")]


def _float_arrays(outputs: Any) -> list[Any]:
    found = _arrays(outputs)
    return [t for t in found if finiteness.is_float(keras.backend.standardize_dtype(t.dtype))]


class _Distance(NamedTuple):
    """How far the moving statistics of a layer are from those of the batch.

    Attributes:
        path: path of its moving variance.
        sentence: the distance as a sentence.
        wrong: whether the statistics are wrong, and not only those of less similar rows.
    """

    path: str
    sentence: str
    wrong: bool


def _far(step: ReplayableStep, x: Any) -> list[_Distance]:
    """Return the layers whose moving statistics are far from those of the inputs `x`."""
    layers = [layer for layer in keras_layers.batchnorms(step.model) if layer.trainable]
    if not layers:
        return []
    try:
        with step.preserved():
            report, pairs = estimated(step.model, layers, [x])
    except StateLostError:
        raise
    except Exception:  # noqa: BLE001  a custom model may not run this way, or its inputs are bad
        return []
    own = {id(v): value for v, value in pairs}
    called = [layer for layer in layers if id(layer.moving_mean) in own]
    distances = (_distance(one, own, about.samples) for one, about in zip(called, report.layers))
    return [distance for distance in distances if distance is not None]


def _distance(layer: Any, own: Mapping[int, finiteness.Array], count: int) -> _Distance | None:
    """Return how far the moving statistics of a layer are from its `own` ones in the batch, by the
    `id` of the variable; `None` if they are not.

    Args:
        count: number of values per channel in the batch.
    """
    variables = (layer.moving_mean, layer.moving_variance)
    mean, variance = (keras_variables.read(v).astype(np.float64) for v in variables)
    own_mean, own_variance = (own[id(v)].astype(np.float64) for v in variables)
    if not own_variance.any():
        return None
    # A channel that is constant in the batch, such as a dead one, says nothing about its variance.
    known = np.where(own_variance > 0.0, own_variance, np.maximum(variance, 0.0)) + layer.epsilon
    ratio = (variance + layer.epsilon) / known
    away = np.abs(mean - own_mean) / np.sqrt(np.fmax(known, variance))
    similar = ratio > MAX_VARIANCE_RATIO if count >= MIN_VALUES else np.zeros_like(ratio, bool)
    wrong = (ratio < 1 / MAX_VARIANCE_RATIO) | (away > MAX_MEAN_DEVIATIONS)
    wrong |= similar & (ratio > MAX_SIMILARITY)
    far = wrong if wrong.any() else similar
    if not far.any():
        return None
    worst = int(np.argmax(np.where(far, np.abs(np.log(np.maximum(ratio, 1e-30))) + away, 0.0)))
    path = layer.moving_variance.path
    explained = "" if wrong.any() else " Similar rows, as of one class, may explain this."
    sentence = (
        f"{path} is far from the statistics of the batch in {int(far.sum())} of {far.size}"
        f" channels. Channel {worst} has moving mean {mean[worst]:.3g} and variance"
        f" {variance[worst]:.3g}; the batch has {own_mean[worst]:.3g} and"
        f" {own_variance[worst]:.3g}.{explained}"
    )
    return _Distance(path, sentence, bool(wrong.any()))
