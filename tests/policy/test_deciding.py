"""What a policy decides: custom rules, the bounds of the engine, and the guarantees of the presets."""

import pytest
from hypothesis import given, strategies as st

from keras_nanguard import Diagnosis, Finding, Incident, Outcome, Policy
from keras_nanguard._core.literals import CAUSES, KINDS, SITES
from keras_nanguard._policy.decide import BAD_DATA, RATE_CURES, PolicyState, decide
from keras_nanguard._policy.settings import matches_path
from keras_nanguard._policy.warnings import warnings_about
from keras_nanguard.actions import ACTIONS

BOUND = 12
CLIMB = 10
"""The place of `stop` in the escalation of `recover`."""


def bad(step, *sites, kind="nonfinite", refused=True, cause=None, path="", committed=50):
    findings = tuple(Finding(site, kind, path) for site in sites or ("loss", "gradients"))
    diagnosis = None if cause is None else Diagnosis(cause=cause)
    return Incident(step, 0, step, findings, refused, diagnosis=diagnosis, committed=committed)


def run(policy, incidents):
    """Return the names of the actions decided for each incident, and the state."""
    state, found = PolicyState(), []
    for incident in incidents:
        decision, state = decide(policy, state, incident)
        found.append([action["action"] for action in decision.actions])
    return found, state


def rules(*rules, **sections):
    tables = [{"name": f"rule {n}", **rule} for n, rule in enumerate(rules)]
    return Policy.load("recover", rules=tables, **sections)


# Rules


ROW = [bad(n) for n in range(50, 62)]
DIVERGED = bad(90, "loss", kind="divergence", refused=False)
SPIKES = [bad(n, kind="spike", refused=False) for n in range(100, 600, 100)]
BROKEN = [bad(n, "weights", refused=False) for n in (40, 60, 80)]
HEALS = Policy.load(escalation=["skip", ["rollback", "lower_lr"]])
DECIDED = {
    "a rule in place of the escalation": (
        rules({"cause": "loss_domain", "do": {"clip": {"global_clipnorm": 2.0}}}),
        [bad(5, cause="loss_domain"), bad(9, cause="unknown")], [["clip"], ["skip"]], "escalation: The first bad step.",
    ),
    "the first rule that is due": (
        rules({"site": "loss", "do": "clip"}, {"do": "stop"}), [bad(5), bad(6, "outputs")], [["clip"], ["stop"]],
        "rule 1: 2 matching incidents in a row.",
    ),
    "reports, the rollback, other changes, and no skip besides": (
        rules({"do": ["skip", "clip", "rollback", "warn"]}), [bad(5)], [["warn", "rollback", "clip"]],
        "rule 0: The first matching incident.",
    ),
    "reports besides the escalation": (
        rules({"do": ["warn", {"call": {"function": "page"}}]}, {"site": "inputs", "do": "warn"}),
        ROW[:3], [["warn", "call", "skip"]] * 2 + [["warn", "call", "rollback", "lower_lr"]], "rule 0 + escalation: 3 bad steps in a row.",
    ),
    "each function and message of the rules and the policy, once": (
        rules({"do": [{"call": {"function": "log"}}, {"call": {"function": "page"}}]}, {"do": [{"warn": {"message": "!"}}, "warn"]},
              {"do": [{"call": {"function": "page"}}, {"warn": {"message": "!"}}]}, escalation=[{"call": {"function": "escalate"}}, "stop"]),
        [bad(5)], [["call", "call", "warn", "warn", "call", "skip"]], "rule 0 + rule 1 + rule 2 + escalation: The first bad step.",
    ),
    "no rule keeps training from ending": (
        rules({"do": "skip"}, escalation=["skip"], max_consecutive_refused=7), ROW[:7], [*[["skip"]] * 6, ["stop"]],
        "max_consecutive_refused: 7 bad steps in a row.",
    ),
    "a bound ends as the escalation does": (
        Policy.load(escalation=["skip"] * 20 + ["raise_error"]), [bad(n, "inputs") for n in range(12)], [*[["skip"]] * 11, ["raise_error"]],
        "max_consecutive_refused: 12 bad steps in a row.",
    ),
    "a bound ends at a bad step, and not once more at another incident": (
        Policy.load(max_consecutive_refused=1), [ROW[0], SPIKES[0]], [["stop"], []],
        ": Nothing is changed.",
    ),
    "no bound ends what refuses nothing": (Policy.load("observe", max_consecutive_refused=1), [bad(5, refused=False)], [[]], ": Nothing is changed."),
    "half of the steps were refused, without a streak": (
        Policy(), [bad(step, "inputs") for step in range(0, 200, 2)], [["skip"]] * 99 + [["stop"]],
        "max_refused_share: 100 of the last 200 steps were refused.",
    ),
    "the budget counts each action of rules": (
        rules({"kind": "spike", "do": "clip"}, action_budget=2), SPIKES[:3], [["clip"], ["clip"], ["stop"]],
        "action_budget: Clip was done 2 times within 5000 steps.",
    ),
    "the last of fewer stages repeats within the budget": (
        Policy.load(escalation=["skip", "rollback"], action_budget=3), ROW[:5], [["skip"], ["rollback"], ["rollback"], ["rollback"], ["stop"]],
        "action_budget: Rollback was done 3 times within 5000 steps.",
    ),
    "a bad batch is no stage, and a second reason in its step is the first": (
        Policy.load(escalation=["warn", "stop"], rules=[]), [bad(50, "inputs"), bad(50)], [["warn", "skip"]] * 2,
        "escalation: The first bad step.",
    ),
    "bad data": (Policy(), [bad(50, "inputs")], [["skip"]], "bad_data: The first bad step."),
    "a finite divergence": (Policy(), [DIVERGED], [["rollback", "lower_lr"]], "divergence: Training has diverged."),
    "a finite divergence that nothing is done about": (Policy.load(divergence={"action": "off"}), [DIVERGED], [[]], ": Training has diverged."),
    "a loss scale that collapsed": (
        Policy(), [bad(9, "loss_scale", kind="collapse", refused=False)], [["fix_loss_scale"]],
        "loss_scale: The loss scale is outside of its range.",
    ),
    "a model that is bad before the first step": (
        Policy(), [bad(0, "state", refused=False, committed=0)], [["stop"]],
        "before_training: The model is bad before the first step.",
    ),
    "a model that is bad after it": (Policy(), [bad(1, "state", refused=False)], [["rollback"]], "bad_state: The state is bad."),
    "a state that is bad again": (
        HEALS, [*BROKEN, bad(99, "weights", refused=False, cause="state_nonfinite")], [["rollback"], *[["rollback", "lower_lr"]] * 3],
        "bad_state: The state is bad again.",
    ),
    "a state that no rate can cure": (
        HEALS, [BROKEN[0], bad(60, "weights", refused=False, cause="loss_domain")], [["rollback"], ["rollback"]],
        "bad_state: The state is bad again.",
    ),
    "a bad state that nothing restores": (Policy.load(escalation=["skip"]), BROKEN[:1], [[]], ": The escalation restores nothing."),
    "large weights of a refused step that diverged": (
        Policy(), [bad(5, "state", kind="out_of_range", cause="divergence")], [["skip"]],
        "escalation: The first bad step.",
    ),
    "large weights of a committed step that diverged": (
        Policy(), [bad(5, "weights", kind="out_of_range", refused=False, cause="divergence")], [["rollback"]],
        "bad_state: The state is bad.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_decided(name):
    """The actions about each incident; what decides about the last one, and the reason."""
    policy, incidents, expected, said = DECIDED[name]
    assert run(policy, incidents)[0] == expected
    _, state = run(policy, incidents[:-1])
    decision, _ = decide(policy, state, incidents[-1])
    assert f"{decision.rule}: {decision.reason}" == said


def test_a_rule_is_due_after_a_number_of_incidents_in_a_row():
    """`after = 4` acts at the fourth and the eighth matching incident in a row."""
    policy = rules({"cause": "transient", "after": 4, "do": "reset_slots"})
    done = run(policy, [bad(n, cause="transient") for n in range(50, 58)])[0]
    assert [n for n, one in enumerate(done) if one == ["reset_slots"]] == [3, 7]
    assert done[2] == ["rollback"]
    apart = run(policy, [bad(n, cause="transient") for n in range(0, 80, 2)])[0]
    assert ["reset_slots"] not in apart


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({}, True),
        ({"site": "loss"}, True),
        ({"site": ["gradients", "loss"]}, True),
        ({"site": "gradients"}, False),
        ({"kind": "spike"}, False),
        ({"cause": ["unknown", "loss_domain"]}, True),
        ({"cause": "divergence"}, False),
        ({"layer": "den*"}, True),
        ({"layer": "conv*"}, False),
        ({"site": "loss", "layer": "conv*"}, False),
    ],
)
def test_a_rule_matches_if_every_field_matches(fields, matches):
    """One finding matches site, kind and layer, and the diagnosis the cause."""
    (rule,) = rules({**fields, "do": "stop"}).rules
    assert rule.matches(bad(5, "loss", cause="loss_domain", path="model/dense/kernel")) is matches


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("post_bn*", "model/post_bn_1/moving_mean", True),
        ("model/post_bn*", "model/post_bn_1/gamma", True),
        ("bn", "model/post_bn/gamma", False),
        ("*", "anything", True),
        ("post_bn_1/gamma", "model/post_bn_1/gamma", True),
        ("model", "model/post_bn/gamma", True),
        ("model/post_bn", "model/post_bn/gamma", True),
    ],
)
def test_a_glob_matches_a_run_of_the_parts_of_a_path(glob, path, matches):
    assert matches_path(path, glob) is matches


# The engine


def test_a_stage_that_changed_nothing_is_not_repeated():
    """A skipped action is omitted until a good step has occurred."""
    policy, state = Policy.load(), PolicyState()
    done = []
    for step in (50, 51, 52, 53, 54, 55, 60, 61, 62):
        decision, state = decide(policy, state, bad(step))
        done.append([action["action"] for action in decision.actions])
        state = state.performed([Outcome("lower_lr", "skipped")] if "lower_lr" in done[-1] else [])
    assert done[2] == ["rollback", "lower_lr"] and done[5] == ["rollback"]
    assert done[8] == ["rollback", "lower_lr"]


def test_tables_of_a_policy_are_the_defaults_of_its_actions():
    """They apply if the action has no parameters; those of an item have precedence."""
    item = {"lower_lr": {"min_lr": 0.5}}
    policy = Policy.load(escalation=["lower_lr", item], lower_lr={"factor": 0.3, "min_lr": 0.1})
    _, state = decide(policy, PolicyState(), bad(50))
    first = decide(policy, PolicyState(), bad(50))[0].actions[-1]
    second = decide(policy, state, bad(51))[0].actions[-1]
    assert (first["factor"], first["min_lr"]) == (0.3, 0.1)
    assert (second["factor"], second["min_lr"]) == (0.3, 0.5)


def test_a_limit_applies_to_the_paths_that_its_glob_matches():
    """The last matching limit applies; without a match there is no limit."""
    limits = [
        {"site": "weights", "max_abs": 5.0},
        {"site": "weights", "max_abs": 9.0, "layer": "head*"},
    ]
    policy = Policy.load(limits=limits)
    assert policy.max_abs("model/body/kernel", "weights") == 5.0
    assert policy.max_abs("model/head/kernel", "weights") == 9.0
    assert policy.max_abs("model/head/kernel", "slots") is None
    assert Policy().max_abs("a", "statistics") is None


INCIDENTS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.sampled_from(SITES),
        st.sampled_from(KINDS),
        st.sampled_from([*CAUSES, None]),
        st.booleans(),
        st.sampled_from([None, 0, 50]),
    ),
    max_size=60,
)
ITEMS = st.sampled_from([name for name in ACTIONS if name != "call"])
POLICIES = st.builds(
    lambda stages, after, do, bound, budget: rules(
        {"after": after, "do": do},
        escalation=stages,
        max_consecutive_refused=bound,
        action_budget=budget,
    ),
    st.lists(st.one_of(ITEMS, st.lists(ITEMS, min_size=1, max_size=3)), min_size=1, max_size=6),
    st.integers(1, 5),
    ITEMS,
    st.integers(1, 15),
    st.integers(1, 6),
)


@given(POLICIES, INCIDENTS)
def test_the_engine_keeps_its_guarantees_under_any_policy(policy, events):
    """The decision is pure, prints as JSON, is bounded, and never loses a refusal."""
    state, step, done = PolicyState(), 0, {}
    for gap, site, kind, cause, refused, committed in events:
        step += gap
        incident = bad(step, site, kind=kind, refused=refused, cause=cause, committed=committed)
        decision, after = decide(policy, state, incident)
        assert (decision, after) == decide(policy, state, incident)
        assert PolicyState.model_validate_json(after.model_dump_json()) == after
        state, names = after, [action["action"] for action in decision.actions]
        assert len(names) == len(set(names))
        assert decision.terminal == any(ACTIONS[name].terminal for name in names)
        if refused:
            assert names, "a refused step has a decision"
        if refused and state.consecutive >= policy.max_consecutive_refused:
            assert decision.terminal
        if decision.terminal:
            break
        for name in names:
            done[name] = done.get(name, 0) + ACTIONS[name].changes
            assert done[name] <= policy.action_budget


def test_rules_that_never_act_give_a_warning():
    """Results have their own row, which no bound ends; findings between steps are never in a row."""
    warned = {
        "late": {"after": 13},
        "loss": {"site": "loss", "after": 13},
        "spike": {"kind": ["spike", "stuck"], "after": 2},
        "all": {"kind": ["divergence", "spike", "stuck"], "after": 2},
    }
    silent = {
        "results": {"site": "validation", "after": 50},
        "first": {"kind": "spike"},
        "both": {"kind": ["spike", "nonfinite"], "after": 2},
        "soon": {"after": 12},
    }
    tables = [{"name": name, "do": "warn", **table} for name, table in {**warned, **silent}.items()]
    found = warnings_about(Policy.load(rules=tables))
    assert [sentence.split("'")[1] for sentence in found] == [*warned]
    assert "on bad steps" in found[0] and "no two steps in a row have spike or stuck" in found[2]


@pytest.mark.parametrize("do", ["warn", "clip"])
@pytest.mark.parametrize("after", [11, 12, 13])
@pytest.mark.parametrize("preset", ["recover", "observe"])
def test_a_rule_for_many_bad_steps_gives_a_warning_if_it_never_acts(preset, after, do):
    """Compared with the decisions about bad steps until training ends."""
    policy = Policy.load(preset, escalation=["skip"], rules=[{"name": "late", "after": after, "do": do}])
    state, acted = PolicyState(), False
    for step in range(50, 70):
        decision, state = decide(policy, state, bad(step, "inputs", refused=policy.refuse))
        acted |= "late" in decision.rule
        if decision.terminal:
            break
    assert bool(warnings_about(policy)) is not acted
    if preset == "observe" and do == "clip":
        assert warnings_about(policy) == ("Rule 'late' does not clip: a policy with refuse = false changes nothing.",)


def test_globs_causes_and_calls_without_effect_give_a_warning():
    """Each glob that matches nothing, with a similar part of a path; a cause without a diagnosis; an unknown function."""
    call = {"call": {"function": "page"}}
    policy = Policy.load(
        rules=[{"name": "a", "layer": ["hiden*", "hidden"], "do": "warn"}, {"name": "b", "cause": "spike", "do": call}],
        limits=[{"site": "weights", "max_abs": 1.0}, {"site": "slots", "max_abs": 1.0, "layer": "xyz"}],
        escalation=["skip", call], divergence={"action": call}, loss_scale={"action": call},
    )
    assert warnings_about(policy, "net", ["net/hidden/kernel"]) == (
        "Rule 'a' never acts: nothing in the model 'net' matches the glob 'hiden*' (did you mean 'hidden'?).",
        "limits[1] never acts: nothing in the model 'net' matches the glob 'xyz'.",
    )
    of_data = Policy.load(rules=[{"name": "age", "site": "inputs", "layer": "age", "do": "stop"}])
    assert decide(of_data, PolicyState(), bad(3, "inputs", path="x/age"))[0].rule
    assert warnings_about(of_data, "net", ["net/hidden/kernel"]) == ()
    for functions, registered in (((), "none"), (("f", "e"), "e, f"), (("page",), "")):
        said = f"does nothing: no function is registered as 'page' (registered: {registered})."
        expected = [f"call in {place} {said}" for place in ("escalation", "rule 'b'", "divergence.action", "loss_scale.action")]
        expected = expected if registered else []
        assert warnings_about(policy, functions=functions) == (*expected,)
        expected.append("Rule 'b' never acts: it needs a cause, and diagnose=False finds none.")
        assert warnings_about(policy, functions=functions, diagnose=False) == (*expected,)


# The presets


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


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_three_bad_steps_in_a_row(cause):
    """The third rolls back. The rate is lowered only if a lower rate can cure the cause."""
    done = names("recover", [bad(step, cause=cause) for step in (50, 51, 52)])
    third = ["rollback", "lower_lr"] if cause is None or cause in RATE_CURES else ["rollback"]
    assert done == [["skip"], ["skip"], ["skip"] if cause in BAD_DATA else third]


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_endless_bad_steps_end_training(cause):
    """A run that never recovers stops at the tenth bad step in a row, at the twelfth for bad data."""
    done = names("recover", [bad(step, cause=cause) for step in range(50, 100)])
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
    row = [bad(step, cause="unknown") for step in range(50, 59)]
    found = decisions("recover", row)
    acting = [found[2], found[5], found[8]]
    assert [parameters(one, "rollback")["further_back"] for one in acting] == [False, True, True]
    assert [parameters(one, "lower_lr")["recover_after"] for one in acting] == [500, 0, 0]
    assert not any(parameters(one, "rollback")["replay_steps"] for one in acting)
    *_, third = decisions({"rollback": {"further_back": False}}, row[:6])
    assert not parameters(third, "rollback")["further_back"]


def test_a_divergence_restores_a_state_before_its_onset_and_replays():
    """Refused for a divergence: a snapshot from before its onset, at a lower rate for good."""
    row = [bad(step, cause="divergence") for step in (50, 51, 52)]
    *_, third = decisions("recover", row)
    back = parameters(third, "rollback")
    assert back["further_back"] and back["replay_steps"]
    assert parameters(third, "lower_lr")["recover_after"] == 0


@pytest.mark.parametrize("refused", [False, True])
def test_a_bad_state_is_rolled_back_at_once(refused):
    """NaN from a committed step or other code: a rollback, and good steps are replayed."""
    site = "state" if refused else "weights"
    steps = range(40, 400, 20)
    found = decisions("recover", [bad(n, site, refused=refused) for n in steps])
    changes = [[a["action"] for a in one.actions] for one in found]
    assert changes == [["rollback"], ["rollback", "lower_lr"], ["rollback", "lower_lr"], ["stop"]]
    back = [parameters(one, "rollback") for one in found[:3]]
    assert all(one["replay_steps"] for one in back)
    assert [one["further_back"] for one in back] == [False, True, True]


def test_a_finite_divergence_is_acted_on_at_once():
    """A proven divergence leads to a rollback before its onset, and a lower rate for good."""
    (decision,) = decisions("recover", [DIVERGED])
    assert parameters(decision, "rollback")["further_back"]
    assert parameters(decision, "lower_lr")["recover_after"] == 0


QUIET = [("loss", "spike"), ("loss", "stuck")]
QUIET += [(site, "nonfinite") for site in ("metrics", "validation", "predictions")]


@pytest.mark.parametrize(("site", "kind"), QUIET)
def test_results_and_finite_anomalies_are_at_most_reported(site, kind):
    """They have no action, however often they come."""
    found = [bad(n, site, kind=kind, refused=False) for n in range(500)]
    assert names("recover", found) == [[]] * 500


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
    *_, last = decisions("tune", [bad(n) for n in (9, 10, 11)])
    expected = {"action": "stop", "restore": False, "log_worst_metrics": True}
    assert parameters(last, "stop") == expected
    assert names("tune", [bad(9, "loss", kind="divergence", refused=False)]) == [["stop"]]


def test_long_run_rolls_back_past_the_data():
    """`long-run` keeps snapshots on disk, and skips 200 batches on a rollback."""
    found = decisions("long-run", [bad(n) for n in (9, 10, 11)])
    assert Policy.load("long-run").snapshot.storage == "disk"
    assert parameters(found[2], "rollback")["skip_batches"] == 200
