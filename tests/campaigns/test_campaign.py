"""A short fault campaign: its plan is fixed, expectations follow from the numbers."""

import json

import keras
import numpy as np
import pytest

from campaigns import fault_models, fault_plan, fault_runs, fault_tables
from campaigns.fault_plan import Fault

BACKEND = keras.backend.backend()


def test_the_plan_is_fixed():
    """The same faults each time, each in a run, and never two of one run in the same step."""
    one, other = (fault_plan.plan("name", 60, 24, 32, "float32", ["statistics"]) for _ in range(2))
    assert one == other != fault_plan.plan("another", 60, 24, 32, "float32", ["statistics"])
    assert sorted(f.number for f in one) == list(range(60))
    assert len({(f.run, f.step) for f in one}) == 60
    assert {f.site for f in one} >= {"inputs", "loss", "gradients", "weights", "statistics", "slots"}


@pytest.mark.parametrize(
    ("value", "bit", "becomes"),
    [(1.5, 1, "nonfinite"), (0.1, 1, "huge"), (3.0, 1, "ordinary"), (3.0, 2, "large"), (0.1, 0, "ordinary"), (0.1, 20, "ordinary")],
)
def test_the_result_of_a_flipped_bit(value, bit, becomes):
    array = np.array([1.0, value], "float32")
    after = fault_plan.flipped(array, 1, bit)
    assert (after != array).tolist() == [False, True] and array[1] == np.float32(value)
    assert fault_plan.judged(array, after[1:]) == becomes
    must = fault_plan.expected(Fault(0, "flip", "weights", "bit", 3), "float32", becomes) == "incident"
    assert must == (becomes == "nonfinite")


ROW = {"backend": "jax", "model": "MLP", "mode": "XLA", "precision": "float32", "optimizer": "Adam", "number": 1}
ROW |= {"way": "data", "site": "inputs", "kind": "nan", "becomes": "", "expected": "incident", "seen": True, "identical": True}
ROW |= {"right": True, "place": "right", "error": "", "finite": True, "stopped": False, "accuracy": 0.9, "undisturbed": 0.9}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"seen": False}, "not seen in its step"),
        ({"seen": False, "expected": "may"}, ""),
        ({"identical": False}, "state differs"),
        ({"identical": None}, ""),
        ({"right": False}, "wrong cause"),
        ({"accuracy": 0.889}, "less accurate"),
        ({"accuracy": 0.89}, ""),
        ({"finite": False, "stopped": True}, "not finite, stopped"),
    ],
)
def test_a_miss_is_a_miss(change, why):
    row = {**ROW, **change}
    assert fault_tables.missed(row) == why
    assert any("**" in cell for cell in fault_tables.counts([ROW, row])) == bool(why)


def test_a_later_row_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "jax.jsonl"
    lines = [json.dumps({**ROW, "seen": seen}) for seen in (False, True)]
    path.write_text("\n".join(lines) + '\n{"cut off', "utf-8")
    (row,) = fault_tables.latest(fault_tables.read(path))
    assert row["seen"]


def test_a_few_faults(monkeypatch):
    """Each fault of one configuration of each backend; no healthy run has an incident."""
    monkeypatch.setattr(fault_runs, "WARM_UP", 1)
    mode = {"tensorflow": "graph", "jax": "XLA", "torch": "eager"}[BACKEND]
    configuration = fault_models.Configuration(BACKEND, "MLP", mode, "float32", "Adam")
    rows = list(fault_runs.run(configuration, 10, 12))
    faults = [row for row in rows if "number" in row]
    assert len(faults) == 10 and {row["way"] for row in faults} >= {"data", "flip"}
    assert any("healthy" in row for row in rows)
    assert [fault_tables.described(row) for row in rows if fault_tables.missed(row) not in ("", "less accurate")] == []
