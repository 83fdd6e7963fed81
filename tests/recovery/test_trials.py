"""A trial of another way is undone whole: variables of any kind, rates, counts."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import optimizers
from support import zoo
from support.programs import PROGRAMS

from keras_nanguard import NanGuard
from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.learning_rates import Rate

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((256, 4)).astype("float32"), RNG.standard_normal((256, 1)).astype("float32")


class Trial(keras.callbacks.Callback):
    """Tries the steps so far with a tenth of the learning rate."""

    def __init__(self, guard, step):
        super().__init__()
        self.guard, self.step, self.found = guard, step, []

    def on_train_batch_end(self, batch, logs=None):
        session = self.guard.session
        if session.step == self.step:
            self.found.append(session.try_again(session.ring.start, 0.1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("model-unlisted-state", marks=pytest.mark.requires_backend("tensorflow", "torch", reason="a pure step cannot")),
        "precision-mixed_float16",
        "optimizer-adam",
    ],
)
def test_undone_whole(name):
    """After a trial the run ends as if there had been none: variables that no list of Keras has, loss scales and slots included."""
    program = PROGRAMS[name]
    data, ends = program.data(), []
    for tries in (False, True):
        guard = NanGuard(verbose=0)
        trial = Trial(guard, 10 if tries else -1)
        ends.append(zoo.run(lambda: program.build(), data, guard=guard, callbacks=[trial], epochs=1))
        assert [level is not None for level in trial.found] == [True] * tries
    assert zoo.differences(*ends) == []
    calls = [getattr(end.model, "calls", None) for end in ends]
    assert calls[0] is None or float(calls[0]) == float(calls[1]) == data.batches


def test_none_where_the_policy_refuses_nothing():
    """Steps are run again only where a bad one of them would be refused again."""
    guard = NanGuard({"preset": "recover", "version": 1, "refuse": False}, verbose=0)
    trial = Trial(guard, 10)
    zoo.run(zoo.plain, zoo.regression(), guard=guard, callbacks=[trial], epochs=1)
    assert trial.found == [None]


def test_rates_are_given_back():
    """A plain rate, and its limit, after a trial: exactly those from before."""
    optimizer = optimizers.SGD(0.3)
    rate = Rate(optimizer)
    rate.limit_to(0.5)
    with rate.tried(0.1):
        assert rate.value == pytest.approx(0.03) and rate.limit == pytest.approx(0.05)
    assert rate.value == np.float32(0.3) and rate.limit == 0.5


@pytest.mark.requires_backend("torch", reason="optimizers of torch")
def test_rates_of_the_groups_of_torch():
    """Each group keeps its own, also where the first does not learn."""
    import torch

    from keras_nanguard._backends.torch.modules import TorchOptimizer

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.0, 0.3, 0.07))])
    rate = Rate(TorchOptimizer(optimizer, {}))
    with rate.tried(0.1):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0, 0.03, 0.007])
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.3, 0.07]


def test_counts_return_by_steps():
    """What is run again or left out counts for its epoch only where it is of that epoch."""
    counts = Counts()
    counts.step, counts.committed = 10, 8
    counts.refuse(2)
    counts.begin_epoch(1)
    counts.step = 15
    counts.refuse(1)
    counts.return_to(5, 5, again={6, 12}, left_out={7, 13, 14})
    assert (counts.step, counts.committed, counts.refused, counts.epoch_refused) == (5, 5, 3 + 3 - 2, 1 + 2 - 1)
