"""The benchmark of special paths can disable each of them."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import keras
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PATHS = ("fused_updates", "exact_products", "late_verdict", "compiled_step", "step_cache")


@pytest.mark.parametrize("name", PATHS)
def test_a_path_can_be_disabled(name, monkeypatch):
    """Its name exists in the library, and is back afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", keras.backend.backend())
    paths = importlib.import_module("special_paths").PATHS
    assert sorted(paths) == sorted(PATHS)
    try:
        with paths[name][1]():
            pass
    except ModuleNotFoundError as error:
        assert error.name in ("tensorflow", "jax", "torch") and error.name != keras.backend.backend()
