"""The docs, the published JSON Schema and the explanations: each member of a family is in all of them."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

import keras_nanguard
from keras_nanguard._core.incident import KINDS, SITES
from keras_nanguard._policy.conditions import CONDITIONS
from keras_nanguard._policy.config import preset
from keras_nanguard._policy.documents import parsed
from keras_nanguard._policy.explain import explain
from keras_nanguard._policy.fields import MOMENTS
from keras_nanguard._policy.no_effect import warnings_about
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.presets import PRESETS
from keras_nanguard._policy.rules import Rule
from keras_nanguard._policy.schema import json_schema, problems_in
from keras_nanguard._policy.settings import Checks, Snapshot
from keras_nanguard.actions import ACTIONS

FOLDER = Path(keras_nanguard.__file__).parent / "policies"
DOCS = (Path(__file__).parents[2] / "docs" / "policies.md").read_text("utf-8")
SCHEMA = json.loads((FOLDER / "policy.schema.json").read_text("utf-8"))


def rows(heading: str) -> dict[str, str]:
    """Return the rows of the table under a heading of the docs, by their first cell."""
    section = DOCS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {first: rest for first, rest in table if first.startswith("`")}


def test_the_published_schema_is_the_one_of_the_code():
    """`python -m keras_nanguard._policy.schema > keras_nanguard/policies/policy.schema.json` has been run."""
    assert json_schema() == SCHEMA


def test_every_action_condition_and_preset_is_in_the_docs():
    """Each family's table in the docs has one row for each member, and no other."""
    assert set(rows("Actions")) == {f"`{name}`" for name in ACTIONS}
    assert set(re.findall(r"`(\w+) =", " ".join(rows("Conditions")))) == set(CONDITIONS)
    assert set(rows("Presets")) == {f"`{name}`" for name in PRESETS}
    ladder = {"do", "limit", "otherwise"}
    assert set(rows("How deciding works")) == {f"`{f.name}`" for f in fields(Rule) if f.name != "ladder"} | {
        f"`{name}`" for name in ladder
    }


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_every_parameter_of_an_action_is_in_the_docs_and_in_the_schema(name):
    """Each parameter is named in the row of its action, and has a description in the schema."""
    row = rows("Actions")[f"`{name}`"]
    properties = SCHEMA["$defs"]["".join(word.capitalize() for word in name.split("_"))].get("properties", {})
    assert {entry.name for entry in fields(ACTIONS[name])} == set(properties)
    for parameter, described in properties.items():
        assert f"`{parameter}`" in row
        assert described["description"]


def test_every_setting_is_in_the_docs():
    """Each setting of checks and snapshot is named in its table."""
    table = " ".join(rows("Checks and snapshots"))
    names = {entry.name for entry in fields(Snapshot)}
    for check in fields(Checks):
        names |= {entry.name for entry in fields(check.default)} - {"enabled"}
    assert [name for name in names if f".{name}" not in table] == []


def test_every_word_is_in_the_docs_and_in_the_schema():
    """Sites, kinds and moments are spelt out where a rule is described."""
    text = " ".join(rows("How deciding works").values())
    published = json.dumps(SCHEMA)
    for word in (*SITES, *KINDS, *MOMENTS):
        assert f"`{word}`" in text and f'"{word}"' in published


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_policy_file(name):
    """Each preset passes the schema in both its forms, and prints as a file that makes it."""
    document = parsed((FOLDER / f"{name}.toml").read_text("utf-8"), ".toml")
    assert problems_in(document) == []
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)
    policy = Policy.from_any(name)
    assert (
        policy == Policy.from_any(FOLDER / f"{name}.toml") == Policy.from_any({"preset": name, "title": policy.title})
    )
    assert parsed(str(policy), ".toml") == policy.to_dict()
    jsonschema.validate(policy.to_dict(), SCHEMA, jsonschema.Draft202012Validator)
    assert policy.title.startswith(f"{name}: ") and preset(name)["title"] == policy.title


def test_the_folder_holds_the_presets_and_the_schema():
    """Nothing else lies among the presets."""
    assert {path.name for path in FOLDER.iterdir()} == {*(f"{name}.toml" for name in PRESETS), "policy.schema.json"}


@pytest.mark.parametrize(
    "document",
    [
        {"snapshot": {"every": -1}},
        {"rules": [{"do": "stop"}]},
        {"rules": [{"name": "a", "do": "stopp"}]},
        {"rules": [{"name": "a", "do": {"stop": {}, "warn": {}}}]},
        {"rules": [{"name": "a", "do": {"call": {}}}]},
        {"rules": [{"name": "a", "after": {"consecutive": 0}, "do": "stop"}]},
        {"checks": {"loss": 3}},
        {"layers": {"a": {"loss": True}}},
        {"nonsense": 1},
    ],
)
def test_the_schema_refuses_what_the_validator_refuses(document):
    """An editor that knows the schema marks what the library would refuse."""
    assert problems_in(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)


def test_the_policy_file_of_the_docs_works():
    """The TOML of the docs is a policy, and its rules say what they do."""
    (text,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    policy = Policy.from_any(parsed(text, ".toml"))
    reported = explain(policy)
    assert (
        "Rule embedding: on any finding in gradients, at layers embedding*, (at 2 in a row or at 5 within 100 steps)"
        in reported
    )
    assert "Layers that match 'post_bn*' differ: statistics max_abs = 65504.0." in reported
    assert "It does not check gradients between two steps." in reported
    assert warnings_about(policy) == ()


@pytest.mark.parametrize("name", PRESETS)
def test_a_policy_is_explained_in_sentences(name):
    """Each rule has its sentence; the bound is reported first; every line ends as a sentence does."""
    policy = Policy.from_any(name)
    reported = explain(policy).splitlines()
    assert all(line.endswith(".") for line in reported)
    assert [line.split(":")[0].removeprefix("Rule ") for line in reported if line.startswith("Rule ")] == [
        rule.name for rule in policy.rules
    ]
    bound = policy.longest_trouble
    assert (f"at most {bound} step" in reported[1]) if bound else ("are not refused" in reported[1])
