"""`replay`: runs the bad step of a bundle again, under the mode, dtype and device that one asks for."""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._core.errors import BundleError, GuardError, expected
from keras_nanguard._core.evidence import Evidence, LayerRow
from keras_nanguard._core.incident import Diagnosis, Incident
from keras_nanguard._diagnose import bundle as _bundle
from keras_nanguard._diagnose import raised
from keras_nanguard._diagnose.conclude import conclude
from keras_nanguard._diagnose.counterfactuals import Anew, tried
from keras_nanguard._diagnose.facts import objective, optimizer_facts
from keras_nanguard._diagnose.precision import in_float32, lowest
from keras_nanguard._diagnose.trials import Trials
from keras_nanguard._diagnose.words import table
from keras_nanguard._files.stored import first_line, plain_text
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["MODES", "Replay", "replay"]

MODES = ("eager", "graph", "xla")


@dataclass(frozen=True)
class Replay:
    """What came of running a step again.

    Attributes:
        incident: the incident of the bundle.
        mode: how the step was run.
        result: `"bad"`, `"finite"` or `"failed"`.
        diagnosis: the diagnosis made anew.
        layers: a row for each layer call.
        counterfactuals: `(what was changed, what came of it)`.
    """

    incident: Incident
    mode: str
    result: str
    diagnosis: Diagnosis
    layers: tuple[LayerRow, ...]
    counterfactuals: tuple[tuple[str, str], ...] = ()

    @property
    def reproduced(self) -> bool:
        """Whether the step went bad again."""
        return self.result == "bad"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        shown = Incident(self.incident.step, self.incident.epoch, self.incident.batch, (), diagnosis=self.diagnosis)
        return {
            "format": 1,
            "incident": self.incident.to_dict(),
            "mode": self.mode,
            "result": self.result,
            "diagnosis": shown.to_dict()["diagnosis"],
            "layers": [{name: _plain(getattr(row, name)) for name in LayerRow.__slots__} for row in self.layers],
            "counterfactuals": [list(pair) for pair in self.counterfactuals],
        }

    def __repr__(self) -> str:
        return f"Replay({self.result!r}, {self.diagnosis!r})"

    def __str__(self) -> str:
        what = {"bad": "goes bad again", "finite": "comes out finite", "failed": "cannot be run"}[self.result]
        lines = [f"{self.incident.moment.capitalize()}, run again ({self.mode}), {what}.", str(self.diagnosis)]
        lines += [f"  {change}: {outcome}." for change, outcome in self.counterfactuals]
        return "\n".join([*lines, "", table(self.layers)])


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


@np.errstate(all="ignore")  # what is looked at is not finite
def replay(
    bundle: str | Path,
    model: Any = None,
    *,
    mode: str = "eager",
    dtype: str | None = None,
    device: str | None = None,
    counterfactuals: bool = False,
    custom_objects: Mapping[str, Any] | None = None,
) -> Replay:
    """Run the bad step of a bundle again and find out anew why it is bad.

    Args:
        bundle: folder of the bundle, as `Incident.bundle` names it.
        model: a compiled model, or the path of a `.keras` file; by default it is made from the bundle's configuration.
            Its weights are set to those of the bundle.
        mode: `"eager"`, `"graph"` or `"xla"`; on JAX both of the latter are XLA, and PyTorch has only the first.
        dtype: `"float32"` computes everything in it; `None` as it was.
        device: where to run, in the backend's words (`"CPU:0"`, `"GPU:0"`); `None` where the backend likes.
        counterfactuals: run the steps up to the bad one again, from a snapshot, each time with one thing changed, and
            tell which change cures it. Where the bundle holds no steps before it (they are kept where training had
            diverged), a few steps on its batch alone. Costs six times as many steps, eagerly.
        custom_objects: classes and functions of your own that the model is made of, by name, as
            `keras.saving.load_model` takes them; not needed for those that are registered with Keras.

    Returns:
        What came of it; print it.

    Raises:
        BundleError: if the bundle cannot be read, is hostile, or does not fit the model.
        GuardError: if an argument is of no use.
    """
    if mode not in MODES:
        raise GuardError(expected(f"mode to be one of {', '.join(MODES)}", f"mode={mode!r}", "Choose one."))
    if mode not in current.compiled_replay().MODES:
        raise GuardError(expected("mode='eager' on PyTorch, where a guarded step runs eagerly", f"mode={mode!r}", "Leave it out."))
    if dtype not in (None, "float32"):
        raise GuardError(expected("dtype to be None or 'float32'", f"dtype={dtype!r}", "Choose one."))
    found = _bundle.read(bundle)
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(keras.device(device))
        model = _model(found, model, custom_objects)
        step = _prepared(found, model)
        batch = _tensors(found.batch)
        if dtype == "float32":
            stack.enter_context(in_float32(model, step.variables(), step.optimizers))
        run, evidence = _run(found, step, batch, mode)
        cures = tuple(tried(step, _anew(found, step, batch))) if counterfactuals else ()
    diagnosis = raised.by_replay(model, evidence, found) or conclude(evidence)
    return Replay(found.incident, mode, run.word, diagnosis, run.rows, cures)


def _tensors(batch: Any) -> Any:
    return keras.tree.map_structure(lambda a: None if a is None else current.replay().tensor(a), batch)


def _anew(found: _bundle.Bundle, step: ReplayableStep, batch: Any) -> Anew:
    """Return from where and over which batches the steps up to the bad one are run again."""
    told, start = found.about.get("before") or {}, found.start or found.state
    return Anew(
        start=lambda: _write_state(start, TrainState.of(step.model, step.optimizers).everything),
        before=[_tensors(args) for args in found.before],
        batch=batch,
        rows=tuple(found.incident.diagnosis.samples) if found.incident.diagnosis else (),
        since=int(told.get("snapshot", 0)),
        exact=bool(told.get("exact")),
    )


def _model(found: _bundle.Bundle, model: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    """Return the model: as given, from a file, or from the bundle's configuration."""
    own = dict(custom_objects or {})
    try:
        if isinstance(model, (str, Path)):
            return keras.saving.load_model(model, own)
        if model is None and found.model:
            return keras.models.model_from_json(found.model, own)
    except Exception as error:
        raise BundleError(f"The model cannot be made: {_why_not(error)}") from error
    if model is None:
        raise BundleError("The bundle has no configuration of its model. Pass the model, or the path of a .keras file.")
    return model


def _why_not(error: Exception) -> str:
    """Return why Keras could not make the model, and what to do: its own messages carry the whole configuration."""
    if missing := re.search(r"Could not locate (class|function) '([^']+)'", str(error)):
        word, name = missing[1], plain_text(missing[2])
        return (
            f"its {word} {name!r} is your own, and is not known here. Pass custom_objects={{{name!r}: {name}}} or the model "
            f"itself; on the command line, --import the module that defines {name}."
        )
    remedy = "A model with Python code in it is not run from a file; pass the model itself."
    return f"{type(error).__name__}: {first_line(error)}. {remedy}"


def _prepared(found: _bundle.Bundle, model: Any) -> ReplayableStep:
    """Return the step of the model, with the state of the bundle."""
    optimizers = keras_optimizers.find_optimizers(model)
    if not getattr(model, "compiled", False) or not optimizers:
        raise BundleError(expected("a compiled model", f"model={model.name!r}, which is not", "Call compile first."))
    for optimizer in optimizers:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    step = ReplayableStep.of(model, optimizers, keeps_undo=bool(found.about.get("saving")))
    if found.state:
        _write_state(found.state, TrainState.of(model, optimizers).everything)
    return step


def _write_state(state: Sequence[tuple[str, np.ndarray[Any, Any]]], variables: Sequence[Any]) -> None:
    """Give the variables the values of a bundle.

    A variable that came into being in the bad step itself (a slot, in the first step) is in no bundle, and is left.
    """
    for variable, array in _pairs(state, variables):
        if tuple(array.shape) != tuple(variable.shape):
            what = f"{variable.path} of shape {tuple(array.shape)}"
            raise BundleError(expected(what, tuple(variable.shape), "Pass the model that was trained."))
        keras_variables.write(variable, array)


def _pairs(state: Sequence[tuple[str, np.ndarray[Any, Any]]], variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each variable with its value: by path where paths are unique, else in order."""
    by_path, paths = dict(state), {v.path for v in variables}
    unique = len(by_path) == len(state) and len(paths) == len(variables)
    if unique and (set(by_path) <= paths or paths <= set(by_path)):
        return [(v, by_path[v.path]) for v in variables if v.path in by_path]
    found, rest = [], deque(state)  # one path for several slots, as the lowest Keras names them
    for variable in variables:
        if rest and (variable.path, tuple(variable.shape)) == (rest[0][0], rest[0][1].shape):
            found.append((variable, rest.popleft()[1]))
    if not rest:
        return found
    if len(state) != len(variables):
        raise BundleError(expected(f"a model with {len(state)} variables", len(variables), "Pass the model that was trained."))
    return [(v, array) for v, (_, array) in zip(variables, state)]


def _run(found: _bundle.Bundle, step: ReplayableStep, batch: Any, mode: str) -> tuple[ReplayResult, Evidence]:
    own = found.incident
    evidence = Evidence(
        step=own.step,
        refused=True,
        sites=tuple(f"{f.site}:{f.kind}" for f in own.findings),
        mode=mode,
        growth=found.growth,
        optimizers=optimizer_facts(step.optimizers),
        objective=objective(step.model),
        gradient_norm=own.values.get("gradient_norm", math.nan),
        loss_scale=own.values.get("loss_scale"),
        low_precision=lowest(step.model),
    )
    first = found.start and not (found.about.get("before") or {}).get("snapshot")
    trials = Trials(step, batch, evidence, _Start(found.start) if first else None)
    evidence = trials.carried_out()
    if mode == "eager":
        return trials.run, evidence
    return current.compiled_replay().run_compiled(step, batch, jit=mode == "xla"), evidence


class _Start:
    """The first state of a bundle, in the form of a snapshot."""

    def __init__(self, arrays: Sequence[tuple[str, np.ndarray[Any, Any]]]):
        self._arrays = dict(arrays)

    def value(self, variable: Any) -> np.ndarray[Any, Any] | None:
        """Return the value of one variable, `None` where there is none."""
        return self._arrays.get(variable.path)
