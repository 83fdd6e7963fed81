"""The update of a TensorFlow step as values: which updates there are some of, and that they are the update's own bits."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import zoo

from keras_nanguard import NanGuard

if keras.backend.backend() != "tensorflow":
    pytest.skip("the backend is not TensorFlow", allow_module_level=True)

import tensorflow as tf

from keras_nanguard._step import _draft

optimizers = keras.optimizers


def _warmed_up():
    return optimizers.schedules.CosineDecay(0.05, 40, warmup_target=0.08, warmup_steps=6)


AS_VALUES = {
    "SGD": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, global_clipnorm=0.5),
    "schedule": lambda: optimizers.SGD(_warmed_up(), clipnorm=1.0),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True, clipvalue=0.1),
    "EMA": lambda: optimizers.AdamW(0.01, use_ema=True),
    "RMSprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Adagrad": optimizers.Adagrad,
    "Adadelta": optimizers.Adadelta,
    "Adamax": optimizers.Adamax,
    "Nadam": optimizers.Nadam,
    "Ftrl": optimizers.Ftrl,
    "Lion": optimizers.Lion,
    "Lamb": optimizers.Lamb,
    "Adafactor": optimizers.Adafactor,
    "Muon": getattr(optimizers, "Muon", optimizers.Lamb),
}
AS_IT_IS = {
    "writes in a conditional": lambda: optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3),
    "accumulates": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 64.0, 5),
}


@pytest.fixture
def drafts(monkeypatch):
    """What became of each update that was traced."""
    made, real = [], _draft.drafted

    def drafted(update, written):
        made.append(real(update, written))
        return made[-1]

    monkeypatch.setattr(_draft, "drafted", drafted)
    return made


def network(optimizer):
    """Return a model whose update has a constraint in it, too."""
    limit = keras.constraints.MaxNorm(0.7)
    body = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    model = keras.Sequential([*body, keras.layers.Dropout(0.2), keras.layers.Dense(1, kernel_constraint=limit)])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("name", [*AS_VALUES, *AS_IT_IS])
def test_the_same_bits(drafts, name):
    """Guarded with bad batches put in, the run ends as the plain one without them, whichever way the update takes."""
    make, data = {**AS_VALUES, **AS_IT_IS}[name], zoo.regression()
    plain = zoo.run(lambda: network(make()), data)
    bad = zoo.run(lambda: network(make()), data.with_poison((2, 5)), guard=True)
    assert zoo.differences(bad, plain) == []
    assert bad.guard.session.refused == 4
    assert drafts and all((draft is not None) is (name in AS_VALUES) for draft in drafts)


@pytest.mark.parametrize("name", ["Adam", "accumulates"])
def test_what_was_not_written_is_not_found_bad(name):
    """The values that a refused update would have written are no state, and nothing is told of them."""
    make = {**AS_VALUES, **AS_IT_IS}[name]
    run = zoo.run(lambda: network(make()), zoo.regression().with_poison((2,)), guard=True, epochs=1)
    (incident,) = run.guard.incidents
    assert incident.refused and {f.site for f in incident.findings}.isdisjoint({"weights", "slots"})


def test_scattered_writes_stay_as_they_are(drafts):
    """A table of which a step writes a few rows is not written anew."""

    def build():
        model = keras.Sequential([keras.Input((6,), dtype="int32"), keras.layers.Embedding(20, 4), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        model.compile(optimizers.SGD(0.05), "mse")
        return model

    source = zoo.regression()
    data = zoo.Data((np.abs(source.x * 5) % 20).astype("int32"), source.y)
    assert zoo.differences(zoo.run(build, data, guard=True), zoo.run(build, data)) == []
    assert drafts == [None] * len(drafts) != []


class Twice(optimizers.SGD):
    """Reads what it has just written, writes one variable more than once, and one with what another is given."""

    def build(self, variables):
        super().build(variables)
        self.seen = [self.add_variable_from_reference(v, name="seen") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        seen = self.seen[self._get_variable_index(variable)]
        self.assign_sub(variable, learning_rate * gradient)
        self.assign(seen, keras.ops.convert_to_tensor(variable) * 2)
        self.assign_add(variable, 0.01 * (seen - variable))
        self.assign(seen, variable)


def test_reads_what_it_wrote(drafts):
    """The program's order is kept, and variables that were given one value do not share it afterwards."""
    data = zoo.regression()
    plain = zoo.run(lambda: network(Twice(0.05)), data)
    run = zoo.run(lambda: network(Twice(0.05)), data.with_poison((2,)), guard=True)
    assert zoo.differences(run, plain) == [] and None not in drafts
    weight, seen = run.model.trainable_variables[0], run.model.optimizer.seen[0]
    before = np.array(seen.value)
    np.testing.assert_array_equal(before, np.array(weight.value))
    weight.value.assign_add(tf.ones_like(weight.value))
    np.testing.assert_array_equal(before, np.array(seen.value))


def test_large_updates_wait(drafts, monkeypatch):
    """Beyond a limit memory matters more than time."""
    monkeypatch.setattr(_draft, "MOST_BYTES", 64)
    data = zoo.regression()
    run = zoo.run(lambda: network(optimizers.Adam(0.01)), data.with_poison((2,)), guard=True)
    assert zoo.differences(run, zoo.run(lambda: network(optimizers.Adam(0.01)), data)) == []
    assert drafts == [None] * len(drafts) != []


def test_its_functions_live_on():
    """What the update calls stays there while the step does: also for the next fit, which is not traced again."""
    model, data, guard = network(optimizers.SGD(_warmed_up())), zoo.regression(), NanGuard(verbose=0)
    for _ in range(2):
        model.fit(data.x, data.y, batch_size=8, verbose=0, callbacks=[guard])
        gc.collect()
    assert guard.incidents == [] and np.isfinite(model.evaluate(data.x, data.y, verbose=0))
