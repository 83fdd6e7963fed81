"""The docs and the published JSON Schema list each member of each family."""

import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
from support.public_api import listed

import keras_nanguard
from keras_nanguard import Policy, PolicyError
from keras_nanguard.actions import ACTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = listed("preset")
FOLDER = Path(keras_nanguard.__file__).parent / "policies"
DOCS = (Path(__file__).parents[2] / "docs" / "policies.md").read_text("utf-8")
SCHEMA = json.loads((FOLDER / "policy.schema.json").read_text("utf-8"))


def rows(heading):
    """Return the rows of the table under a heading of the docs, by their first cell."""
    section = DOCS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {first.strip("`"): rest for first, rest in table if first.startswith("`")}


def test_every_action_preset_and_field_is_in_the_docs():
    """The table of each family has one row for each member, and no other."""
    assert set(rows("Actions")) == set(ACTIONS)
    assert set(rows("Presets")) == set(PRESETS)
    assert set(rows("Rules")) == set(SCHEMA["$defs"]["Rule"]["properties"])
    assert set(rows("Kinds")) == set(listed("kind"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_by_the_schema(name):
    document = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
    for one in (document, Policy.load(name).to_dict()):
        jsonschema.validate(one, SCHEMA, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "document",
    [
        {"snapshot": {"every": -1}},
        {"escalation": []},
        {"escalation": ["stopp"]},
        {"rules": [{"do": "stop"}]},
        {"rules": [{"name": "a", "do": {"stop": {}, "warn": {}}}]},
        {"rules": [{"name": "a", "do": {"call": {}}}]},
        {"rules": [{"name": "a", "after": 0, "do": "stop"}]},
        {"divergence": {"action": "of"}},
        {"limits": [{"site": "loss", "max_abs": 1.0}]},
        {"nonsense": 1},
        {"version": 1},
    ],
)
def test_the_schema_rejects_the_same_as_the_library(document):
    with pytest.raises(PolicyError):
        Policy.load(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)


def test_the_policy_file_of_the_docs_works():
    (text, *_) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    assert Policy.load(tomllib.loads(text)).rules
