"""What has no effect in a policy is reported: rules that never fire, rungs never reached, names that the model lacks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import keras_nanguard
from keras_nanguard._core.errors import PolicyError
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._policy.no_effect import GuardOptions, ModelNames, own_rules, warnings_about
from keras_nanguard._policy.occurrence import OCCURRENCES, matched_by, why_it_never_fires
from keras_nanguard._policy.policy import Ledger, Policy, decide
from keras_nanguard._policy.presets import PRESETS

ENDLESS = "rule 'endless' ends training at 12 in a row"
PACKAGE = Path(keras_nanguard.__file__).parent
NET = ModelNames(
    "net",
    {
        "weights": ("net/dense/kernel", "net/dense/bias"),
        "gradients": ("net/dense/kernel", "net/dense/bias"),
        "statistics": (),
        "loss_scale": (),
        "slots": ("adam/net_dense_kernel_momentum",),
    },
)


def reported(base="recover", model=None, guard=None, **fields):
    """Return the warnings about a policy with one more rule."""
    return warnings_about(Policy.from_any(base, rules=[{"name": "mine", "do": "warn", **fields}]), model, guard)


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_has_anything_without_effect(name):
    """Every rule of every preset can fire, and no `do` was written over an old `otherwise`, by name and as a file."""
    for policy in (Policy.from_any(name), Policy.from_any(PACKAGE / "policies" / f"{name}.toml")):
        assert warnings_about(policy) == warnings_about(policy, NET, GuardOptions(False, (), False)) == ()
        assert {rule.name: why_it_never_fires(rule, policy.checks, policy.refuse) for rule in policy.rules} == {
            rule.name: "" for rule in policy.rules
        }
        assert own_rules(policy) == ()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"when": "refused", "after": {"consecutive": 20}}, ENDLESS),
        ({"when": "refused", "after": {"consecutive": 13}}, ENDLESS),
        ({"on": ["loss", "gradients"], "kind": "nonfinite", "after": {"consecutive": 20}}, ENDLESS),
        ({"when": "refused", "after": {"any": [{"consecutive": 20}, {"consecutive": 13}]}}, ENDLESS),
        ({"when": "refused", "after": {"all": [{"consecutive": 20}, {"total": 2}]}}, ENDLESS),
        ({"when": "refused", "after": {"within": {"times": 150, "steps": 200}}}, "rule 'mostly-bad' ends training when 50%"),
        ({"on": "validation", "when": "refused"}, "validation never occurs when = 'refused', only when committed"),
        ({"on": "validation", "kind": "spike"}, "validation never reports spike, only nonfinite"),
        ({"on": "slots", "kind": "collapse"}, "slots never reports collapse"),
        ({"kind": "spike", "when": "refused"}, "spike never occurs when = 'refused'"),
        ({"on": "loss", "when": "before_training"}, "loss never occurs when = 'before_training'"),
        ({"on": "metrics"}, "nothing is ever reported at metrics"),
        ({"on": "loss", "layer": "dense*"}, "what is found at loss names no layer"),
        ({"on": "loss", "unless": {"on": "loss"}}, "unless.on excludes all of its sites"),
        ({"cause": "spike", "unless": {"cause": ["spike", "transient"]}}, "unless.cause excludes all of its causes"),
        ({"cause": "spike", "when": "refused"}, "no refused step has the cause spike"),
        ({"kind": "spike", "magnitude": {"min_share": 0.5}}, "has no such magnitude"),
        ({"kind": "stuck", "magnitude": {"min_abs": 0.5}}, "has no such magnitude"),
    ],
)
def test_a_rule_that_can_never_fire(fields, reason):
    """The reason is said: another rule ends training before, or what it looks at never happens."""
    (line,) = reported(**fields)
    assert line.startswith("Rule 'mine' can never fire: ") and reason in line


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"when": "refused", "after": {"consecutive": 12}},
        {"when": "refused", "after": {"total": 200}},
        {"when": "refused", "after": {"any": [{"consecutive": 20}, {"total": 13}]}},
        {"when": "refused", "after": {"within": {"times": 100, "steps": 200}}},
        {"when": "refused", "after": {"within": {"times": 150, "steps": 1000}}},
        {"when": "committed", "after": {"consecutive": 20}},
        {"on": "validation"},
        {"on": ["loss", "metrics"]},
        {"on": "loss", "layer": "*"},
        {"kind": "spike", "cause": "spike"},
        {"after": {"spike": {}}},
        {"after": {"not": {"consecutive": 20}}},
        {"enabled": False, "on": "metrics"},
    ],
)
def test_a_rule_that_can_fire_is_let_be(fields):
    """No warning without a proof."""
    assert reported(**fields) == ()


def test_a_rule_that_never_fires_for_refused_steps():
    """A rule for refused and committed steps alike of which only the refused ones come too late."""
    (line,) = reported(after={"consecutive": 20})
    assert line == f"Rule 'mine': it never fires for a refused step: it fires only at 20 in a row, and {ENDLESS}."


def test_rules_that_end_training_together():
    """A streak that is longer than any that training outlasts is never seen, whichever rules end it."""
    sites = (["inputs", "targets", "outputs", "loss"], ["state", "gradients", "weights", "statistics", "slots", "loss_scale"])
    rules = [{"name": f"end-{n}", "on": sites[n], "after": {"consecutive": 3 + n}, "do": "stop"} for n in range(2)]
    late = {"name": "late", "when": "refused", "do": "warn"}
    for streak, never in ((6, False), (7, True)):
        policy = Policy.from_any({"preset": "none", "rules": [*rules, {**late, "after": {"consecutive": streak}}]})
        assert policy.longest_trouble == 6
        assert bool(warnings_about(policy)) is never


def test_what_is_changed_while_training_ends():
    """A change that an ending always puts aside is never done, though its rule fires."""
    (line,) = reported("stop", when="refused", do="rollback", limit={"times": 1})
    assert line == "Rule 'mine': rollback is never done, as rule 'refused' ends training whenever this one fires."
    assert reported("stop", when="refused", do="warn") == ()
    assert reported("stop", when="refused", do="raise_error") == ()


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"otherwise": "stop"}, ["otherwise is never reached without a limit"]),
        ({"do": "stop", "limit": {"times": 2}}, ["limit has no effect on an action that ends training"]),
        ({"do": "stop", "otherwise": "warn"}, ["otherwise is never reached, as training has ended before"]),
        (
            {"limit": {"times": 2}, "otherwise": {"do": "skip", "otherwise": "stop"}},
            ["otherwise.otherwise is never reached without a limit"],
        ),
        (
            {"after": {"consecutive": 4}, "limit": {"times": 3, "per_steps": 12}, "otherwise": "skip"},
            ["otherwise is never reached, as it fires at most every 4 steps, and limit.per_steps is 12"],
        ),
        ({"do": {"lower_lr": {"ramp": 50}}, "limit": {"times": 1}}, ["ramp has no effect without recover_after"]),
        (
            {"do": {"rollback": {"depth": 5}}, "limit": {"times": 1}},
            ["rollback.depth = 5 exceeds the number of snapshots that are kept, snapshot.keep = 2"],
        ),
    ],
)
def test_what_of_a_rule_is_never_reached(fields, lines):
    """Rungs behind an ending or without a limit before them, and parameters that nothing reads."""
    assert reported(**fields) == tuple(f"Rule 'mine': {line}." for line in lines)


def test_do_written_over_a_preset_whose_otherwise_stays():
    """A policy that changes only the first rung of a ladder gets a warning with the rest of it."""
    policy = Policy.from_any("recover", rules=[{"name": "persistent", "do": "warn"}])
    (line,) = warnings_about(policy)
    assert line.startswith("Rule 'persistent': `do` was changed, `otherwise` was inherited: the guard rolls back")
    assert line.endswith("then stops training with the last good state restored. Write `otherwise`, too.")
    assert warnings_about(Policy.from_any(policy, snapshot={"every": 7})) == (line,)
    assert warnings_about(Policy.from_any(policy, rules=[{"name": "persistent", "otherwise": "stop"}])) == ()
    assert policy == Policy.from_any(policy.to_dict())
    for fields in ({"do": "warn", "otherwise": "stop"}, {"limit": {"times": 9}}, {"otherwise": "stop"}):
        assert warnings_about(Policy.from_any("recover", rules=[{"name": "persistent", **fields}])) == ()
    assert warnings_about(Policy.from_any("recover", rules=[{"name": "endless", "do": "raise_error"}])) == ()


def test_settings_that_contradict_what_a_rule_does():
    """A loss scale that an action allows and a check calls collapsed; rules for refused steps where none is refused."""
    rule = {"name": "loss-scale", "limit": {"times": 2}}
    (line,) = warnings_about(Policy.from_any("recover", checks={"loss_scale": {"min_value": 16.0}}, rules=[rule]))
    assert "fix_loss_scale.floor = 1 allows what checks.loss_scale.min_value = 16 treats as a collapse" in line
    mine = {"name": "mine", "when": "refused", "layer": "dense", "do": "rollback", "limit": {"times": 1}}
    (line,) = warnings_about(Policy.from_any("recover", refuse=False, rules=[mine]), NET)
    assert "these rules never fire: mine, tell" in line
    (line,) = warnings_about(Policy.from_any("recover", refuse=False))
    assert "these rules never fire: tell, persistent, endless, mostly-bad, damaged" in line


@pytest.mark.parametrize(
    ("checks", "fields", "line"),
    [
        ({"statistics": {"stuck_after": 0}}, {"kind": "stuck", "on": "statistics"}, "checks.statistics is disabled"),
        ({"loss_scale": False}, {"on": "loss_scale", "when": "committed"}, "checks.loss_scale is disabled"),
    ],
)
def test_a_rule_for_what_is_not_looked_at(checks, fields, line):
    """A rule for trouble that the checks do not look for can never fire."""
    (found,) = warnings_about(Policy.from_any("recover", checks=checks, rules=[{"name": "mine", "do": "warn", **fields}]))
    assert found.endswith(f"{line}.")


def test_settings_that_nothing_reads():
    """A check that is disabled and done all the same, and a limit that nothing is compared with, are reported."""
    checks = {"slots": False, "loss": {"max_abs": 3.0}, "weights": {"max_abs": 3.0}}
    layers = {"dense*": {"weights": False, "gradients": {"max_abs": 3.0}}}
    assert warnings_about(Policy.from_any("recover", checks=checks, layers=layers)) == (
        "checks.loss.max_abs has no effect: only weights, statistics, slots are compared with a limit.",
        "checks.slots.enabled has no effect: slots is always checked.",
        'layers."dense*".weights.enabled has no effect: weights is always checked.',
        'layers."dense*".gradients.max_abs has no effect: only weights, statistics, slots are compared with a limit.',
    )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"on": "statistics"}, "can never fire: the model 'net' has no moving statistics (no BatchNormalization or Normalization)"),
        ({"on": "loss_scale"}, "can never fire: the model 'net' has no loss scale (its optimizer is no LossScaleOptimizer)"),
        (
            {"layer": "dens", "on": "gradients"},
            "can never fire: nothing in the model 'net' matches the glob 'dens' (did you mean 'dense'?)",
        ),
        (
            {"layer": "dense*", "on": "slots"},
            "can never fire: nothing in the model 'net' matches the glob 'dense*' (there is 'adam/net_dense_kernel_momentum')",
        ),
        (
            {"layer": ["dense", "embed*"], "on": "weights"},
            "nothing in the model 'net' matches the glob 'embed*' (there is 'net/dense/kernel')",
        ),
        ({"layer": "dense*"}, ""),
        ({"layer": "net/dense", "on": ["weights", "statistics"]}, ""),
        ({"layer": "anything", "on": "outputs"}, ""),
        ({}, ""),
    ],
)
def test_what_the_model_does_not_have(fields, line):
    """A site that the model lacks and a glob that meets nothing are said; what is not known of a model is let be."""
    found = reported(model=NET, **fields)
    assert [one.removeprefix("Rule 'mine'").strip(" :.") for one in found] == ([line] if line else [])


def test_a_section_for_layers_that_the_model_does_not_have():
    """Limits for layers by a glob that meets nothing are said, too."""
    layers = {name: {"weights": {"max_abs": 3.0}} for name in ("dense*", "dens", "net/dense/bias")}
    layers["bn*"] = {"statistics": {"max_abs": 3.0}}
    found = warnings_about(Policy.from_any("recover", layers=layers), NET)
    assert [line.split(":")[0] for line in found] == ["layers.dens", 'layers."bn*"']


def test_what_the_guard_does_not_have():
    """Without a directory, a function or a diagnosis some actions and rules have no effect."""
    functions = {"notify": print}
    fields = {"do": ["quarantine", {"call": {"function": "notifi"}}], "when": "refused"}
    assert reported(guard=GuardOptions(False, functions, True), **fields) == (
        "Rule 'mine': quarantine saves nothing, as NanGuard has no directory.",
        "Rule 'mine': call names 'notifi', which is not among the functions of NanGuard (did you mean 'notify'?).",
    )
    assert reported(guard=GuardOptions(True, {"notifi": print}, True), **fields) == ()
    (line,) = reported(guard=GuardOptions(True, (), False), cause="divergence")
    assert "with diagnose=False there is none" in line


# The table of what can happen, and the proofs


def test_the_table_holds_every_kind_of_finding_that_is_made():
    """Each `Finding(site, kind)` of the package is in the table, apart from those that are reported and never decided about."""
    made = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("raised.py", "incident.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                    made.add(tuple(getattr(arg, "value", "") if isinstance(arg, ast.Constant) else "" for arg in node.args[:2]))
    assert len(made) > 8
    unknown = {pair for pair in made if not any(_fits(one, *pair) for one in OCCURRENCES)}
    assert unknown == set(), "add them to OCCURRENCES in _policy/occurrence.py"


def _fits(one, site, kind="nonfinite"):
    return (not site or one.site == site) and (not kind or one.kind == kind)


steps = st.integers(1, 6)
conditions = st.one_of(
    st.builds(lambda n: {"consecutive": n}, steps),
    st.builds(lambda n: {"total": n}, steps),
    st.builds(lambda n, more: {"within": {"times": n, "steps": n + more}}, steps, st.integers(0, 4)),
    st.builds(lambda n: {"fraction": {"share": 0.5, "steps": n}}, st.integers(1, 12)),
    st.builds(lambda a, b: {"any": [{"consecutive": a}, {"total": b}]}, steps, steps),
    st.builds(lambda a, b: {"all": [{"consecutive": a}, {"total": b}]}, steps, steps),
)


@st.composite
def policies(draw):
    """Return policies in which rules often come too late, with the warnings about them."""
    rules = []
    for number in range(draw(st.integers(2, 4))):
        rule = {"name": f"rule-{number}", "do": draw(st.sampled_from(["stop", "warn", "skip", "rollback"]))}
        rule |= {"limit": {"times": 2}} if rule["do"] == "rollback" else {}
        rule |= {"after": draw(conditions)} if draw(st.booleans()) else {}
        rule |= {"when": draw(st.sampled_from(["any", "refused", "committed"]))}
        if draw(st.booleans()):
            rule["on"] = draw(st.lists(st.sampled_from(["loss", "gradients", "weights", "state", "validation"]), min_size=1, unique=True))
        if draw(st.booleans()):
            rule["kind"] = draw(st.lists(st.sampled_from(["nonfinite", "explosion", "spike"]), min_size=1, unique=True))
        rules.append(rule)
    try:
        return Policy.from_any({"preset": "none", "rules": rules})
    except PolicyError:
        assume(False)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(policies(), st.data())
def test_what_is_said_to_never_happen_never_happens(policy, data):
    """For any incidents in any order, a rule that is reported to never fire does not fire before training ends."""
    lines = warnings_about(policy)
    never = [re.match(r"Rule '(.+?)' can never", line) for line in lines]
    dead = {match.group(1) for match in never if match}
    idle = {match.group(1) for line in lines if (match := re.match(r"Rule '(.+?)': rollback is never done", line))}
    ledger, step = Ledger(), 0
    for _ in range(data.draw(st.integers(1, 40))):
        one = data.draw(st.sampled_from(OCCURRENCES))
        step += data.draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
        incident = Incident(step, 0, step, (Finding(one.site, one.kind),), refused=one.moment == "refused")
        decision, ledger = decide(policy, ledger, incident)
        fired = {name for name, tally in ledger.rules.items() if tally.fired is not None}
        assert not fired & dead
        changing = {rule.name for rule in policy.rules if rule.ladder[0].changes}
        if any(action["action"] == "rollback" for action in decision.actions):
            assert (fired & changing) - idle
        if decision.terminal:
            return


def test_what_a_rule_sees_follows_its_fields():
    """`matched_by` is what is left of the table; a policy that refuses nothing commits everything."""
    rule = Policy.from_any("recover").rules[0]
    checks = Policy.from_any("recover").checks
    assert {one.moment for one in matched_by(rule, checks)} == {"refused"}
    assert matched_by(rule, checks, refuse=False) == ()
    everything = Policy.from_any("observe").rules[0]
    assert {one.moment for one in matched_by(everything, checks, refuse=False)} == {"committed", "before_training"}
