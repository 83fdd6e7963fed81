"""The ledger: what a policy remembers, through JSON and into the next process."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.incident import KINDS, SITES, Finding, Incident
from keras_nanguard._policy.ledger import Ledger, Tally, is_bad_step
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


def spike(step):
    return bad(step, refused=False, kind="spike")


def test_a_new_fit_keeps_every_distance():
    """All steps move by the same number, to before the first step of the new fit, with a good step between."""
    before = after([bad(3), bad(4), spike(6), bad(7), spike(9)])
    found, by = before.resumed(), -11
    assert (found.step, found.last, found.run, found.jumps) == (-2, 7 + by, 7 + by, (6 + by, 9 + by))
    assert (found.consecutive, found.total) == (before.consecutive, before.total)
    assert found.rules == {name: tally.shifted(by) for name, tally in before.rules.items()} and found.rules
    assert after([bad(0)], found).consecutive == 1


def test_a_new_fit_after_a_run_without_bad_steps():
    """Nothing happened, or only a spike: there is no streak that could go on."""
    assert Ledger().resumed() == Ledger()
    found = after([spike(9)]).resumed()
    assert (found.step, found.last, found.run, found.jumps) == (-2, None, None, (-2,))


def test_a_tally_moves_whole():
    """Steps move; counts do not, and what has never been stays so."""
    tally = Tally(consecutive=2, total=5, since=3, last=9, fired=4, recent=(8, 9), spent=((1, 4), ()))
    assert tally.shifted(-10) == Tally(2, 5, 3, -1, -6, (-2, -1), ((-9, -6), ()))
    assert Tally().shifted(7) == Tally() == Tally(0, 0, 0, None, None, (), ())


def test_a_step_that_is_run_again_counts_as_a_later_one():
    """A good step lies between: what is run again continues no streak, and its own failure is one more."""
    assert Ledger().rewound() == Ledger()
    ledger = after([bad(4), bad(5)]).rewound()
    assert (ledger.step, ledger.step_of(bad(4)), ledger.step_of(bad(6)), ledger.step_of(bad(8))) == (6, 7, 6, 8)
    ledger = after([bad(5)], ledger)
    assert (ledger.consecutive, ledger.total, ledger.last) == (1, 3, 7)


def test_as_many_jumps_are_kept_as_a_condition_can_count():
    """The last thousand, the oldest first; two findings of one step are one jump."""
    ledger = Ledger()
    for step in range(1005):
        ledger = ledger.entered(spike(step), step).entered(spike(step), step)
    assert ledger.jumps == tuple(range(5, 1005))


def test_two_jumps_of_one_step_are_one():
    """From the first on."""
    ledger = Ledger()
    for step in (4, 4, 5, 5):
        ledger = ledger.entered(spike(step), step)
    assert ledger.jumps == (4, 5)


def test_a_row_of_matching_steps():
    """Steps side by side are one, whether or not they are bad; others only where the run of bad steps goes on between them."""
    tally = Tally().counted(3, None, 0).counted(4, None, 0)
    assert (tally.consecutive, tally.total, tally.since) == (2, 2, 2)
    assert tally.counted(4, None, 0) == tally and tally.counted(6, None, 0).consecutive == 1
    assert tally.counted(6, 3, 0).consecutive == tally.counted(6, 4, 0).consecutive == 3 and tally.counted(6, 5, 0).consecutive == 1


def test_only_what_a_window_can_hold_is_kept():
    tally = Tally(last=5, recent=(1, 2, 5))
    assert tally.counted(6, None, 5).recent == (2, 5, 6) and tally.counted(6, None, 0).recent == ()


def test_good_steps_lie_between():
    """None before the first bad step, none in the step of one."""
    assert Ledger().good_steps(Tally(), 9) == 0
    assert [Ledger(last=4).good_steps(Tally(last=last), 7) for last in (None, 2, 6)] == [2, 2, 0]
    assert Ledger(last=7).good_steps(Tally(), 7) == 0 and Ledger().good_steps(Tally(last=5), 7) == 1


def test_a_ledger_begins_with_nothing():
    assert Ledger() == Ledger(None, None, None, 0, 0, (), {})


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("refused", [True, False])
def test_what_a_bad_step_is(site, refused):
    """A refused step, or one that left NaN or Inf where training reads it; not what only reports on training."""
    reports = site in ("metrics", "validation", "predictions")
    assert is_bad_step(bad(0, refused, site)) is (refused or not reports)
    assert is_bad_step(bad(0, refused, site, "spike")) is refused


STORED = {
    "format": 1, "step": 9, "last": 9, "run": 8, "consecutive": 2, "total": 3, "jumps": [4],
    "rules": {"mine": {"consecutive": 2, "total": 3, "since": 1, "last": 9, "fired": 8, "recent": [8, 9], "spent": [[8], []]}},
}  # fmt: skip


def test_a_ledger_of_an_earlier_run_is_read():
    """The format on disk, word by word: a run that is resumed with a newer version reads it."""
    ledger = Ledger(9, 9, 8, 2, 3, (4,), {"mine": Tally(2, 3, 1, 9, 8, (8, 9), ((8,), ()))})
    assert ledger.to_dict() == STORED and Ledger.from_dict(STORED) == ledger


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


@settings(max_examples=60)
@given(st.lists(incidents, max_size=30), incidents)
def test_a_ledger_survives_json_and_decides_the_same(past, new):
    """A ledger read back from JSON decides exactly as the one that was written."""
    ledger = after(past)
    read = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict(), allow_nan=False)))
    assert read == ledger
    assert decide(POLICY, read, new) == decide(POLICY, ledger, new)


@settings(max_examples=60)
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
        {**Ledger().to_dict(), "jumps": [1.5]},
        {**Ledger().to_dict(), "jumps": {}},
        {**Ledger().to_dict(), "consecutive": -1},
        {**Ledger().to_dict(), "format": 2},
        {**Ledger().to_dict(), "format": 0},
        {**Ledger().to_dict(), "rules": {"x": {}}},
        {**Ledger().to_dict(), "rules": {"x": 3}},
        {**Ledger().to_dict(), "rules": []},
    ],
)
def test_a_broken_ledger_is_refused(broken):
    """Anything that is not a ledger raises an error of the library."""
    with pytest.raises(FileFormatError):
        Ledger.from_dict(broken)
