"""A user program with every public name, for mypy and pyright; nothing runs it."""

from __future__ import annotations

import keras
import numpy as np

import keras_nanguard
from keras_nanguard import (
    BundleError,
    Decision,
    Diagnosis,
    FileFormatError,
    Finding,
    GuardError,
    GuardInUseError,
    Incident,
    NanGuard,
    NanGuardError,
    NanGuardModel,
    NonFiniteError,
    Outcome,
    Policy,
    PolicyError,
    Recording,
    StateLostError,
    diagnose,
    lint,
    recalibrate,
    repair,
    replay,
    scan,
)
from keras_nanguard.actions import LowerLr, Skip
from keras_nanguard.errors import NonFiniteError as TheSame
from keras_nanguard.testing import corrupt, inject

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class Model(NanGuardModel):
    nanguard_policy = "stop"


def page(incident: Incident) -> str:
    """Return the contents of an incident, each attribute with its type."""
    finding: Finding = incident.findings[0]
    counts: list[int | None] = [finding.nan, finding.inf, finding.size]
    where: tuple[int | None, int | None, int | None] = (incident.step, incident.epoch, incident.batch)
    diagnosis: Diagnosis | None = incident.diagnosis
    decision: Decision | None = incident.decision
    outcomes: tuple[Outcome, ...] = incident.outcomes
    cause: str = diagnosis.cause if diagnosis else ""
    advice: tuple[str, ...] = diagnosis.advice if diagnosis else ()
    return f"{finding.site} {finding.kind} {finding.path} {counts} {where} {cause} {advice} {decision} {[o.action for o in outcomes]}"


def train(model: keras.Model, x: Array, y: Array) -> str:
    """Train with a guard that has every argument, and read all of its attributes."""
    policy: Policy = Policy.load("recover", snapshot={"every": 50})
    guard = NanGuard(
        policy,
        directory="run1",
        verbose=2,
        functions={"page": page},
        diagnose=True,
        resume=False,
        logs=True,
        sample_ids=["a", "b"],
        lower_lr={"factor": 0.5},
    )
    with inject(model, site="gradients", kind="inf", step=3) as fault:
        model.fit(x, y, callbacks=[guard])  # pyright: ignore[reportUnknownMemberType]  Keras has no types
    fired: tuple[int, ...] = fault.fired
    incidents: list[Incident] = guard.incidents
    recording: Recording = guard.recording
    labels: list[str] = [sample.label for sample in guard.bad_samples()]
    stopped: bool = guard.stopped
    refused: bool = guard.refused
    verbose: int = guard.verbose
    own = Model()
    theirs: NanGuard = own.nanguard
    text: str = f"{guard.report('run.html').name} {guard.summary()} {theirs.summary()}"
    return f"{text} {list(map(page, incidents))} {recording.steps['loss']} {labels} {stopped} {refused} {verbose} {fired}"


def loop(model: keras.Model, optimizer: keras.optimizers.Optimizer, x: Array) -> float:
    """Guard a hand-written step."""
    guard = NanGuard("observe")

    def train_step(x: Array) -> float:
        return float(x.mean())

    with guard.watch(model, optimizer):
        step = guard.step(train_step)
        return step(x)


def files(model: keras.Model, x: Array) -> None:
    """Use the functions for models, batches and files."""
    finite: bool = scan("model.keras").ok
    statuses: list[str] = [change.status for change in repair("model.keras", weights="zeros", dry_run=True).changes]
    healthy: bool = diagnose(model, x).ok
    hazards: list[str] = [hazard.code for hazard in lint(model).hazards]
    corrupt(model, "nan")
    print(finite, statuses, healthy, hazards, recalibrate(model, x, steps=3), replay("run1/incidents/x"))
    print(LowerLr(factor=0.5).factor, Skip().to_file(), keras_nanguard.__version__)


def errors() -> Incident | None:
    """Catch the errors of the library."""
    try:
        NanGuard("no such policy")
    except PolicyError as error:
        print(error)
    except (BundleError, FileFormatError, GuardInUseError, StateLostError, GuardError) as error:
        print(error)
    except (NonFiniteError, TheSame) as error:
        return error.incident
    except NanGuardError as error:
        print(error)
    return None
