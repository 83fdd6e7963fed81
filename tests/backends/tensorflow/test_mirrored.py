"""Under `MirroredStrategy` all replicas have one verdict, whichever has the fault."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import zoo

SCRIPT = Path(__file__).parents[2] / "support" / "mirrored_runs.py"
TOGETHER = {
    "daily": ("adam",),
    "graph": ("healthy",),
    "float16": ("mixed_float16", "overflow"),
    "one replica": ("several_steps",),
    "eager": ("eager",),
    "own step": ("own_step", "uneven"),
    "diagnosed": ("forward_domain",),
    "two optimizers": ("two_optimizers",),
}
"""Cases that share a process. In stock TensorFlow 2.21 two strategies in one process need models of
the same shapes (see docs/limits.md)."""

SLOW = tuple(name for names in TOGETHER.values() for name in names if name != "adam")
"""Cases that run only as slow tests."""


def cases(*names: str) -> list[Any]:
    """Return cases as parameters; some run only as slow tests."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names]


STEPS = [3, 7, 8, 18, 22, 23]
REPLICAS = [[1], [0], [0, 1]] * 2


def results(*arguments: str) -> dict[str, Any]:
    """Run these cases in a process. A refusal is no error: TensorFlow prints nothing of it. At the
    end of a fit it may print that an iterator which still reads ahead is cancelled.
    """
    command, env = [sys.executable, SCRIPT, *arguments], {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = re.sub(".*GetNextFromShard was cancelled", "", done.stderr)
    assert not re.search("rendezvous|INVALID_ARGUMENT|assertion", printed), printed[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.fixture
def result(once):
    """`result(name)`: the report of a case; all cases of its process run together."""

    def of_case(name: str) -> dict[str, Any]:
        process = next(process for process, names in TOGETHER.items() if name in names)
        return once(f"mirrored {process}", lambda folder: results(*TOGETHER[process]))[name]

    return of_case


ORACLE = ["adam", "mixed_float16", "eager", "two_optimizers", "own_step"]


@pytest.mark.parametrize("name", cases(*ORACLE, "several_steps"))
def test_a_bad_batch_never_happened(result, name):
    """Keras ends with NaN; guarded replicas end as without the bad batches.

    An incident names the replica with the fault, or both, and the rows of the whole batch; a single
    replica is not named.
    """
    reported = result(name)
    assert reported["stock"] > 0, "the poison does nothing to Keras"
    assert reported["differences"] == []
    assert reported["steps"] == STEPS and all(reported["refused"])
    assert set(reported["causes"]) == {"input_nonfinite"}
    assert reported["samples"] == [[6], [1], [1, 6]] * 2
    replicas = [[]] * 6 if name == "several_steps" else REPLICAS
    if zoo.OLD and name in ("two_optimizers", "own_step"):  # names both although one saw it
        named = zip(replicas, reported["replicas"])
        assert all(set(true) <= set(found) for true, found in named)
    else:
        assert reported["replicas"] == replicas


@pytest.mark.slow
def test_an_overflow_of_one_replica_halves_the_scale_of_both(result):
    """Once, and nothing else changes."""
    reported = result("overflow")
    assert reported["finite"] and reported["overflows"] == 1 and reported["steps"] == []
    assert reported["changed"] == {
        f"loss_scale_optimizer/{name} on replica {replica}": change
        for name, change in {"step_counter": [2, 0], "dynamic_scale": [64.0, 32.0]}.items()
        for replica in (0, 1)
    }


@pytest.mark.slow
def test_a_healthy_run_is_untouched(result):
    """On clean data guarded and plain runs agree, bit by bit."""
    reported = result("healthy")
    assert reported["differences"] == [] and reported["steps"] == []


@pytest.mark.slow
def test_a_replica_without_rows(result):
    """The result for a last batch with fewer rows than replicas is that of Keras."""
    reported = result("uneven")
    assert reported["finite"] == (reported["stock"] or zoo.OLD) and (reported["steps"] == []) == reported["stock"]


@pytest.mark.slow
def test_a_layer_that_leaves_its_domain(result):
    """A replay on one replica names layer and row; another model trains on both afterwards."""
    reported = result("forward_domain")
    assert reported["finite"] and reported["steps"] == [3] and reported["replicas"] == [[1]]
    assert reported["causes"] == ["forward_domain"] and reported["samples"] == [[6]]
    assert "logarithm" in reported["culprits"][0]
    assert reported["second"]["differences"] == [] and reported["second"]["steps"] == []


@pytest.mark.slow
def test_four_replicas():
    """They end alike, the one with the fault is named, and a replay names the layer."""
    batches = results("4", "adam")["adam"]
    domain = results("4", "forward_domain")["forward_domain"]
    assert batches["stock"] > 0 and batches["differences"] == [] and batches["steps"] == STEPS
    assert batches["replicas"] == [[3], [0], [0, 3]] * 2
    assert batches["samples"] == [[6], [1], [1, 6]] * 2
    assert domain["steps"] == [3] and domain["replicas"] == [[3]] and domain["samples"] == [[6]]
    assert domain["causes"] == ["forward_domain"] and "logarithm" in domain["culprits"][0]
