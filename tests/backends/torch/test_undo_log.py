"""The undo log alone: all writes while it is active can be undone."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from support.torch_steps import DeviceGenerator

from keras_nanguard._backends import current
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.watching import RECORDED_WRITES

VALUES = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def values(of):
    return np.array(of.value.detach() if isinstance(of, keras.Variable) else of.detach())


def test_writes_to_kept_tensors_are_undone():
    """In place, outside of Keras; a tensor without writes is not written by the log."""
    changed, same = torch.tensor(VALUES), torch.tensor(VALUES)
    log = UndoLog([changed, same, changed])
    before = same._version
    changed.mul_(2.0)
    assert [id(t) for t in log.written] == [id(changed)]
    log.give_back()
    np.testing.assert_array_equal(values(changed), VALUES)
    assert same._version == before


@pytest.mark.parametrize("how", ["uncounted", "replay"])
def test_writes_that_torch_does_not_count_are_undone(how):
    """A write through NumPy, which shares the memory, like writes of running statistics by torch's
    own layers.
    """
    tensor = torch.tensor(VALUES)
    log = UndoLog((), [tensor]) if how == "uncounted" else UndoLog([tensor], is_replay=True)
    tensor.numpy()[:] = 0.0
    assert [id(t) for t in log.written] == ([id(tensor)] if how == "uncounted" else [])
    log.give_back()
    np.testing.assert_array_equal(values(tensor), VALUES)


@pytest.mark.parametrize("shape", [(2, 3), (3, 1), (1, 3), (2, 1, 3), (1, 1)])
def test_a_tensor_whose_memory_is_shared_within_it_is_given_back(shape):
    """PyTorch cannot write into an expanded tensor: its memory is written once, along every
    repeated dimension.
    """
    for base in (torch.full((1,) * len(shape), 4.0), torch.arange(1.0, shape[-1] + 1.0)):
        expanded = base.expand(shape)
        before = values(expanded)
        log = UndoLog([expanded], is_replay=True)
        base.mul_(-3.0)
        log.give_back()
        np.testing.assert_array_equal(values(expanded), before)


def test_a_tensor_that_is_resized_is_given_back():
    tensor, empty = torch.tensor(VALUES), torch.empty(0)
    log = UndoLog(())
    for each in (tensor, empty):
        log.keep_outside(each)
        each.resize_(3, 3).fill_(7.0)
    log.give_back()
    np.testing.assert_array_equal(values(tensor), VALUES)
    assert empty.shape == (0,)


def test_a_tensor_without_strides_is_given_back():
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,)).coalesce()
    log = UndoLog([sparse], is_replay=True)
    sparse.mul_(5.0)
    log.give_back()
    np.testing.assert_array_equal(values(sparse.to_dense()), [1.0, 2.0, 0.0])


def test_a_variable_without_memory_has_nothing_to_be_kept():
    with keras.device("meta"):
        variable = keras.Variable(VALUES)
    log = UndoLog(())
    log.note(variable)
    log.note_created(variable)
    assert log.kept == {} and log.created == []


def test_a_variable_that_was_kept_is_still_known_to_be_written():
    """Its earlier value is already stored; the log also has to know its variable."""
    variable = keras.Variable(VALUES)
    log = UndoLog([variable.value])
    with RECORDED_WRITES.entered(log):
        variable.assign(np.zeros((2, 3), "float32"))
    assert [*log.kept] == [*log.writers] and [*log.writers.values()] == [variable] and log.created == []
    log.give_back()
    np.testing.assert_array_equal(values(variable), VALUES)


@pytest.fixture
def devices(monkeypatch):
    """The generators of two devices that are in use."""
    generators = DeviceGenerator(1), DeviceGenerator(2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    return generators


@pytest.mark.parametrize("started", [False, True])
def test_generators_of_devices(monkeypatch, devices, started):
    """Those of all devices too, once there are any; reading them does not start one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    log = UndoLog(())
    for generator in devices:
        generator.draw()
    log.give_back()
    assert [generator.offset for generator in devices] == [0 if started else 4] * 2


def test_the_host_reads_writes_and_advances_the_generators_of_devices(devices):
    """Of another number of devices it writes those that there are."""
    host, (one, other) = current.host(), devices
    one.draw()
    both = host.generator_state()
    numbers = torch.rand(3)
    host.advance_generator()
    assert (one.offset, other.offset) == (8, 4)
    host.set_generator_state(both)
    assert (one.offset, other.offset) == (4, 0) and torch.equal(torch.rand(3), numbers)
    other.seed = 9
    host.set_generator_state(both[:-16])
    assert (one.offset, other.seed) == (4, 9)
    torch.cuda.default_generators = (other,)
    host.set_generator_state(both)
    assert (other.seed, other.offset) == (1, 4)


def test_a_dtype_without_bits_is_given_back():
    """Torch does not count a write through `.data`, and no integer dtype has 16 bytes."""
    tensor = torch.ones(2, dtype=torch.complex128)
    log = UndoLog([tensor])
    tensor.data.mul_(2.0)
    log.give_back()
    assert torch.equal(tensor, torch.ones(2, dtype=torch.complex128))
