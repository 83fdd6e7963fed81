"""What each strategy of a guarded step on JAX buys: `fit` with it, and with what would run the step otherwise, in paired rounds.

    python benchmarks/jax_strategies.py [NAME ...]

Prints, for each model that the strategy is for, the time of a step with it, and the median of the ratios without / with it with
their quartiles, in wall time and in processor time: above 1 it saves time. Processor time does not see what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from overhead_backends import CASES, measured

from keras_nanguard import NanGuard
from keras_nanguard._backends.jax import strategies
from keras_nanguard._backends.jax.step import pinned


def waiting() -> AbstractContextManager[object]:
    """Start no step before the verdict on the last one."""
    return mock.patch.object(strategies.LooksAhead, "results", strategies.HostSelects.results)


def sleeping() -> AbstractContextManager[object]:
    """Sleep until a step has ended."""
    return mock.patch.object(strategies.LooksAhead, "max_polls", 0)


@contextmanager
def waiting_and_sleeping() -> Iterator[None]:
    with waiting(), sleeping():
        yield


STRATEGIES = {
    "look-ahead": (("mlp", "mlp-batchnorm", "cnn"), nullcontext, waiting),
    "polling": (("mlp", "mlp-batchnorm"), nullcontext, sleeping),
    "polling alone": (("mlp", "mlp-batchnorm"), waiting, waiting_and_sleeping),
    "packed": (("mlp", "mlp-batchnorm"), nullcontext, lambda: pinned(strategies.LooksAhead)),
    "two-programs": (("wide",), nullcontext, lambda: pinned(strategies.AlternatingBuffers)),
    "alternating": (("wide",), lambda: pinned(strategies.AlternatingBuffers), lambda: pinned(strategies.HostSelects)),
}
"""The models that each is for, and contexts with it and without it."""


def main(names: list[str], rounds: int) -> None:
    print(f"keras {keras.__version__}, {rounds} rounds")
    for name in names or STRATEGIES:
        cases, *contexts = STRATEGIES[name]
        for case in cases:
            build, shape, batch, steps = CASES[case]
            x = np.random.default_rng(0).standard_normal((batch * steps, *shape)).astype("float32")
            data = (x, x.reshape(len(x), -1)[:, :1].copy())
            models = [build() for _ in contexts]
            for model in models:
                model.compile("adam", "mse")
            times = []
            for _ in range(rounds):
                taken = {}
                for which in random.sample((0, 1), 2):
                    with contexts[which]():
                        taken[which] = measured(models[which], data, batch, [NanGuard(verbose=0)])
                times.append(taken)
            spent = statistics.median(taken[0][0] for taken in times) / steps
            ratios = [statistics.quantiles([taken[1][kind] / taken[0][kind] for taken in times], n=4) for kind in (0, 1)]
            wall, processor = (f"x{middle:.3f} [{low:.2f}, {high:.2f}]" for low, middle, high in ratios)
            print(f"{name:14s}{case:14s}{spent * 1e3:8.2f} ms with   without: wall {wall}   processor {processor}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STRATEGIES)}; all by default")
    parser.add_argument("--rounds", type=int, default=25)
    given = parser.parse_args()
    main(given.names, given.rounds)
