"""The benchmark of special paths can disable each of them."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import keras
import pytest
from support import zoo

from keras_nanguard import NanGuard

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PATHS = ("fused_updates", "exact_products", "late_verdict", "compiled_step", "step_cache")


def special_paths(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", keras.backend.backend())
    return importlib.import_module("special_paths").PATHS


@pytest.mark.parametrize("name", PATHS)
def test_a_path_can_be_disabled(name, monkeypatch):
    """Its name exists in the library, and is back afterwards."""
    paths = special_paths(monkeypatch)
    assert sorted(paths) == sorted(PATHS)
    try:
        with paths[name][1]():
            pass
    except ModuleNotFoundError as error:
        assert error.name in ("tensorflow", "jax", "torch") and error.name != keras.backend.backend()


@pytest.mark.requires_backend("torch", reason="the other backends compile every step")
def test_a_step_is_not_compiled_without_its_path(monkeypatch):
    import torch

    compiled, data, without = [], zoo.regression(), special_paths(monkeypatch)["compiled_step"][1]
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)

    def fit():
        compiled.clear()
        model = keras.Sequential([keras.Input(data.x.shape[1:]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[NanGuard(verbose=0)])
        return bool(compiled)

    assert fit()
    with without():
        assert not fit()
