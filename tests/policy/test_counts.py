"""The counts of a policy, against a reference that keeps every event and counts anew each time."""

import random

import pytest

from keras_nanguard import Diagnosis, Finding, Incident, Outcome, PolicyError
from keras_nanguard._core.literals import KINDS, SITES
from keras_nanguard._policy.decide import PolicyState, RuleState

RESULTS = ("validation", "predictions")
GAPS = (0, 0, 0, 1, 1, 1, 1, 2, 199, 200, 201, 4998, 4999, 5000, 5001)
"""Steps from one incident to the next: also the ends of windows."""


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


class Streaks:
    """The incidents and good results of which streaks consist, and the outcomes of actions."""

    def __init__(self):
        self.seen = []  # (place, incident, rules), or (None, site, ()) for a good result
        self.outcomes = []  # (number of `seen` before, action, status)

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
        for number, (at, _, rules) in enumerate(self.seen):
            if name in rules and not self.site(number) and at not in places:
                bad = self.bad(number + 1)
                joined = places and (at - places[-1] == 1 or all(n in bad for n in range(places[-1], at + 1)))
                places, count = [*places, at], count + 1 if joined else 1
        return RuleState(consecutive=count, last=places[-1]) if places else None

    def results_in_a_row(self, site, name):
        count, last = 0, None
        for number, (at, incident, rules) in enumerate(self.seen):
            matches = self.site(number) == site and name in rules
            if matches or site == incident or (at is not None and site in incident.sites):
                count, last = count + 1 if matches else 0, at
        return RuleState(consecutive=count, last=last) if count else None

    def site(self, number):
        at, incident, _ = self.seen[number]
        return next((site for site in RESULTS if at is not None and site in incident.sites), "")

    def fields(self):
        bad, last = self.bad(), max(self.bad(), default=None)
        row = 0
        while last is not None and last - row in bad:
            row += 1
        streak = sorted(bad)[len(bad) - row :]
        began = bad[streak[0]] if streak else -1
        status = {action: status for number, action, status in self.outcomes if number > began}
        rules = {name: self.steps_in_a_row(name) for name in "ab"}
        rules |= {f"{site}:{name}": self.results_in_a_row(site, name) for site in RESULTS for name in "ab"}
        return {
            "last": last,
            "consecutive": row,
            "climb": sum(not is_of_data(self.seen[bad[at]][1]) for at in streak),
            "without_effect": tuple(sorted(action for action, one in status.items() if one == "skipped")),
            "rules": {key: one for key, one in rules.items() if one is not None},
        }


class Reference:
    """All events, at their steps since the first fit. Replays and new fits begin new streaks; after
    replays those from before continue.
    """

    def __init__(self):
        self.fit = 0  # the steps of earlier fits
        self.now = None
        self.streaks = Streaks()
        self.outer = None  # the streaks from before the replays
        self.refused, self.done = [], []  # place; (place, action)

    def add(self, incident, rules):
        self.now = self.fit + incident.step
        self.streaks.seen.append((self.now, incident, rules))
        self.refused += [self.now] * incident.refused

    def replay(self):
        self.outer = self.outer or self.streaks
        self.streaks = Streaks()

    def end_replays(self):
        self.streaks, self.outer = self.outer, None

    def end_fit(self, steps):
        """Its last incident may be about a further step, so the next fit begins after that."""
        self.fit += steps + 1
        self.streaks, self.outer = Streaks(), None

    def state(self):
        places = {}
        for at, action in self.done:
            places[action] = (*places.get(action, ()), at)
        return PolicyState(
            earlier=self.fit,
            step=self.now,
            refused=tuple(sorted({*within(200, self.refused)})),
            action_steps={action: within(5000, all) for action, all in places.items()},
            **self.streaks.fields(),
        )

    def times(self, action):
        places = within(5000, [at for at, done in self.done if done == action])
        return sum(at > self.now - 5000 for at in places)


def within(window, places):
    """The places, in the order of time, until one that is a whole window later comes."""
    return tuple(at for n, at in enumerate(places) if all(later - at < window for later in places[n:]))


def in_order(state):
    return state.replaced(refused=tuple(sorted(state.refused)))


def drawn(draw, step):
    """Return an incident at a step, and the rules that match it."""
    sites = draw.sample(SITES, draw.choice((1, 1, 2))) if draw.random() < 0.7 else [draw.choice(RESULTS)]
    findings = tuple(Finding(site, draw.choice(("nonfinite", "nonfinite", *KINDS))) for site in sites)
    cause = draw.choice((None, None, "divergence", "input_nonfinite"))
    diagnosis = None if cause is None else Diagnosis(cause=cause)
    values = {"bad_at_start": 1.0} if draw.random() < 0.1 else {}
    incident = Incident(step, 0, 0, findings, draw.random() < 0.6, values, diagnosis)
    return incident, draw.sample("ab", draw.choice((0, 1, 1, 2)))


@pytest.mark.daily("0")
@pytest.mark.parametrize("seed", range(4))
def test_the_counts_are_those_of_all_events(seed):
    """Windows and streaks, after each incident, result, action, replay and new fit."""
    draw = random.Random(seed)
    for _ in range(60):
        state, reference, step, number, before, back = PolicyState(), Reference(), 0, 0, None, 0
        assert state.times("clip") == 0

        while number < 20:
            number, step = number + 1, step + draw.choice(GAPS)
            incident, rules = drawn(draw, step)
            reference.add(incident, rules)
            state = state.counted(incident, rules)
            assert in_order(state) == reference.state()
            for name in rules:
                site = next((site for site in RESULTS if site in incident.sites), "")
                streaks = reference.streaks
                found = streaks.results_in_a_row(site, name) if site else streaks.steps_in_a_row(name)
                assert state.in_a_row(name, incident) == found.consecutive
            assert all(state.times(action) == reference.times(action) for action in ("rollback", "clip"))
            actions = draw.choice(((), ("rollback",), ("rollback", "clip")))
            reference.done += [(reference.now, action) for action in actions]
            state = state.acted(actions)
            outcomes = {name: draw.choice(("done", "skipped")) for name in draw.sample(("clip", "rollback"), draw.choice((0, 1, 2)))}
            reference.streaks.outcomes += [(len(reference.streaks.seen), *outcome) for outcome in outcomes.items()]
            state = state.performed([Outcome(*outcome) for outcome in outcomes.items()])
            if draw.random() < 0.2:
                reference.streaks.seen.append((None, draw.choice(RESULTS), ()))
                state = state.with_good_result(reference.streaks.seen[-1][1])
            if draw.random() < 0.2:  # a rollback, also one of a replayed step
                before, back = (state, step) if before is None else (before, back)
                step -= min(step, draw.choice((0, 1, 3, 300)))
                reference.replay()
                state = state.with_streaks_of(PolicyState())
            elif before is not None and (step >= back or draw.random() < 0.3):
                state, before, step = state.with_streaks_of(before), None, max(step, back)
                reference.end_replays()
            if draw.random() < 0.1:
                steps = step + draw.choice((0, 1, 300, 6000))
                reference.end_fit(steps)
                state, before, step = state.after_fit(steps), None, 0
            assert in_order(state) == reference.state()


@pytest.mark.parametrize("name", ["earlier", "consecutive", "climb"])
def test_a_saved_count_is_not_negative(name):
    assert PolicyState(**{name: 0}) == PolicyState()
    with pytest.raises(PolicyError, match=f"{name}: expected greater than or equal to 0, received -1"):
        PolicyState(**{name: -1})
