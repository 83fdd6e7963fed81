"""A healthy run equals the plain one, and a bad batch changes nothing."""


import numpy as np
import pytest
from support import libraries, zoo

from keras_nanguard import NanGuard

pytestmark = pytest.mark.slow


def different(one, other):
    return [path for (path, value), (_, found) in zip(one, other, strict=True) if not np.array_equal(value, found)]


@pytest.mark.parametrize("name", list(libraries.LIBRARIES))
def test_plain_is_guarded_and_a_bad_batch_leaves_nothing(name):
    """Same history and state, no incident; the same state if a bad batch follows."""
    library = libraries.LIBRARIES[name]
    pytest.importorskip(library.package, exc_type=ImportError, reason=f"{library.package} does not import here")
    with zoo.as_written():
        plain, state = library.train()
        guard, other = (NanGuard(verbose=0, diagnose=False) for _ in range(2))
        history, guarded = library.train(guard)
        bad, after = library.train(other, bad=True)
    assert guard.incidents == [] and zoo.plain_logs(history) == plain and different(state, guarded) == []
    assert [incident.batch for incident in other.incidents] == [libraries.GOOD] and bad["refused_steps"] == [1]
    assert different(state, after) == []
