"""Several processes on PyTorch: after each fault all have the same weights, slots and rate."""

from __future__ import annotations

import pytest
from support.several_processes import assert_same, torch_cases

PROGRAMS = ("module", "own buffers", "keras", "accumulate", "reports")
FAULTS = ("healthy", "row", "batch", "all", "three", "loss", "spike", "weights", "slots", "memory")
CASES = (
    *(f"{program}:{fault}" for program in PROGRAMS for fault in ("plain", "without", *FAULTS)),
    *(
        "module:raise",
        "keras:kill",
        "module:row:4",
        "module:three:4",
        "module:without:4",
        "module:kill:4",
        "module:observed",
        *(f"sharded:{fault}" for fault in ("plain", "without", *FAULTS, "kill", "whole")),
        *("module:whole", "module:die", "module:resume"),
        *("keras:whole", "keras:die", "keras:resume"),
    ),
)

SAME = ("weights", "optimizer", "rate", "steps", "snapshots", "incidents")


@pytest.fixture
def found(once):
    """The results of the processes of each case."""
    return once("matrix", lambda folder: torch_cases(CASES))


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.endswith((":plain", ":without", ":without:4"))]
)
def test_the_matrix(found, case):
    """All processes end alike, or all remaining ones end with an error."""
    ranks, (program, fault, *count) = found[case], case.split(":")
    if fault == "observed":  # nothing is refused: NaN reaches all of them
        assert_same(ranks, "rate", "steps", "incidents")
        return
    if fault in ("kill", "die", "raise"):
        *others, gone = ranks
        assert all(left["error"] for left in others) and (
            gone is None or "disk full" in gone["error"]
        )
        return
    if program == "sharded" and fault == "whole":  # no process alone can save it
        assert all("one process can save" in left["error"] for left in ranks)
        return
    parts = ("weights", "optimizer") if program == "sharded" else ()  # each has its shard
    assert_same(ranks, *(name for name in SAME if name not in parts))
    steps = [incident["step"] for incident in ranks[0]["incidents"]]
    assert bool(steps) is (fault not in ("healthy", "spike", "whole", "resume"))
    if fault == "resume":
        whole = found[f"{program}:whole"][0]
        assert all(ranks[0][name] == whole[name] for name in ("weights", "optimizer", "rate"))
    if fault in ("healthy", "row", "batch", "all"):
        plain = ":".join([program, "without" if steps else "plain", *count])
        for left, other in zip(ranks, found[plain], strict=True):
            assert left["weights"] == other["weights"] and left["optimizer"] == other["optimizer"]
