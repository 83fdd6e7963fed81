"""Values that a policy inherits from defaults and presets are adjusted to those that it sets."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
from hypothesis import given, settings, strategies as st

from keras_nanguard import actions
from keras_nanguard._core.errors import PolicyError
from keras_nanguard._policy.conditions import CONDITIONS
from keras_nanguard._policy.explain import explain
from keras_nanguard._policy.fields import reconciled
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.settings import LossScaleCheck, Snapshot

BASES = ["recover", "finetune", "long-run", "none", Policy.from_any("long-run"), {"preset": "finetune"}]


def policy(base, **sections):
    if base == "none":
        ending = {"name": "end", "do": "stop"}
        return Policy.from_any({"preset": "none", "rules": [ending], **sections})
    return Policy.from_any(base, **sections)


@pytest.mark.parametrize("base", BASES, ids=lambda base: base if isinstance(base, str) else type(base).__name__)
@pytest.mark.parametrize(
    ("set_", "becomes"),
    [
        ({"every": 5}, {"every": 5, "good_after": 5}),
        ({"every": 1}, {"every": 1, "good_after": 1}),
        ({"good_after": 500}, {"every": 500, "good_after": 500}),
        ({"keep": 1}, {"keep": 1, "good_after": 0}),
        ({"keep": 1, "every": 3}, {"keep": 1, "every": 3, "good_after": 0}),
    ],
)
def test_the_other_settings_of_snapshots_follow_the_one_that_is_set(base, set_, becomes):
    """A single setting of snapshots never contradicts inherited ones, and the adjusted ones are printed."""
    chosen = policy(base, snapshot=set_)
    assert {name: getattr(chosen.snapshot, name) for name in becomes} == becomes
    assert Policy.from_any(chosen.to_dict()) == chosen
    differs = {name: value for name, value in becomes.items() if value != getattr(Snapshot(), name)}
    assert all(f"{name} = {value}" in str(chosen) for name, value in differs.items())
    proved = f"after {becomes['good_after']} good step" if becomes["good_after"] else "at once"
    assert f"counts one as verified {proved}" in explain(chosen)


def test_what_does_not_contradict_stays():
    """Only contradicting values are adjusted: the rest of a preset is unchanged."""
    assert policy("long-run", snapshot={"every": 70}).snapshot == Snapshot(every=70, keep=4, storage="disk", good_after=50)
    assert policy("none", snapshot={"every": 0}).snapshot.good_after == 10
    kept = policy(policy("recover", snapshot={"keep": 1}), snapshot={"good_after": 4}).snapshot
    assert (kept.keep, kept.good_after) == (2, 4)


@pytest.mark.parametrize(
    "document",
    [
        {"snapshot": {"every": 5, "good_after": 10}},
        {"snapshot": {"keep": 1, "good_after": 10}},
        {"checks": {"loss_scale": {"min_value": 2.0, "max_value": 1.0}}},
    ],
)
def test_two_settings_that_contradict_are_refused_though_one_is_a_default(document):
    """What a file or dict sets itself is taken at its word, also where it says what the default says."""
    with pytest.raises(PolicyError, match="expected"):
        Policy.from_any(document)
    ((section, settings_),) = document.items()
    with pytest.raises(PolicyError, match="expected"):
        Policy.from_any(**document)
    if section == "snapshot":
        first, second = settings_
        with pytest.raises(PolicyError, match="expected"):
            Policy.from_any({"snapshot": {first: settings_[first]}}, snapshot={second: settings_[second]})


@pytest.mark.parametrize(
    ("preset", "set_", "becomes"),
    [
        ("recover", {"min_value": 1e12}, (1e12, 1e12)),
        ("recover", {"max_value": 0.5}, (0.5, 0.5)),
        ("strict-fp16", {"max_value": 8.0}, (8.0, 8.0)),
        ("strict-fp16", {"min_value": 1.0}, (1.0, 2.0**24)),
    ],
)
def test_the_other_end_of_the_range_of_loss_scales_follows(preset, set_, becomes):
    """One end of the range that is set moves the other where it has to."""
    scale = policy(preset, checks={"loss_scale": set_}).checks.loss_scale
    assert (scale.min_value, scale.max_value) == becomes
    assert scale.patience == Policy.from_any(preset).checks.loss_scale.patience


@pytest.mark.parametrize(
    ("table", "becomes"),
    [
        ({"clip": {"global_clipnorm": 1e-4}}, actions.Clip(global_clipnorm=1e-4, min_clipnorm=1e-4)),
        ({"clip": {"min_clipnorm": 3.0}}, actions.Clip(global_clipnorm=3.0, min_clipnorm=3.0)),
        ({"fix_loss_scale": {"floor": 2.0**25}}, actions.FixLossScale(floor=2.0**25, ceiling=2.0**25)),
        ({"fix_loss_scale": {"reset_to": 0.5}}, actions.FixLossScale(floor=0.5, reset_to=0.5)),
        ({"fix_loss_scale": {"reset_to": 2.0**30}}, actions.FixLossScale(ceiling=2.0**30, reset_to=2.0**30)),
    ],
)
def test_the_other_parameters_of_an_action_follow(table, becomes):
    """Omitted parameters are adjusted, in a policy and in code."""
    assert actions.from_file(table) == becomes
    chosen = policy("recover", rules=[{"name": "mine", "do": table, "limit": {"times": 1}}])
    assert chosen.rules[0].ladder[0].do == (becomes,)
    assert Policy.from_any(chosen.to_dict()) == chosen


def test_the_window_of_a_condition_follows():
    """More jumps than the usual window has steps widen it; a window that is given stays, and is refused."""
    chosen = policy("recover", rules=[{"name": "mine", "after": {"spike": {"times": 200}}, "do": "warn"}])
    assert chosen.rules[0].after == CONDITIONS["spike"](times=200, steps=200)
    with pytest.raises(PolicyError, match=r"rules\[0\].after.spike.times: expected a whole number <= steps = 9"):
        policy("recover", rules=[{"name": "mine", "after": {"spike": {"times": 10, "steps": 9}}, "do": "warn"}])


@pytest.mark.parametrize("set_", [{"cooldown": 1000}, {"after": {"consecutive": 1000}}])
def test_a_limit_of_the_preset_follows_a_rule_that_fires_less_often(set_):
    """A limit that was inherited spans as many steps as it takes to reach it; one that was given is refused."""
    chosen = policy("recover", rules=[{"name": "persistent", **set_}])
    rule = next(rule for rule in chosen.rules if rule.name == "persistent")
    first, second, _ = (rung.limit for rung in rule.ladder)
    assert (first.times, first.per_steps) == (1, 2000)
    assert second.times == 2 and 2000 < second.per_steps <= 2003
    given_ = {"do": "rollback", "limit": {"times": 2, "per_steps": 1000}, "otherwise": "stop"}
    with pytest.raises(PolicyError, match="the limit is never reached"):
        policy("recover", rules=[{"name": "persistent", "otherwise": given_, **set_}])


RECORDS = [
    kind
    for kind in (Snapshot, LossScaleCheck, *actions.ACTIONS.values(), *CONDITIONS.values())
    if getattr(kind, "ordered", ())
]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=60)
@given(st.data())
def test_one_value_that_is_set_never_contradicts_a_default(kind, data):
    """Of every ordered pair of every record, one value alone is accepted, kept, and changes nothing without need."""
    low, high = data.draw(st.sampled_from(kind.ordered))
    name = data.draw(st.sampled_from((low, high)))
    entry = next(entry for entry in fields(kind) if entry.name == name)
    most = min(entry.metadata["bounds"].get("le", 10**6), 1000)
    number = data.draw(st.integers(1, int(most)))
    required = {e.name: 5 for e in fields(kind) if e.default is MISSING}
    if name in required:
        return
    value = float(number) if "float" in str(entry.type) else number
    table = reconciled(kind, {name: value, **required})
    record = kind(**table)
    assert getattr(record, name) == value
    changed = set(table) - {name, *required}
    assert changed <= {other for pair in kind.ordered for other in pair}
    for other in changed:
        with pytest.raises(PolicyError):
            kind(**{word: given for word, given in table.items() if word != other})
