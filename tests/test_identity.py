"""A healthy run is untouched, and a poisoned one ends as if the poison had not been there, whatever the program."""

from __future__ import annotations

import pytest
import zoo
from programs import PROGRAMS

BAD = (3, 8)
"""Where the poisoned batches stand."""

NORMAL = {
    *(("optimizer-adam", "graph"), ("optimizer-accumulation", "graph"), ("feed-pydataset", "graph")),
    *(("feed-sample-weight-bad", "graph"), ("model-many-inputs-outputs", "graph"), ("model-stateful-rnn", "graph")),
    *(("precision-mixed_float16", "graph"), ("step-gan", "graph"), ("step-conditional", "graph")),
    *(("model-subclassed", "eager"), ("step-own-loss", "eager"), ("optimizer-clipnorm", "eager")),
}
"""One of each kind for the normal run; all of them are a campaign."""

CASES = [
    pytest.param(name, mode, marks=() if (name, mode) in NORMAL else pytest.mark.slow)
    for name in PROGRAMS
    for mode in ("graph", "eager")
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_program(name, mode):
    """A guarded run leaves the same bits behind as an unguarded one, and so does one with poisoned batches put in."""
    program = PROGRAMS[name]
    oracle = program.run(program.data(), None, mode)
    healthy = program.run(program.data(), True, mode)
    assert zoo.differences(healthy, oracle) == []
    assert healthy.guard.incidents == [] and healthy.guard.session.refused == 0
    assert "refused_steps" not in healthy.history
    poisoned = program.run(program.data().with_poison(BAD, where=program.where), True, mode)
    assert zoo.differences(poisoned, oracle) == []
    epoch = program.data().batches + len(BAD)
    assert poisoned.steps == [*BAD, *(epoch + batch for batch in BAD)]
    assert zoo.bad_entries(poisoned.model) == []


def test_the_normal_run_names_programs():
    """Every case chosen for the normal run is there."""
    assert {name for name, _ in NORMAL} <= set(PROGRAMS)
