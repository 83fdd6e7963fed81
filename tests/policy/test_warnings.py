"""The three warnings about a valid policy: a rule that never acts, a glob of nothing, something missing."""

from __future__ import annotations

import pytest

from keras_nanguard import Policy
from keras_nanguard._policy.policy import PRESETS
from keras_nanguard._policy.warnings import GuardOptions, ModelNames, warnings_about

NET = ModelNames("net", ("net/embedding/embeddings", "net/dense/kernel", "net/bn/moving_mean"))


def warnings(rule, names=None, options=None, **sections):
    policy = Policy.load(rules=[{"name": "mine", "do": "stop", **rule}], **sections)
    return warnings_about(policy, names, options)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_no_warnings(name):
    """What comes with the package can do what it says, in a guard with a directory."""
    assert warnings_about(Policy.load(name), NET, GuardOptions(directory=True)) == ()


def test_a_rule_that_the_bound_comes_before():
    """A rule for 50 in a row never acts while training ends at 12."""
    (line,) = warnings({"cause": "input_nonfinite", "after": 50})
    assert line == (
        "Rule 'mine' never acts: it acts at 50 in a row, and max_consecutive_refused = 12 ends "
        "training first."
    )
    assert warnings({"cause": "input_nonfinite", "after": 50}, max_consecutive_refused=60) == ()
    assert warnings({"after": 11}) == () and warnings({"kind": "spike", "after": 50}) == ()


def test_a_glob_that_matches_nothing():
    """The line names the model and the nearest layer, also for a limit."""
    (line,) = warnings({"layer": "embeding*"}, NET)
    assert line == (
        "Rule 'mine' never acts: nothing in the model 'net' matches the glob 'embeding*' "
        "(did you mean 'embedding'?)."
    )
    assert warnings({"layer": ["dense*", "bn/*"]}, NET) == () == warnings({"layer": "nothing"})
    limits = [{"site": "weights", "max_abs": 1.0, "layer": "conv*"}]
    (line,) = warnings({}, NET, limits=limits)
    assert line.startswith("limits[0] never acts")


def test_an_action_without_what_it_needs():
    """`quarantine` needs a directory, `call` a function, a cause a diagnosis."""
    nothing = GuardOptions(diagnose=False)
    assert "no directory" in warnings({"do": "quarantine"}, None, nothing)[0]
    (line,) = warnings({"do": {"call": {"function": "page"}}}, None, nothing)
    assert line == (
        "call in rule 'mine' does nothing: no function is registered as 'page' (registered: none)."
    )
    assert "diagnose=False" in warnings({"cause": "divergence"}, None, nothing)[0]
    everything = GuardOptions(directory=True, functions={"page": print})
    do = ["quarantine", {"call": {"function": "page"}}]
    assert warnings({"cause": "divergence", "do": do}, None, everything) == ()
    assert (
        "no directory"
        in warnings_about(Policy.load(escalation=["quarantine", "stop"]), None, nothing)[0]
    )
