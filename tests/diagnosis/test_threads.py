"""Diagnoses in several threads do not affect each other, and other threads are not observed."""

import threading

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard
from keras_nanguard._backends.shared.replay import preserved


def in_thread(work):
    """Run a function in another thread until it has ended; return its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


def test_replays_run_one_after_the_other():
    """A second thread waits with its replay until the first has restored everything."""
    order, waiting = [], threading.Event()

    def other():
        waiting.set()
        with preserved([]):
            order.append("second")

    thread = threading.Thread(target=other)
    with preserved([]):
        thread.start()
        waiting.wait()
        thread.join(0.2)  # too short for the other one only if there is no lock
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.requires_backend("torch", reason="the optimizers are those of PyTorch")
def test_a_diagnosis_leaves_the_other_threads_alone():
    """The replaced losses and restored optimizers of a diagnosis are those of its own fit."""
    import torch

    from keras_nanguard._backends.torch.optimizers import TorchOptimizer
    from keras_nanguard._backends.torch.replay import Replay

    modules = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    optimizers = [TorchOptimizer(torch.optim.Adam(m.parameters()), {}) for m in modules]
    real = torch.nn.functional.binary_cross_entropy
    bad = torch.tensor([float("nan")])

    def step(place):
        modules[place](torch.ones(1, 2)).sum().backward()
        optimizers[place].of.step()

    def other():
        step(1)
        with pytest.raises(RuntimeError):
            torch.nn.functional.binary_cross_entropy(bad, torch.ones(1))
        return [float(slots["step"]) for slots in optimizers[1].of.state.values()]

    step(0)
    with preserved(list(modules[0].parameters()), None, optimizers[:1]), Replay().intercepted(None, [], False):
        assert torch.isnan(torch.nn.functional.binary_cross_entropy(bad, torch.ones(1)))
        step(0)
        assert in_thread(other) == [1.0, 1.0]
    assert [float(slots["step"]) for slots in optimizers[0].of.state.values()] == [1.0, 1.0]
    assert [float(slots["step"]) for slots in optimizers[1].of.state.values()] == [1.0, 1.0]
    assert torch.nn.functional.binary_cross_entropy is real


@pytest.mark.parametrize("by_hand", [False, True])
def test_arrays_of_numpy_given_to_train_on_batch(by_hand):
    """A batch that stays a NumPy array until the step is found by its values."""
    from keras_nanguard import NanGuardModel

    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    y = x.sum(1, keepdims=True)
    x[5, 1] = np.nan
    keras.utils.set_random_seed(0)
    inputs = keras.Input((2,))
    outputs = layers.Dense(1)(layers.Dense(4, "relu")(inputs))
    model = (keras.Model if by_hand else NanGuardModel)(inputs, outputs)
    model.compile("sgd", "mse")
    guard = NanGuard(verbose=0) if by_hand else model.nanguard
    if by_hand:
        guard.set_params({"epochs": 1, "steps": 1, "verbose": 0})
        guard.set_model(model)
        guard.on_train_begin()
        guard.on_epoch_begin(0)
    model.train_on_batch(x, y)
    model.train_on_batch(x[:5], y[:5])
    if by_hand:
        guard.on_epoch_end(0, {})
        guard.on_train_end()
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "input_nonfinite"
    assert incident.diagnosis.samples == (5,)
