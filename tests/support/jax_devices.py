"""Training over several simulated devices on JAX, in a separate process: `python
jax_devices.py CASE...`.

The number of devices is fixed when JAX starts. A case is "data" or "model", which is distributed,
the number of devices, and a run, as in "data 4 rollback". Prints one line of JSON for each.
"""

# ruff: noqa: E402  what JAX reads when it starts is set before it is imported

from __future__ import annotations

import contextlib
import json
import os
import re
import sys

ASKED = sys.argv[1:]
DEVICES = max(int(asked.split()[1]) for asked in ASKED)
os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax
import keras
import numpy as np
from keras import distribution, layers
from keras.src.backend.jax import trainer

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

BATCH, STEPS = 16, 12
BAD = {3: 1, 7: 14}
"""Bad batch and the row in it: one row of the first device, one of the last."""

ITEM = {"f32": 4, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "s64": 8}


def data(bad):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, BATCH, 8)).astype("float32")
    y = x.sum(2, keepdims=True)
    for batch, row in BAD.items():
        x[batch, row, 2] = np.nan
    kept = list(range(STEPS)) if bad else [i for i in range(STEPS) if i not in BAD]
    return x[kept].reshape(-1, 8), y[kept].reshape(-1, 1)


def model(width=16):
    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(width, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.2),
            layers.Dense(1, dtype="float32", name="head"),
        ]
    )
    net.compile(keras.optimizers.Adam(1e-2), "mse")
    return net


def values(net):
    held = [*net.variables, *net.optimizer.variables]
    return [np.asarray(v.value).astype("float64") for v in held]


def oracle(**more):
    """Compare a guarded run over bad batches with a plain one without them.

    In float16 the latter is guarded as well, because stock Keras updates statistics and seeds in a
    step that overflows.
    """
    x, y = data(bad=False)
    plain = model()
    half = keras.config.dtype_policy().name == "mixed_float16"
    history = plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[NanGuard(verbose=0)] if half else [])
    x, y = data(bad=True)
    guard, net = NanGuard(verbose=0, **more), model()
    guarded = net.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard])
    far = [float(np.max(np.abs(a - b) / (np.abs(b) + 1e-6))) for a, b in zip(values(net), values(plain)) if a.size]
    return {
        "far": max(far),
        "loss": abs(guarded.history["loss"][0] - history.history["loss"][0]),
        "steps": [i.step for i in guard.incidents],
        "causes": [i.diagnosis.cause for i in guard.incidents],
        "rows": [list(i.diagnosis.samples) for i in guard.incidents],
        "spread": len(net.layers[0].kernel.value.sharding.device_set),
    }


def rolled_back():
    """Three bad batches in a row: a rollback, on arrays that are spread over several devices."""
    x, y = data(bad=False)
    guard, net = NanGuard(verbose=0, diagnose=False), model()
    before = net.layers[0].kernel.value.sharding
    with inject(net, site="gradients", step=5, count=3):
        net.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard])
    return {
        "finite": all(np.isfinite(v).all() for v in values(net)),
        "outcomes": [[o.action for o in i.outcomes] for i in guard.incidents],
        "same place": net.layers[0].kernel.value.sharding.is_equivalent_to(before, 2),
    }


def reduced(text):
    """Return the bytes of the result of each collective of a compiled program, as a sorted list.

    Conditional branches are not counted: one of them counts the bad entries, only in a refused
    step.
    """
    found = []
    for line in text[text.index("ENTRY ") :].splitlines():
        made = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.+?) (?:all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", line)
        if made:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", made.group(1))
            found.append(sum(ITEM[kind] * int(np.prod([int(n) for n in dims.split(",") if n] or [1])) for kind, dims in shapes))
    return sorted(found)


def traffic():
    """Return the bytes that one step exchanges between devices, plain and guarded, for two sizes of the model."""
    reported = {}
    for width in (16, 256):
        for word, callbacks in (("plain", []), ("guarded", [NanGuard(verbose=0)])):
            with compiled() as seen:
                x, y = data(bad=False)
                model(width).fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0, callbacks=callbacks)
            step, given = seen[0]
            reported[f"{word} {width}"] = sum(reduced(step.lower(*given).compile().as_text()))
    return reported


@contextlib.contextmanager
def compiled():
    """Yield the list of compiled functions that are called here, each with its arguments."""
    seen, real = [], jax.jit

    def jit(function, *args, **kwargs):
        made = real(function, *args, **kwargs)

        def call(*given):
            seen.append((made, jax.tree_util.tree_map(_abstract, given)))
            return made(*given)

        return call

    trainer.jit = jax.jit = jit
    try:
        yield seen
    finally:
        trainer.jit = jax.jit = real


def _abstract(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if isinstance(leaf, jax.Array) else leaf


def reported(what):
    """Run one of the requested cases, and return its result."""
    spread, count, *name = what.split()
    devices = distribution.list_devices()[: int(count)]
    if spread == "model":
        mesh = distribution.DeviceMesh((len(devices) // 2, 2), ["batch", "model"], devices)
        layout = distribution.LayoutMap(mesh)
        layout[".*hidden/kernel"] = (None, "model")
        layout[".*hidden/bias"] = ("model",)
        distribution.set_distribution(distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    else:
        distribution.set_distribution(distribution.DataParallel(devices=devices))
    keras.config.set_dtype_policy("mixed_float16" if name == ["float16"] else "float32")
    return {"rollback": rolled_back, "traffic": traffic}.get(" ".join(name), oracle)()


if __name__ == "__main__":
    for asked in ASKED:
        print(json.dumps(reported(asked)), flush=True)
