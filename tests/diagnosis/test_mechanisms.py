"""Each failing mechanism is diagnosed with place and rows; without it nothing is reported."""

import json
from pathlib import Path

import mechanisms
import pytest
from support import zoo

from keras_nanguard import NanGuard, replay

NAMES = [pytest.param(n, marks=mechanisms.MARKS.get(n, ())) for n in mechanisms.PROGRAMS]


def fitted(case: mechanisms.Case, directory=None) -> NanGuard:
    guard = NanGuard(verbose=0, directory=directory, rules=[{"name": "seen", "after": 3, "do": "stop"}])
    try:
        case.train(guard)
    except Exception as error:  # noqa: BLE001  some faults end in an exception of the backend, after the incident
        guard.raised = error
    return guard


@pytest.mark.parametrize("name", NAMES)
def test_the_mechanism_is_named_at_once_and_from_its_bundle(name, tmp_path):
    if zoo.OLD and name == "activation_beyond_float16":
        pytest.skip("the lowest Keras casts in operations of their own, and the inputs are named instead of the layer")
    case = mechanisms.PROGRAMS[name](True)
    guard = fitted(case, tmp_path)
    check(case, guard)
    bundled = next((incident for incident in guard.incidents if incident.bundle), None)
    if bundled is not None:
        mode = json.loads((Path(bundled.bundle) / "bundle.json").read_text())["mode"]
        again = replay(bundled.bundle, case.model, mode=mode)
        again = again if again.result == "bad" else replay(bundled.bundle, case.model)
        for attribute in ("cause", "culprit", "samples"):
            assert getattr(again.diagnosis, attribute) == getattr(bundled.diagnosis, attribute)


def check(case, guard):
    if not case.causes:
        assert all(incident.diagnosis.cause == "unknown" or not incident.refused for incident in guard.incidents)
        return
    assert guard.incidents, getattr(guard, "raised", "no incident")
    reported = next((i for i in guard.incidents[:3] if i.diagnosis.cause in case.causes), guard.incidents[0])
    assert reported.diagnosis.cause in case.causes, reported.diagnosis.evidence
    assert case.culprit in reported.diagnosis.culprit
    if case.rows is not None:
        assert set(reported.diagnosis.samples) == set(case.rows)
    if case.step is not None:
        assert guard.incidents[0].step == case.step


@pytest.mark.parametrize("name", NAMES)
def test_the_healthy_twin_is_left_alone(name):
    guard = fitted(mechanisms.PROGRAMS[name](False))
    assert guard.incidents == []
    assert not hasattr(guard, "raised")
