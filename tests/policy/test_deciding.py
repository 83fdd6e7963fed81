"""The corners of `decide` and of a policy written in code: what no preset does, and a policy may."""

from __future__ import annotations

import pytest

from keras_nanguard._core.errors import PolicyError
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._policy.actions import LowerLr, Rollback, Skip, Stop, Warn
from keras_nanguard._policy.ledger import Ledger, Tally
from keras_nanguard._policy.policy import Policy, decide
from keras_nanguard._policy.rules import Limit, Rule, Rung

ENDLESS = {"name": "endless", "when": "refused", "after": {"consecutive": 1000}, "do": "stop"}
SPOILED = {"name": "spoiled", "when": "committed", "kind": "nonfinite", "do": "stop"}
STOPS = Rule("stops", (Rung((Stop(),)),))


def policy(*rules, **more):
    return Policy.from_any({"preset": "none", "rules": [*rules, ENDLESS, SPOILED], **more})


def bad(step, refused=True, site="loss", kind="nonfinite"):
    return Incident(step=step, epoch=0, batch=step, findings=(Finding(site, kind),), refused=refused)


def run(of, steps, **more):
    ledger, decisions = Ledger(), []
    for step in steps:
        decision, ledger = decide(of, ledger, bad(step, **more))
        decisions.append(decision)
    return decisions, ledger


def test_a_rollback_goes_no_deeper_than_the_deepest():
    """Each one goes one snapshot further back, up to a hundred."""
    deeper = policy({"name": "back", "do": {"rollback": {"deeper": True}}, "limit": {"times": 200}})
    depths = [decision.actions[0]["depth"] for decision in run(deeper, range(103))[0]]
    assert depths == [*range(1, 101), 100, 100, 100]


def test_a_rollback_that_does_not_go_deeper_stays_where_it_is():
    same = policy({"name": "back", "do": {"rollback": {"depth": 2}}, "limit": {"times": 9}})
    assert [decision.actions[0]["depth"] for decision in run(same, range(3))[0]] == [2, 2, 2]


def test_a_rule_whose_ladder_is_used_up_says_so_and_counts_anew():
    """It fires once more each time its condition holds, with no action and with the reason."""
    used = policy({"name": "warned", "after": {"consecutive": 3}, "do": "warn", "limit": {"times": 1}})
    decisions, ledger = run(used, range(9))
    named = [step for step, decision in enumerate(decisions) if "warned" in decision.reason]
    assert named == [2, 5, 8] and [decision.rule for decision in decisions] == ["", "", "warned", "", "", "", "", "", ""]
    assert decisions[5].reason == "warned: 6 in a row, 6 in total; the limit of once in total is reached; the step was skipped."
    assert ledger.rules["warned"].since == 0 and ledger.rules["warned"].spent == ((2,),)


def test_nothing_is_remembered_that_no_limit_counts():
    """A rung without a limit acts for ever and keeps no steps."""
    _, ledger = run(policy({"name": "warned", "do": "warn"}), range(5))
    assert ledger.rules["warned"] == Tally(5, 5, 0, 4, 4, (), ((),))


def test_a_rule_that_saw_nothing_has_no_tally():
    _, ledger = run(policy({"name": "other", "on": "slots", "do": "warn"}), range(3))
    assert set(ledger.rules) == {"endless"}


def test_what_no_rule_answers():
    """A refused step was skipped all the same; a committed one was not."""
    silent = policy({"name": "other", "on": "slots", "do": "warn"})
    ((refused,), _), ((committed,), _) = run(silent, [1]), run(silent, [1], refused=False, kind="spike")
    assert (refused.actions, refused.reason, refused.rule) == (({"action": "skip"},), "no rule fired; the step was skipped.", "")
    assert (committed.actions, committed.reason, committed.terminal) == ((), "no rule fired.", False)


def test_the_reason_of_a_change_says_nothing_of_a_skip():
    changes = policy({"name": "back", "do": ["skip", "rollback"], "limit": {"times": 3}})
    ((decision, *_), _) = run(changes, [1])
    assert decision.reason == "back: 1 in a row, 1 in total." and [action["action"] for action in decision.actions] == ["rollback"]


def test_an_ending_drops_what_other_rules_change_and_keeps_what_its_own_does():
    back = {"name": "back", "do": ["warn", "rollback"], "limit": {"times": 3}}
    ends = {"name": "ends", "do": [{"lower_lr": {"factor": 0.5}}, "stop"]}
    raises = {"name": "raises", "do": "raise_error"}
    ((decision,), _) = run(policy(back, ends, raises), [1])
    assert [action["action"] for action in decision.actions] == ["warn", "lower_lr", "stop"]
    assert decision.terminal and decision.rule == "ends + raises" and "back" not in decision.reason
    ((decision,), _) = run(policy(back, {"name": "tells", "do": "warn"}), [1])
    assert not decision.terminal and decision.rule == "back" and "tells" not in decision.reason


def test_of_two_rules_the_first_gives_an_action_its_parameters():
    first, second = ({"name": name, "do": {"warn": {"message": name}}} for name in ("first", "second"))
    ((decision,), _) = run(policy(first, second), [1])
    assert decision.actions[0]["message"] == "first" and decision.rule == "first + second"


def test_reset_after_good_steps_of_any_rule():
    """Bad steps that another rule saw are no good steps."""
    watched = policy({"name": "watched", "on": "loss", "after": {"total": 2}, "reset_after": 3, "do": {"warn": {"message": "fired"}}})
    ledger, fired = Ledger(), []
    for step, site in ((0, "loss"), (2, "slots"), (5, "loss"), (9, "loss"), (12, "loss")):
        decision, ledger = decide(watched, ledger, bad(step, site=site))
        fired += [step for action in decision.actions if action.get("message") == "fired"]
    assert fired == [5, 12]


def test_a_policy_in_code():
    """It refuses, it has rules of different names, and it says what it is."""
    made = Policy(title="mine", rules=(STOPS,))
    assert made.refuse and repr(made) == "Policy('mine', 1 rules)" and not Policy(refuse=False).refuse
    assert made == Policy(title="mine", rules=(STOPS,), half_written=frozenset({"stops"}))
    with pytest.raises(PolicyError, match=r"a policy with rules.*Write Policy\.from_any\(.recover.\)"):
        Policy()
    with pytest.raises(PolicyError, match=r"Received: Policy\(.strict.\)\. Write Policy\.from_any\(.strict.\)"):
        Policy("strict")
    with pytest.raises(PolicyError, match=r"rules\.stops: expected one rule of this name, received 2"):
        Policy(rules=(STOPS, STOPS))


def test_a_policy_that_refuses_nothing_and_changes_something_has_to_end_too():
    """One whose changing rules are disabled, or that only tells, need not."""
    lowers = Rule("lowers", (Rung((LowerLr(),), Limit(1)),))
    with pytest.raises(PolicyError, match="a rule that ends training"):
        Policy(refuse=False, rules=(lowers,))
    Policy(refuse=False, rules=(Rule("lowers", lowers.ladder, enabled=False),))
    Policy(refuse=False, rules=(Rule("tells", (Rung((Warn(),)),)),))


def test_a_policy_without_snapshots_cannot_roll_back():
    """Unless the rule that does is disabled."""
    back = Rule("back", (Rung((Rollback(),), Limit(1)), Rung((Stop(),))))
    snapshot = Policy(rules=(STOPS,)).snapshot
    never = type(snapshot)(every=0)
    with pytest.raises(PolicyError, match="as these rules roll back: back, received 0"):
        Policy(rules=(back, STOPS), snapshot=never)
    Policy(rules=(STOPS,), snapshot=never)
    Policy(rules=(Rule("back", back.ladder, enabled=False), STOPS), snapshot=never)


def test_a_policy_of_a_file_has_rules_with_actions():
    with pytest.raises(PolicyError, match=r"rules\.mine\.do: expected at least one action, received nothing"):
        Policy.from_any({"preset": "none", "rules": [{"name": "mine"}, ENDLESS, SPOILED]})
    with pytest.raises(PolicyError, match="a rule that ends training"):
        Policy.from_any({"preset": "none"})
    assert Policy.from_any({"preset": "none", "refuse": False}).rules == ()


def test_skip_is_an_action_without_parameters():
    assert Skip().to_dict() == {"action": "skip"}


def test_an_inherited_limit_is_extended_to_what_the_rule_can_reach():
    """A limit of one's own that is never reached is an error."""
    def persistent(**fields):
        made = Policy.from_any("recover", rules=[{"name": "persistent", **fields}])
        return next(rule for rule in made.rules if rule.name == "persistent").ladder[0].limit

    longer, known = {"after": {"consecutive": 2500}}, persistent()
    assert persistent(after={"consecutive": 900}) == known
    assert persistent(**longer) == Limit(known.times, 2500 * known.times + 1)
    with pytest.raises(PolicyError, match="the limit is never reached"):
        persistent(**longer, limit={"times": 1, "per_steps": 2000})


def test_a_ladder_of_two_rungs_of_which_one_was_written_over():
    """The other one is inherited, and the policy knows it."""
    ladder = {"name": "mine", "do": "rollback", "limit": {"times": 3}, "otherwise": "stop"}
    inherited = Policy.from_any(policy(ladder), rules=[{"name": "mine", "do": "clip"}])
    assert inherited.half_written == {"mine"} and [rung.do[0].name for rung in inherited.rules[0].ladder] == ["clip", "stop"]
    assert Policy.from_any(policy(ladder), rules=[{"name": "endless", "do": "raise_error"}]).half_written == frozenset()
