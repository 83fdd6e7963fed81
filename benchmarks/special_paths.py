"""The gain of each special path of a backend, in paired rounds with and without it.

    KERAS_BACKEND=tensorflow python benchmarks/special_paths.py fused_updates exact_products
    KERAS_BACKEND=jax python benchmarks/special_paths.py late_verdict
    KERAS_BACKEND=torch python benchmarks/special_paths.py compiled_step
    KERAS_BACKEND=tensorflow python benchmarks/special_paths.py step_cache    # also jax; torch compiles with jit_compile=True

A path is disabled by replacing one function for the whole fit, on the model of
`overhead_backends.py` that it was made for. Each round fits both variants in random order, in one
process. Prints the median and quartiles of the ratios without / with the path: above 1 the path
saves time. Other work on the machine does not affect processor time.

Without `late_verdict` the host waits for each verdict before it starts the next step. To see what that
costs while the device computes, leave one core to the host:
`XLA_FLAGS=--xla_cpu_multi_thread_eigen=false`.

For `step_cache` a fit is one epoch of 10 steps, and the whole fit is compared, including the trace.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import keras
import numpy as np
from overhead_backends import CASES, measured, reported

from keras_nanguard import NanGuard

BACKENDS = "keras_nanguard._backends"
NEVER = property(lambda owner: False, lambda owner, value: None)


def without(module: str, name: str, stand_in: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context that replaces a name (`function` or `Class.method`) of a module of the
    library.
    """
    owner, _, last = name.rpartition(".")

    def switched_off() -> AbstractContextManager[Any]:
        found = importlib.import_module(f"{BACKENDS}.{module}")
        target = getattr(found, owner) if owner else found
        of_instances = last == "jit"  # set in `__init__`; the others must exist
        return mock.patch.object(target, last, stand_in, create=of_instances)

    return switched_off


PATHS: dict[str, tuple[list[str], Callable[[], AbstractContextManager[Any]]]] = {
    "fused_updates": (["wide"], without("tensorflow.kernels", "same_bits", lambda: False)),
    "exact_products": (["mlp-batchnorm"], without("tensorflow.updates", "_is_product", lambda tensor: False)),
    "late_verdict": (["mlp", "cnn", "transformer"], without("jax.step", "Transaction.may_run_ahead", NEVER)),
    "compiled_step": (["mlp-batchnorm", "wide", "transformer"], without("torch.step", "Transaction.jit", NEVER)),
    "step_cache": (["mlp", "cnn"], without("shared.attach", "Attachment._take_kept", lambda attachment: None)),
}
"""Each path, the models that it was made for, and how it is disabled."""


def short_fit(model: Any, data: Any, batch: int, callbacks: list[Any]) -> list[float]:
    """Return the wall time and the processor time of a whole fit of 10 steps."""
    start = time.perf_counter(), time.process_time()
    model.fit(*(part[: 10 * batch] for part in data), batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)
    return [time.perf_counter() - start[0], time.process_time() - start[1]]


def compare(path: str, case: str, rounds: int) -> None:
    """Print the gain of one path on one model."""
    build, shape, batch, steps = CASES[case]
    jit = True if path == "compiled_step" or (path == "step_cache" and keras.backend.backend() == "torch") else "auto"
    timed = short_fit if path == "step_cache" else measured
    x = np.random.default_rng(0).standard_normal((batch * steps, *shape)).astype("float32")
    data = (x, x.reshape(len(x), -1)[:, :1].copy())
    variants = {"with": nullcontext, "without": PATHS[path][1]}
    models, times = {}, []
    for variant, context in variants.items():
        models[variant] = build()
        models[variant].compile("adam", "mse", jit_compile=jit)
        with context():
            short_fit(models[variant], data, batch, [NanGuard(verbose=0)])
    for _ in range(rounds):
        taken = {}
        for variant in random.sample(list(variants), len(variants)):
            with variants[variant]():
                taken[variant] = timed(models[variant], data, batch, [NanGuard(verbose=0)])
        times.append(taken)
    wall, processor = ([taken["without"][kind] / taken["with"][kind] for taken in times] for kind in (0, 1))
    spent = statistics.median(taken["with"][0] for taken in times) / (1 if path == "step_cache" else steps)
    print(f"{path:16s}{case:16s}{spent * 1e3:9.2f} ms with   without: wall {reported(wall)}   processor {reported(processor)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", choices=list(PATHS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="models, instead of those that the path was made for")
    given = parser.parse_args()
    random.seed(0)
    keras.utils.set_random_seed(0)
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    print(f"keras {keras.__version__} on {keras.backend.backend()}, {given.rounds} rounds")
    for path in given.paths:
        for case in given.cases or PATHS[path][0]:
            compare(path, case, given.rounds)


if __name__ == "__main__":
    main()
