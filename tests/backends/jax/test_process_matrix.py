"""Several processes on JAX decide alike; one writes, and a killed run is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.several_processes import LIMIT, assert_same, ended, jax_runs, jax_started

from keras_nanguard import Recording

WAYS = {"data parallel": (2, []), "four processes": (4, []), "model parallel": (2, ["model"])}
"""Number of processes; with `model` a kernel is also spread over the devices of each process."""

FAULTS = ("batch", "all", "three", "weights", "memory", "slots", "statistics", "ahead")
ENDED = ("plain", "without", "bad", "waited", "rollback", "endless", "whole", "observed", *FAULTS)
"""The runs that complete without help."""


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    """How state and batches are spread."""
    return request.param


@pytest.fixture(scope="module")
def runs(way, once):
    """The reports of all processes of each run, and the directory."""
    found, directory = once(way, lambda folder: (jax_runs(folder, *WAYS[way], *ENDED), str(folder)))
    return found, Path(directory)


def assert_alike(ranks):
    """Check that all processes have the same state, optimizer, rate, incidents and logs."""
    assert_same(ranks, "weights", "state", "rate", "incidents", "findings", "loss", "snapshots")
    assert all(np.isfinite(numbers).all() for numbers in (*ranks[0]["weights"], *ranks[0]["state"]))


def same(one, other, tolerance=0.0):
    """Check that two runs end alike, with the same bits if both run one compiled step."""
    for a, b in zip([one["loss"], *one["weights"]], [other["loss"], *other["weights"]]):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_one_recording(way, runs):
    """The first process writes the recording, every step once."""
    found, directory = runs
    first = found["bad"][0][0]
    recording = Recording.read(directory / "bad")
    assert recording.steps["step"].tolist() == list(range(24)) and np.flatnonzero(
        recording.steps["status"]
    ).tolist() == [3, 7]
    assert recording.meta["status"] == "finished" and len(recording.samples) >= 1
    assert first["folder"] == str(directory / "bad")


def test_refused_by_both(way, runs):
    """A bad row of either process: all skip the batch, and end like a run without it."""
    found, directory = runs
    ranks, printed = found["bad"]
    first, *others = ranks
    assert_alike(ranks)
    assert first["spread"] == WAYS[way][1]
    same(first, found["without"][0][0])
    same(first, found["plain"][0][0], 1e-5)
    assert [i[:3] for i in first["incidents"]] == [
        [3, "input_nonfinite", [1]],
        [7, "input_nonfinite", [14]],
    ], "rows of the whole batch"
    rows = 16 // WAYS[way][0]
    for place, found, evidence in zip(
        ("rank 0: x, row 1", f"rank {len(others)}: x, row {14 - rows * len(others)}"),
        first["findings"],
        first["evidence"],
    ):
        assert any(place in text for text in found) and evidence[0] == f"{place}."
    assert first["folder"] == str(directory / "bad")
    assert len(list((directory / "bad" / "incidents").iterdir())) == 2
    assert not any(Path(other["folder"]).exists() for other in others), (
        "what the other processes wrote is gone with them"
    )
    told = [text.count("NanGuard: skipped step ") for text in printed]
    assert told == [1, *[0] * len(others)], "one reports it, and what comes again is counted"


def test_refused_if_the_host_waits(way, runs):
    """The same, to the bit, if each verdict is read before the next step starts."""
    ranks, _ = runs[0]["waited"]
    assert_alike(ranks)
    same(ranks[0], runs[0]["bad"][0][0])
    assert ranks[0]["incidents"] == runs[0]["bad"][0][0]["incidents"]
    assert ranks[0]["spread"] == WAYS[way][1]


def test_rolled_back_by_both(way, runs):
    ranks, _ = runs[0]["rollback"]
    first = ranks[0]
    assert_alike(ranks)
    assert first["spread"] == WAYS[way][1], "restored arrays keep their placement"
    assert [i[3] for i in first["incidents"]] == [["skip"], ["skip"], ["rollback", "lower_lr"]]
    assert first["rate"] == pytest.approx(1e-3)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_end(runs, fault):
    """All end alike, for a fault in any process."""
    ranks, _ = runs[0][fault]
    assert_alike(ranks)
    incidents = ranks[0]["incidents"]
    assert [i[0] for i in incidents] == {
        "three": [9, 10, 11],
        "weights": [10],
        "memory": [5, 6, 7],
        "slots": [10],
        "statistics": [10],
        "ahead": [24],
    }.get(fault, [3, 7])
    if fault in ("batch", "all"):
        same(ranks[0], runs[0]["without"][0][0])
    if fault in ("weights", "slots", "statistics", "ahead"):
        assert incidents[0][1] == "state_nonfinite" and "rollback" in incidents[0][3]
    if fault == "weights":
        assert ranks[0]["findings"][0][0].startswith("state of sequential/dense/kernel")
    if fault == "memory":
        assert ranks[0]["snapshots"] == [] and incidents[2][3] == ["lower_lr"], (
            "no process restores a snapshot"
        )


def test_observed_by_all(runs):
    """NaN in one process under a policy that changes nothing: reported once it has reached all."""
    ranks, _ = runs[0]["observed"]
    assert_same(ranks, "rate", "incidents", "findings")
    assert [i[0] for i in ranks[0]["incidents"]] == [11]


def test_stopped_by_both(runs):
    """No process waits for the other."""
    ranks, _ = runs[0]["endless"]
    first = ranks[0]
    assert_alike(ranks)
    assert len(first["incidents"]) == 12
    assert first["incidents"][-1][3][-1] == "stop"


def test_killed_and_resumed(way, runs, tmp_path):
    """One process dies; after a restart all resume from disk and end like an uninterrupted run."""
    whole = runs[0]["whole"][0][0]
    count, spread = WAYS[way]
    *others, last = jax_started([tmp_path] * count, *spread, "killed")
    last.communicate(timeout=LIMIT)
    assert last.returncode == 9
    for other in others:  # JAX itself would end them after 100 seconds
        other.kill()
        other.communicate(timeout=60)
    left = sorted(path.name for path in (tmp_path / "killed" / "snapshots").iterdir())
    assert any(name.startswith("snapshot-") for name in left)
    ranks, printed = jax_runs(tmp_path, count, spread, "resumed")["resumed"]
    assert "resuming from" in printed[0]
    assert_alike(ranks)
    for name in ("weights", "state", "rate"):
        assert ranks[0][name] == whole[name]


def test_the_others_end_with_an_error(way, tmp_path):
    """One process dies: the others end by themselves, with an error."""
    count, spread = WAYS[way]
    *others, last = jax_started([tmp_path] * count, *spread, "killed")
    last.communicate(timeout=LIMIT)
    for other in others:
        other.communicate(timeout=LIMIT)
        assert other.returncode != 0


def test_not_the_same_directory(way, runs, tmp_path):
    """If only one process finds a snapshot, all detect this, and none waits for another."""
    here, (count, spread) = tmp_path / "here", WAYS[way]
    shutil.copytree(runs[1] / "whole", here / "killed")
    processes = jax_started([here, *[tmp_path / "elsewhere"] * (count - 1)], *spread, "resumed")
    errors = [error for _, error in ended(processes)]
    assert all("Expected all processes to find the same snapshot" in error for error in errors)
