"""The words of `ReduceLROnPlateau` as arguments of `NanGuard`: what they set, where it shows, and what is refused."""

from __future__ import annotations

import re

import pytest

from keras_nanguard._core.errors import GuardError, PolicyError
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._fit import arguments
from keras_nanguard._policy.policy import Ledger, Policy, decide


def made(source="recover", **words):
    return arguments.policy(source, words, None, False)


def lowered(policy, steps=20):
    """Return at which bad steps in a row a policy lowers the rate, with the factor, and at which one it ends training."""
    ledger, found = Ledger(), []
    for step in range(100, 100 + steps):
        decision, ledger = decide(policy, ledger, Incident(step=step, epoch=0, batch=step, findings=(Finding("loss"),), refused=True))
        found += [(step - 99, action["factor"]) for action in decision.actions if action["action"] == "lower_lr"]
        if decision.terminal:
            return found, step - 99
    return found, None


def test_the_words_set_the_rules():
    """`patience` bad steps in a row, then the rate is multiplied by `factor`, down to `min_lr`; `print` shows it."""
    policy = made(patience=5, factor=0.5, min_lr=1e-6)
    assert lowered(policy) == ([(5, 0.5), (10, 0.5), (15, 0.5)], 20)
    text = str(policy)
    assert text.count("factor = 0.5, min_lr = 1e-06") == text.count("lower_lr") > 3 and "after = { consecutive = 5 }" in text
    assert Policy.from_any(policy.to_dict()) == policy


@pytest.mark.parametrize(("patience", "becomes"), [(0, 1), (1, 1), (2, 2), (50, 50)])
def test_patience(patience, becomes):
    """0 is at the first one, as in Keras; a long patience is within every limit."""
    rates, end = lowered(made(patience=patience), 300)
    assert [step for step, _ in rates] == [becomes, 2 * becomes, 3 * becomes] and end == 4 * becomes


def test_one_word_leaves_the_others():
    """A word sets itself only; none of them changes nothing."""
    assert lowered(made(factor=0.5)) == ([(3, 0.5), (6, 0.5), (9, 0.5)], 12)
    assert made() == made(patience=None, factor=None, min_lr=None) == Policy.from_any("recover")
    assert made(snapshot={"every": 50}, patience=5).snapshot.every == 50


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ({"patience": -1}, "patience: expected a whole number >= 0 and <= 1000, received -1"),
        ({"patience": 2.5}, "patience: expected a whole number >= 0 and <= 1000, received 2.5"),
        ({"patience": True}, "patience"),
        ({"factor": 1}, "factor: expected a finite number > 0 and < 1, received 1"),
        ({"factor": float("nan")}, "factor"),
        ({"min_lr": -1e-6}, "min_lr: expected a finite number >= 0"),
        ({"min_lr": "1e-6"}, "min_lr"),
        ({"patence": 5}, "did you mean 'patience'?"),
        ({"patience": -1, "factor": 2}, "2 problems in the arguments of NanGuard"),
    ],
)
def test_wrong_values(words, reported):
    """Each is answered with what was expected and received, all at once."""
    with pytest.raises(PolicyError, match=re.escape(reported)):
        made(**words)


@pytest.mark.parametrize("preset", ["stop", "raise", "observe", "tune"])
def test_a_policy_that_lowers_no_rate(preset):
    """There is nothing that the words could set, and the error says so."""
    with pytest.raises(PolicyError, match=f"Expected a policy that lowers the learning rate. Received: factor with the policy '{preset}'"):
        made(preset, factor=0.5)


def test_patience_without_a_rule_that_waits():
    """A policy of one's own that lowers the rate at once has no patience to set."""
    rules = [{"name": "a", "do": "lower_lr", "limit": {"times": 1}, "otherwise": "stop"}]
    assert "factor = 0.5" in str(made({"preset": "none", "rules": rules}, factor=0.5))
    with pytest.raises(PolicyError, match="after some bad steps in a row"):
        made({"preset": "none", "rules": rules}, patience=5)


def test_resume_keeps_snapshots_on_disk(tmp_path):
    """`resume=True` implies snapshots on disk, and asks for a directory to keep them in."""
    assert arguments.policy("recover", {}, tmp_path, True).snapshot.storage == "disk"
    with pytest.raises(GuardError, match=r"Expected a directory .* Received: directory=None, resume=True. Write NanGuard"):
        arguments.policy("recover", {}, None, True)


@pytest.mark.parametrize(("factor", "safe"), [(0.5, 0.5), (0.05, 0.1)])
def test_a_factor_is_the_least_share_that_is_safe(factor, safe):
    """After a divergence the rate falls by the factor that was asked for, not to a tenth at once."""
    rungs = [rung for rule in made(factor=factor).rules for rung in rule.ladder]
    assert {action.safe for rung in rungs for action in rung.do if action.name == "lower_lr"} == {safe}
