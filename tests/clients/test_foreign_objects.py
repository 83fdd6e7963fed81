"""Custom objects in a model, an optimizer or a batch, which the guard must not affect."""

import random

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, diagnose


def same_as_plain(build, epochs=2):
    """Train plain and guarded; both end alike, and the guard has no incident."""
    guard = NanGuard(verbose=0)
    runs = [zoo.run(build, zoo.regression(), guard=one, epochs=epochs) for one in (None, guard)]
    assert zoo.differences(*runs, tolerance=1e-5) == []
    assert guard.incidents == []


class Environment:
    """Like environments of reinforcement learning before their first reset."""

    read = 0

    @property
    def state(self):
        Environment.read += 1
        raise RuntimeError("call reset first")


class NoAttributes:
    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.parametrize("helper", [Environment(), [NoAttributes()], {"env": Environment()}])
def test_attributes_whose_properties_raise(helper):
    def build():
        model = zoo.plain()
        object.__setattr__(model, "helper", helper)
        return model

    same_as_plain(build)
    assert Environment.read == 0


@pytest.mark.parametrize("inputs", [keras.layers.ReLU(), [keras.layers.ReLU()], 5], ids=["layer", "list", "number"])
def test_an_attribute_that_has_the_name_of_one_of_keras(inputs, tmp_path):
    """Only functional models have their inputs in it."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inputs, self.dense = inputs, keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    model, guard = Own(), NanGuard(verbose=0, directory=tmp_path)
    model.compile("sgd", "mse")
    zoo.fit(model, zoo.poison(zoo.regression(), 2), guard)
    (incident,) = guard.incidents
    assert (incident.diagnosis.cause, incident.diagnosis.culprit) == ("input_nonfinite", "inputs")
    assert incident.bundle and diagnose(model, zoo.regression().x).ok


class Counting:
    """A rate that falls with each call."""

    calls = 0

    def __call__(self):
        self.calls += 1
        return 0.01 / self.calls


@pytest.mark.parametrize("rate", [Counting, lambda: lambda: 10.0 ** random.uniform(-4.0, -2.0)])
def test_a_rate_that_changes_when_it_is_read(rate):
    """In a healthy run the guard does not read a rate that is a custom function."""
    if zoo.BACKEND == "tensorflow":
        pytest.skip("Keras reads it while tracing, and traces a step twice where the guard traces it once")
    same_as_plain(lambda: zoo.plain(keras.optimizers.SGD(rate())))


@pytest.mark.requires_backend("tensorflow", reason="only there the rate is a constant of the compiled step")
def test_a_rate_that_is_read_while_tracing():
    """The guard reads a rate that is a custom function no more often than Keras."""
    rates = []

    def build():
        rates.append(Counting())
        return zoo.plain(keras.optimizers.SGD(rates[-1]))

    for guard in (None, NanGuard(verbose=0)):
        zoo.run(build, zoo.regression(), guard=guard)
    plain, guarded = (rate.calls for rate in rates)
    assert 1 <= guarded <= plain


class Other(keras.Model):
    """Trains on `x` of its batches, which may contain anything else."""

    def __init__(self):
        super().__init__()
        self.inner, self.mean = keras.layers.Dense(1), keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.mean]

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        import torch

        (batch,) = data
        self.zero_grad()
        loss = keras.ops.mean(self.inner(torch.as_tensor(batch["x"])) ** 2)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights], self.trainable_weights)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


@pytest.mark.requires_backend("torch", reason="other backends train only on tensors")
@pytest.mark.parametrize(
    "more",
    [
        np.array(["a", "b"]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.zeros((0, 3)),
        None,
        object(),
        {"name": "a"},
    ],
    ids=lambda value: getattr(getattr(value, "dtype", None), "name", type(value).__name__),
)
def test_batches_with_more_than_numbers(more):
    """A bad step is refused and explained, also if the batch contains more than numbers."""
    import torch

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            for number in range(4):
                x = np.ones((8, 3), "float32")
                x[5] = np.nan if number == 2 else 1.0
                yield ({"x": torch.from_numpy(x), "more": more},)

    model = Other()
    model(np.zeros((1, 3), "float32"))
    model.compile("adam")
    guard = NanGuard(verbose=0)
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None, collate_fn=lambda batch: batch)
    model.fit(loader, verbose=0, callbacks=[guard])
    (incident,) = guard.incidents
    assert incident.step == 2 and zoo.bad_entries(model) == []
    assert incident.diagnosis.cause == "input_nonfinite" and incident.diagnosis.samples == (5,)


@pytest.mark.requires_backend("torch", reason="`torch.inference_mode`")
@pytest.mark.parametrize("bad", [False, True])
def test_tensors_of_inference_mode(bad):
    """A teacher's targets, a tensor in an attribute: torch counts no writes to them."""
    import torch

    data = zoo.regression(batches=4)

    def batches():
        for number in range(4):
            x = torch.from_numpy(data.x[number * zoo.BATCH : (number + 1) * zoo.BATCH])
            with torch.inference_mode():
                y = x.sum(1, keepdim=True)
                y = y * np.nan if bad and number == 2 else y
            yield x, y

    weights = []
    for guard in (None, NanGuard(verbose=0)):
        keras.utils.set_random_seed(0)
        model = zoo.plain(dropout=False)
        with torch.inference_mode():
            model.layers[0].means = torch.ones(3)
        if guard is not None or not bad:
            model.fit(batches(), verbose=0, callbacks=[guard] if guard is not None else [])
        weights.append(model.get_weights())
    assert zoo.bad_entries(model) == []
    if bad:
        assert [i.diagnosis.cause for i in guard.incidents] == ["target_nonfinite"]
    else:
        assert guard.incidents == [] and all(map(np.array_equal, *weights))
