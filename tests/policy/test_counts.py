"""The counts of a policy, against a reference that keeps every event and counts anew each time."""

import random

import pytest

from keras_nanguard import Diagnosis, Finding, Incident, PolicyError
from keras_nanguard._core.literals import KINDS, SITES
from keras_nanguard._policy.decide import PolicyState, RuleState

RESULTS = ("validation", "predictions")
GAPS = (0, 0, 0, 1, 1, 1, 1, 2, -1, -7, 199, 200, 201, 4998, 4999, 5000, 5001)
"""Steps from one incident to the next: also some that are reported late, and the ends of windows."""


def is_bad(incident):
    """A step is bad if it was refused, or if what it trains is not finite."""
    results = ("metrics", *RESULTS)
    return incident.refused or any(f.kind == "nonfinite" and f.site not in results for f in incident.findings)


def is_of_data(incident):
    """A refused step is one of bad data if data is bad or blamed, and the state before it is not."""
    sites = {finding.site for finding in incident.findings}
    blamed = incident.diagnosis is not None and incident.diagnosis.cause == "input_nonfinite"
    of_data = blamed or "bad_at_start" in incident.values or not sites.isdisjoint({"inputs", "targets"})
    return incident.refused and "state" not in sites and of_data


class Reference:
    """All events. An incident is at its step, or after the latest one if that is a later step."""

    def __init__(self):
        self.now = None
        self.seen = []  # (place, incident, rules), or (None, site, ()) for a good result
        self.fit = 0  # how many of them are of earlier fits
        self.done = []  # (place, action)
        self.outcomes = []  # (number of `seen` before, action, status)

    def add(self, incident, rules):
        late = self.now is not None and incident.step < self.now
        self.now = self.now + 1 if late else incident.step
        self.seen.append((self.now, incident, rules))

    def resumed(self):
        """The latest step of earlier fits is -2, so that 0 is not the step after it."""
        by, self.now, self.fit = -2 - self.now, -2, len(self.seen)
        self.seen = [(at if at is None else at + by, *rest) for at, *rest in self.seen]
        self.done = [(at + by, action) for at, action in self.done]

    def bad(self, until=None):
        """Return the first bad incident of each bad step, by its number in `seen`."""
        found = {}
        for number, (at, incident, _) in enumerate(self.seen[:until]):
            if at is not None and is_bad(incident):
                found.setdefault(at, number)
        return found

    def steps_in_a_row(self, name):
        """No good step is between two steps in a row."""
        places, count = [], 0
        for number, (at, _, rules) in enumerate(self.seen[self.fit :], self.fit):
            if name in rules and not self.site(number) and at not in places:
                bad = self.bad(number + 1)
                joined = places and (at - places[-1] == 1 or all(n in bad for n in range(places[-1], at + 1)))
                places, count = [*places, at], count + 1 if joined else 1
        return RuleState(consecutive=count, last=places[-1]) if places else None

    def results_in_a_row(self, site, name):
        count, last = 0, None
        for number, (at, incident, rules) in enumerate(self.seen[self.fit :], self.fit):
            matches = self.site(number) == site and name in rules
            if matches or site == incident or (at is not None and site in incident.sites):
                count, last = count + 1 if matches else 0, at
        return RuleState(consecutive=count, last=last) if count else None

    def site(self, number):
        at, incident, _ = self.seen[number]
        return next((site for site in RESULTS if at is not None and site in incident.sites), "")

    def state(self):
        bad, last = self.bad(), max(self.bad(), default=None)
        row = 0
        while last is not None and last - row in bad:
            row += 1
        streak = sorted(bad)[len(bad) - row :]
        began = bad[streak[0]] if streak else -1
        status = {action: status for number, action, status in self.outcomes if number > began}
        refused = {at for at, incident, _ in self.seen if at is not None and incident.refused}
        rules = {name: self.steps_in_a_row(name) for name in "ab"}
        rules |= {f"{site}:{name}": self.results_in_a_row(site, name) for site in RESULTS for name in "ab"}
        places = {}
        for at, action in self.done:
            places[action] = (*places.get(action, ()), at)
        return PolicyState(
            step=self.now,
            last=last,
            consecutive=row,
            climb=sum(not is_of_data(self.seen[bad[at]][1]) for at in streak),
            refused=tuple(sorted(at for at in refused if at > max(refused) - 200)),
            action_steps={action: tuple(at for at in all if at > all[-1] - 5000) for action, all in places.items()},
            without_effect=tuple(sorted(action for action, one in status.items() if one == "skipped")),
            rules={key: one for key, one in rules.items() if one is not None},
        )

    def times(self, action):
        return sum(at > self.now - 5000 for at, done in self.done if done == action)


def drawn(draw, step):
    """Return an incident at a step, and the rules that match it."""
    sites = draw.sample(SITES, draw.choice((1, 1, 2))) if draw.random() < 0.7 else [draw.choice(RESULTS)]
    findings = tuple(Finding(site, draw.choice(("nonfinite", "nonfinite", *KINDS))) for site in sites)
    cause = draw.choice((None, None, "divergence", "input_nonfinite"))
    diagnosis = None if cause is None else Diagnosis(cause=cause)
    values = {"bad_at_start": 1.0} if draw.random() < 0.1 else {}
    incident = Incident(step, 0, 0, findings, draw.random() < 0.6, values, diagnosis)
    return incident, draw.sample("ab", draw.choice((0, 1, 1, 2)))


@pytest.mark.parametrize("seed", range(4))
def test_the_counts_are_those_of_all_events(seed):
    """Windows and streaks, after each incident, result, action, replay and new fit."""
    draw = random.Random(seed)
    for _ in range(60):
        state, reference = PolicyState(), Reference()
        assert state.rewound() == state.resumed() == state and state.times("clip") == 0
        while len(reference.seen) < 20:
            incident, rules = drawn(draw, max(0, (reference.now or 0) + draw.choice(GAPS)))
            reference.add(incident, rules)
            state = state.counted(incident, rules)
            assert state == reference.state()
            for name in rules:
                site = next((site for site in RESULTS if site in incident.sites), "")
                found = reference.results_in_a_row(site, name) if site else reference.steps_in_a_row(name)
                assert state.in_a_row(name, incident) == found.consecutive
            assert all(state.times(action) == reference.times(action) for action in ("rollback", "clip"))
            actions = draw.choice(((), ("rollback",), ("rollback", "clip")))
            reference.done += [(reference.now, action) for action in actions]
            state = state.acted(actions)
            outcomes = {name: draw.choice(("done", "skipped")) for name in draw.sample(("clip", "rollback"), draw.choice((0, 1, 2)))}
            reference.outcomes += [(len(reference.seen), *outcome) for outcome in outcomes.items()]
            state = state.performed(outcomes)
            if draw.random() < 0.2:
                reference.seen.append((None, draw.choice(RESULTS), ()))
                state = state.with_good_result(reference.seen[-1][1])
            if draw.random() < 0.1:
                reference.now += 1
                state = state.rewound()
            if draw.random() < 0.1:
                reference.resumed()
                state = state.resumed()
            assert state == reference.state()


@pytest.mark.parametrize("name", ["consecutive", "climb"])
def test_a_saved_count_is_not_negative(name):
    assert PolicyState(**{name: 0}) == PolicyState()
    with pytest.raises(PolicyError, match=f"{name}: expected a number >= 0, received -1"):
        PolicyState(**{name: -1})
