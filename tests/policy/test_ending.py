"""After how many bad steps a policy ends training, to the step, and which limits can be reached."""

from __future__ import annotations

import pytest

from keras_nanguard._core.errors import PolicyError
from keras_nanguard._policy.actions import LowerLr, Stop, Warn
from keras_nanguard._policy.conditions import AllOf, AnyOf, Consecutive, Immediately, Not, Total, Within
from keras_nanguard._policy.ending import limit_problems, longest_trouble, termination_problem, with_reachable_limits
from keras_nanguard._policy.rules import Limit, Magnitude, Rule, Rung, Unless

LOWERS, STOPS, WARNS = (LowerLr(),), Rung((Stop(),)), Rung((Warn(),))
NEVER_SURE = Not(Total(1))


def rule(name="one", ladder=(STOPS,), **more):
    return Rule(name, ladder, **more)


def ladder(times, per_steps=None):
    return (Rung(LOWERS, Limit(times, per_steps)), STOPS)


@pytest.mark.parametrize(
    ("made", "steps"),
    [
        (rule(), 1),
        (rule(after=Consecutive(5)), 5),
        (rule(after=Within(3, 10)), 3),
        (rule(after=NEVER_SURE), None),
        (rule(cooldown=4), 5),
        (rule(after=Consecutive(5), cooldown=4), 5),
        (rule(after=Consecutive(5), cooldown=5), 6),
        (rule(ladder=ladder(2), cooldown=5), 18),
        (rule(ladder=ladder(2, 18), cooldown=5), 18),
        (rule(ladder=ladder(2, 17), cooldown=5), None),
        (rule(ladder=(Rung(LOWERS, Limit(2)), Rung(LOWERS, Limit(3, 50)), STOPS)), 6),
        (rule(ladder=(WARNS, STOPS)), None),
        (rule(ladder=(Rung(LOWERS, Limit(2)),)), None),
        (rule(ladder=(Rung((*LOWERS, Stop()), Limit(9)), WARNS)), 1),
        (rule(enabled=False), None),
        (rule(layer=("dense*",)), None),
        (rule(cause=("divergence",)), None),
        (rule(unless=Unless(on=("loss",))), None),
        (rule(unless=Unless(cause=("divergence",))), None),
        (rule(when="before_training"), None),
        (rule(when="from_start"), None),
        (rule(magnitude=Magnitude(min_abs=1.0)), None),
        (rule(magnitude=Magnitude(min_share=0.5)), None),
        (rule(on=("loss", "gradients")), None),
        (rule(kind=("nonfinite",)), None),
        (rule(when="refused"), None),
    ],
)
def test_a_single_rule(made, steps):
    """The larger of condition and cool-down, once for each time that the rungs above act, and once for the ending."""
    assert longest_trouble([made]) == steps
    assert bool(termination_problem([made])) is (steps is None)


def test_steps_that_are_only_refused():
    """Without those that spoil a committed state a rule for refused steps is enough."""
    assert longest_trouble([rule(when="refused", after=Total(7))], committed=False) == 7
    assert longest_trouble([rule(when="committed", after=Total(7))], committed=False) is None


REFUSED, COMMITTED = rule("refused", when="refused", after=Total(5)), rule("committed", when="committed", after=Total(7))


def test_rules_that_end_training_together():
    """By the pigeonhole principle: one less for each, and one more; a rule that is not needed for it does not count."""
    assert longest_trouble([REFUSED, COMMITTED]) == 1 + 4 + 6
    costly, narrow = rule("costly", when="refused", after=Total(50)), rule("narrow", on=("loss",), cause=("spike",), after=Total(2))
    for extra in (costly, narrow, rule("cheap", layer=("a*",))):
        assert longest_trouble([REFUSED, extra, COMMITTED]) == 11
    assert longest_trouble([REFUSED, COMMITTED, rule("all", after=Total(9))]) == 9


def test_limits_have_to_remember_all_that_the_rules_need_together():
    """Each of the rules ends by itself; of the mixture the limit forgets the first step before the last."""
    for per_steps, bound in ((12, 12), (11, None)):
        forgets = rule("refused", ladder(2, per_steps), when="refused", after=Total(2))
        assert longest_trouble([forgets, COMMITTED]) == bound
    assert "limits whose per_steps is so short" in termination_problem([forgets, COMMITTED])


def test_a_policy_that_ends_has_no_problem():
    assert termination_problem([REFUSED, COMMITTED]) == ""


def test_what_is_missing_is_named():
    """Sites and moments for which nothing certainly ends training; a window is certain only for a rule that matches every step."""
    missing = "none that certainly does so for inputs, targets, state, outputs, loss, gradients, weights, statistics, slots, loss_scale"
    found = termination_problem([COMMITTED])
    assert f"{missing} (refused);" in found and "(committed)" not in found
    found = termination_problem([REFUSED])
    assert "for state, weights, statistics, slots, loss_scale (committed);" in found and "(refused)" not in found
    windows = [rule(when, when=when, after=Within(3, 10)) for when in ("refused", "committed")]
    assert f"{missing} (refused) and none" in termination_problem(windows)


@pytest.mark.parametrize(
    ("more", "spacing"),
    [
        ({}, 1),
        ({"cooldown": 4}, 5),
        ({"after": Within(3, 10)}, 3),
        ({"after": NEVER_SURE, "cooldown": 4}, 5),
        ({"after": Consecutive(7), "cooldown": 4}, 7),
    ],
)
def test_a_limit_within_steps_has_to_be_reached(more, spacing):
    """A rule that fires too seldom never uses its limit up; an inherited limit is extended to what it can reach."""
    short, enough = (rule(ladder=ladder(2, per_steps), **more) for per_steps in (2 * spacing, 2 * spacing + 1))
    (found,) = limit_problems([short])
    assert f"expected more than {2 * spacing} steps (rule 'one' fires at most every {spacing} steps)" in found
    assert list(limit_problems([enough])) == [] and list(limit_problems([rule(ladder=short.ladder, enabled=False)])) == []
    extended = with_reachable_limits(short, True, True)
    assert extended == rule(ladder=ladder(2, 2 * spacing + 1), **more)
    assert with_reachable_limits(short, False, True) == short
    assert with_reachable_limits(rule(ladder=ladder(2, 999), **more), True, True) == rule(ladder=ladder(2, 999), **more)


def test_which_rungs_are_extended():
    """Those that inherited their limit, change something, do not end training, and have a window."""
    short = Limit(2, 2)
    rungs = (Rung(LOWERS, short), Rung(LOWERS, short), Rung(LOWERS, Limit(2)), Rung((Warn(),), short), Rung((*LOWERS, Stop()), short))
    given, long = rule(ladder=rungs), Rung(LOWERS, Limit(2, 3))
    assert with_reachable_limits(given, True, True).ladder == (long, long, *rungs[2:])
    assert with_reachable_limits(given, True, False).ladder == (long, *rungs[1:])
    assert with_reachable_limits(given, False, True).ladder == (rungs[0], long, *rungs[2:])
    assert with_reachable_limits(given, False, False).ladder == rungs


def test_a_rung_that_changes_something_needs_a_limit():
    """One that ends training does not, nor one that changes nothing; the path names the rung."""
    rungs = (Rung((Warn(),), Limit(1)), Rung(LOWERS), Rung((*LOWERS, Stop())))
    (found,) = limit_problems([rule(ladder=rungs)])
    assert found.startswith("rules.one.otherwise.limit: expected a limit for lower_lr (rule 'one')")


@pytest.mark.parametrize(
    ("condition", "sole", "among_others", "horizon", "words"),
    [
        (Immediately(), 1, 1, 0, "each time"),
        (Consecutive(3), 3, 3, 0, "at 3 in a row"),
        (Total(4), 4, 4, 0, "at 4 in all"),
        (Within(3, 10), 3, None, 10, "at 3 within 10 steps"),
        (NEVER_SURE, None, None, 0, "unless at 1 in all"),
        (Not(Within(3, 10)), None, None, 10, "unless at 3 within 10 steps"),
        (AnyOf((Total(4), Within(3, 10))), 3, 4, 10, "(at 4 in all or at 3 within 10 steps)"),
        (AnyOf((NEVER_SURE, NEVER_SURE)), None, None, 0, "(unless at 1 in all or unless at 1 in all)"),
        (AllOf((Total(4), Within(3, 10))), 4, None, 10, "(at 4 in all and at 3 within 10 steps)"),
        (AllOf((Within(1, 5), Within(3, 10))), 3, None, 10, "(at 1 within 5 steps and at 3 within 10 steps)"),
    ],
)
def test_what_a_condition_needs(condition, sole, among_others, horizon, words):
    """Matching steps after which it certainly holds, how far back it looks, and its words."""
    assert (condition.needs(True), condition.needs(False)) == (sole, among_others)
    assert (condition.horizon, condition.sentence()) == (horizon, words)


@pytest.mark.parametrize("make", [lambda: Limit(0), lambda: Magnitude(min_abs=-1.0), lambda: rule(cooldown=-1), lambda: rule("a b")])
def test_records_in_code_are_validated(make):
    with pytest.raises(PolicyError, match="expected"):
        make()


def test_a_rule_has_an_action():
    with pytest.raises(PolicyError, match="no action") as caught:
        Rule("empty", ())
    assert caught.value.problems == ("do: expected at least one action, received nothing",)
