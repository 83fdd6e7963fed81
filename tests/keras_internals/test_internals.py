"""Every name private to Keras that the library uses is still there: this file fails when a release takes one away."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.utils import io_utils

from keras_nanguard._keras import layers as keras_layers
from keras_nanguard._keras import variables as keras_variables


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="first"), layers.Dropout(0.5), layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_layers_at_any_depth(model):
    """`Layer._flatten_layers` lists the model first, then every layer inside of it, and takes the two arguments."""
    nested = keras.Sequential([keras.Input((4,)), model])
    found = nested._flatten_layers(include_self=True, recursive=True)
    assert found[0] is nested and model in found and model.layers[0] in found


def test_rate_of_the_next_step(model):
    """`Optimizer._get_current_learning_rate` gives the rate of a number and of a schedule, and `_learning_rate` tells
    one from the other."""
    plain = model.optimizer.inner_optimizer
    assert isinstance(plain._learning_rate, keras_variables.VARIABLE)
    assert float(plain._get_current_learning_rate()) == pytest.approx(1e-3)
    schedule = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10))
    assert not isinstance(schedule._learning_rate, keras_variables.VARIABLE)
    assert float(schedule._get_current_learning_rate()) == pytest.approx(0.5)


def test_loss_scale_variables(model):
    """`LossScaleOptimizer` keeps `dynamic_scale`, `step_counter` and `initial_scale`, and trains `_trainable_variables`
    through its inner optimizer."""
    optimizer = model.optimizer
    assert float(optimizer.dynamic_scale.numpy()) == optimizer.initial_scale
    assert int(optimizer.step_counter.numpy()) == 0
    assert len(optimizer.inner_optimizer._trainable_variables) == 4


def test_compiled_anew():
    """`Model._compile_config` is another object after each `compile`."""
    again = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    again.compile("sgd", "mse")
    first = again._compile_config
    again.compile("sgd", "mse")
    assert first is not None and again._compile_config is not first


def test_printing():
    """Keras' own printing takes a message and a flag for the line break."""
    assert list(inspect.signature(io_utils.print_msg).parameters) == ["message", "line_break"]


def test_train_function_protocol(model):
    """`make_train_function(force)` sets `train_function`, and `jit_compile` can be set on the model."""
    assert "force" in inspect.signature(keras.Model.make_train_function).parameters
    before = model.jit_compile
    model.jit_compile = False
    assert model.jit_compile is False
    model.jit_compile = before


def test_callback_list_is_told_the_model_first():
    """`CallbackList` hands the model to every callback when it is made, before a train function exists."""

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


def test_recurrent_states_stand_in_no_list():
    """The states of a stateful RNN are variables that `model.variables` does not hold; the guard looks for them."""
    rnn = layers.LSTM(2, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(1, 3, 2)), rnn])
    listed = {id(v) for v in model.variables}
    assert rnn.states and all(isinstance(s, keras_variables.VARIABLE) and id(s) not in listed for s in rnn.states)


def test_what_an_optimizer_keeps_of_its_weights():
    """An optimizer with averages lists them in the order of what it was built for."""
    weights = [keras.Variable(np.ones(3)), keras.Variable(np.ones(2))]
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.build(weights)
    assert [w is t for w, t in zip(weights, optimizer._trainable_variables, strict=True)] == [True, True]
    assert [tuple(a.shape) for a in optimizer._model_variables_moving_average] == [(3,), (2,)]


def test_the_epoch_that_fit_begins_with(model):
    """`fit` begins with `Model._initial_epoch` where it is set, before its first epoch."""
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


def test_a_metric_says_whether_it_is_to_grow():
    """`Metric._direction`, by the names under which metrics are logged."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.R2Score(name="r2"), "binary_accuracy"])
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    assert keras_layers.rising(model) == {"r2", "binary_accuracy"}
