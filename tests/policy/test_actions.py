"""Each action as data: its name, its parameters, and its two forms in files."""

import pytest

from keras_nanguard import Policy, PolicyError
from keras_nanguard.actions import ACTIONS, Call

REQUIRED = {"call": {"function": "page"}}

OTHER = {
    "rollback": {"further_back": False, "skip_batches": 5, "replay_steps": True},
    "lower_lr": {"factor": 0.5, "min_lr": 0.25, "recover_after": 7},
    "clip": {"global_clipnorm": 2.0, "factor": 0.25, "min_clipnorm": 0.125},
    "fix_loss_scale": {"reset_to": 8.0, "growth_steps": 5},
    "repair": {"source": "zeros"},
    "reset_batchnorm": {"source": "last_good"},
    "recalibrate_batchnorm": {"batches": 5},
    "reset_slots": {"scope": "all"},
    "warn": {"message": "look"},
    "stop": {"restore": False, "log_worst_metrics": True},
    "raise_error": {"restore": False},
    "call": {"function": "page"},
    "skip": {},
}
"""Every parameter of every action, at a value that is not its default."""


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_survives_a_file(name):
    """By name alone, and as a table of all of its parameters."""
    kind = ACTIONS[name]
    assert set(OTHER[name]) == set(kind.model_fields)
    for given in (REQUIRED.get(name, {}), OTHER[name]):
        action = kind(**given)
        item = {name: given} if given else name
        assert action.to_file() == item
        ((found, *_),) = Policy.load(escalation=[item]).escalation
        assert found == action
    fresh = kind(**REQUIRED.get(name, {}))
    assert all(
        OTHER[name][field] != getattr(fresh, field) for field in OTHER[name] if name != "call"
    )


def test_an_action_needs_its_required_parameter():
    with pytest.raises(PolicyError, match="Call: function: expected a value, received nothing"):
        Call()
