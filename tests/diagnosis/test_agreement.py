"""The rows of a bad batch in the findings of several processes.

Here one process plays both: its messages come back as those of the other one, too. Real processes
are in `tests/backends/jax/test_processes.py` and `tests/backends/torch/test_processes.py`.
"""

import keras
import numpy as np
import pytest

from keras_nanguard import NanGuard
from keras_nanguard._backends import processes
from keras_nanguard._fit.agreement import Agreement

ROW, RANK = 5, 1


class Second(Agreement):
    """The agreement of the second of two processes."""

    def __init__(self, together=False):
        super().__init__(together)
        self.rank, self.count = RANK, 2


def fitted(names):
    keras.utils.set_random_seed(0)
    inputs = [keras.Input((4,), name=name) for name in names]
    both = keras.layers.Concatenate()(inputs) if len(inputs) > 1 else inputs[0]
    model = keras.Model(inputs if len(inputs) > 1 else inputs[0], keras.layers.Dense(1)(both))
    model.compile("sgd", "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((8, 4)).astype("float32") for _ in names]
    x[-1][ROW, 2] = np.nan
    guard = NanGuard(verbose=0)
    x = x if len(x) > 1 else x[0]
    model.fit(x, np.ones((8, 1)), batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
    return guard


@pytest.mark.requires_backend("tensorflow", reason="the others ask their own processes as well")
@pytest.mark.parametrize(
    ("names", "place"),
    [([None], "x"), (["features"], "x/features"), (["first", "second"], "x/second")],
    ids=["without a name", "one name", "two names"],
)
def test_findings_name_process_and_row(names, place, monkeypatch):
    monkeypatch.setattr(processes, "exchange", lambda value, what: [value, value])
    monkeypatch.setattr("keras_nanguard._fit.run.Agreement", Second)
    incident = fitted(names).incidents[0]
    assert incident.findings[0].path == f"rank {RANK}: {place}, row {ROW}"
