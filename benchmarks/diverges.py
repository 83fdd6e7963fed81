"""How many runs at a learning rate that is too high end as well as at the right one?

    KERAS_BACKEND=tensorflow python benchmarks/diverges.py [NAME ...] [--more] [--seeds 0 1 2] [--json out.json] [--check]

The best result of a program is that of stock Keras at its rate divided by 1, 10, 100 and 1000. A
run has recovered if it ends within 2 points of accuracy, or 15% of the loss, of this result, on the
training data. The benchmark compares stock Keras, `TerminateOnNaN`, the best epoch restored by
hand, and `NanGuard()` with its defaults. It also checks whether a guard prints anything at the best
rate. `--more` runs the programs of `more_diverging_programs.py` instead. `--check` exits with 1 if
the guard recovers fewer than 90%, or prints anything at a best rate.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
from diverging_programs import PROGRAMS, Program, finite
from more_diverging_programs import MORE
from program_options import Options

from keras_nanguard import NanGuard

POINTS, SHARE = 0.02, 1.15


class BestEpoch(keras.callbacks.Callback):
    """A common hand-written callback: restores the best epoch if the loss is NaN or has doubled,
    and at the end.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        self.best, self.weights = math.inf, self.model.get_weights()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss", math.nan)
        if loss < self.best:
            self.best, self.weights = loss, self.model.get_weights()
        elif not loss < 2 * self.best:
            self.model.set_weights(self.weights)

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.weights)


WAYS: dict[str, Callable[[], list[Any]]] = {
    "stock": list,
    "TerminateOnNaN": lambda: [keras.callbacks.TerminateOnNaN()],
    "best epoch": lambda: [BestEpoch()],
    "NanGuard": lambda: [NanGuard(verbose=0)],
}


def run(program: Program, rate: float, seed: int, callbacks: Sequence[Any] = ()) -> float:
    """Train once; return accuracy or loss on the training data, NaN if the model is not finite."""
    fit = program.build(rate, seed)
    fit.model.fit(
        fit.x,
        fit.y,
        batch_size=fit.batch_size,
        epochs=fit.epochs,
        steps_per_epoch=fit.steps,
        verbose=0,
        callbacks=[*callbacks, *fit.callbacks],
    )
    if not finite(fit.model):
        return math.nan
    x, y = fit.tested or (fit.x, fit.y)
    return float(fit.model.evaluate(x, y, batch_size=256, verbose=0, return_dict=True)[program.figure])


def recovered(program: Program, value: float, best: float) -> bool:
    return value >= best - POINTS if program.figure == "accuracy" else value <= best * SHARE


def measured(program: Program, seed: int) -> dict[str, Any]:
    """Return the result of each variant, and the best rate of the sweep."""
    sweep = {divisor: run(program, program.rate / divisor, seed) for divisor in program.lowers}
    known = {divisor: value for divisor, value in sweep.items() if math.isfinite(value)}
    at = (max if program.figure == "accuracy" else min)(known, key=known.__getitem__)
    best = known[at]
    values = {name: sweep[1] if name == "stock" else run(program, program.rate, seed, make()) for name, make in WAYS.items()}
    quiet = NanGuard(verbose=0)
    same = run(program, program.rate / at, seed, [quiet])
    return {
        "program": program.name,
        "seed": seed,
        "best": best,
        "at": at,
        "values": values,
        "recovered": {name: recovered(program, value, best) for name, value in values.items()},
        "quiet": not quiet.incidents and abs(same - best) <= 1e-4 * max(1.0, abs(best)),
    }


def main() -> int:
    command = Options(__doc__, MORE if "--more" in sys.argv else PROGRAMS)
    command.parser.add_argument("--more", action="store_true", help="the other programs")
    command.parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options, chosen = command.read()
    rows = []
    ways = " ".join(f"{name:>15s}" for name in WAYS)
    print(f"{'program':22s} {'seed':>4s} {ways} {'best':>9s} {'at rate /':>9s}  at the best rate")
    for program in chosen:
        for seed in options.seeds:
            row = measured(program, seed)
            rows.append(row)
            shown = " ".join(f"{row['values'][name]:>13.4g} {'*' if row['recovered'][name] else ' '}" for name in WAYS)
            silent = "silent" if row["quiet"] else "NOT silent"
            print(f"{program.name:22s} {seed:4d} {shown} {row['best']:9.4g} {row['at']:9d}  {silent}", flush=True)
    counts = Counter(name for row in rows for name in WAYS if row["recovered"][name])
    loud = sum(not row["quiet"] for row in rows)
    shown = " ".join(f"{counts[name]:>8d} of {len(rows):3d}" for name in WAYS)
    print(f"{'recovered (*)':27s} {shown}   {loud} not silent at the best rate")
    command.end(rows, options.json)
    return int(options.check and (counts["NanGuard"] < 0.9 * len(rows) or loud > 0))


if __name__ == "__main__":
    sys.exit(main())
