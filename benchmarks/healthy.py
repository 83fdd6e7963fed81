"""Does the guard leave healthy programs with unusual losses alone?

    KERAS_BACKEND=tensorflow python benchmarks/healthy.py [NAME ...] [--json out.json] [--check]

Each program is trained plain and with `NanGuard()`, in one process and from the same seed. The
guard acted on it if an action other than `warn` and `skip` was done, or if a step was refused that
plain Keras would commit; overflows that loss scaling handles are not counted. A program ended worse
if its metric is worse than that of plain Keras by more than the difference of two plain runs. The
second plain run is made only if the metric is worse at all. `--check` exits with 1 if the guard
acted on a program, if one ended worse or raised an error, or if more than 3 % printed a line.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
from diverging_programs import finite
from healthy_programs import PROGRAMS, Program
from program_options import Options

from keras_nanguard import NanGuard

LINES_SHARE = 0.03


def trained(program: Program, callbacks: Sequence[Any] = ()) -> tuple[float, list[str]]:
    """Train once; return the metric, NaN if a model is not finite, and the printed lines."""
    gc.collect()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        training = program.build()
        training.train(callbacks)
        metric = training.metric() if all(map(finite, training.models)) else math.nan
    return metric, [line for line in printed.getvalue().splitlines() if line.strip()]


def worse_by(program: Program, plain: float, guarded: float) -> float:
    """Return by how much the guarded run ended worse, at least 0, infinite if only it is NaN."""
    if math.isnan(guarded):
        return 0.0 if math.isnan(plain) else math.inf
    loss = guarded - plain if program.better == "lower" else plain - guarded
    return max(loss, 0.0)


def measured(program: Program) -> dict[str, Any]:
    """Train plain and guarded; return the metrics and what the guard did."""
    plain, _ = trained(program)
    guard = NanGuard()
    guarded, lines = trained(program, [guard])
    totals = guard._counted()
    outcomes = Counter(
        outcome.action
        for incident in guard.incidents
        for outcome in incident.outcomes
        if outcome.status == "done"
    )
    lost = worse_by(program, plain, guarded)
    again = trained(program)[0] if lost else plain
    refused = totals.refused - totals.overflows + totals.run_again
    causes = (i.diagnosis.cause if i.diagnosis else "none" for i in guard.incidents)
    return {
        "program": program.name,
        "plain": plain,
        "guarded": guarded,
        "plain again": again if lost else None,
        "refused": refused,
        "overflows": totals.overflows,
        "incidents": dict(Counter(causes)),
        "actions": dict(outcomes),
        "lines": lines,
        "acted on": refused > 0 or not {"skip"}.issuperset(outcomes),
        "worse": lost > abs(plain - again),
    }


def attempted(program: Program) -> dict[str, Any]:
    """Measure a program; an error becomes a row, so that the other programs are still measured."""
    try:
        return measured(program)
    except Exception as error:  # noqa: BLE001  a program may raise anything
        return {"program": program.name, "error": f"{type(error).__name__}: {error}"}


def shown(row: dict[str, Any]) -> str:
    """Return the line of a program."""
    name = f"{row['program']:40s}"
    if "error" in row:
        return f"{name} {row['error'].splitlines()[0]}"
    causes = ", ".join(f"{count} {cause}" for cause, count in row["incidents"].items()) or "-"
    actions = ", ".join(f"{count} {action}" for action, count in row["actions"].items()) or "-"
    verdicts = [word for word in ("acted on", "worse") if row[word]]
    figures = f"{row['plain']:10.5g} {row['guarded']:10.5g} {row['refused']:7d}"
    found = f"{len(row['lines']):5d}  {causes:24s} {actions:24s} {', '.join(verdicts)}"
    return f"{name} {figures} {found}".rstrip()


def main() -> int:
    command = Options(__doc__, PROGRAMS)
    options, chosen = command.read()
    on_tensorflow = keras.backend.backend() == "tensorflow"
    chosen = [p for p in chosen if on_tensorflow or not p.tensorflow_only]
    heads = f"{'plain':>10s} {'guarded':>10s} {'refused':>7s} {'lines':>5s}"
    print(f"{'program':40s} {heads}  {'incidents':24s} actions")
    rows = []
    for program in chosen:
        rows.append(attempted(program))
        print(shown(rows[-1]), flush=True)
    acted = sum(row.get("acted on", False) for row in rows)
    lined = sum(bool(row.get("lines")) for row in rows)
    worse = sum(row.get("worse", False) for row in rows)
    errors = sum("error" in row for row in rows)
    counts = f"{acted} acted on, {lined} with a line, {worse} ended worse, {errors} errors"
    print(f"{len(rows)} programs: {counts}")
    command.end(rows, options.json)
    failed = acted or worse or errors or lined > LINES_SHARE * len(rows)
    return int(options.check and bool(failed))


if __name__ == "__main__":
    sys.exit(main())
