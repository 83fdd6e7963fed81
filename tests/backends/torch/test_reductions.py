"""The sums on PyTorch: right for any mixture of sizes, and computed in one thread if a step is
small.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from keras_nanguard._backends.torch import reductions
from keras_nanguard._core import finiteness
from keras_nanguard._keras import arrays as keras_arrays


def read(given):
    """Return the norms of tensors as numbers."""
    return reductions.read({"norms": reductions.norms(given)})["norms"]


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32)


def of_every_kind(layout):
    """Return tensors of every dtype that can or cannot have bad numbers, small and large, some with
    other strides.
    """
    torch.manual_seed(0)
    made = [torch.randn(3, 4), torch.randn(8, 2).t(), torch.randn(300, 300), torch.zeros(0), torch.tensor(2.0)]
    made += [torch.randn(5).to(dtype) for dtype in DTYPES]
    made += [torch.nn.Parameter(torch.randn(6)), *(torch.randn(reductions.LARGE + n) for n in (-1, 0))]
    if layout == "sparse":
        made.append(torch.eye(4).to_sparse())
    return made


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_counts_are_those_of_the_host(layout):
    given = of_every_kind(layout)
    for number, tensor in enumerate(given):
        if reductions.is_inexact(tensor) and tensor.numel() and tensor.layout == torch.strided:
            first = tensor.detach()[..., :1] if tensor.ndim else tensor
            first.fill_(float("nan" if number % 2 else "-inf"))
    found = reductions.counts(given)
    assert sum(nan + inf for nan, inf, _ in found) > 10
    stored = [t.coalesce().values() if t.is_sparse else t for t in given]
    assert found == [finiteness.counts(keras_arrays.dense(tensor)) for tensor in stored]


def test_numbers_on_the_cpu_are_not_moved_to_the_device_of_others(monkeypatch):
    """Each move would wait for the device, as for the step counts of torch's Adam."""
    near, scalars, moved = torch.tensor([1.0, 2.0]), list(torch.tensor([3.0, 4.0])), []
    far_away = set(map(id, scalars))
    real = torch.Tensor.to
    monkeypatch.setattr(reductions, "is_away", lambda given: not far_away.isdisjoint(map(id, given)))
    monkeypatch.setattr(torch.Tensor, "to", lambda *args: moved.append(args[0]) or real(*args))
    groups = {"losses": [near[0], scalars[0]], "scales": [scalars[1], near[1], scalars[0]]}
    assert reductions.read(groups) == {"losses": [1.0, 3.0], "scales": [4.0, 2.0, 3.0]}
    assert {id(tensor) for tensor in moved} == far_away


@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_sums_are_those_of_each_tensor(layout, bad):
    """For any layout of tensors a sum is that of all entries, and is not finite if one entry is
    not.
    """
    for place in range(len(of_every_kind(layout))):
        given = of_every_kind(layout)
        if bad is not None:
            if not reductions.is_inexact(given[place]) or not given[place].numel() or given[place].is_sparse:
                continue
            given[place].detach().flatten()[:1].fill_(bad) if given[place].is_contiguous() else given[place][:1].fill_(bad)
        floats = [t.detach().to_dense() for t in given if reductions.is_inexact(t)]
        squares = sum(float(t.to(torch.complex128).abs().square().sum()) for t in floats) / 2
        found = reductions.squares_of(read(given), given), reductions.norm_of(read(given), given)
        assert [*map(math.isfinite, found)] == [bad is None] * 2
        if bad is None:
            np.testing.assert_allclose(found, (squares, math.sqrt(2 * squares)), rtol=1e-4)
    assert reductions.squares_of([], []) == reductions.norm_of([], []) == 0.0


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("power", [1, 2])
def test_a_sum_is_finite_exactly_if_its_entries_are(power, dtype, bad):
    """Also in the dtype in which it overflows."""
    tensors = [torch.full((5,), torch.finfo(dtype).max, dtype=dtype), torch.ones((3, 2), dtype=dtype)]
    if bad is not None:
        tensors[1][1, 1] = bad
    number = (reductions.squares_of if power == 2 else reductions.norm_of)(read(tensors), tensors)
    assert math.isfinite(number) is (bad is None)


def test_small_ones_are_read_with_one_call(monkeypatch):
    """For any number of them, and any dtype."""
    calls, real = [], torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda given: calls.append(len(given)) or real(given))
    small = [torch.ones(10)] * 100 + [torch.ones(10, dtype=torch.float64)]
    read([*small, torch.ones(reductions.LARGE, dtype=torch.float64)])
    assert calls == [101]


PROGRAM = """
import os, sys, threading
import keras, numpy as np
from keras_nanguard import NanGuard
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), *[keras.layers.Dense(64, "relu") for _ in range(int(sys.argv[1]))], keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((100, 64), "float32"), np.ones((100, 1), "float32")

def spent():
    own = threading.get_native_id()
    taken = {int(task): int(open(f"/proc/self/task/{task}/schedstat").read().split()[0]) for task in os.listdir("/proc/self/task")}
    return taken.pop(own), sum(taken.values())

def fit(guards):
    model.fit(x, y, batch_size=1, verbose=0, callbacks=guards)
    before = spent()
    model.fit(x, y, batch_size=1, verbose=0, callbacks=guards)
    own, others = (now - then for now, then in zip(spent(), before))
    return others / own

print(fit([]), fit([NanGuard(verbose=0, diagnose=False, snapshot={"every": 1000})]))
"""
"""Batches of one: products of a few rows wake threads on some AMD processors even without a guard.
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="reads what Linux says of threads")
@pytest.mark.parametrize("layers", [3, 20])
def test_a_small_step_wakes_no_threads(layers):
    """The threads of PyTorch sleep in a guarded step of small layers as in a plain one: waking them
    takes as long as the step.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "2", "KERAS_BACKEND": "torch", "PYTHONPATH": str(Path(__file__).parents[3])}
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(layers)], env=env, capture_output=True, text=True, check=True)
    plain, guarded = map(float, ran.stdout.splitlines()[-1].split())
    if plain >= 0.2:
        pytest.skip("a plain step wakes them on this processor")
    assert guarded < 0.2
