"""`replay`: runs the bad step of a bundle again, in a chosen mode and dtype."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current, interface
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core.errors import (
    BundleError,
    FileFormatError,
    GuardError,
    expected,
    require_one_of,
)
from keras_nanguard._core.finiteness import Array
from keras_nanguard._core.incident import Diagnosis, Incident
from keras_nanguard._core.json_records import stored
from keras_nanguard._core.plain_values import first_line, plain, plain_text
from keras_nanguard._core.verdict import LayerRow
from keras_nanguard._diagnose.evidence import Evidence
from keras_nanguard._diagnose.examination import (
    Case,
    computing_in_float32,
    examine,
    obstacle_to,
    tensors,
)
from keras_nanguard._diagnose.explainer import diagnose_step
from keras_nanguard._diagnose.gathering import known_evidence
from keras_nanguard._diagnose.growth import Growth
from keras_nanguard._diagnose.sentences import RESULTS, layer_table
from keras_nanguard._files.bundles import Bundle, read
from keras_nanguard._files.formats.limits import refuse_missing
from keras_nanguard._files.loading import refuse_legacy
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.torch_tensors import resizable
from keras_nanguard._keras.train_state import TrainState

FORMAT = 1
"""Version of the JSON format of a `ReplayReport`."""

State = Sequence[tuple[str, Array]]
"""Path and value of each variable of a bundle."""


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        result: `"bad"`, `"finite"` or `"failed"`.
        layers: a row for each layer call.
    """

    incident: Incident
    mode: str
    result: str
    diagnosis: Diagnosis
    layers: tuple[LayerRow, ...]

    @property
    def ok(self) -> bool:
        """Whether the step is finite: it is neither bad again, nor does it fail."""
        return self.result == "finite"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"format": FORMAT, **plain(asdict(self)), "incident": self.incident.to_dict()}

    def __repr__(self) -> str:
        return f"ReplayReport({self.result!r}, {self.diagnosis!r})"

    def __str__(self) -> str:
        what = f"{self.incident.moment.capitalize()}, replayed in mode {self.mode!r},"
        lines = [f"{what} {RESULTS[self.result]}.", str(self.diagnosis)]
        return "\n".join([*lines, "", layer_table(self.layers)])


@np.errstate(all="ignore")  # the data is not finite
def replay(
    bundle: str | Path | None,
    model: Any = None,
    *,
    mode: str = "eager",
    dtype: str | None = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> ReplayReport:
    """Run the bad step of a bundle again, and diagnose it.

    Args:
        bundle: folder of the bundle, as `Incident.bundle` names it.
        model: a compiled model, or the path of a `.keras` file; by default it is created from the
            configuration in the bundle. Its weights are set to those of the bundle.
        mode: `"eager"`, `"graph"` or `"xla"`. On JAX `"graph"` is XLA, too. PyTorch has only
            `"eager"`.
        dtype: `"float32"` to compute everything in float32; `None`: unchanged.
        custom_objects: custom classes and functions of the model by name, as for
            `keras.saving.load_model`; not needed for those that are registered with Keras.

    Returns:
        The result. `print` shows it as text.

    Raises:
        BundleError: if the bundle cannot be read, is unsafe, or does not match the model.
        GuardError: if an argument is invalid, or this process cannot replay the step: there is too
            little memory for a copy of the state, or another process has a part of it.
    """
    _check(mode, dtype)
    found = read(bundle)
    model = _model(found, model, custom_objects)
    step = _step_before(found, model)
    batch = tensors(found.batch)
    with computing_in_float32(step) if dtype else nullcontext():
        evidence = _evidence(found, step, batch, mode)
        result, layers = evidence.replay.result, evidence.replay.table
        if mode != "eager":
            run = step.run_compiled(batch, jit=mode == "xla")
            result, layers = run.word, run.rows
    diagnosis = diagnose_step(model, evidence, found.batch)
    return ReplayReport(found.incident, mode, result, diagnosis, layers)


def _check(mode: str, dtype: str | None) -> None:
    require_one_of("mode", mode, interface.Replay.MODES)
    if mode not in current.replay().MODES:
        what = "mode='eager' on PyTorch, where a guarded step runs eagerly"
        raise GuardError(expected(what, f"mode={mode!r}", "Leave it out."))
    if dtype is not None:
        require_one_of("dtype", dtype, ("float32",))


def _model(found: Bundle, model: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    """Return the model: as given, from a file, or from the bundle's configuration."""
    own = dict(custom_objects or {})
    try:
        if isinstance(model, (str, Path)):
            refuse_missing(str(model), "a model file")
            refuse_legacy(str(model))
            return keras.saving.load_model(model, own)
        if model is None and found.model:
            return keras.models.model_from_json(found.model, own)
    except FileFormatError as error:  # of a file that is missing or refused
        raise BundleError(str(error)) from error
    except Exception as error:
        raise BundleError(f"The model cannot be created: {_reason(error)}") from error
    if model is None:
        remedy = "Pass the model, or the path of a .keras file."
        raise BundleError(f"The bundle has no configuration of its model. {remedy}")
    return model


def _reason(error: Exception) -> str:
    """Return why Keras could not create the model, and a remedy: its own messages contain the whole
    configuration.
    """
    if missing := re.search(r"Could not locate (class|function) '([^']+)'", str(error)):
        word, name = missing[1], plain_text(missing[2])
        given = f"Pass custom_objects={{{name!r}: {name}}} or the model itself"
        imported = f"on the command line, --import the module that defines {name}"
        return f"its custom {word} {name!r} is not known here. {given}; {imported}."
    remedy = "A model that contains Python code is not created from a file; pass the model itself."
    return f"{type(error).__name__}: {first_line(error)}. {remedy}"


def _step_before(found: Bundle, model: Any) -> ReplayableStep:
    """Return the step of the model, with the state of the bundle."""
    optimizers = keras_optimizers.find_optimizers(model)
    if not getattr(model, "compiled", False) or not optimizers:
        received = f"model={model.name!r}, which is not"
        raise BundleError(expected("a compiled model", received, "Call compile first."))
    for optimizer in optimizers:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    step = ReplayableStep.of(model, optimizers, updates_first=found.updates_first)
    if obstacle := obstacle_to(step):
        remedy = "Replay the bundle in one process, on a machine with enough memory."
        raise GuardError(f"{obstacle} {remedy}")
    # A variable that the bad step itself created (a slot, in the first step) is in no bundle.
    for variable, array in _pairs(found.state, step) if found.state else ():
        fits = tuple(array.shape) == tuple(variable.shape) or resizable(variable)
        if not fits:
            raise _another(f"{variable.path} of shape {tuple(array.shape)}", tuple(variable.shape))
        keras_variables.write(variable, array)
    keras_layers.use_written_values(model)
    return step


def _pairs(state: State, step: ReplayableStep) -> list[tuple[Any, Any]]:
    """Return each variable with its value: by path, in order if the paths are different."""
    train_state = TrainState.of(step.model, step.optimizers)
    variables = train_state.everything
    left: dict[str, deque[Array]] = defaultdict(deque)
    for path, array in state:  # in Keras 3.6 several slots have the same path
        left[path].append(array)
    found = [(v, left[v.path].popleft()) for v in variables if left[v.path]]
    # The bundle may have the slots of an optimizer of a layer, which only a step shows.
    if len(found) == len(state) or (train_state.unused and len(found) == len(variables)):
        return found
    if len(state) != len(variables):
        raise _another(f"a model with {len(state)} variables", len(variables))
    return [(v, array) for v, (_, array) in zip(variables, state)]


def _another(what: str, received: object) -> BundleError:
    return BundleError(expected(what, received, "Pass the model that was trained."))


def _evidence(found: Bundle, step: ReplayableStep, batch: Any, mode: str) -> Evidence:
    """Return the evidence of a step, which always includes that of an eager replay."""
    state = TrainState.of(step.model, step.optimizers)
    known = known_evidence(step.model, state, found.incident, batch)
    known = dataclasses.replace(known, mode=mode, growth=_growth(found))
    values = {id(variable): array for variable, array in _pairs(found.start, step)}
    start = (lambda variable: values.get(id(variable))) if values else None
    return examine(Case(step, batch, known, start))


def _growth(found: Bundle) -> Growth:
    try:
        return stored(Growth, found.growth)
    except ValueError as error:
        raise BundleError(
            f"The growth in the bundle cannot be read: {plain_text(error)}"
        ) from error
