"""Two processes on JAX make the same decisions; `test_process_matrix.py` has the other faults."""

from __future__ import annotations

from support.several_processes import assert_same, jax_runs


def test_a_bad_row_of_each_process(tmp_path):
    """Both refuse the same steps, and end with the same state, rate and incidents."""
    ranks, printed = jax_runs(tmp_path, 2, [], "bad")["bad"]
    assert_same(ranks, "weights", "state", "rate", "incidents", "findings", "evidence")
    assert [i[:3] for i in ranks[0]["incidents"]] == [
        [3, "input_nonfinite", [1]],
        [7, "input_nonfinite", [14]],
    ], "rows of the whole batch"
    assert [evidence[0] for evidence in ranks[0]["evidence"]] == [
        "rank 0: x, row 1.",
        "rank 1: x, row 6.",
    ], "rows of the part of that process"
    assert [text.count("NanGuard: skipped step ") for text in printed] == [1, 0]
