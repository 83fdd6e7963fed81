"""Steps compiled by `torch.compile`: of a Keras trainer with `jit_compile=True`, and hand-written
ones.
"""

from __future__ import annotations

import contextlib

import keras
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

BAD = (1, 4, 8)
EPOCHS = 2
STEADY = 6
"""Number of steps after which nothing may be compiled again."""

COMPILED: list[bool] = []
"""An entry for each compiled step."""


@torch.compiler.disable
def note():
    COMPILED.append(True)


class Noted(layers.Layer):
    """Records the steps that torch's compiler has traced."""

    def call(self, x):
        if torch.compiler.is_compiling():
            note()
        return x


class Steady(keras.callbacks.Callback):
    """Makes torch raise if it would compile again."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == STEADY:
            torch.compiler.set_stance("fail_on_recompile")


@pytest.fixture
def steady():
    yield Steady()
    torch.compiler.set_stance("default")


class Hidden:
    """Has a variable that no list of Keras contains."""

    def __init__(self):
        self.sum = keras.Variable(0.0, trainable=False)


class OwnStep(keras.Model):
    """Continues after its update, and adds up its loss in such a variable."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.average = keras.metrics.Mean(name="average")
        self.hidden = Hidden()

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_variables]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_variables)
            self.hidden.sum.assign(self.hidden.sum + loss)
            self.average.update_state(self.trainable_variables[0])
        return {"loss": loss, "average": self.average.result()}


def network(kind=keras.Model, optimizer=None):
    def build(**mode):
        inputs = keras.Input((6,))
        x = layers.BatchNormalization()(layers.Dense(8, use_bias=False)(Noted()(inputs)))
        model = kind(inputs, layers.Dense(1, dtype="float32")(layers.Dropout(0.2, seed=3)(x)))
        model.compile(optimizer() if optimizer else keras.optimizers.Adam(0.01), "mse", **mode)
        return model

    return build


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)


CASES = {
    "keras": (network(), "float32"),
    "half precision": (network(optimizer=scaled), "mixed_float16"),
    "own step": (network(OwnStep), "float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_bad_batch_never_happened(name, steady):
    """A compiled guarded fit ends like one without the bad batches, and is compiled once."""
    build, policy = CASES[name]
    data, guard = zoo.regression().with_poison(BAD), NanGuard(verbose=0)
    keras.config.set_dtype_policy(policy)
    COMPILED.clear()
    guarded = zoo.run(lambda: build(jit_compile=True), data, guard=guard, epochs=EPOCHS, callbacks=[steady])
    assert len(COMPILED) >= STEADY and steady.steps > STEADY
    torch.compiler.set_stance("default")
    assert zoo.bad_entries(zoo.run(build, data, epochs=EPOCHS).model), "the poison does nothing to Keras"
    without = zoo.run(build, data.without(BAD), epochs=EPOCHS)
    assert zoo.differences(guarded, without, 1e-3 if policy == "mixed_float16" else 1e-5) == []
    if name == "own step":
        assert float(guarded.model.hidden.sum.value) == pytest.approx(float(without.model.hidden.sum.value), rel=1e-5)
    assert [i.step for i in guard.incidents] == [epoch * (zoo.BATCHES + len(BAD)) + bad for epoch in range(EPOCHS) for bad in BAD]
    assert all(i.refused and i.diagnosis.cause == "input_nonfinite" for i in guard.incidents)


@pytest.mark.slow
def test_a_healthy_compiled_fit_equals_that_of_keras():
    """On clean data the guarded fit ends like the compiled fit of Keras."""
    guard = NanGuard(verbose=0)
    guarded = zoo.run(lambda: network()(jit_compile=True), zoo.regression(), guard=guard, epochs=EPOCHS)
    assert zoo.differences(guarded, zoo.run(lambda: network()(jit_compile=True), zoo.regression(), epochs=EPOCHS), 1e-5) == []
    assert guard.incidents == []


@pytest.mark.slow
def test_the_next_fit_compiles_nothing(steady):
    """A guarded step is compiled once for all fits, like Keras' own, until `compile` is called."""
    model, data = network()(jit_compile=True), zoo.regression()
    fit = {"batch_size": zoo.BATCH, "verbose": 0, "shuffle": False}
    model.fit(*data.all, callbacks=[NanGuard(verbose=0)], **fit)
    torch.compiler.set_stance("fail_on_recompile")
    for _ in range(2):
        COMPILED.clear()
        model.fit(*data.all, callbacks=[NanGuard(verbose=0)], **fit)
        assert len(COMPILED) > STEADY
    torch.compiler.set_stance("default")


@pytest.mark.slow
def test_a_model_that_is_guarded_for_good():
    """`NanGuardModel` compiles its step, too."""
    model = network(NanGuardModel)(jit_compile=True)
    data = zoo.regression().with_poison(BAD)
    COMPILED.clear()
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, shuffle=False)
    assert len(COMPILED) >= STEADY and zoo.bad_entries(model) == [] and [i.step for i in model.nanguard.incidents] == list(BAD)


def test_a_loop():
    """A compiled hand-written step is compiled again with the code of the guard."""
    data = zoo.regression().with_poison(BAD)

    def trained(guard, left_out=()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            if torch.compiler.is_compiling():
                note()
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss

        with guard.watch(model, optimizer) if guard is not None else contextlib.nullcontext():
            run = guard.step(torch.compile(step)) if guard is not None else step
            parts = (torch.as_tensor(part).split(zoo.BATCH) for part in (data.x, data.y))
            for batch, (x, y) in enumerate(zip(*parts)):
                if batch not in left_out:
                    run(x, y)
        return model.state_dict()

    guard = NanGuard(verbose=0)
    COMPILED.clear()
    guarded = trained(guard)
    assert len(COMPILED) >= STEADY
    without = trained(None, BAD)
    for name, value in guarded.items():
        torch.testing.assert_close(value, without[name], rtol=1e-5, atol=1e-6)
    assert [i.step for i in guard.incidents] == list(BAD) and all(i.refused for i in guard.incidents)
