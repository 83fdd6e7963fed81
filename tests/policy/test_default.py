"""The guarantees of the default policy, one by one, and the other presets."""

import pytest

from keras_nanguard import Diagnosis, Finding, Incident, Policy
from keras_nanguard._core.literals import CAUSES
from keras_nanguard._policy.decide import RATE_CURES, decide
from keras_nanguard._policy.policy import PRESETS
from keras_nanguard._policy.state import BAD_DATA, PolicyState

BOUND = 12
CLIMB = 10
"""The place of `stop` in the escalation."""


def bad(step, *sites, kind="nonfinite", refused=True, cause=None, committed=None):
    findings = tuple(Finding(site, kind) for site in sites or ("loss", "gradients"))
    diagnosis = None if cause is None else Diagnosis(cause=cause)
    return Incident(step, 0, step, findings, refused, diagnosis=diagnosis, committed=committed)


def decisions(policy, incidents):
    """Return the decisions about incidents, up to the first terminal one."""
    policy, state, found = Policy.load(policy), PolicyState(), []
    for incident in incidents:
        decision, state = decide(policy, state, incident)
        found.append(decision)
        if decision.terminal:
            break
    return found


def names(policy, incidents):
    return [[action["action"] for action in one.actions] for one in decisions(policy, incidents)]


def parameters(decision, name):
    return next(action for action in decision.actions if action["action"] == name)


def test_scattered_bad_steps_are_skipped_for_ever():
    """One bad step in fifty is only ever skipped, because a good step resets the escalation."""
    found = decisions("recover", [bad(step) for step in range(0, 100_000, 50)])
    assert len(found) == 2000 and {(one.rule, one.terminal) for one in found} == {("escalation", False)}
    assert all([action["action"] for action in one.actions] == ["skip"] for one in found)


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_three_bad_steps_in_a_row(cause):
    """The third rolls back. The rate is lowered only if a lower rate can cure the cause."""
    done = names("recover", [bad(step, cause=cause, committed=50) for step in (50, 51, 52)])
    third = ["rollback", "lower_lr"] if cause is None or cause in RATE_CURES else ["rollback"]
    assert done == [["skip"], ["skip"], ["skip"] if cause in BAD_DATA else third]


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_endless_bad_steps_end_training(cause):
    """A run that never recovers stops at the tenth bad step in a row, at the twelfth for bad data."""
    done = names("recover", [bad(step, cause=cause, committed=50) for step in range(50, 100)])
    assert done[-1] == ["stop"]
    assert len(done) == (BOUND if cause in BAD_DATA else CLIMB)
    assert sum("rollback" in one for one in done) == (0 if cause in BAD_DATA else 3)


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_bad_steps_from_the_first_on_end_training_without_a_rollback(cause):
    """Before any step has committed, there is nothing to restore."""
    done = names("recover", [bad(step, cause=cause, committed=0) for step in range(30)])
    assert done[-1] == ["stop"] and len(done) <= BOUND
    assert not any("rollback" in one for one in done)


def test_the_rate_returns_once_and_a_second_reduction_is_permanent():
    """Repeated rollbacks go further back; only the first reduction is temporary."""
    row = [bad(step, cause="unknown", committed=50) for step in range(50, 59)]
    found = decisions("recover", row)
    acting = [found[2], found[5], found[8]]
    assert [parameters(one, "rollback")["depth"] for one in acting] == [1, 2, 3]
    assert [parameters(one, "lower_lr")["recover_after"] for one in acting] == [500, 0, 0]
    assert not any(parameters(one, "rollback")["replay_steps"] for one in acting)


def test_a_divergence_restores_a_state_before_its_onset_and_replays():
    """Refused for a divergence: a snapshot from before its onset, at a lower rate for good."""
    row = [bad(step, cause="divergence", committed=50) for step in (50, 51, 52)]
    *_, third = decisions("recover", row)
    back = parameters(third, "rollback")
    assert back["before_onset"] and back["replay_steps"]
    assert parameters(third, "lower_lr")["recover_after"] == 0


def test_half_of_the_steps_refused_ends_training():
    """Every other step is bad: no streak, but training ends at half of the last 200 steps."""
    done = names("recover", [bad(step, "inputs") for step in range(0, 1000, 2)])
    assert done[-1] == ["stop"] and len(done) == 100


def test_each_change_has_a_budget():
    """Six streaks within 5000 steps give rollbacks, the seventh ends; rare ones never do."""
    often = [bad(start + n) for start in range(0, 9000, 300) for n in range(3)]
    done = names("recover", often)
    assert sum("rollback" in one for one in done) == 6
    assert done[-1] == ["stop"] and len(done) == 21
    seldom = [bad(start + n) for start in range(0, 100_000, 1000) for n in range(3)]
    assert sum("rollback" in one for one in names("recover", seldom)) == 100


@pytest.mark.parametrize("refused", [False, True])
def test_a_bad_state_is_rolled_back_at_once(refused):
    """NaN from a committed step or other code: a rollback, and good steps are replayed."""
    site = "state" if refused else "weights"
    steps = range(40, 400, 20)
    found = decisions("recover", [bad(n, site, refused=refused, committed=40) for n in steps])
    changes = [[a["action"] for a in one.actions] for one in found]
    assert changes == [["rollback"], ["rollback", "lower_lr"], ["rollback", "lower_lr"], ["stop"]]
    back = [parameters(one, "rollback") for one in found[:3]]
    assert all(one["replay_steps"] for one in back) and [one["depth"] for one in back] == [1, 2, 3]


def test_a_model_that_is_bad_before_training_stops():
    assert names("recover", [bad(0, "state", refused=False, committed=0)]) == [["stop"]]


def test_a_finite_divergence_is_acted_on_at_once():
    """A proven divergence leads to a rollback before its onset, a lower rate, and a replay."""
    diverged = [bad(90, "loss", kind="divergence", refused=False)]
    (decision,) = decisions("recover", diverged)
    assert parameters(decision, "rollback")["before_onset"]
    assert parameters(decision, "lower_lr")["recover_after"] == 0
    assert names({"divergence": {"action": "off"}}, diverged) == [[]]


QUIET = [("loss", "spike"), ("loss", "stuck")]
QUIET += [(site, "nonfinite") for site in ("metrics", "validation", "predictions")]


@pytest.mark.parametrize(("site", "kind"), QUIET)
def test_results_and_finite_anomalies_are_at_most_reported(site, kind):
    """They have no action, however often they come."""
    found = [bad(n, site, kind=kind, refused=False) for n in range(500)]
    assert names("recover", found) == [[]] * 500


def test_a_loss_scale_out_of_range_is_moved_back():
    """A collapsed loss scale restarts from 1024."""
    (decision,) = decisions("recover", [bad(9, "loss_scale", kind="collapse", refused=False)])
    assert parameters(decision, "fix_loss_scale")["reset_to"] == 1024.0


@pytest.mark.parametrize("preset", ["stop", "raise"])
def test_stop_and_raise_end_at_the_first_bad_step(preset):
    """One bad step, a bad state, a divergence or a collapsed scale ends training; a spike does not."""
    ending = [["stop" if preset == "stop" else "raise_error"]]
    assert names(preset, [bad(9)]) == ending
    assert names(preset, [bad(9, "weights", refused=False)]) == ending
    assert names(preset, [bad(9, "loss", kind="divergence", refused=False)]) == ending
    assert names(preset, [bad(9, "loss_scale", kind="collapse", refused=False)]) == ending
    assert names(preset, [bad(0, "state", refused=False)]) == ending
    assert names(preset, [bad(9, "loss", kind="spike", refused=False)]) == [[]]
    assert names(preset, [bad(n, "inputs") for n in range(12)])[-1:] == ending


def test_observe_never_does_more_than_report():
    policy = Policy.load("observe")
    assert not policy.refuse and policy.snapshot.every == 0
    incidents = [bad(n, site, refused=False) for n in range(50) for site in ("loss", "weights")]
    assert names("observe", incidents) == [[]] * 100


def test_tune_skips_bad_data():
    """A trial ends after three batches with NaN in a row, not after the first."""
    data = [bad(n, "inputs", cause="input_nonfinite") for n in (9, 10, 11)]
    assert names("tune", data) == [["skip"], ["skip"], ["stop"]]
    assert names("tune", [bad(n, "inputs") for n in range(0, 900, 9)]) == [["skip"]] * 100


def test_tune_ends_a_hopeless_trial_with_the_worst_values():
    """Three bad steps in a row end a trial, so that no tuner chooses it as the best one."""
    *_, last = decisions("tune", [bad(n, committed=9) for n in (9, 10, 11)])
    expected = {"action": "stop", "restore": False, "log_worst_metrics": True}
    assert parameters(last, "stop") == expected
    assert names("tune", [bad(9, "loss", kind="divergence", refused=False)]) == [["stop"]]


def test_long_run_rolls_back_past_the_data():
    """`long-run` keeps snapshots on disk, and skips 200 batches on a rollback."""
    found = decisions("long-run", [bad(n, committed=9) for n in (9, 10, 11)])
    assert Policy.load("long-run").snapshot.storage == "disk"
    assert parameters(found[2], "rollback")["skip_batches"] == 200


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_ends_an_endless_run(preset):
    """The engine bounds every policy that refuses steps."""
    done = decisions(preset, [bad(n) for n in range(50)])
    assert (not Policy.load(preset).refuse) or (done[-1].terminal and len(done) <= BOUND)
