"""Policy files: three formats of one form, how they change a preset, and their errors."""

import json
import os
import tempfile
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import tomli_w
import yaml
from hypothesis import given, strategies as st
from pydantic import ValidationError
from support.public_api import listed

import keras_nanguard
from keras_nanguard import Finding, Policy, PolicyError
from keras_nanguard.actions import ACTIONS, Clip, LowerLr

FOLDER = Path(keras_nanguard.__file__).parent / "policies"
KINDS = get_args(get_type_hints(Finding)["kind"])


def loaded(text, suffix=".toml"):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"policy{suffix}"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return Policy.load(path)


FULL = {
    "version": 2,
    "preset": "recover",
    "refuse": True,
    "escalation": ["skip", ["rollback", {"lower_lr": {"factor": 0.25}}], "stop"],
    "max_consecutive_refused": 9,
    "max_refused_share": 0.25,
    "action_budget": 3,
    "lower_lr": {"factor": 0.5, "min_lr": 1e-5},
    "rollback": {"skip_batches": 7},
    "snapshot": {"every": 20, "keep": 4, "storage": "disk", "verify_after": 3},
    "divergence": {"action": "warn"},
    "loss_scale": {"floor": 16.0, "ceiling": 65536.0, "streak": 2, "action": "off"},
    "statistics": {"stuck_after": 0},
    "limits": [{"site": "statistics", "max_abs": 65504.0, "layer": "post_bn*"}],
    "rules": [
        {
            "name": "bad data",
            "cause": ["input_nonfinite", "target_nonfinite"],
            "after": 5,
            "do": ["warn", {"stop": {"restore": False}}],
        }
    ],
}
"""A document with every field at a value that is not its default."""

TEXTS = {
    ".toml": tomli_w.dumps(FULL),
    ".json": json.dumps(FULL),
    ".yaml": yaml.safe_dump(FULL),
    ".yml": yaml.safe_dump(FULL),
}


def problems(document, **sections):
    with pytest.raises(PolicyError) as caught:
        Policy.load(document, **sections)
    return caught.value.problems


# What files hold


def test_the_full_document_has_every_field():
    """No field of a policy is left out of the round trips below, and none has its default."""
    default = Policy().to_dict()
    assert set(FULL) == set(Policy.model_fields)
    for name in set(FULL) - {"version", "preset", "refuse", "limits", "rules"}:
        assert Policy.load(FULL).to_dict()[name] != default[name], name
    assert [Policy.load(FULL).to_dict()[name] for name in ("limits", "rules")] == [FULL["limits"], FULL["rules"]]
    assert repr(Policy.load(FULL)) == "Policy(preset='recover', 1 rule)"


@pytest.mark.parametrize("suffix", TEXTS)
def test_each_format_gives_the_same_policy_and_back(tmp_path, suffix):
    """File -> Policy -> dict -> file loses nothing."""
    path = tmp_path / f"policy{suffix}"
    path.write_text(TEXTS[suffix], "utf-8")
    policy = Policy.load(path)
    assert policy == Policy.load(str(path)) == Policy.load(FULL)
    assert Policy.load(policy.to_dict()) == policy
    again = tmp_path / "again.toml"
    again.write_text(str(policy), "utf-8")
    assert Policy.load(again) == policy and Policy.load(again).to_dict() == policy.to_dict()


@pytest.mark.parametrize("name", listed("preset"))
def test_a_preset_is_a_policy_file(name):
    """The file of a preset gives the preset, which prints as TOML that gives it again."""
    policy, file = Policy.load(name), Policy.load(FOLDER / f"{name}.toml")
    assert policy.preset == name and policy.to_dict() == {**file.to_dict(), "preset": name}
    assert loaded(str(policy)) == policy


def test_the_file_of_the_default_shows_every_default():
    assert Policy.load(FOLDER / "recover.toml").to_dict() == Policy().to_dict()


# How documents change one another


def test_sections_are_merged_field_by_field():
    """A table changes the fields that it has; a list is replaced."""
    policy = Policy.load({"preset": "long-run", "snapshot": {"every": 7}}, snapshot={"keep": 9})
    assert (policy.snapshot.every, policy.snapshot.keep) == (7, 9)
    assert (policy.snapshot.storage, policy.rollback.skip_batches) == ("disk", 200)
    assert Policy.load(policy, escalation=["stop"]).escalation == Policy.load("stop").escalation
    assert Policy.load(policy, snapshot={"keep": 3}).snapshot.every == 7
    assert Policy.load(Policy.load(FULL), limits=[], escalation=["skip"]).limits == ()


def test_a_whole_policy_is_not_started_from_another_preset():
    """A policy has every field, so another preset would change nothing but its label."""
    policy = Policy.load("recover")
    with pytest.raises(PolicyError, match=r"no other preset.*preset='stop'.*Write Policy.load\('stop', ...\)"):
        Policy.load(policy, preset="stop")
    assert Policy.load(policy, preset="recover") == policy
    assert Policy.load({"preset": "long-run"}, preset="stop") == Policy.load("stop")


def test_a_rule_replaces_the_rule_of_the_same_name_whole():
    """Other rules are kept, after the new ones."""
    document = {"rules": [{"name": "keep", "site": "inputs", "do": "skip"}]}
    (before,) = Policy.load(document).rules
    new = {"name": before.name, "do": "warn"}
    (after,) = Policy.load(document, rules=[new]).rules
    assert after.site == () and after.do[0].name == "warn"
    more = Policy.load(document, rules=[{"name": "mine", "do": "stop"}])
    assert [rule.name for rule in more.rules] == ["mine", before.name] and more.rules[1] == before


def test_a_policy_is_made_of_records_too():
    actions = keras_nanguard.actions
    policy = Policy(lower_lr=LowerLr(factor=0.5), escalation=["skip", actions.Rollback(skip_batches=2)])
    assert policy == Policy.load(policy.to_dict()) and policy.lower_lr.factor == 0.5
    with pytest.raises(ValidationError, match="input_value=3"):
        Policy.model_validate(3)
    assert Policy(preset="stop") == Policy.load("stop")


def test_a_snapshot_is_verified_no_later_than_the_next_one():
    """`every` and `keep` limit `verify_after`; else no snapshot would ever be verified."""
    assert Policy.load(snapshot={"every": 3}).snapshot.good_steps == 3
    assert Policy.load(snapshot={"keep": 1}).snapshot.good_steps == 0
    assert Policy.load(snapshot={"every": 0}).snapshot.good_steps == 10


@pytest.mark.parametrize(
    ("streak", "scale", "last", "expected"),
    [
        (2, 64.0, 64.0, True),
        (3, 64.0, 64.0, False),  # more than are left to dynamic scaling
        (3, 65536.0, 65536.0, False),
        (3, 131072.0, 131072.0, True),  # a gradient of 1 overflows at this scale
        (1, 32.0, 32.0, True),
        (1, 31.0, 31.0, False),  # half of it is below the floor
        (1, 2.0**21, 1.0, True),
        (1, 2.0**22, 1.0, False),  # half of it is above the ceiling, and no good step explains it
        (1, 2.0**22, 2.0**20, True),
        (1, 2.0**23, 2.0**20, False),
    ],
)
def test_overflows_that_dynamic_scaling_handles(streak, scale, last, expected):
    scaling = Policy.load(loss_scale={"floor": 16.0, "ceiling": 2.0**20, "streak": 2}).loss_scale
    assert scaling.is_expected_overflow(streak, scale, last) is expected


def test_the_only_loss_scale_may_be_the_floor_and_the_ceiling():
    scaling = Policy.load(loss_scale={"floor": 8.0, "ceiling": 8.0}).loss_scale
    assert scaling.is_too_high(9.0, 0.0) and not scaling.is_too_high(8.0, 0.0) and not scaling.is_too_high(16.0, 8.0)


# What is wrong


def test_a_problem_is_in_the_policy_or_in_the_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("mine.toml")
    path.write_text("refuse = 3", "utf-8")
    for source, sections, where in (
        ({"refuse": 3}, {}, "The policy"),
        (path, {}, "'mine.toml'"),
        (path, {"action_budget": 2}, "The sections given as arguments"),
        (Policy(), {"refuse": 3}, "The sections given as arguments"),
    ):
        with pytest.raises(PolicyError) as caught:
            Policy.load(source, **sections)
        assert str(caught.value) == f"{where}: refuse: expected true or false, received 3"


def test_all_problems_are_reported_at_once_with_path_and_nearest_word():
    """Each problem has its path, the expected and the received value, and a similar word."""
    document = {
        "snapshto": {},
        "snapshot": {"every": -1, "storage": "dsik", "kep": 3},
        "lower_lr": {"factor": 2.0, "min_lr": "low"},
        "escalation": ["skip", ["rolback"]],
        "rules": [
            {"name": "a", "kind": "nonfinit", "do": {"lower_lr": {"factr": 1}}},
            {"name": "b"},
        ],
    }
    words = ", ".join(ACTIONS)
    assert set(problems(document)) == {
        f"escalation[1][0]: expected one of {words}, received 'rolback', did you mean 'rollback'?",
        "lower_lr.factor: expected less than 1, received 2.0",
        "lower_lr.min_lr: expected a valid number, received 'low'",
        "snapshot.every: expected greater than or equal to 0, received -1",
        "snapshot.storage: expected one of memory, disk, received 'dsik', did you mean 'disk'?",
        "snapshot.kep: expected one of every, keep, storage, verify_after, received 'kep', "
        "did you mean 'keep'?",
        f"rules[0].kind: expected one of {', '.join(KINDS)}, "
        "received 'nonfinit', did you mean 'nonfinite'?",
        f"rules[0].do.lower_lr.factr: expected one of {', '.join(LowerLr.model_fields)}, "
        "received 'factr', did you mean 'factor'?",
        "rules[1].do: expected a value, received nothing",
        f"snapshto: expected one of {', '.join(Policy.model_fields)}, received 'snapshto', "
        "did you mean 'snapshot'?",
    }


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"escalation": []}, "escalation: expected at least one, received none"),
        ({"escalation": "stop"}, "escalation: expected a list"),
        ({"escalation": ["skip", []]}, "escalation[1]: expected at least one"),
        ({"snapshot": 3}, "snapshot: expected a table, received 3"),
        ({"snapshot": {"every": 2.5}}, "expected a valid integer"),
        ({"snapshot": {"every": True}}, "expected a valid integer"),
        ({"snapshot": {"every": "5"}}, "expected a valid integer, received '5'"),
        ({"lower_lr": {"min_lr": float("nan")}}, "finite number"),
        ({"lower_lr": {"min_lr": float("inf")}}, "finite number"),
        ({"loss_scale": {"floor": 9.0, "ceiling": 2.0}}, "floor <= ceiling = 2"),
        ({"rules": [{"name": "a", "do": []}]}, "rules[0].do: expected at least one"),
        ({"limits": [{"site": "slots", "max_abs": 1, "layer": []}]}, "limits[0].layer: expected at least one"),
        ({"rules": [{"name": "a", "do": {"stop": {}, "warn": {}}}]}, "one action in each table"),
        ({"rules": [{"name": "a", "do": "call"}]}, "do.function: expected a value"),
        ({"rules": [{"name": "a\n", "do": "stop"}]}, "a name of at most 64"),
        ({"rules": [{"name": "a", "do": "stop"}] * 2}, "one rule named 'a'"),
        ({"rules": {"name": "a"}}, "rules: expected a list"),
        ({"preset": "recovr"}, "did you mean 'recover'?"),
        ({"version": 3}, "version: expected 2, received 3"),
        ({1: 2}, "expected text as keys"),
        ({"refuse": "no"}, "true or false"),
        ({"rules": [{"name": 3, "do": "stop"}]}, "rules[0].name: expected a valid string, received 3"),
        ({"rules": [{"name": "a", "layer": "", "do": "stop"}]}, "expected a text that is not empty"),
        ({"escalation": [{"warn": {"message": "x" * 201}}]}, "expected a text of at most 200 characters"),
        ({"escalation": [{"lower_lr": None}]}, "lower_lr: expected a table, received None"),
        ({"limits": [{"site": "weights", "max_abs": 1.0, "layer": "\u202eabc"}]}, r"received '\u202eabc'"),
        ({"rules": [{"name": "a", "layer": ["x", "\ud800"], "do": "stop"}]}, "valid string"),
        ({"escalation": [{"warn": {"message": "\x1b[2J"}}]}, "expected printable characters"),
    ],
)
def test_a_problem_names_the_expected_value(document, words):
    """The message names path and remedy in the words of a policy file."""
    (problem,) = problems(document)
    assert words in problem


def test_a_record_in_code_is_validated_like_a_file():
    """A mistake in Python gets the same sentence as one in a file."""
    with pytest.raises(PolicyError, match=r"LowerLr: factor: expected less than 1, received 2.0"):
        LowerLr(factor=2.0)
    with pytest.raises(PolicyError, match=r"did you mean 'factor'"):
        LowerLr(factr=0.5)
    with pytest.raises(PolicyError, match=r"Write Policy.load\('stop'\)"):
        Policy("stop")
    with pytest.raises(Exception, match="frozen"):
        Clip().factor = 2.0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("recovr", "Did you mean 'recover'"),
        ("nothing_like_it", r"A file ends in .toml"),
        (None, "Write 'recover' for the default"),
        (3, "the name of a preset"),
        (Policy, "the class Policy"),
        (b"recover", "as text|the name of a preset"),
        (os.sep, "a directory"),
        ("missing.toml", "which does not exist"),
        ("policy.ini" + os.sep + "x", "ends in .toml"),
    ],
)
def test_anything_but_a_policy_is_rejected(source, words):
    with pytest.raises(PolicyError, match=words):
        Policy.load(source)


HOSTILE = {
    "not text.toml": b"\xff\xfe\x00",
    "binary.yaml": bytes(range(256)),
    "text.yaml": b"hello",
    "nothing.yaml": b"",
    "list.json": b"[1]",
    "two documents.yaml": b"version: 2\n---\nversion: 2\n",
    "large.toml": b"#" * 16_385,
    "dots.toml": b"a" + b".a" * 8000 + b" = 1",
    "deep.json": b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep.yaml": b"a: " + b"[" * 5000 + b"]" * 5000,
    "deep.toml": b"a = " + b"[" * 5000 + b"]" * 5000,
    "many.json": b'{"rules": [' + b",".join([b"1"] * 7000) + b"]}",
    "twice.json": b'{"version": 2, "version": 2}',
    "twice.yaml": b"version: 2\nversion: 2\n",
    "twice.toml": b"version = 2\nversion = 2\n",
    "number.json": b'{"snapshot": {"every": ' + b"9" * 9000 + b"}}",
    "nan.json": b'{"lower_lr": {"min_lr": NaN}}',
    "nan.toml": b"[lower_lr]\nmin_lr = nan\n",
    "code.yaml": b"preset: !!python/object/apply:os.system ['touch hacked']\n",
    "bomb.yaml": b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    "circle.yaml": b"&a a: *a\n",
    "key.yaml": b"1: 2\n",
    "list as key.yaml": b"? [a]\n: 2\n",
    "controls.json": b'{"\\u001b[2J": 1}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gets_one_clear_error(tmp_path, monkeypatch, name):
    """Any such file only raises a `PolicyError` with printable text."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.write_bytes(HOSTILE[name])
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert str(caught.value).replace("\n", "").isprintable() and len(str(caught.value)) < 2000
    assert not (tmp_path / "hacked").exists()


def test_a_circular_dict_is_rejected():
    document = {"rules": []}
    document["rules"].append(document)
    with pytest.raises(PolicyError, match="at most 12 levels"):
        Policy.load(document)


def test_numbers_and_words_of_yaml():
    """`1e-7` is a number, and `off` without quotes is `off`; 0 is not."""
    with pytest.raises(PolicyError):
        Policy.load({"divergence": {"action": 0}})
    text = "lower_lr: {min_lr: 1e-7}\ndivergence: {action: off}\n"
    policy = loaded(text, ".yaml")
    assert policy.lower_lr.min_lr == 1e-7 and policy.divergence.action == ()


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_bytes(b"\xef\xbb\xbfversion = 2\n")
    assert Policy.load(path) == Policy()


WORDS = st.sampled_from(
    [*Policy.model_fields, "stop", "rollback", "every", "do", "name", "loss", "x"]
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=12,
)


@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_no_document_gets_anything_but_a_policy_or_a_policy_error(document):
    try:
        policy = Policy.load(document)
    except PolicyError as error:
        assert str(error)
        return
    assert Policy.load(policy.to_dict()) == policy


@given(
    st.sampled_from([".toml", ".json", ".yaml"]),
    st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: raw.decode("latin-1"))),
)
def test_no_text_gets_anything_but_a_policy_or_a_policy_error(suffix, text):
    try:
        assert isinstance(loaded(text, suffix), Policy)
    except PolicyError as error:
        assert str(error)
