"""What the default policy promises, sentence by sentence, and what the other presets do."""

from __future__ import annotations

import pytest

from keras_nanguard._core.incident import CAUSES, Diagnosis, Finding, Incident
from keras_nanguard._policy.ledger import Ledger
from keras_nanguard._policy.policy import Policy, decide
from keras_nanguard._policy.presets import PRESETS

LIMIT = 12


def bad(step, *sites, kind="nonfinite", refused=True, cause=None, value=None, committed=None):
    findings = tuple(Finding(site, kind, value=value) for site in sites or ("loss", "gradients"))
    diagnosis = None if cause is None else Diagnosis(cause=cause)
    return Incident(step, 0, step, findings, refused, diagnosis=diagnosis, committed=committed)


def run(policy, incidents):
    """Return the names of the actions decided at each incident, up to the first terminal decision."""
    policy, ledger, reported = Policy.from_any(policy), Ledger(), []
    for incident in incidents:
        decision, ledger = decide(policy, ledger, incident)
        reported.append([action["action"] for action in decision.actions])
        if decision.terminal:
            break
    return reported


def test_one_bad_batch_is_left_out_and_reported():
    """One bad step: skipped, reported in one line, nothing else."""
    assert run("recover", [bad(40)]) == [["warn", "skip"]]


def test_scattered_bad_steps_are_left_out_for_ever():
    """One bad step in fifty never leads to more than leaving it out, in a million steps."""
    reported = run("recover", [bad(step) for step in range(0, 1_000_000, 500)])
    assert {name for names in reported for name in names} == {"warn", "skip"}
    reported = run("recover", [bad(step) for step in range(0, 20_000, 50)])
    assert {name for names in reported for name in names} == {"warn", "skip"}


def test_half_of_the_steps_left_out_is_the_end():
    """Every other step bad is never a streak, and yet no training: it stops at half of the last 200."""
    reported = run("recover", [bad(step) for step in range(0, 1000, 2)])
    assert reported[-1] == ["stop"] or reported[-1] == ["warn", "stop"]
    assert len(reported) == 100


def test_three_in_a_row_go_back_and_slow_down():
    """Three bad steps in a row: back to the newest verified snapshot and a tenth of the learning rate."""
    policy, ledger = Policy.from_any(), Ledger()
    for step in (5, 6, 7):
        decision, ledger = decide(policy, ledger, bad(step))
    assert decision.rule == "persistent" and not decision.terminal
    by_name = {action["action"]: action for action in decision.actions}
    assert by_name["rollback"]["depth"] == 1
    assert by_name["lower_lr"]["factor"] == 0.1 and by_name["lower_lr"]["recover_after"] == 500
    names = [action["action"] for action in decision.actions]
    assert names.index("rollback") < names.index("lower_lr")


HOPELESS = ("forward_domain", "loss_domain", "gradient_domain", "float16_overflow", "float16_underflow", "divergence")


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_what_cannot_be_cured_from_the_start_stops_at_the_third(cause):
    """From the first step on nothing has been trained: what no rate and no earlier state can cure ends at the third step.

    Bad data is skipped instead, up to the twelfth, as it may be a stretch; and what comes by chance may pass.
    """
    reported = run("recover", [bad(step, "loss", cause=cause, committed=0) for step in range(30)])
    assert reported[-1][-1] == "stop" and len(reported) == (3 if cause in HOPELESS else LIMIT)
    assert cause not in HOPELESS or reported == [["warn", "skip"], ["warn", "skip"], ["warn", "stop"]]


@pytest.mark.parametrize("cause", HOPELESS)
def test_the_same_causes_may_be_cured_once_steps_have_committed(cause):
    """A logarithm that leaves its domain late in training may do so because training went too far: back and slower."""
    reported = run("recover", [bad(step, "loss", cause=cause, committed=500) for step in range(500, 503)])
    assert reported[-1] == ["warn", "rollback", "lower_lr"]


def test_endless_trouble_from_step_0_stops_in_twelve_steps():
    """Back at the third, sixth and ninth bad step, each time deeper and slower; the end at the twelfth."""
    policy, ledger, rollbacks = Policy.from_any(), Ledger(), {}
    for step in range(LIMIT):
        decision, ledger = decide(policy, ledger, bad(step, "outputs", "loss", "gradients", cause="unknown", committed=0))
        for action in decision.actions:
            if action["action"] == "rollback":
                rollbacks[step] = action["depth"]
        assert decision.terminal == (step == LIMIT - 1)
    assert rollbacks == {2: 1, 5: 2, 8: 3}
    assert "persistent" in decision.rule and "12 in a row" in decision.reason
    assert decision.actions[-1] == {"action": "stop", "restore": True, "failed": False}


def test_a_rate_a_hundred_times_too_high_is_lowered_twice_for_good():
    """The second lowering comes without recovery: the rate stays at a hundredth, which is where it belongs."""
    policy, ledger, lowered = Policy.from_any(), Ledger(), []
    for step in [3, 4, 5, 9, 10, 11]:
        decision, ledger = decide(policy, ledger, bad(step))
        lowered += [action for action in decision.actions if action["action"] == "lower_lr"]
    assert [action["factor"] for action in lowered] == [0.1, 0.1]
    assert [action["recover_after"] for action in lowered] == [500, None]


def test_the_budget_returns_after_2000_steps():
    """At most three rollbacks in 2000 steps; a streak every 3000 steps may recur forever."""
    seldom = [bad(step) for start in range(0, 60_000, 3000) for step in range(start, start + 3)]
    assert sum("rollback" in names for names in run("recover", seldom)) == 20
    often = [bad(step) for start in range(0, 60_000, 400) for step in range(start, start + 3)]
    reported = run("recover", often)
    assert "stop" in reported[-1] and sum("rollback" in names for names in reported) == 3


@pytest.mark.parametrize("site", ["inputs", "targets"])
def test_bad_data_is_left_out_and_nothing_else_is_changed(site):
    """A stretch of bad data costs neither progress nor learning rate; data that is always bad stops within twelve."""
    reported = run("recover", [bad(step, site, "loss", "gradients") for step in range(30)])
    assert len(reported) == LIMIT and "stop" in reported[-1]
    assert {name for names in reported[:-1] for name in names} == {"warn", "skip"}


def test_labels_out_of_range_are_bad_data_too():
    """The diagnosis may cut it short: a cause in the data is never answered with a lower rate."""
    reported = run("recover", [bad(step, "loss", cause="target_out_of_range") for step in range(11)])
    assert {name for names in reported for name in names} == {"warn", "skip"}


@pytest.mark.parametrize("site", ["weights", "statistics", "slots", "state"])
def test_a_poisoned_state_is_gone_back_from_at_once(site):
    """NaN in a committed state: back at once; again within 2000 steps: back and slower; in the end stop."""
    reported = run("recover", [bad(step, site, refused=False) for step in (10, 500, 900, 1500)])
    names = [[name for name in one if name != "warn"] for one in reported]
    assert names == [["rollback"], ["rollback", "lower_lr"], ["rollback", "lower_lr"], ["stop"]]


def test_a_model_that_is_bad_before_training_stops_before_the_first_step():
    """A model that comes with NaN cannot be trained, and there is nothing to restore."""
    assert run("recover", [bad(0, "state", refused=False)])[0][-1] == "stop"
    assert run("recover", [bad(1, "state", refused=False)])[0][-1] == "rollback"


def test_divergence_is_met_while_it_is_finite():
    """A run that is proven to be lost: back and slower, six times in 5000 steps, then stop."""
    steps = (50, 300, 500, 700, 900, 1100, 1300)
    reported = run("recover", [bad(step, "loss", kind="divergence", refused=False, value=1e8) for step in steps])
    assert reported == [["warn", "rollback", "lower_lr"]] * 6 + [["stop"]]


@pytest.mark.parametrize("kind", ["nonfinite", "out_of_range"])
def test_a_state_that_someone_damaged_is_healed_at_once(kind):
    """NaN or numbers out of range in the state before a refused step: a rollback at once, a bounded number of times."""
    reported = run("recover", [bad(step, "state", "loss", kind=kind) for step in (40, 90, 140, 190)])
    assert reported[0] == ["warn", "rollback"]
    assert reported[1:3] == [["warn", "rollback", "lower_lr"]] * 2 and reported[3][-1] == "stop"


def test_a_finite_spike_is_reported_only():
    """One jump of the loss changes nothing, and many are reported three times in 1000 steps."""
    reported = run("recover", [bad(step, kind="spike", refused=False) for step in range(5)])
    assert reported == [["warn"]] * 3 + [[], []]


@pytest.mark.parametrize("kind", ["collapse", "nonfinite", "out_of_range"])
def test_a_loss_scale_that_collapsed_is_set_right(kind):
    """The loss scale is moved into its range three times, then training stops."""
    reported = run("recover", [bad(step, "loss_scale", kind=kind, refused=False) for step in (0, 100, 200, 300)])
    assert all("fix_loss_scale" in names for names in reported[:3]) and reported[3] == ["stop"]


@pytest.mark.parametrize("site", ["metrics", "validation", "predictions"])
def test_results_that_are_not_finite_are_reported_once_in_a_while(site):
    """NaN in validation, predictions or metrics is reported, and never refuses or ends anything."""
    reported = run("recover", [bad(step, site, refused=False) for step in range(0, 900, 100)])
    assert reported == [["warn"]] * 3 + [[]] * 6


@pytest.mark.parametrize("preset", ["stop", "raise"])
def test_stop_and_raise_end_at_the_first_real_incident(preset):
    """The first bad step ends training with the last good state restored; spikes and results are only reported."""
    ending = "stop" if preset == "stop" else "raise_error"
    for incident in [
        bad(7),
        bad(7, "weights", refused=False),
        bad(7, kind="divergence", refused=False),
        bad(7, "slots"),
    ]:
        assert run(preset, [incident]) == [[ending]]
    assert run(preset, [bad(7, kind="spike", refused=False)]) == [["warn"]]
    assert run(preset, [bad(7, "validation", refused=False)]) == [["warn"]]


def test_observe_only_ever_warns():
    """`observe` refuses nothing and decides nothing but to tell."""
    policy = Policy.from_any("observe")
    assert not policy.refuse and policy.snapshot.every == 0 and policy.longest_trouble is None
    assert {action.name for rule in policy.rules for rung in rule.ladder for action in rung.do} == {"warn"}
    incidents = [bad(step, site, refused=False) for step in range(50) for site in ("weights", "loss", "state")]
    assert {name for names in run("observe", incidents) for name in names} == {"warn"}


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "observe"])
def test_every_preset_ends_endless_trouble_within_a_dozen_steps(preset):
    """NaN in every step ends training within twelve steps, under every preset that refuses steps."""
    assert Policy.from_any(preset).longest_trouble <= LIMIT
    reported = run(preset, [bad(step) for step in range(100)])
    assert len(reported) <= LIMIT and reported[-1][-1] in ("stop", "raise_error")


def test_tune_ends_a_hopeless_trial():
    """`tune` heals nothing: three in a row or a divergence end the trial as failed, bad data is skipped."""
    policy = Policy.from_any("tune")
    assert policy.snapshot.every == 0 and policy.longest_trouble == LIMIT
    assert run("tune", [bad(step, "loss") for step in range(5)]) == [["warn", "skip"], ["warn", "skip"], ["warn", "stop"]]
    assert run("tune", [bad(9, "loss", kind="divergence", refused=False)]) == [["stop"]]
    assert run("tune", [bad(step, "inputs", cause="input_nonfinite") for step in range(5)])[-1] == ["warn", "skip"]
    endings = [a for rule in policy.rules for rung in rule.ladder for a in rung.do if a.terminal]
    assert endings and all(action.failed and not action.restore for action in endings)


def test_rules_that_fire_together_give_one_decision():
    """Each action is done once, as the first rule wants it, and an ending puts changes of other rules aside."""
    fast = {"name": "fast", "do": [{"lower_lr": {"factor": 0.5}}, "rollback"], "limit": {"times": 2}}
    kept = {"name": "kept", "do": ["quarantine", "warn"]}
    policy, ledger = Policy.from_any("recover", rules=[fast, kept]), Ledger()
    seen = []
    for step in range(3):
        decision, ledger = decide(policy, ledger, bad(step))
        seen.append([action["action"] for action in decision.actions])
    assert seen[0] == ["quarantine", "warn", "rollback", "lower_lr"]
    assert seen[2] == ["quarantine", "warn", "rollback", "lower_lr"]
    strict = Policy.from_any(
        "recover", rules=[fast, {"name": "strict", "do": "stop"}, {"name": "loud", "do": "raise_error"}]
    )
    decision, _ = decide(strict, Ledger(), bad(0))
    assert [action["action"] for action in decision.actions] == ["warn", "stop"]
    assert decision.rule == "strict + loud" and decision.terminal
