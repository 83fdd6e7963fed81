"""Every private Keras name that the library uses still exists."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.backend.common import masking
from keras.src.utils import io_utils
from support import zoo

from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core.variable_names import snake_case
from keras_nanguard._diagnose.changes import computing_in_float32
from keras_nanguard._keras import (
    fitting,
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.optimizers import SECOND_MOMENTS, second_moments
from keras_nanguard._keras.overrides import Overrides

pytestmark = pytest.mark.filterwarnings(
    "error::DeprecationWarning",
    "ignore:__array__ implementation:DeprecationWarning",  # of Keras on PyTorch
)
"""Deprecations of Keras are found here first."""


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="first"), layers.Dropout(0.5), layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_names():
    """`print_msg`; `_make_function` since Keras 3.8, but on PyTorch; Orbax' `_save_checkpoint`."""
    assert list(inspect.signature(io_utils.print_msg).parameters) == ["message", "line_break"]
    assert hasattr(keras.Model, "_make_function") or zoo.OLD or zoo.BACKEND == "torch"
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    assert orbax is None or hasattr(orbax, "_save_checkpoint")


def test_layers_at_any_depth(model):
    """`Layer._flatten_layers` lists the model first, then every layer inside it, and takes the two arguments."""
    nested = keras.Sequential([keras.Input((4,)), model])
    found = nested._flatten_layers(include_self=True, recursive=True)
    assert found[0] is nested and model in found and model.layers[0] in found


def test_rate_of_the_next_step(model):
    """`_get_current_learning_rate`; `_learning_rate` distinguishes numbers and schedules."""
    plain = model.optimizer.inner_optimizer
    assert isinstance(plain._learning_rate, keras_variables.VARIABLE)
    assert float(plain._get_current_learning_rate()) == pytest.approx(1e-3)
    schedule = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10))
    assert not isinstance(schedule._learning_rate, keras_variables.VARIABLE)
    assert float(schedule._get_current_learning_rate()) == pytest.approx(0.5)


def test_iteration_that_a_schedule_sees():
    """`Optimizer._iterations` counts every step, also if gradients are accumulated."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    optimizer = keras.optimizers.SGD(rate, gradient_accumulation_steps=2)
    assert keras_optimizers.scheduled_iteration(optimizer) == 0
    keras_optimizers.iterations(optimizer).assign(4)
    assert keras_optimizers.scheduled_iteration(optimizer) == 4
    assert keras_optimizers.learning_rate(optimizer) == keras_optimizers.rate_before(optimizer, 0) == 0.25
    assert keras_optimizers.rate_before(optimizer) == 0.5
    assert keras_optimizers.accumulation_steps(optimizer) == 2


@pytest.mark.requires_backend("tensorflow", reason="only TensorFlow mirrors variables")
def test_the_variable_and_the_strategy_behind(model):
    """`Variable._value` is `value`; `_distribution_strategy` is that of an update."""
    import tensorflow as tf

    weight = model.trainable_variables[0]
    assert weight._value is weight.value
    assert model.optimizer.inner_optimizer._distribution_strategy is tf.distribute.get_strategy()


def test_loss_scale_variables(model):
    """`dynamic_scale`, `step_counter`, `initial_scale`; the inner optimizer trains."""
    optimizer = model.optimizer
    assert float(optimizer.dynamic_scale.numpy()) == optimizer.initial_scale
    assert int(optimizer.step_counter.numpy()) == 0
    assert len(optimizer.inner_optimizer._trainable_variables) == 4


def test_compiled_again():
    """`Model._compile_config` is another object after each `compile`."""
    again = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    again.compile("sgd", "mse")
    first = again._compile_config
    again.compile("sgd", "mse")
    assert first is not None and again._compile_config is not first


def test_the_width_of_a_progress_bar(capsys):
    """It is 0 before a bar is drawn, which is redrawn after a reset."""
    bar = keras.utils.Progbar(4)
    assert bar._prev_total_width == 0
    bar.update(1)
    assert bar._prev_total_width > 4
    bar._prev_total_width = 0
    capsys.readouterr()
    bar.update(4)
    assert "4/4" in capsys.readouterr().out
    assert isinstance(keras.callbacks.ProgbarLogger().progbar, (type(None), keras.utils.Progbar))


def test_arrays_of_a_fit():
    """They are its local variables `x` and `y`; its data adapter is one for arrays."""
    probe = zoo.After(lambda model: fitting.running_arrays())
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[probe])
    assert probe.seen[0][0] is x and probe.seen[0][1] is y
    model.fit(((x, y) for _ in range(1)), verbose=0, callbacks=[probe])
    assert probe.seen[1] == (None, None) and fitting.running_arrays() == (None, None)


def test_callback_list_sets_the_model_first():
    """`CallbackList` passes the model to every callback when it is created, before a train function exists."""

    class Probe(keras.callbacks.Callback):
        seen = None

        def set_model(self, model):
            Probe.seen = model
            super().set_model(model)

    other = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    keras.callbacks.CallbackList([Probe()], model=other)
    assert Probe.seen is other and other.train_function is None


def test_seed_generator_states(model):
    """The state of a seed generator is an integer variable whose name ends in `seed_generator_state`."""
    names = [v.name for v in model.non_trainable_variables]
    assert any(name.endswith("seed_generator_state") for name in names)


def test_no_list_contains_recurrent_states():
    """The states of a stateful RNN are variables that `model.variables` does not contain; the guard searches for them."""
    rnn = layers.LSTM(2, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(1, 3, 2)), rnn])
    listed = {id(v) for v in model.variables}
    assert rnn.states and all(isinstance(s, keras_variables.VARIABLE) and id(s) not in listed for s in rnn.states)


def test_moving_averages_of_an_optimizer():
    """An optimizer with moving averages lists them in the order of the variables that it was built for."""
    weights = [keras.Variable(np.ones(3)), keras.Variable(np.ones(2))]
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.build(weights)
    assert [w is t for w, t in zip(weights, optimizer._trainable_variables, strict=True)] == [True, True]
    assert [tuple(a.shape) for a in optimizer._model_variables_moving_average] == [(3,), (2,)]


def test_initial_epoch_of_a_model(model):
    """`fit` starts at `Model._initial_epoch` if a callback sets it before the first epoch."""
    begun = []

    class Begin(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model._initial_epoch = 2

        def on_epoch_begin(self, epoch, logs=None):
            begun.append(epoch)
            self.model._initial_epoch = None

    model.compile("sgd", "mse")
    model.fit(np.ones((4, *model.input_shape[1:])), np.ones((4, *model.output_shape[1:])), epochs=4, verbose=0, callbacks=[Begin()])
    assert begun == [2, 3]


def test_direction_of_metrics():
    """`Metric._direction`, by the names under which metrics are logged."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.R2Score(name="r2"), "binary_accuracy"])
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    assert keras_layers.directed(model, "up") == {"r2", "binary_accuracy"}


def test_the_data_of_a_running_call():
    """A local variable `epoch_iterator` of `fit` and `evaluate` has the `data_adapter`, and on TensorFlow the dataset."""
    seen = {}

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen["spec"] = fitting.running_spec()

        def on_test_batch_end(self, batch, logs=None):
            seen["data"] = fitting.running_data()

    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, verbose=0, callbacks=[Look()])
    model.evaluate(x, y, verbose=0, callbacks=[Look()])
    assert type(seen["data"]).__name__ == "ArrayDataAdapter"
    assert (seen["spec"] is not None) == (keras.backend.backend() == "tensorflow")


def test_masks_of_tensors():
    """Keras attaches a mask to a tensor, which `get_keras_mask` and `set_keras_mask` read and write."""
    masked = layers.Masking()(np.array([[[0.0], [1.0]]], "float32"))
    copy = keras_layers.with_mask_of(masked, keras.ops.convert_to_tensor(np.ones((1, 2, 1), "float32")))
    assert keras.ops.convert_to_numpy(masking.get_keras_mask(copy)).tolist() == [[False, True]]


def test_snake_case():
    """Class names are written as Keras writes them in the names of objects."""
    names = [name for room in (layers, keras.losses, keras.optimizers) for name in dir(room)]
    assert [snake_case(name) for name in names] == list(map(keras.src.utils.naming.to_snake_case, names))


def test_states_losses_and_arguments_of_custom_layers():
    """`_call_has_training_arg`, `_losses` and `_non_trainable_variables` describe a layer."""

    class Custom(layers.Layer):
        def build(self, shape):
            self.state = self.add_weight(shape=(), name="state", trainable=False)
            self.weight = self.add_weight(shape=(), name="weight")
            self.weight.trainable = False

        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.custom = Custom()

        def call(self, x):
            return self.custom(x)

    own = Own()
    own(np.ones((1, 2), "float32"))
    assert keras_layers.mode(own, True) == {} and keras_layers.adds_losses(own)
    assert keras_layers.states_of_own_layers(own) == {id(own.custom.state)}
    plain = keras.Sequential([keras.Input((2,)), layers.Dropout(0.5)])
    assert keras_layers.mode(plain, True) == {"training": True} and not keras_layers.adds_losses(plain)


def test_an_optimizer_finds_slots_by_a_key():
    """`Optimizer._var_key` and `_trainable_variables_indices`: an optimizer updates a registered twin as the variable."""
    variable, twin = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([variable])
    with Overrides() as overrides:
        keras_optimizers.register_twins(optimizer, [(variable, twin)], overrides)
        optimizer.apply([keras.ops.ones(1)], [twin])
    assert twin.numpy().tolist() == [0.5] and variable.numpy().tolist() == [1.0]


def test_the_graph_of_a_model():
    """`KerasTensor._keras_history`, `Operation._inbound_nodes` and `Sequential._functional` lead through a graph."""
    inputs = keras.Input((3,))
    dense = layers.Dense(2)
    outputs = keras.ops.log(dense(inputs))
    operation, call, index = keras_layers.source_of(outputs)
    (argument,) = keras_layers.symbolic_arguments(operation, call)
    assert index == 0 and keras_layers.source_of(argument)[0] is dense
    assert [id(a) for a in keras_layers.arguments_of(dense)] == [id(inputs)]
    sequential = keras.Sequential([keras.Input((3,)), dense])
    assert dense in keras_layers.graph_operations(sequential) and dense in keras_layers.children(sequential)


def test_compile_arguments():
    """`_compile_metrics`, `_fn_kwargs` and `_learning_rate` store what was passed."""
    rate = keras.optimizers.schedules.CosineDecay(0.5, 10)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
    assert keras_losses.given_metrics(model) == ["mae"] and keras_optimizers.given_rate(model.optimizer) is rate
    assert keras_losses.option_of(keras.losses.BinaryCrossentropy(from_logits=True), "from_logits") is True


def test_the_global_seed_generator():
    """Keras stores the generator that it uses without a seed under `global_seed_generator` in its global state."""
    keras.random.normal((1,))
    assert len(keras_variables.global_seed_variables()) == 1


@pytest.mark.requires_backend("tensorflow", reason="variables of TensorFlow")
def test_tensorflow_is_imported_lazily():
    """`keras.src.utils.module_utils.tensorflow` has the raw operations."""
    assert keras_variables.view(keras.Variable([1.0, 2.0])).tolist() == [1.0, 2.0]


@pytest.mark.requires_backend("jax", reason="the trainer of JAX")
def test_the_state_of_the_trainer_of_jax():
    """`_symbolic_build`, `_get_jax_state`, and `_jax_state` with `_jax_state_synced`."""
    from keras_nanguard._keras import jax_trainer

    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    jax_trainer.ready(model, (np.ones((1, 2), "float32"), np.ones((1, 1), "float32")))
    assert model.optimizer.built and model.metrics_variables
    state = jax_trainer.TrainerState(model)
    state.synced = True
    taken = state.take()
    assert model.layers[0].kernel._value is None and not model._jax_state_synced
    state.sync_variables()
    assert model._jax_state_synced and model.layers[0].kernel.numpy().tolist() == [[1.0], [1.0]]
    assert len(taken) == 4 == len(jax_trainer.by_part(model))


@pytest.mark.skipif(zoo.OLD, reason="Keras 3.6 gives a step on JAX a list of batches")
@pytest.mark.requires_backend("jax", reason="the trainer of JAX")
def test_the_loop_over_the_steps_of_an_execution(monkeypatch):
    """`_make_function` returns it, uncompiled for an uncompiled model."""
    from keras_nanguard._keras import jax_trainer

    make, seen = keras.Model._make_function, []

    def makes(self, step, **more):
        seen.append(self.jit_compile)
        return make(self, step, **more)

    monkeypatch.setattr(keras.Model, "_make_function", makes)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    function = jax_trainer.in_executions(model, lambda state, data: ({"loss": np.float32(data)}, [*state, data]))
    assert (seen, model.jit_compile) == ([False], True)
    assert function([], iter([1, 2, 3])) == ({"loss": 1.0}, [1])


def test_second_moments():
    """The arrays that it names exist for each weight; no entry is negative."""
    for kind in SECOND_MOMENTS:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = kind(0.1)
        optimizer.build(model.trainable_variables)
        for gradient in (3.0, -2.0):
            optimizer.apply([keras.ops.full(v.shape, gradient) for v in model.trainable_variables])
        found = second_moments([optimizer])
        assert [v.shape for v in found] == [v.shape for v in model.trainable_variables], kind
        values = [keras.ops.convert_to_numpy(v) for v in found]
        assert all((v > 0.0).all() and (v <= 13.2).all() for v in values), kind  # 0.1 + 9 + 4


def test_operations_losses_and_inputs_are_found():
    inputs = keras.Input((4,), dtype="float16")
    h = layers.Dense(3, dtype="float16", name="low")(inputs)
    outputs = {"x": layers.Dense(1, name="a")(keras.ops.log(h)), "y": layers.Dense(1, name="b")(h)}
    built = keras.Model(inputs, outputs)
    built.compile("sgd", {"x": "mse", "y": "mae"}, auto_scale_loss=False)
    y = np.zeros((2, 1), "float32")
    built.train_on_batch(np.ones((2, 4), "float16"), {"x": y, "y": y})
    found = [op.name.split("_")[0] for op in keras_layers.operations_of(built)]
    assert "log" in found and set(found) <= {"log", "cast"}  # the lowest Keras casts inputs by operations
    assert [name for name, _ in keras_losses.losses_by_output(built)] == ["x", "y"]
    assert [str(t.dtype) for t in keras_layers.symbolic_inputs(built)] == ["float16"]
    assert keras_layers.output_shapes(built) == [("x", (None, 1)), ("y", (None, 1))]
    assert keras_layers.output_names(built) == ["x", "y"]


def test_a_policy_is_exchanged_and_put_back():
    layer = layers.Dense(2, dtype="mixed_float16")
    with Overrides() as overrides:
        keras_layers.replace_policy(layer, keras.DTypePolicy("float32"), ("float16",), overrides)
        assert layer.compute_dtype == "float32"
    assert layer.compute_dtype == "float16"


def test_dtypes_are_exchanged_and_put_back():
    """`Variable._value` and `_dtype` of variables, losses and symbolic tensors."""
    inputs = keras.Input((4,), dtype="float16")
    built = keras.Model(inputs, layers.Dense(1, dtype="float16", activation="tanh")(inputs))
    built.compile("sgd", keras.losses.MeanSquaredError(dtype="float16"), auto_scale_loss=False)
    dtypes = lambda: {str(t.dtype) for t in (*built.weights, built.loss, built.inputs[0])}  # noqa: E731
    x, before = np.full((1, 4), 0.3, "float16"), dtypes()
    with computing_in_float32(ReplayableStep(built, built, [])):
        assert (before, dtypes()) == ({"float16"}, {"float32"})
        assert keras.backend.standardize_dtype(built(x).dtype) == "float32"
    assert dtypes() == before and keras.backend.standardize_dtype(built(x).dtype) == "float16"


def test_the_limits_of_files_are_those_of_the_loader_of_keras():
    """A scan rejects exactly the files that Keras itself refuses to load as a bomb."""
    from keras.src.saving import saving_lib

    from keras_nanguard._files.formats import limits

    if zoo.OLD:
        pytest.skip("this version of Keras loads bombs")
    assert saving_lib._H5_DATASET_BOMB_FLOOR_BYTES == limits.BOMB_FLOOR
    assert saving_lib._H5_DATASET_MAX_EXPANSION == limits.MAX_EXPANSION
    assert saving_lib._ZIP_MEMBER_MAX_EXPANSION == limits.MAX_MEMBER_EXPANSION


def test_an_attribute_set_twice_gets_its_first_value_back():
    """The same attribute can be overridden again; nothing of the values between is kept."""

    class Target:
        name = "of the class"

    target = Target()
    with Overrides() as overrides:
        overrides.set(target, "name", "one")
        overrides.set(target, "name", "two")
        assert target.name == "two" and len(overrides._before) == 1
    assert target.name == "of the class" and "name" not in vars(target)
