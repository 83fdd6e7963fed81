"""Bad use gets an error that says what was expected, what was received and what to do."""

from __future__ import annotations

import keras
import pytest
import zoo

from keras_nanguard import NanGuard
from keras_nanguard._errors import GuardError, GuardInUseError, NanGuardError, PolicyError


def test_unknown_preset():
    """An unknown preset is told with the nearest known one."""
    with pytest.raises(PolicyError, match="recover"):
        NanGuard("recovr")


@pytest.mark.parametrize("policy", [3, None, 1.5, ["recover"], object()])
def test_policy_of_the_wrong_type(policy):
    """A policy that is neither name, path, dict nor Policy is refused with what it may be."""
    with pytest.raises(PolicyError, match=r"(?i)expected"):
        NanGuard(policy)


def test_unknown_override():
    """A section that no policy has is refused, with every fault at once."""
    with pytest.raises(PolicyError) as error:
        NanGuard(snapshots={"every": 5}, checks={"lss": True})
    assert len(error.value.faults) == 2


@pytest.mark.parametrize("verbose", [-1, 3, "loud"])
def test_verbose(verbose):
    """`verbose` is 0, 1 or 2."""
    with pytest.raises(GuardError, match=r"Expected verbose.*Received"):
        NanGuard(verbose=verbose)


def test_model_without_optimizer():
    """A model without an optimizer is refused before its first step, and the guard is off again."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizer=None, loss="mse")
    data = zoo.regression(batches=1)
    with pytest.raises(GuardError, match=r"Expected a model with an optimizer.*Received.*compile"):
        model.fit(data.x, data.y, verbose=0, callbacks=[NanGuard(verbose=0)])


def test_model_not_compiled():
    """A model that is not compiled is refused, by Keras in `fit` and by the guard where Keras does not look."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    guard = NanGuard(verbose=0)
    guard.set_model(model)
    with pytest.raises(GuardError, match=r"Expected a compiled model.*Received.*compile"):
        model.make_train_function()
    with pytest.raises(ValueError, match="compile"):
        model.fit(zoo.draw(batches=1), zoo.draw(batches=1)[:, :1], verbose=0, callbacks=[NanGuard(verbose=0)])


def test_loop_without_watch():
    """A step outside of `watch` says where it belongs."""
    guard = NanGuard(verbose=0)
    with pytest.raises(GuardError, match=r"with guard\.watch"):
        guard.step(lambda: None)()


def test_watch_without_optimizer():
    """`watch` needs an optimizer, of its own or of the model."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    with pytest.raises(GuardError, match="optimizer"), NanGuard(verbose=0).watch(model):
        pass


def test_watch_twice():
    """One guard watches one loop at a time."""
    model, guard = zoo.plain(), NanGuard(verbose=0)
    with guard.watch(model), pytest.raises(GuardInUseError, match="one"), guard.watch(model):
        pass


def test_report_of_unknown_ending(tmp_path):
    """A report is .json, .jsonl or .md, and another ending writes nothing."""
    with pytest.raises(GuardError, match="json"):
        NanGuard(verbose=0).report(tmp_path / "report.xlsx")
    assert list(tmp_path.iterdir()) == []


def test_one_base_class():
    """Every error of the library is a NanGuardError, and a built-in one that fits."""
    assert issubclass(GuardError, (NanGuardError, ValueError)) and issubclass(PolicyError, ValueError)
