"""The ledger: what a policy remembers, through JSON and into the next process."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.incident import KINDS, SITES, Finding, Incident
from keras_nanguard._policy.ledger import Ledger
from keras_nanguard._policy.policy import Policy, decide

POLICY = Policy.from_any("recover")


def bad(step, refused=True, site="loss", kind="nonfinite"):
    return Incident(step=step, epoch=0, batch=step, findings=(Finding(site, kind),), refused=refused)


def after(incidents, ledger=None):
    ledger = ledger or Ledger()
    for incident in incidents:
        _, ledger = decide(POLICY, ledger, incident)
    return ledger


def test_a_streak_counts_bad_steps_also_across_a_rollback():
    """A decision to go back does not end a streak: the twelfth bad step in a row is the twelfth."""
    ledger = after(bad(step) for step in range(12))
    assert (ledger.consecutive, ledger.total, ledger.run) == (12, 12, 0)


def test_good_steps_follow_from_the_step_numbers():
    """Healthy steps are not recorded: they are the gaps in the numbers of bad steps."""
    ledger = after(bad(step) for step in (3, 4, 9))
    assert (ledger.consecutive, ledger.total, ledger.run) == (1, 3, 9)


def test_a_finite_spike_is_no_bad_step():
    """A spike in a committed step neither counts as a bad step nor joins two of them to a row."""
    ledger = after([bad(3), bad(4, refused=False, kind="spike"), bad(5)])
    assert (ledger.consecutive, ledger.total, ledger.jumps) == (1, 2, (4,))


def test_one_step_counts_once():
    """Two incidents of one step are one bad step."""
    ledger = after([bad(3), bad(3), bad(3)])
    assert (ledger.consecutive, ledger.total) == (1, 1)
    assert ledger.rules["persistent"].consecutive == 1


def test_incidents_reported_out_of_order_still_count():
    """Whatever the order in which steps are reported, a streak cannot be kept from growing."""
    ledger = after([bad(10), bad(9), bad(8)])
    assert ledger.consecutive == 3


def test_a_new_fit_keeps_budgets_and_ends_streaks():
    """A run that is resumed in a new process, from step 0, still has its budget used and starts a new streak."""
    before = after(bad(step) for step in range(100, 105))
    resumed = Ledger.from_dict(json.loads(json.dumps(before.to_dict()))).resumed()
    assert resumed.rules["persistent"].spent[0] != ()
    ledger = after([bad(0), bad(1)], resumed)
    assert ledger.consecutive == 2 and ledger.total == 7
    decision, _ = decide(POLICY, ledger, bad(2))
    assert [action["action"] for action in decision.actions] == ["warn", "rollback", "lower_lr"]
    assert "the limit of once in 2000 steps is reached" in decision.reason


incidents = st.builds(
    Incident,
    step=st.integers(0, 60),
    epoch=st.just(0),
    batch=st.just(0),
    findings=st.lists(st.builds(Finding, site=st.sampled_from(SITES), kind=st.sampled_from(KINDS)), min_size=1).map(
        tuple
    ),
    refused=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(incidents, max_size=30), incidents)
def test_a_ledger_survives_json_and_decides_the_same(past, new):
    """A ledger read back from JSON decides exactly as the one that was written."""
    ledger = after(past)
    read = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict(), allow_nan=False)))
    assert read == ledger
    assert decide(POLICY, read, new) == decide(POLICY, ledger, new)


@settings(max_examples=60, deadline=None)
@given(st.lists(incidents, max_size=30), incidents)
def test_deciding_is_pure(past, new):
    """The same policy, ledger and incident give the same decision, and the argument is not modified."""
    ledger = after(past)
    written = json.dumps(ledger.to_dict())
    assert decide(POLICY, ledger, new) == decide(POLICY, ledger, new)
    assert json.dumps(ledger.to_dict()) == written


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        {"format": 99},
        {"format": 1},
        {**Ledger().to_dict(), "extra": 1},
        {**Ledger().to_dict(), "step": "three"},
        {**Ledger().to_dict(), "total": -1},
        {**Ledger().to_dict(), "total": True},
        {**Ledger().to_dict(), "total": None},
        {**Ledger().to_dict(), "jumps": 3},
        {**Ledger().to_dict(), "rules": {"x": {}}},
        {**Ledger().to_dict(), "rules": {"x": 3}},
        {**Ledger().to_dict(), "rules": []},
    ],
)
def test_a_broken_ledger_is_refused(broken):
    """Anything that is not a ledger raises an error of the library."""
    with pytest.raises(FileFormatError):
        Ledger.from_dict(broken)
