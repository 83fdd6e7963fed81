"""The batches before an incident: correct, in order, in every mode, and limited in memory.

The oracle is training itself: from an earlier snapshot, stock Keras trained on the remembered
batches must reach the weights of the model before the refused step.
"""

from __future__ import annotations

import types
from typing import NamedTuple

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.steps import bytes_of
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard.testing import inject

BACKEND = keras.backend.backend()
BATCH = 8
LOOK = {"name": "look", "do": {"call": {"function": "look"}}}

MODES = {"eager": {"run_eagerly": True}, "xla": {"jit_compile": True}}
if BACKEND == "jax":  # where a step is compiled by XLA or not at all
    MODES["four steps in one"] = {"jit_compile": True, "steps_per_execution": 4}
if BACKEND == "tensorflow":  # which remembers no batches of several steps per execution
    MODES["compiled"] = {"jit_compile": False}
if BACKEND == "torch":
    MODES = {"torch": {"jit_compile": False}}
PLAIN = {"jit_compile": BACKEND == "jax"}
"""How most tests compile: not at all on JAX would take longest, and XLA on TensorFlow rounds otherwise."""

DAILY = ("compiled",) if BACKEND == "tensorflow" else ("torch", "xla")
"""Modes of the normal run. On TensorFlow the host takes the batches in the same way with XLA."""


def network(**compile_):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", **compile_)
    return model


def data(count=96):
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 4)).astype("float32"), rng.standard_normal((count, 1)).astype("float32")


class Known(NamedTuple):
    """What is known at a refused step.

    Attributes:
        snapshot: the newest snapshot.
        steps: the numbers of the remembered steps.
        batches: the arguments of those since the snapshot.
        start: the state in the snapshot.
        end: the state now.
    """

    snapshot: Snapshot
    steps: tuple[int, ...]
    batches: list
    start: list
    end: list


def steps_of(recent):
    return tuple(entry.step for entry in recent._entries if not entry.refused)


def known_at(model, *data, steps, rules=(), every=1000, epochs=3, **fit):
    """Train with refused steps; return what is known at the last one."""
    found = []

    def look(incident):
        run = guard.session.run
        variables, numbers = run.train_state().restorable, steps_of(run.recent)
        snapshot = run.ring.snapshots[-1]
        batches = run.recent.last(sum(number >= snapshot.step for number in numbers))
        then = [np.array(snapshot.value(v)) for v in variables]
        found.append(Known(snapshot, numbers, batches, then, [keras_variables.read(v) for v in variables]))

    policy = {"rules": [*rules, LOOK], "snapshot": {"every": every, "verify_after": 1}}
    guard = NanGuard(policy, verbose=0, diagnose=False, functions={"look": look})
    with inject(model, site="gradients", step=steps):
        model.fit(*data, epochs=epochs, verbose=0, callbacks=[guard], **fit)
    return found[-1]


def check(known):
    """Train on the batches with stock Keras, from the snapshot, and compare."""
    model = network(run_eagerly=True) if BACKEND == "tensorflow" else network(**PLAIN)
    model.optimizer.build(model.trainable_variables)
    variables = TrainState.of(model).restorable
    for variable, value in zip(variables, known.start, strict=True):
        keras_variables.write(variable, value)
    for (batch,) in known.batches:
        model.train_on_batch(*batch[:2])
    for variable, value in zip(variables, known.end, strict=True):
        np.testing.assert_allclose(keras_variables.read(variable), value, rtol=1e-4, atol=1e-6)


@pytest.mark.daily(*DAILY, "xla", "four*")
@pytest.mark.parametrize("mode", MODES)
def test_training_on_them_gives_the_same_state(mode):
    known = known_at(network(**MODES[mode]), *data(), steps=27, every=10, batch_size=BATCH)
    assert known.snapshot.step > 0
    assert known.steps == tuple(range(27))
    check(known)


@pytest.mark.daily(*DAILY, "four*")
@pytest.mark.parametrize("mode", MODES)
def test_refused_steps_are_not_among_them(mode):
    """Each is the last of an execution: only then the host can read the state."""
    known = known_at(network(**MODES[mode]), *data(), steps=(3, 11, 19), batch_size=BATCH)
    assert known.snapshot.step == 0
    assert known.steps == tuple(step for step in range(19) if step not in (3, 11))
    check(known)


@pytest.mark.shared
def test_after_a_rollback_they_begin_at_the_snapshot_it_went_back_to():
    back = {"name": "back", "after": 2, "do": "rollback"}
    model = network(**PLAIN)
    known = known_at(model, *data(), steps=(12, 13, 17, 19), rules=[back], every=10, batch_size=BATCH)
    assert known.snapshot.step == 10
    assert known.steps == (14, 15, 16, 18)
    check(known)


@pytest.mark.shared
@pytest.mark.requires_backend("torch", "tensorflow", reason="on JAX a callback cannot write weights during fit")
def test_a_replayed_step_is_among_them():
    """Its batch is good if another callback has written NaN into the weights before it."""
    model, found = network(**PLAIN), []

    class Spoil(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5 and not found:
                found.append(batch)
                model.layers[0].kernel.assign(np.full((4, 8), np.nan, "float32"))
            elif batch == 9:
                recent = guard.session.run.recent
                found.append(len(recent.last(100)))

    guard = NanGuard(verbose=0)
    model.fit(*data(), epochs=1, batch_size=BATCH, verbose=0, callbacks=[Spoil(), guard])
    assert "rollback" in [outcome.action for outcome in guard.incidents[0].outcomes]
    assert found == [5, 10]


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("mode", MODES)
def test_the_bytes_that_are_held_count_and_not_those_of_the_first_batch(mode, set_limit):
    """With batches of any size in any order, the remembered ones never exceed the limit."""
    large = BATCH * (4 + 1) * 4
    set_limit("bytes of remembered batches", 6 * large)
    x, y = data()
    sizes = [1, *[1, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 1] * 4, 1, 1, 1]

    def batches():
        for size in sizes:
            yield x[:size], y[:size]

    def held(model):
        session = guard.session
        given = session.run.recent.last(200)
        return sum(bytes_of(keras.tree.flatten(batch)) for batch in given)

    guard, model, looks = NanGuard(verbose=0, diagnose=False), network(**MODES[mode]), zoo.After(held)
    source = batches()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        source = tf.data.Dataset.from_generator(batches, output_signature=(tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])))
    model.fit(source, steps_per_epoch=len(sizes) // 4 * 4, verbose=0, callbacks=[guard, looks])
    assert 4 * large <= max(looks.seen) <= 6 * large
    assert max(looks.seen[-2:]) > 0, "the last ones are there"


def test_bytes_of_structures():
    """Composite tensors and objects count by their parts, anything else and a model as 0."""
    array = np.zeros((3, 4), "float32")
    assert bytes_of((array, [array, None], {"a": array}, 3, "text", ())) == 3 * 48
    assert bytes_of(keras.ops.convert_to_tensor(array)) == 48
    bytes_of(keras.Variable(array))  # is not known on each backend, but raises nothing
    table = type("Table", (), {"shape": (3, 4)})()  # as of pandas
    assert bytes_of((table, type("Odd", (), {"shape": "wide"})())) == 96
    graph = types.SimpleNamespace(store=types.SimpleNamespace(mapping={"x": array, "edges": [array]}))
    assert bytes_of(({"graph": graph}, network(), test_bytes_of_structures)) == 2 * 48
    slow = type("Slow", (), {"trainable_variables": property(lambda _: 1 / 0)})()
    slow.kernel = array
    assert bytes_of((slow,)) == 0, "a model is recognized by its class"
    words = types.SimpleNamespace(index=dict.fromkeys(range(1000), array), x=array)
    assert bytes_of(words) == 48, "a vocabulary is not searched in every step"
    if BACKEND == "tensorflow":
        import tensorflow as tf

        ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
        assert bytes_of(ragged) == 3 * 4 + 3 * 8
        assert bytes_of(tf.sparse.from_dense([[0.0, 2.0]])) == 4 + 2 * 8
        assert bytes_of(tf.constant(["a", "b"])) == 32


def test_bytes_of_what_is_not_known():
    """Any argument of a step is measured before each one, so an odd one counts as 0."""
    odd = types.SimpleNamespace(shape=(3, 4), todense=lambda: np.zeros((3, 4)), data=np.ones(1))
    endless = [np.zeros(3)]
    endless.append(endless)
    assert [bytes_of((odd,)), bytes_of(endless), bytes_of({"a": endless})] == [0, 0, 0]


@pytest.mark.requires_backend("tensorflow", "torch", reason="there the arguments of a step begin with the state")
def test_a_step_of_a_loop_takes_a_sparse_matrix_of_scipy():
    """A COO matrix has no `indices`."""
    matrix = pytest.importorskip("scipy.sparse").coo_matrix(np.eye(4, dtype="float32"))
    model, guard, seen = network(), NanGuard(verbose=0), []

    @guard.step
    def step(x):
        seen.append(x.shape)

    with guard.watch(model, model.optimizer):
        step(matrix)
        step(matrix)
    assert seen == [(4, 4), (4, 4)] and guard.incidents == []


@pytest.mark.requires_backend("jax", "torch", reason="tf.data itself reads such a buffer too late, guarded or not")
def test_a_buffer_that_is_written_over_does_not_change_them():
    """A generator that yields one array again and again, with other numbers in it."""
    x, y = data(BATCH * 30)
    inputs, targets = np.zeros((BATCH, 4), "float32"), np.zeros((BATCH, 1), "float32")

    def batches():
        for row in range(0, len(x), BATCH):
            inputs[:], targets[:] = x[row : row + BATCH], y[row : row + BATCH]
            yield inputs, targets

    model = network(**PLAIN)
    known = known_at(model, batches(), steps=12, epochs=1, steps_per_epoch=20)
    check(known)
    assert len(known.batches) == 12


@pytest.mark.requires_backend("tensorflow", "torch", reason="a step on JAX is a function of its state: its own test is in jax/test_step.py")
def test_a_loop_without_a_trainer_has_them_too_and_may_use_one_buffer_for_all():
    x, y = data()
    model, found = network(**PLAIN), []

    def look(incident):
        recent = guard.session.run.recent
        found.append((steps_of(recent), recent.last(100)))

    guard = NanGuard(rules=[LOOK], verbose=0, diagnose=False, functions={"look": look})
    inputs = np.zeros((BATCH, 4), "float32")
    shared = inputs
    if BACKEND == "torch":
        import torch

        shared = torch.from_numpy(inputs)

    def train(x, y):
        return model.train_step((keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)))["loss"]

    with guard.watch(model):
        step = guard.step(train)
        for number in range(9):
            rows = slice(number * BATCH, (number + 1) * BATCH)
            inputs[:] = x[rows] if number != 7 else np.nan
            step(shared, y[rows])
    ((steps, known),) = found
    assert steps == tuple(range(7)) and len(known) == 7
    for number, (args, _) in enumerate(known):
        np.testing.assert_array_equal(np.asarray(args[0]), x[number * BATCH : (number + 1) * BATCH])


class Alone(NanGuardModel):
    """A model that `train_on_batch` trains."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)


@pytest.mark.requires_backend("tensorflow", "jax", reason="PyTorch does not copy them: such a rollback replays nothing")
def test_train_on_batch_may_use_one_buffer_for_all():
    """A rollback replays the batches as they were."""
    x, y = data()
    ended = []
    for buffers in ([np.empty((BATCH, 4), "float32"), np.empty((BATCH, 1), "float32")], None):
        keras.utils.set_random_seed(0)
        model = Alone(guard=NanGuard(verbose=0, diagnose=False))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **PLAIN)
        model(x[:1])
        model.optimizer.build(model.trainable_variables)
        with inject(model, site="slots", kind="overflow", step=7):
            for row in range(0, len(x), BATCH):
                batch = [array[row : row + BATCH].copy() for array in (x, y)]
                for buffer, array in zip(buffers or (), batch):
                    buffer[:] = array
                model.train_on_batch(*(buffers or batch))
        assert [o.action for i in model.nanguard.incidents for o in i.outcomes if o.status == "done"] == ["rollback"]
        ended.append(model.get_weights())
    zoo.assert_same(*ended)


class Endless:
    """Data without an end, as an infinite `tf.data.Dataset`, which raises when asked for its length."""

    def __len__(self):
        raise TypeError("The dataset is infinite.")


@pytest.mark.shared
@pytest.mark.requires_backend("tensorflow", "torch", reason="a step on JAX takes the state of the model")
def test_a_step_of_an_object_that_has_endless_data():
    model, guard, (x, y) = network(run_eagerly=True), NanGuard(verbose=0), data(BATCH)
    trainer = types.SimpleNamespace(data=Endless(), scale=np.ones(4, "float32"))
    tensors = [keras.ops.convert_to_tensor(array) for array in (x, y)]
    with guard.watch(model):
        step = guard.step(lambda trainer, x, y: model.train_step((x * trainer.scale, y))["loss"])
        step(trainer, *tensors)
    assert guard.session.run.step == 1 and bytes_of(trainer) == 16


@pytest.mark.requires_backend("torch", reason="only tensors of torch can be written to")
def test_a_tensor_that_was_overwritten_is_dropped():
    import torch

    from keras_nanguard._backends.torch.step import Given

    x = torch.ones(3)
    given = Given.of((x,))
    assert given == (x,) and given.is_unchanged
    x.add_(1)
    assert not given.is_unchanged


@pytest.mark.daily(*DAILY)
@pytest.mark.parametrize("mode", MODES)
def test_they_are_released_at_the_end_of_the_fit(mode):
    model, guard = network(**MODES[mode]), NanGuard(verbose=0)
    model.fit(*data(), batch_size=BATCH, verbose=0, callbacks=[guard])
    run = guard.session.run
    assert run.recent.last(100) == []
    assert run.recent.newest is None
    model.fit(*data(), batch_size=BATCH, verbose=0, callbacks=[guard])  # and it trains on
    assert guard.session.run.step == 12


@pytest.mark.requires_backend("tensorflow", reason="the only one that runs several guarded steps in one program")
def test_of_several_steps_in_one_the_refused_batch_alone_is_known():
    """The report of a refused step has its batch; the batches of the other steps are not stored."""
    found = []

    def look(incident):
        found.append((incident.step, incident.diagnosis.samples, guard.session.run.recent.last(100)))

    guard, (x, y) = NanGuard({"rules": [LOOK]}, verbose=0, functions={"look": look}), data()
    x[BATCH * 6 + 3] = np.nan
    model = network(steps_per_execution=4)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard])
    assert found == [(6, (3,), [])]
