"""Which incidents a rule looks at, and which limits a layer has."""

from __future__ import annotations

import math

import pytest

from keras_nanguard._core.errors import PolicyError
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._policy.ledger import Ledger
from keras_nanguard._policy.policy import Policy, decide
from keras_nanguard._policy.rules import Magnitude
from keras_nanguard._policy.settings import Checks, matches_path

RULE = {"name": "one", "do": "warn"}


def rule(**fields):
    return Policy.from_any("recover", rules=[RULE | fields]).rules[0]


def incident(*findings, refused=True, cause=None, step=5):
    diagnosis = None if cause is None else Diagnosis(cause=cause)
    return Incident(step=step, epoch=0, batch=0, findings=findings, refused=refused, diagnosis=diagnosis)


LOSS, WEIGHTS = Finding("loss"), Finding("weights", path="model/post_bn_1/gamma", nan=3, size=10)


def unscaled(diverged):
    """Return an incident whose cause is unscaled data."""
    return incident(LOSS).with_(diagnosis=Diagnosis("input_scale", diverged=diverged))


@pytest.mark.parametrize(
    ("fields", "given", "matches"),
    [
        ({}, incident(LOSS), True),
        ({}, incident(), False),
        ({"enabled": False}, incident(LOSS), False),
        ({"on": "loss"}, incident(WEIGHTS, LOSS), True),
        ({"on": ["gradients", "slots"]}, incident(WEIGHTS, LOSS), False),
        ({"kind": "spike"}, incident(LOSS), False),
        ({"kind": ["spike", "nonfinite"]}, incident(LOSS), True),
        ({"when": "refused"}, incident(LOSS, refused=False), False),
        ({"when": "committed"}, incident(LOSS, refused=False), True),
        ({"when": "before_training"}, incident(Finding("state"), refused=False, step=0), True),
        ({"when": "before_training"}, incident(Finding("state"), refused=False, step=1), False),
        ({"when": "before_training"}, incident(Finding("weights"), refused=False, step=0), False),
        ({"when": "from_start"}, incident(Finding("loss")).with_(committed=0), True),
        ({"when": "from_start"}, incident(Finding("loss")).with_(committed=1), False),
        ({"when": "from_start"}, incident(Finding("loss")), False),
        ({"when": "from_start"}, incident(Finding("weights"), refused=False).with_(committed=0), False),
        ({"layer": "post_bn*"}, incident(WEIGHTS), True),
        ({"layer": ["dense*", "model/post_bn_1"]}, incident(WEIGHTS), True),
        ({"layer": "dense*"}, incident(WEIGHTS), False),
        ({"cause": "divergence"}, incident(LOSS), False),
        ({"cause": "divergence"}, incident(LOSS, cause="divergence"), True),
        ({"cause": "divergence"}, unscaled(diverged=True), True),
        ({"cause": "divergence"}, unscaled(diverged=False), False),
        ({"cause": "input_scale"}, unscaled(diverged=True), True),
        ({"unless": {"cause": "divergence"}}, unscaled(diverged=True), False),
        ({"unless": {"cause": "divergence"}}, unscaled(diverged=False), True),
        ({"unless": {"on": "weights"}}, incident(LOSS, WEIGHTS), False),
        ({"unless": {"on": "weights"}}, incident(LOSS), True),
        ({"unless": {"cause": ["spike", "transient"]}}, incident(LOSS, cause="transient"), False),
        ({"unless": {"cause": "transient"}}, incident(LOSS), True),
        ({"magnitude": {"min_abs": 10.0}}, incident(Finding("loss", value=-11.0)), True),
        ({"magnitude": {"min_abs": 10.0}}, incident(Finding("loss", value=9.0)), False),
        ({"magnitude": {"min_abs": 10.0}}, incident(Finding("loss", value=math.nan)), True),
        ({"magnitude": {"min_abs": 10.0}}, incident(Finding("loss", value=-math.inf)), True),
        ({"magnitude": {"min_abs": 10.0}}, incident(LOSS), False),
        ({"magnitude": {"min_share": 0.3}}, incident(WEIGHTS), True),
        ({"magnitude": {"min_share": 0.4}}, incident(WEIGHTS), False),
        ({"magnitude": {"min_share": 0.4}}, incident(Finding("weights", nan=2, inf=2, size=10)), True),
        ({"magnitude": {"min_share": 0.0}}, incident(Finding("weights", size=0)), False),
        ({"on": "loss", "layer": "post*"}, incident(LOSS, WEIGHTS), False),
    ],
)
def test_a_rule_matches_when_one_finding_meets_everything(fields, given, matches):
    """Site, kind, layer and magnitude are asked of one and the same finding; moment and cause of the incident."""
    assert rule(**fields).matches(given) is matches


def test_every_field_of_a_rule_survives_a_file():
    """A rule with every field at a non-default value comes back the same."""
    full = {
        "name": "full",
        "on": ["loss", "gradients"],
        "kind": ["nonfinite", "spike"],
        "layer": ['a"b*', "c/d"],
        "cause": "divergence",
        "magnitude": {"min_abs": 2.0, "min_share": 0.5},
        "when": "committed",
        "unless": {"on": "inputs", "cause": ["spike", "unknown"]},
        "after": {"any": [{"not": {"total": 3}}, {"within": {"times": 2, "steps": 9}}]},
        "cooldown": 4,
        "reset_after": 50,
        "enabled": False,
        "do": ["warn", {"clip": {"factor": 0.25}}],
        "limit": {"times": 2, "per_steps": 70},
        "otherwise": {"do": ["rollback"], "limit": {"times": 3}, "otherwise": ["warn", "stop"]},
    }
    policy = Policy.from_any("recover", rules=[full])
    again = Policy.from_any(policy.to_dict())
    assert again.rules[0] == policy.rules[0] == Policy.from_any("recover", rules=[again.to_dict()["rules"][0]]).rules[0]
    assert set(policy.to_dict()["rules"][0]) == set(full)


@pytest.mark.parametrize(
    ("path", "glob", "meets"),
    [
        ("post_bn", "post_bn", True),
        ("post_bn_1", "post_bn*", True),
        ("model/post_bn_1", "post_bn*", True),
        ("model/post_bn_1/moving_mean", "post_bn_1", True),
        ("model/post_bn_1/moving_mean", "model/post_bn_1", True),
        ("model/post_bn_1/moving_mean", "*/moving_mean", True),
        ("model/post_bn_1/moving_mean", "Post*", False),
        ("model/my_post_bn", "post_bn*", False),
        ("", "*", True),
        ("", "a*", False),
    ],
)
def test_a_glob_meets_whole_paths_and_parts_between_slashes(path, glob, meets):
    """A glob is written without the model's name, and holds for a layer as for its variables."""
    assert matches_path(path, glob) is meets


def test_limits_per_layer_lie_over_the_checks():
    """A layer's section changes what it names; the last section that meets a path wins; the rest stays."""
    policy = Policy.from_any(
        "recover",
        checks={"statistics": {"max_abs": 1e6}, "weights": {"max_abs": 50.0}},
        layers={"post_bn*": {"statistics": {"max_abs": 65504.0}}, "post_bn_9": {"statistics": False, "weights": True}},
    )
    assert policy.limits_for("dense") is policy.checks
    assert policy.limits_for("model/post_bn_1").statistics.max_abs == 65504.0
    assert policy.limits_for("model/post_bn_1").statistics.stuck_after == 500
    assert policy.limits_for("model/post_bn_1").weights.max_abs == 50.0
    last = policy.limits_for("model/post_bn_9/gamma")
    assert (last.statistics.enabled, last.statistics.max_abs) == (False, 65504.0)
    assert Policy.from_any(policy.to_dict()) == policy


def test_checks_survive_a_file_with_every_field_changed():
    """Every site and every field of it, at a non-default value, comes back the same."""
    site = {"enabled": False, "max_abs": 3.0}
    document = {name: site for name in Checks.__dataclass_fields__ if name not in ("loss_scale", "divergence")}
    document["statistics"] = {**site, "stuck_after": 7}
    document["loss_scale"] = {"enabled": False, "min_value": 2.0, "max_value": 4.0, "patience": 1}
    document["divergence"] = {"enabled": False}
    snapshot = {"every": 7, "keep": 3, "storage": "disk", "good_after": 4}
    policy = Policy.from_any("recover", checks=document, snapshot=snapshot, title="t", refuse=False)
    assert policy.to_dict()["checks"] == {**document, "divergence": False}
    assert policy.to_dict()["snapshot"] == snapshot
    assert Policy.from_any(policy.to_dict()) == policy


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"snapshot": {"every": 5, "good_after": 6}}, "snapshot.good_after: expected a whole number <= every = 5"),
        ({"snapshot": {"keep": 1, "good_after": 10}}, "snapshot.keep: expected at least 2"),
        ({"snapshot": {"every": 0}}, "snapshot.every: expected at least 1, as these rules roll back: persistent, poisoned"),
        (
            {"checks": {"loss_scale": {"min_value": 9.0, "max_value": 8.0}}},
            "checks.loss_scale.min_value: expected a number <= max_value = 8, received 9.0",
        ),
        ({"layers": {"a*": {"inputs": True}}}, 'layers."a*".inputs: expected one of outputs, gradients'),
    ],
)
def test_settings_that_contradict_one_another_are_refused(given, reported):
    """Fields are checked together where everything that lies over them is known."""
    with pytest.raises(PolicyError) as caught:
        Policy.from_any(given)
    assert any(reported in line for line in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("magnitude", "found", "matches"),
    [
        ({"min_abs": 5.0}, {"value": 5.0}, True),
        ({"min_abs": 5.0}, {"value": -5.0}, True),
        ({"min_abs": 5.0}, {"value": math.nextafter(5.0, 0.0)}, False),
        ({"min_abs": 5.0}, {"value": math.nan}, True),
        ({"min_abs": 5.0}, {}, False),
        ({"min_abs": 5.0, "min_share": 0.1}, {"value": 1.0, "nan": 9, "size": 10}, False),
        ({"min_share": 0.2}, {"nan": 1, "inf": 1, "size": 10}, True),
        ({"min_share": 0.2}, {"nan": 1, "size": 10}, False),
        ({"min_share": 0.1}, {"inf": 1, "size": 10}, True),
        ({"min_share": 0.1}, {"nan": 1, "size": 10}, True),
        ({"min_share": 0.1}, {"size": 10}, False),
        ({"min_share": 0.1}, {"nan": 1}, False),
        ({"min_share": 0.0}, {"nan": 0, "inf": 0, "size": 0}, False),
        ({"min_share": 0.0}, {"nan": 0, "inf": 0, "size": 1}, True),
        ({}, {}, True),
    ],
)
def test_how_severe_a_finding_has_to_be(magnitude, found, matches):
    """On the bound it is severe enough; what was not counted is no share, and what has no value no magnitude."""
    assert Magnitude(**magnitude).met(Finding("loss", **found)) is matches


def test_a_rule_fires_once_in_a_step():
    """A second incident of the same step is the same bad step."""
    policy, ledger, fired = Policy.from_any("recover", rules=[{"name": "mine", "do": {"warn": {"message": "mine"}}}]), Ledger(), []
    for step in (3, 3, 4):
        decision, ledger = decide(policy, ledger, incident(LOSS, step=step))
        fired.append("mine" in decision.rule)
    assert fired == [True, False, True]
