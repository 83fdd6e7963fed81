"""Properties of every policy that the validator accepts: it round-trips, decides about anything, and ends."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from keras_nanguard._core.errors import PolicyError
from keras_nanguard._core.incident import CAUSES, KINDS, SITES, Decision, Diagnosis, Finding, Incident
from keras_nanguard._policy.config import toml
from keras_nanguard._policy.documents import parsed
from keras_nanguard._policy.ending import COMMITTED, REFUSED, longest_trouble
from keras_nanguard._policy.explain import explain
from keras_nanguard._policy.ledger import Ledger
from keras_nanguard._policy.policy import Policy, decide

MANY = int(os.environ.get("NANGUARD_EXAMPLES", "50"))
SOME = settings(max_examples=MANY, suppress_health_check=list(HealthCheck))

small = st.integers(1, 5)
conditions = st.recursive(
    st.one_of(
        st.builds(lambda n: {"consecutive": n}, small),
        st.builds(lambda n: {"total": n}, small),
        st.builds(lambda n, more: {"within": {"times": n, "steps": n + more}}, small, st.integers(0, 9)),
        st.builds(lambda s, n: {"fraction": {"share": s, "steps": n}}, st.floats(0.05, 1.0), st.integers(1, 20)),
        st.builds(lambda n, m: {"spike": {"times": n, "steps": m}}, small, small),
    ),
    lambda inner: st.one_of(
        st.builds(lambda parts: {"any": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"all": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part: {"not": part}, inner),
    ),
    max_leaves=4,
)
mild = st.sampled_from(["skip", "warn", {"warn": {"message": 'say "so" \\ Ü'}}, {"call": {"function": "notify"}}])
strong = st.sampled_from(["rollback", {"rollback": {"deeper": True}}, {"lower_lr": {"factor": 0.5}}, "clip", "repair"])
ends = st.sampled_from(["stop", {"stop": {"restore": False}}, "raise_error"])
limits = st.builds(
    lambda times, per: {"times": times} | ({"per_steps": per} if per else {}),
    small,
    st.sampled_from([None, 3, 10, 30, 100, 1000]),
)


def rungs(levels):
    """Return ladders of at most so many rungs, ending or not."""
    plain = st.lists(st.one_of(mild, strong, ends), min_size=1, max_size=3)
    if not levels:
        return st.fixed_dictionaries({"do": st.one_of(plain, ends)}, optional={"limit": limits})
    return st.fixed_dictionaries({"do": plain, "limit": limits, "otherwise": st.one_of(ends, rungs(levels - 1))})


@st.composite
def rules(draw, broad):
    """Return one rule; a broad one looks at everything, so that a policy of some of them is often accepted."""
    rule = draw(st.one_of(rungs(0), rungs(1), rungs(2)))
    words = {"on": SITES, "kind": KINDS, "cause": CAUSES}
    for word in [] if broad else draw(st.sets(st.sampled_from(sorted(words)), max_size=2)):
        rule[word] = draw(st.lists(st.sampled_from(words[word]), min_size=1, max_size=6, unique=True))
    if not broad and draw(st.integers(0, 3)) == 0:
        rule["layer"] = draw(st.sampled_from(["dense*", ["a/b", "*bn"]]))
        rule["magnitude"] = {"min_abs": 10.0, "min_share": 0.5}
        rule["unless"] = {"on": "inputs"}
    if draw(st.booleans()):
        rule["after"] = draw(conditions)
    rule["when"] = draw(st.sampled_from(["any", "refused", "committed", "from_start"]))
    if draw(st.booleans()):
        rule |= {"cooldown": draw(st.integers(0, 4)), "reset_after": draw(small)}
    return rule


@st.composite
def policies(draw):
    """Return a policy that the validator accepts."""
    tables = [
        *draw(st.lists(rules(broad=True), min_size=1, max_size=3)),
        *draw(st.lists(rules(broad=False), max_size=3)),
    ]
    document = {"preset": "none", "rules": [{"name": f"rule-{n}", **table} for n, table in enumerate(tables)]}
    try:
        return Policy.from_any(document)
    except PolicyError:
        assume(False)


numbers = st.one_of(st.none(), st.floats(), st.integers(-(10**6), 10**6).map(float))
findings = st.builds(
    Finding,
    site=st.sampled_from(SITES),
    kind=st.sampled_from(KINDS),
    path=st.sampled_from(["", "dense_1", "model/bn/gamma"]),
    nan=st.one_of(st.none(), st.integers(0, 5)),
    size=st.one_of(st.none(), st.integers(0, 5)),
    value=numbers,
)
anything = st.builds(
    Incident,
    step=st.integers(-5, 100),
    epoch=st.just(0),
    batch=st.just(0),
    findings=st.lists(findings, max_size=3).map(tuple),
    refused=st.booleans(),
    committed=st.sampled_from([None, 0, 3]),
    diagnosis=st.one_of(st.none(), st.builds(Diagnosis, cause=st.sampled_from(CAUSES))),
)


@SOME
@given(policies(), st.data())
def test_no_accepted_policy_can_loop_for_ever(policy, data):
    """However an adversary mixes sites, kinds and moments, bad steps without end reach an end within the bound."""
    bound = longest_trouble(policy.rules)
    assert bound is not None
    assume(bound <= 400)
    troubles = data.draw(
        st.lists(st.sampled_from(sorted(REFUSED | COMMITTED)), min_size=1, max_size=8), label="troubles"
    )
    order = data.draw(st.randoms(use_true_random=False))
    regular = data.draw(st.booleans())
    ledger, start = _after_some_past(policy, data), 200
    for step in range(start, start + bound):
        site, kind, moment = troubles[step % len(troubles)] if regular else order.choice(troubles)
        decision, ledger = decide(policy, ledger, _incident(step, site, kind, moment))
        if decision.terminal:
            return
    raise AssertionError(f"no end within {bound} bad steps")


def _after_some_past(policy, data):
    """Return a ledger with some past, which must not put the end off."""
    ledger = Ledger()
    for step in sorted(data.draw(st.sets(st.integers(0, 199), max_size=20))):
        _, ledger = decide(policy, ledger, _incident(step, "loss", "nonfinite", "refused"))
    return ledger


def _incident(step, site, kind, moment):
    return Incident(step=step, epoch=0, batch=step, findings=(Finding(site, kind),), refused=moment == "refused")


@SOME
@given(policies(), st.lists(anything, max_size=25))
def test_deciding_never_raises(policy, incidents):
    """For any incidents in any order `decide` returns a consistent decision, as plain data."""
    ledger = Ledger()
    for incident in incidents:
        decision, ledger = decide(policy, ledger, incident)
        assert isinstance(decision, Decision) and decision.reason.endswith(".")
        names = [action["action"] for action in decision.actions]
        assert len(names) == len(set(names))
        assert decision.terminal == any(name in ("stop", "raise_error") for name in names)
        assert sum(name in ("stop", "raise_error") for name in names) <= 1
        assert names or not incident.refused
        json.dumps(incident.with_(decision=decision).to_dict(), allow_nan=False)
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger


@SOME
@given(policies())
def test_a_policy_round_trips(policy):
    """Policy -> dict -> TOML and JSON -> Policy gives the same policy, and it can be explained in sentences."""
    document = policy.to_dict()
    assert Policy.from_any(document) == policy
    assert parsed(str(policy), ".toml") == document
    assert parsed(json.dumps(document), ".json") == document
    assert len(explain(policy).splitlines()) >= len(policy.rules)


@SOME
@given(
    st.recursive(
        st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
        max_leaves=8,
    )
)
def test_whatever_is_written_as_toml_is_read_back(value):
    """The TOML writer escapes every text and keeps every number."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        assume(False)
    assert parsed(toml({"snapshot": {"value": value}}), ".toml") == {"snapshot": {"value": value}}


STOP = {"name": "end", "do": "stop"}


@pytest.mark.parametrize(
    ("rules_given", "reported"),
    [
        ([{"name": "a", "do": "warn"}], "rules: expected a rule that ends training with stop or raise_error"),
        ([{"name": "a", "do": "rollback"}, STOP], "rules.a.limit: expected a limit for rollback"),
        ([{"name": "a", "do": ["warn", "lower_lr"]}, STOP], "rules.a.limit: expected a limit for lower_lr"),
        (
            [{"name": "a", "do": "rollback", "limit": {"times": 3, "per_steps": 3}, "otherwise": "stop"}],
            "rules.a.limit.per_steps: expected more than 3 steps",
        ),
        (
            [{"name": "a", "after": {"consecutive": 3}, "do": "rollback", "limit": {"times": 3, "per_steps": 9}}, STOP],
            "the limit is never reached",
        ),
        (
            [{"name": "a", "do": "warn", "limit": {"times": 1}, "otherwise": {"do": "rollback"}}, STOP],
            "rules.a.otherwise.limit: expected a limit for rollback",
        ),
        ([{"name": "a", "do": "rollback", "limit": {"times": 3}}], "rules: expected a rule that ends"),
        ([STOP | {"on": "loss"}], "for inputs, targets, state, outputs, gradients"),
        ([STOP | {"when": "committed"}], "(refused)"),
        ([STOP | {"when": "refused"}], "for state, weights, statistics, slots, loss_scale (committed)"),
        ([STOP | {"when": "from_start"}], "none that certainly does so"),
        ([STOP | {"layer": "dense*"}], "none that certainly does so"),
        ([STOP | {"cause": "divergence"}], "none that certainly does so"),
        ([STOP | {"unless": {"on": "inputs"}}], "none that certainly does so"),
        ([STOP | {"magnitude": {"min_abs": 3.0}}], "none that certainly does so"),
        ([STOP | {"after": {"spike": {}}}], "none that certainly does so"),
        ([STOP | {"after": {"not": {"consecutive": 3}}}], "none that certainly does so"),
        ([STOP | {"after": {"all": [{"consecutive": 3}, {"spike": {}}]}}], "none that certainly does so"),
        ([STOP | {"enabled": False}], "none that certainly does so"),
        ([STOP, STOP], "expected one rule named 'end'"),
    ],
)
def test_a_policy_that_never_ends_is_refused(rules_given, reported):
    """A path without a budget and without an end is a configuration error, and the message says what is missing."""
    with pytest.raises(PolicyError) as caught:
        Policy.from_any({"preset": "none", "rules": rules_given})
    assert any(reported in line for line in caught.value.problems), caught.value.problems


def test_narrow_rules_may_end_trouble_together():
    """Rules that each look at some sites are accepted together; the bound holds for any mixture of troubles."""
    first = {"name": "a", "on": ["inputs", "targets", "outputs", "loss"], "after": {"consecutive": 3}, "do": "stop"}
    rest = ["state", "gradients", "weights", "statistics", "slots", "loss_scale"]
    second = {"name": "b", "on": rest, "after": {"consecutive": 5}, "do": "stop"}
    policy = Policy.from_any({"preset": "none", "rules": [first, second]})
    assert longest_trouble(policy.rules) == 3 + 5 - 1


def test_limits_that_forget_too_soon_do_not_count_together():
    """A mixture of troubles may outlast a short memory: what ends one trouble alone need not end two in turns."""
    short = {"times": 2, "per_steps": 4}
    first = {"name": "a", "when": "refused", "do": "rollback", "limit": short, "otherwise": "stop"}
    second = {"name": "b", "when": "committed", "after": {"consecutive": 5}, "do": "stop"}
    with pytest.raises(PolicyError, match="per_steps is so short"):
        Policy.from_any({"preset": "none", "rules": [first, second]})
    first["limit"]["per_steps"] = 7
    assert longest_trouble(Policy.from_any({"preset": "none", "rules": [first, second]}).rules) == 7


@pytest.mark.parametrize("window", [{"fraction": {"share": 1.0, "steps": 4}}, {"within": {"times": 4, "steps": 4}}])
def test_windows_that_need_every_step_do_not_count_together(window):
    """A window is certain to fill only for a rule that sees every step: two that share the steps may never be met."""
    first = {"name": "a", "when": "refused", "after": window, "do": "stop"}
    second = {"name": "b", "when": "committed", "after": window, "do": "stop"}
    with pytest.raises(PolicyError):
        Policy.from_any({"preset": "none", "rules": [first, second]})
    assert Policy.from_any({"preset": "none", "rules": [{**first, "when": "any"}]}).longest_trouble == 4
