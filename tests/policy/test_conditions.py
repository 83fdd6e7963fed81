"""Conditions: when a rule fires."""

from __future__ import annotations

import math

import pytest

from keras_nanguard._core.errors import PolicyError
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._policy import conditions
from keras_nanguard._policy.conditions import CONDITIONS, Consecutive, Fraction, Immediately, Spike, Within
from keras_nanguard._policy.ledger import Ledger, Tally
from keras_nanguard._policy.policy import Policy, decide
from keras_nanguard._policy.schema import problems_in

SAMPLES = {
    "consecutive": {"consecutive": 3},
    "total": {"total": 4},
    "within": {"within": {"times": 3, "steps": 10}},
    "fraction": {"fraction": {"share": 0.3, "steps": 10}},
    "spike": {"spike": {"times": 2, "steps": 5}},
    "any": {"any": [{"consecutive": 2}, {"total": 5}]},
    "all": {"all": [{"consecutive": 2}, {"total": 5}]},
    "not": {"not": {"consecutive": 2}},
}


def bad(step, site="loss", kind="nonfinite", refused=True):
    return Incident(step=step, epoch=0, batch=step, findings=(Finding(site, kind),), refused=refused)


def firings(after, steps, jumps=(), **more):
    """Return the steps at which a rule with this condition fires, given the bad steps and the finite jumps."""
    rule = {"name": "watched", "after": after, "do": {"warn": {"message": "fired"}}, "when": "refused", **more}
    endless = {"name": "endless", "after": {"consecutive": 1000}, "when": "refused", "do": "stop"}
    poisoned = {"name": "poisoned", "when": "committed", "kind": "nonfinite", "do": "stop"}
    policy, ledger, fired = Policy.from_any({"preset": "none", "rules": [rule, endless, poisoned]}), Ledger(), []
    reported = [bad(step) for step in steps] + [bad(step, kind="spike", refused=False) for step in jumps]
    for incident in sorted(reported, key=lambda one: one.step):
        decision, ledger = decide(policy, ledger, incident)
        if any(action.get("message") == "fired" for action in decision.actions):
            fired.append(incident.step)
    return fired


@pytest.mark.parametrize("name", sorted(CONDITIONS))
def test_a_condition_survives_a_file(name):
    """Each condition comes back the same from a file, and says in words what it waits for."""
    condition = conditions.from_file(SAMPLES[name])
    assert isinstance(condition, CONDITIONS[name])
    assert condition.to_file() == SAMPLES[name]
    assert conditions.from_file(condition.to_file()) == condition
    assert condition.sentence()
    assert not problems_in({"rules": [{"name": "x", "after": SAMPLES[name], "do": "stop"}]})


def test_consecutive_counts_bad_steps_and_starts_anew_when_it_fired():
    """`consecutive = 3` fires at the third bad step in a row, the sixth, the ninth; a good one ends a row."""
    assert firings({"consecutive": 3}, range(10)) == [2, 5, 8]
    assert firings({"consecutive": 3}, [0, 1, 3, 4, 6, 7, 8, 9]) == [8]
    assert firings({"consecutive": 1}, [4, 5, 9]) == [4, 5, 9]


def test_bad_steps_of_other_rules_end_no_row():
    """A row is ended by a good step, not by a bad one that the rule does not look at: no mixture can hide a row."""
    row = {"name": "row", "on": "loss", "after": {"consecutive": 3}, "do": {"warn": {"message": "row"}}}
    policy, ledger, fired = Policy.from_any("recover", rules=[row]), Ledger(), []
    sites = ["loss", "slots", "loss", "slots", "slots", "loss", None, "loss", "loss"]
    for step, site in enumerate(sites):
        if site is not None:
            decision, ledger = decide(policy, ledger, bad(step, site))
            fired += [step for action in decision.actions if action.get("message") == "row"]
    assert fired == [5]


def test_total_counts_bad_steps_however_far_apart():
    """`total = 3` needs no row."""
    assert firings({"total": 3}, [0, 100, 10_000, 20_000, 20_001, 90_000]) == [10_000, 90_000]


def test_within_counts_bad_steps_in_a_window():
    """`within` forgets what the window has left behind, on the step."""
    within = {"within": {"times": 3, "steps": 10}}
    assert firings(within, [0, 5, 9]) == [9]
    assert firings(within, [0, 5, 10]) == []
    assert firings(within, [0, 5, 10, 14]) == [14]


def test_fraction_is_a_share_of_all_steps_of_the_window():
    """`fraction` counts against the whole window, the steps before the run being good."""
    half = {"fraction": {"share": 0.5, "steps": 10}}
    assert firings(half, range(0, 40, 2)) == [8, 18, 28, 38]
    assert firings(half, range(0, 40, 3)) == []
    assert firings({"fraction": {"share": 0.3, "steps": 10}}, [0, 3, 6]) == [6]
    assert firings({"fraction": {"share": 0.3, "steps": 9}}, [0, 3, 20, 22, 24]) == [24]


def test_spike_looks_back_for_finite_jumps():
    """`spike` lets a rule tell trouble after a jump of the loss from trouble out of the blue."""
    assert firings({"spike": {"steps": 5}}, [10, 20], jumps=[6, 14]) == [10]
    assert firings({"spike": {"times": 2, "steps": 5}}, [10], jumps=[6, 7]) == [10]
    assert firings({"all": [{"spike": {"steps": 5}}, {"consecutive": 2}]}, [10, 11, 20, 21], jumps=[9]) == [11]


def test_a_jump_is_forgotten_on_the_step():
    """A window of five steps holds the present one and the four before it."""
    for jumps, holds in (((5,), False), ((6,), True), ((10,), True), ((), False)):
        assert Spike(1, 5).met(Tally(), 10, jumps) is holds
    assert Spike() == Spike(times=1, steps=100)
    assert Spike().sentence() == "after a jump of loss or gradient norm within 100 steps"
    assert Spike(2, 9).sentence() == "after 2 jumps of loss or gradient norm within 9 steps"


SHARES = [(0.5, 10, 5), (0.3, 10, 3), (0.31, 10, 4), (0.01, 10, 1), (1e-10, 1, 1), (1.0, 10_000, 10_000), (0.07, 100, 7)]


@pytest.mark.parametrize(("share", "steps", "times"), SHARES)
def test_a_share_is_a_whole_number_of_steps(share, steps, times):
    """Rounded up, at least one; what only the product of two floats adds is none."""
    assert Fraction(share, steps).bounds == (times, steps)


def test_no_condition_is_always_met():
    assert Immediately().met(Tally(), 0, ()) is True and Immediately().to_file() == {}


def test_conditions_combine():
    """`any`, `all` and `not` mean what they say."""
    assert firings({"any": [{"consecutive": 3}, {"total": 4}]}, [0, 1, 2, 10, 20, 30, 40]) == [2, 40]
    assert firings({"all": [{"consecutive": 2}, {"total": 4}]}, [0, 1, 10, 20, 21]) == [21]
    assert firings({"all": [{"not": {"consecutive": 2}}, {"total": 2}]}, [0, 1, 5]) == [5]


def test_a_cooldown_keeps_a_rule_silent():
    """After firing, a rule with a cool-down stays silent for so many steps."""
    assert firings({"consecutive": 1}, range(12), cooldown=4) == [0, 5, 10]


def test_a_limit_counts_within_its_steps_and_an_ending_has_none():
    """A limit gives its times back when its steps have gone by, on the step; `stop` is never used up."""
    assert firings({"consecutive": 1}, [0, 5, 9, 10, 19, 20], limit={"times": 1, "per_steps": 10}) == [0, 10, 20]
    assert firings({"consecutive": 1}, [0, 5, 9, 90_000], limit={"times": 2}) == [0, 5]
    policy = Policy.from_any({"preset": "none", "rules": [{"name": "end", "do": "stop", "limit": {"times": 1}}]})
    ledger = Ledger()
    for step in range(3):
        decision, ledger = decide(policy, ledger, bad(step))
        assert decision.terminal


def test_good_steps_start_a_rule_anew():
    """`reset_after` good steps in a row forget the count; fewer do not."""
    assert firings({"total": 3}, [0, 1, 12, 13, 14], reset_after=10) == [14]
    assert firings({"total": 3}, [0, 1, 11, 12, 13], reset_after=10) == [11]


@pytest.mark.parametrize(
    ("after", "reported"),
    [
        ({}, "one condition"),
        ({"consecutive": 1, "total": 2}, "one condition"),
        ({"consecutive": 0}, "after.consecutive: expected a whole number >= 1"),
        ({"consecutive": 2.5}, "after.consecutive: expected a whole number"),
        ({"consecutive": True}, "after.consecutive: expected a whole number"),
        ({"consecutiv": 3}, "did you mean 'consecutive'"),
        ({"within": {"times": 5, "steps": 3}}, "after.within.times: expected a whole number <= steps = 3"),
        ({"within": {"times": 5}}, "after.within.steps: expected a whole number >= 1 and <= 10000, received nothing"),
        ({"fraction": {"share": 1.5, "steps": 3}}, "after.fraction.share: expected a finite number > 0 and <= 1"),
        ({"fraction": {"share": float("nan"), "steps": 3}}, "received nan"),
        ({"any": []}, "after.any: expected at least one entry"),
        ({"not": {"al": []}}, "after.not.al: expected one of"),
        ({"within": {"times": 5, "steps": 10**6}}, "after.within.steps"),
    ],
)
def test_what_is_no_condition_is_refused(after, reported):
    """A wrong condition is reported with its path."""
    problems = problems_in({"rules": [{"name": "x", "after": after, "do": "stop"}]})
    assert len(problems) == 1 and reported in problems[0]


def test_a_condition_in_code_is_validated_too():
    """A condition that is written in code gets the problems that it would get in a file."""
    for kind, values in ((Consecutive, {"steps": 0}), (Within, {"times": 3, "steps": 2}), (Fraction, {"share": math.nan, "steps": 2})):
        with pytest.raises(PolicyError, match="expected"):
            kind(**values)
