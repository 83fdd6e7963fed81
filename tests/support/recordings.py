"""Synthetic recordings of any length, and recorders that receive synthetic steps."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from keras_nanguard import Decision, Diagnosis, Finding, Incident, Outcome, Recording
from keras_nanguard._recording import writer as writing
from keras_nanguard._recording.database import (
    COMMITTED,
    MEASURED,  # noqa: F401
    NAME,
    OVERFLOW,
    REFUSED,
    STEP_COLUMNS,  # noqa: F401
    insert,
)
from keras_nanguard._recording.memory import as_json
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import BadSample, Event
from keras_nanguard._recording.writer import File
from keras_nanguard._report.reported_run import ReportedRun

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
"""A name that would become markup if it were not escaped."""


def synthetic(steps: int = 2000, incidents: int = 3, name: str = "net", seed: int = 0, epoch: int = 100) -> Recording:
    """Return a recording of a run.

    Args:
        steps: number of steps.
        incidents: number of incidents, evenly spread.
        name: part of all names of models, layers, files and samples.
        seed: of the random numbers.
        epoch: steps of one epoch.
    """
    random = np.random.default_rng(seed)
    step = np.arange(steps)
    bad = np.unique(np.linspace(epoch // 2, steps - 1, incidents).astype(int)) if incidents and steps > epoch else step[:incidents]
    status = np.full(steps, COMMITTED, np.int8)
    status[bad] = REFUSED
    status[bad[bad + 7 < steps] + 7] = OVERFLOW
    loss = 2.3 * np.exp(-step / max(steps / 4, 1)) + 0.05 * random.random(steps)
    loss[bad] = math.nan
    columns = {
        "step": step,
        "epoch": step // epoch,
        "batch": step % epoch,
        "loss": loss,
        "gradient_norm": 1.0 + random.random(steps) + 20.0 * np.isin(step, bad - 1),
        "learning_rate": np.where(step < steps // 2, 1e-3, 5e-4),
        "loss_scale": np.where(step < steps // 2, 32768.0, 16384.0),
        "time": 1.7e9 + 0.01 * step,
        "status": status,
        "undone": np.isin(step, [n for b in bad[::2] for n in range(b - 3, b)]),
    }
    meta = {
        "format": 1,
        "model": name,
        "backend": "tensorflow",
        "versions": {"keras_nanguard": "0.1.0", "keras": "3.15.1", "tensorflow": "2.21.0", "numpy": "2.4.6", "python": "3.12"},
        "policy": "[rules]\n# recover\n",
        "began": 1.7e9,
        "written": 1.7e9 + 0.01 * steps,
        "status": "finished",
        "epochs": -(-steps // epoch),
        "steps_per_epoch": epoch,
        "refused": int((status != COMMITTED).sum()),
        "overflows": int((status == OVERFLOW).sum()),
    }
    events = _events(columns, bad, name, epoch)
    return Recording(meta, columns, events, _samples(bad, name))


def _events(columns: dict[str, np.ndarray], bad: np.ndarray, name: str, epoch: int) -> tuple[Event, ...]:
    time, steps = columns["time"], len(columns["step"])
    last = max(steps - 1, 0)
    events = [Event(0, 0, float(time[0]), "begin", "Training begins.", {"epochs": -(-steps // epoch)})]
    for number, step in enumerate(bad.tolist()):
        one, at = incident(step, step // epoch, step % epoch, number, name), (step, step // epoch, float(time[step]))
        events.append(Event(*at, "incident", str(one), one.to_dict()))
        if number % 2 == 0:
            back = max(step - 3, 0)
            events.append(Event(*at, "rollback", f"restored the state after {back} steps", {"to": back, "undone": step - back}))
        if number % 5 == 0:
            events.append(Event(*at, "learning_rate", f"{name}: 0.001 -> 0.0005", {"optimizer": name, "before": 1e-3, "after": 5e-4}))
    for end in range(epoch, steps + 1, max(epoch, steps // 50 // epoch * epoch)):
        logs = {"loss": float(np.nan_to_num(columns["loss"][end - 1])), "accuracy": end / steps}
        events.append(Event(end - 1, end // epoch - 1, float(time[end - 1]), "epoch", "", {"logs": logs, "refused": 0}))
    events.append(Event(last, last // epoch, float(time[-1]), "end", "Training ended.", {"status": "finished"}))
    return tuple(sorted(events, key=lambda event: event.time))


def incident(step: int, epoch: int, batch: int, number: int = 0, name: str = "net") -> Incident:
    """Return an incident: one of four kinds, by its number."""
    finding, cause, culprit, evidence = (
        (Finding("inputs", "nonfinite", "x", 3, 0, 96), "input_nonfinite", "inputs", "3 entries of x are NaN."),
        (Finding("gradients", "nonfinite", f"{name}/dense/kernel", 96, 0, 96), "loss_domain", f"{name}/dense", "log(0) in the loss."),
        (Finding("loss", "spike", "", value=91.5), "spike", "", "The loss is 40 times that of the steps before."),
        (Finding("weights", "explosion", f"{name}/dense_1/kernel", value=1e30), "divergence", "", "The rate is too high."),
    )[number % 4]
    rows = (5, 11) if number % 4 == 0 else ()
    diagnosis = Diagnosis(cause, culprit, rows, (evidence,), (f"Look at {name}: `x = np.nan_to_num(x)`.",), 0.9)
    decision = Decision("persistent", ({"action": "skip"}, {"action": "rollback", "depth": 1}), "the third within 20 steps")
    outcomes = (Outcome("skip", "done"), Outcome("rollback", "skipped", "there is no verified snapshot to restore"))
    values = {"loss": math.nan, "gradient_norm": 12.5, "learning_rate": 1e-3, "loss_scale": 32768.0}
    bundle = f"runs/{name}/bundles/step-{step}"
    return Incident(step, epoch, batch, (finding,), True, values, diagnosis, decision, outcomes, bundle, (), step)


def incidents_of(recording: Recording) -> list[Incident]:
    """Return the incidents of a recording."""
    return [Incident.from_dict(event.data) for event in recording.events if event.kind == "incident"]


def run_of(recording: Recording, **more: Any) -> ReportedRun:
    """Return the run of a recording, as reports show it."""
    return ReportedRun(incidents_of(recording), recording, **more)


def _samples(bad: np.ndarray, name: str) -> tuple[BadSample, ...]:
    steps = tuple(bad[::4].tolist())
    if not steps:
        return ()
    one = BadSample("x[217]", 217, "ab" * 32, len(steps), steps[:16], "3 NaN of 96 in x")
    return one, BadSample(f"{name}-17.png", None, "cd" * 32, 1, steps[:1], "the loss of this row alone is Inf")


# What records


def begun(folder, steps=0, **how):
    """Return a recorder that has begun to write to this folder, after this many steps."""
    made = Recorder()
    made.begin({"model": "net", "versions": {"keras": "3"}}, scaled=True, path=folder / NAME, **how)
    push(made, steps)
    return made


def flushed(recorder):
    """Have everything so far written to the file, for a limited time; return whether it is there."""
    writer, end = recorder._writer, time.monotonic() + writing.WAIT
    if writer is None:
        return False
    for _ in range(2):  # what is being written now, then the rest
        recorder._work(time.time())
        while not writer.ready and not writer.problem and time.monotonic() < end:
            time.sleep(0.001)
    return writer.ready


def written(folder, recording):
    """Write the meta data, the steps and the events of a recording to its file."""
    meta = [(key, as_json(value)) for key, value in recording.meta.items()]
    events = [
        (number, e.step, e.epoch, e.time, e.kind, e.text, as_json(dict(e.data)))
        for number, e in enumerate(recording.events)
    ]
    steps = list(zip(range(len(recording)), *(c.tolist() for c in recording.steps.values())))
    tables = {"meta": meta, "steps": steps, "events": events}
    File(folder / NAME, "me", [(insert(table), rows) for table, rows in tables.items()]).close()


def event_of(found):
    """Return text and data of the event of an incident."""
    return {"text": str(found), "data": found.to_dict()}


def push(made, steps, start=0):
    """Record this many steps, some of them refused."""
    for step in range(start, start + steps):
        made.push(step, 1.0 / (step + 1), float("nan") if step % 7 == 3 else 0.5, 1.0, REFUSED if step % 7 == 3 else COMMITTED)


def same(one, other):
    """Check that two recordings are equal, except for their time of writing."""
    assert {**one.meta, "written": 0} == {**other.meta, "written": 0}
    a, b = one.steps, other.steps
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].dtype == b[name].dtype
    assert [str(e) for e in one.events] == [str(e) for e in other.events] and one.samples == other.samples
