"""A trial is completely undone: variables of any kind, rates, generators, counts."""

import keras
import numpy as np
import pytest
from keras import optimizers
from scipy.stats import binomtest
from support import zoo
from support.programs import PROGRAMS

from keras_nanguard import NanGuard
from keras_nanguard._fit.rates import Rate
from keras_nanguard._fit.trial import clearly_lower, trial

RNG = np.random.default_rng(0)
BACK = {"name": "back", "do": {"rollback": {"replay_steps": True}}}
X, Y = RNG.standard_normal((256, 4)).astype("float32"), RNG.standard_normal((256, 1)).astype("float32")


def tried(session):
    """Train on the remembered batches from the first state, at a tenth of the learning rate; return the state."""
    with trial(session.run) as trying:
        if trying is None:
            return None
        batches = session.run.recent.last(8)
        return trying.trained(trying.state_of(session.run.ring.start, {}), batches, 0.1)


class Trial(keras.callbacks.Callback):
    """Runs a trial of the steps so far with a tenth of the learning rate."""

    def __init__(self, guard, step):
        super().__init__()
        self.guard, self.step, self.found = guard, step, []

    def on_train_batch_end(self, batch, logs=None):
        session = self.guard.session
        if session.run.step == self.step:
            self.found.append(tried(session))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("model-unlisted-state", marks=pytest.mark.requires_backend("tensorflow", "torch", reason="a pure step cannot")),
        "precision-mixed_float16",
        "optimizer-adam",
    ],
)
def test_undone_whole(name):
    """The run ends as without a trial: unlisted variables, loss scales and slots included."""
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


class Warming(keras.layers.Layer):
    """Counts its calls in a number, on which its result depends, and keeps its last mean in a tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.mean = 0, None

    def call(self, inputs):
        self.calls += 1
        self.mean = keras.ops.mean(inputs)
        return inputs * min(1.0, self.calls / 30)


@pytest.mark.requires_backend("tensorflow", "torch", reason="a pure step cannot")
def test_attributes_of_a_layer_are_restored():
    """A trial leaves the attributes of layers alone, and so the result of an eager run."""
    ends = []
    for step in (-1, 10):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), Warming(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        guard = NanGuard(verbose=0)
        made, means = Trial(guard, step), zoo.After(lambda model: float(model.layers[0].mean))
        model.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[guard, made, means])
        assert [end is not None for end in made.found] == [True] * (step > 0)
        ends.append((model.layers[0].calls, means.seen, *(w.tobytes() for w in model.get_weights())))
    assert ends[0] == ends[1]


@pytest.mark.requires_backend("torch", reason="there a layer is called in each step, also in one of a trial")
def test_an_error_in_a_trial_does_not_end_training(capsys):
    """As if the device had no memory left: the trial is undone, and the run ends as without it."""
    guard, raised = NanGuard(verbose=1), zoo.Tally()

    class Lacking(keras.layers.Dense):
        def call(self, inputs, training=None):
            is_checked = guard.session is not None and guard.session.run.step == 65  # at first
            if is_checked and not raised.number:
                raised.number += 1
                raise RuntimeError("out of memory")
            return super().call(inputs)

    def fit(*callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), Lacking(1)])
        model.compile(optimizers.Adam(1e-6), "mse", run_eagerly=True)
        model.fit(X, Y, batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]

    alone = fit()
    for one, other in zip(fit(guard), alone):
        np.testing.assert_array_equal(one, other)
    assert raised.number == 1 and guard.incidents == []
    printed = capsys.readouterr().out
    assert printed.startswith("NanGuard: cannot check for divergence: RuntimeError: ") and "out of memory" in printed


def test_a_trial_leaves_nothing_to_do_before_each_step():
    guard = NanGuard(verbose=0)
    trial = Trial(guard, 10)
    zoo.run(lambda: zoo.plain(optimizers.SGD(0.01)), zoo.regression(), guard=guard, epochs=1, callbacks=[trial])
    assert trial.found[0] is not None and not guard.session.pending


def test_no_trial_if_the_policy_refuses_nothing():
    """Steps are replayed only if a bad one of them would be refused again."""
    guard = NanGuard(refuse=False, verbose=0)
    trial = Trial(guard, 10)
    zoo.run(zoo.plain, zoo.regression(), guard=guard, callbacks=[trial], epochs=1)
    assert trial.found == [None]


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.3, 1.0])
def test_clearly_lower_is_a_paired_test(shift):
    """Batches that differ a hundredfold hide nothing; the oracle is NumPy's t statistic."""
    draw = np.random.default_rng(3)
    losses = 10.0 ** draw.uniform(-1, 1, 32)
    others = losses + shift + draw.normal(0, 0.5, 32)
    differences = others - losses
    t = differences.mean() / (differences.std(ddof=1) / np.sqrt(32))
    assert clearly_lower(losses, others) == (t > 3.0)
    assert not clearly_lower(others, losses)


@pytest.mark.parametrize("count", [9, 10, 16, 32])
@pytest.mark.parametrize("higher", range(0, 12, 2))
def test_clearly_lower_by_a_sign_test(count, higher):
    """One huge loss hides no lower loss on most batches; the oracle is SciPy's sign test."""
    others = np.array([0.2] * (count - 1) + [1000.0])
    losses = np.where(np.arange(count) < higher, 0.3, 0.1)
    lower = max(count - higher, 0)
    unlikely = binomtest(lower, count, 0.5, "greater").pvalue <= 0.001
    assert clearly_lower(list(losses), list(others)) == unlikely
    assert not clearly_lower(list(others), list(losses))


def test_a_lower_loss_on_most_batches_is_not_enough_if_the_mean_is_higher():
    """Batches with a rare class are few and have most of the loss."""
    losses, others = [0.1] * 31 + [50.0], [0.2] * 31 + [1.0]
    assert not clearly_lower(losses, others) and not clearly_lower(others, losses)


def test_clearly_lower_with_infinite_losses():
    """A state with an infinite loss is not better than any other; a finite one is better than it."""
    assert clearly_lower([1.0, 2.0], [1.0, np.inf]) and not clearly_lower([1.0, np.inf], [5.0, 5.0])
    assert not clearly_lower([np.inf] * 2, [np.inf] * 2) and not clearly_lower([1.0] * 3, [1.0] * 3)


@pytest.mark.requires_backend("torch", reason="optimizers of torch")
def test_rates_of_the_groups_of_torch():
    """Each group keeps its own rate, also if that of the first is 0."""
    import torch

    from keras_nanguard._backends.torch.optimizers import TorchOptimizer

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.0, 0.3, 0.07))])
    rate = Rate(TorchOptimizer(optimizer, {}))
    with rate.tried(0.1):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0, 0.03, 0.007])
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.3, 0.07]


def watched(model, optimizer, plain, tries, state=None):
    """Run twenty guarded steps, with a trial after the eleventh if `tries`; return the state."""
    guard = NanGuard(verbose=0)
    with guard.watch(model, optimizer):
        step = guard.step(plain)
        for number in range(20):
            rows = slice(8 * number, 8 * number + 8)
            batch = [keras.ops.convert_to_tensor(array[rows]) for array in (X, Y)]
            if state is None:
                step(*batch)
            else:
                _, state = step(state, *batch)
            if number == 10 and tries:
                assert tried(guard.session) is not None
    return state


def _torch_loop(tries):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def plain(x, y):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    watched(model, optimizer, plain, tries)
    return [*model.state_dict().values(), *(t for slots in optimizer.state.values() for t in slots.values())]


def _tensorflow_loop(tries):
    import tensorflow as tf

    kernel = tf.Variable(tf.ones((4, 1)), name="kernel")  # of a tf.Module, say
    optimizer = keras.optimizers.Adam(0.01)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])

    @tf.function
    def plain(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x @ kernel, training=True) - y) ** 2)
        variables = [kernel, *model.trainable_variables]
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    watched(model, optimizer, plain, tries)
    return [kernel, *(v.value for v in [*model.variables, *optimizer.variables])]


def _jax_loop(tries):
    import jax
    import jax.numpy as jnp

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables

    @jax.jit
    def plain(state, x, y):
        (weights, other, slots), (key, average) = state

        def loss_of(weights):
            predicted, _ = model.stateless_call(weights, other, x + 0.1 * jax.random.normal(key, x.shape), training=True)
            return jnp.mean((predicted - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, slots = optimizer.stateless_apply(slots, gradients, weights)
        average = [0.9 * a + 0.1 * w for a, w in zip(average, weights)]
        return loss, ((weights, other, slots), (jax.random.fold_in(key, 1), average))

    weights = [v.value for v in parts[0]]
    state = tuple([v.value for v in part] for part in parts), (jax.random.PRNGKey(0), [w + 0.0 for w in weights])
    return jax.tree_util.tree_leaves(watched(model, optimizer, plain, tries, state))


LOOPS = {"torch": _torch_loop, "tensorflow": _tensorflow_loop, "jax": _jax_loop}


def test_undone_whole_in_a_loop():
    """Torch optimizers, native TensorFlow variables, keys and averages of a JAX loop."""
    for one, other in zip(*(LOOPS[zoo.BACKEND](tries) for tries in (False, True)), strict=True):
        np.testing.assert_array_equal(*(np.asarray(keras.ops.convert_to_numpy(value)) for value in (one, other)))


@pytest.mark.requires_backend("tensorflow", "torch", reason="a step of JAX draws from keys")
def test_generators_of_the_process_are_restored():
    """A step that draws from NumPy draws the same numbers as without the trial."""

    class Draws(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.dense(x) + (np.float32(np.random.rand()) if training else 0.0)

    ends = []
    for tries in (False, True):
        keras.utils.set_random_seed(0)
        model, guard = Draws(), NanGuard(verbose=0)
        model.compile(optimizers.SGD(0.01), "mse", run_eagerly=True)
        trial = Trial(guard, 10 if tries else -1)
        model.fit(X, Y, batch_size=16, verbose=0, shuffle=False, callbacks=[guard, trial])
        assert len(trial.found) == tries
        ends.append(model.get_weights())
    for one, other in zip(*ends):
        np.testing.assert_array_equal(one, other)


class BadAgain(keras.Sequential):
    """Has a bad loss in its thirteenth step, the second one that is replayed."""

    steps = 0

    def train_step(self, *given):
        self.steps += 1
        return super().train_step(*given)

    def compute_loss(self, *given, **named):
        return super().compute_loss(*given, **named) * (float("nan") if self.steps == 13 else 1.0)


def test_a_stop_ends_the_steps_that_are_run_again():
    """The state that the policy restores when it stops is not trained further."""
    end = {"name": "end", "site": "gradients", "kind": "nonfinite", "do": "stop"}
    guard = NanGuard(rules=[end, BACK], snapshot={"every": 4, "verify_after": 1}, verbose=0, diagnose=False)
    data = zoo.regression()
    data.y[10 * zoo.BATCH] = 1e38
    model = BadAgain([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizers.SGD(0.01), "mse", run_eagerly=True)
    zoo.fit(model, data, guard)
    assert [i.outcomes[0].action for i in guard.incidents] == ["rollback", "stop"]
    assert model.steps == 13 and guard.stopped and zoo.bad_entries(model) == []


class Interrupted(keras.Sequential):
    """Is interrupted in its twelfth step, the first one that is replayed."""

    steps = 0

    def train_step(self, *given):
        self.steps += 1
        if self.steps == 12:
            raise KeyboardInterrupt
        return super().train_step(*given)


def test_an_exception_while_steps_are_run_again_loses_no_incident():
    """After Ctrl-C during a replay, the incident that caused the replay is still reported."""
    guard = NanGuard(rules=[BACK], snapshot={"every": 4, "verify_after": 1}, verbose=0, diagnose=False)
    data = zoo.regression()
    data.y[10 * zoo.BATCH] = 1e38  # the update overflows, the data is finite
    model = Interrupted([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizers.SGD(0.01), "mse", run_eagerly=True)
    with pytest.raises(KeyboardInterrupt):
        zoo.fit(model, data, guard)
    assert [i.outcomes[0].action for i in guard.incidents] == ["rollback"]
    assert [event.kind for event in guard.recording.events if event.kind == "incident"] == ["incident"]
