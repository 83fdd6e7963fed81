"""The table of actions: each one, by being in it, keeps these promises."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import MISSING, FrozenInstanceError, fields

import pytest

from keras_nanguard import actions
from keras_nanguard._core.errors import PolicyError
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.schema import problems_in
from keras_nanguard.actions import ACTIONS, Action

NAMES = sorted(ACTIONS)
CANDIDATES = {
    "int": (2, 3, 7, 50),
    "float": (0.25, 2.0, 4.0, 64.0),
    "bool": (False, True),
    "str": ("zeros", "last_good", "all", "notify"),
}


def unusual(name: str) -> Action:
    """Return an action with every field at a value that is not its default."""
    kind = ACTIONS[name]
    choices = [
        [value for value in CANDIDATES[str(entry.type).split(" | ")[0]] if value != entry.default]
        for entry in fields(kind)
    ]
    for values in itertools.product(*choices):
        try:
            return kind(**dict(zip([entry.name for entry in fields(kind)], values, strict=True)))
        except PolicyError:
            continue
    raise AssertionError(f"no unusual {name}")


@pytest.mark.parametrize("name", NAMES)
def test_an_action_survives_a_decision_and_a_file(name):
    """With every field at a non-default value an action comes back the same from a decision and from a policy file."""
    action = unusual(name)
    assert all(getattr(action, entry.name) != entry.default for entry in fields(action))
    assert actions.from_dict(json.loads(json.dumps(action.to_dict()))) == action
    assert actions.from_file(json.loads(json.dumps(actions.to_file(action)))) == action
    assert action.to_dict()["action"] == name


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_keeps_every_parameter_of_an_action(name):
    """File -> Policy -> dict -> TOML -> Policy keeps every parameter of every action."""
    action = unusual(name)
    rule = {"name": "one", "do": [actions.to_file(action)], "limit": {"times": 2}}
    policy = Policy.from_any("recover", rules=[rule])
    assert policy.rules[0].ladder[0].do == (action,)
    assert Policy.from_any(policy.to_dict()) == policy


@pytest.mark.parametrize("name", NAMES)
def test_a_decision_carries_every_parameter(name):
    """A decision names every parameter, so that whoever performs it needs no defaults of his own."""
    assert set(unusual(name).to_dict()) == {"action", *(entry.name for entry in fields(ACTIONS[name]))}


@pytest.mark.parametrize("name", NAMES)
def test_no_number_of_an_action_may_be_nan_or_infinite(name):
    """NaN, Inf, booleans, texts and absurd numbers are refused in every number, in code and in files."""
    numbers = [entry.name for entry in fields(ACTIONS[name]) if str(entry.type).split(" | ")[0] in ("int", "float")]
    for field, bad in itertools.product(numbers, (math.nan, math.inf, -math.inf, True, "1", -1, 10**400)):
        with pytest.raises(PolicyError, match=field):
            ACTIONS[name](**{field: bad})
        assert problems_in({"rules": [{"name": "x", "do": {name: {field: bad}}}]})


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_parameter_is_reported_with_the_nearest_known_one(name):
    """A parameter with a letter too many is answered with the right one."""
    for entry in fields(ACTIONS[name]):
        with pytest.raises(PolicyError, match=f"did you mean '{entry.name}'"):
            actions.from_file({name: {entry.name + "x": 1}})


@pytest.mark.parametrize("name", NAMES)
def test_an_action_is_frozen_and_speaks(name):
    """An action cannot be changed, and says in words what it does."""
    action = unusual(name)
    for entry in fields(action):
        with pytest.raises(FrozenInstanceError):
            setattr(action, entry.name, getattr(action, entry.name))
    assert action.sentence()[0].islower() and not action.sentence().endswith(".")
    assert type(action).__doc__


def test_only_stop_and_raise_error_are_terminal():
    """Two actions end training, and an action that ends it changes nothing besides."""
    assert {name for name, kind in ACTIONS.items() if kind.terminal} == {"stop", "raise_error"}
    assert not any(kind.terminal and kind.changes for kind in ACTIONS.values())


def test_what_must_not_be_combined_is_refused():
    """A floor above a ceiling, a reset outside both, and a clipnorm below its minimum are refused."""
    with pytest.raises(PolicyError, match="floor: expected a number <= ceiling"):
        actions.FixLossScale(floor=8.0, ceiling=4.0)
    with pytest.raises(PolicyError, match="floor: expected a number <= reset_to"):
        actions.FixLossScale(reset_to=0.5)
    with pytest.raises(PolicyError, match="reset_to: expected a number <= ceiling"):
        actions.FixLossScale(reset_to=2.0**30)
    with pytest.raises(PolicyError, match="min_clipnorm"):
        actions.Clip(global_clipnorm=1e-6)


@pytest.mark.parametrize("item", ["", "rolback", 3, None, [], {}, {"stop": {}, "warn": {}}, {"stop": 3}, {"call": {}}])
def test_what_is_no_action_is_refused(item):
    """Anything that is not an action raises an error of the library."""
    with pytest.raises(PolicyError):
        actions.from_file(item)


def test_only_a_call_needs_a_parameter():
    """Every action but `call` can be written as its name alone."""
    for name, kind in ACTIONS.items():
        required = [entry.name for entry in fields(kind) if entry.default is MISSING]
        assert required == (["function"] if name == "call" else [])
