"""A healthy run has the bits of the unguarded one: every optimizer of Keras, on every kind of layer, for two hundred steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard

optimizers = keras.optimizers
ROWS, BATCH, EPOCHS = 192, 32, 34
RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((ROWS, 6, 6, 3)).astype("float32")
VECTORS = RNG.standard_normal((ROWS, 12)).astype("float32")
SERIES = RNG.standard_normal((ROWS, 5, 4)).astype("float32")
TOKENS = RNG.integers(0, 30, (ROWS, 8))
CLASSES = RNG.integers(0, 10, ROWS)

OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "Nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.05, 20, 0.9), momentum=0.9),
    "clipnorm": lambda: optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.05, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.05, momentum=0.9, clipvalue=0.01),
    "weight_decay": lambda: optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "accumulation": lambda: optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
    "EMA": lambda: optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=7),
    "loss_scale_factor": lambda: optimizers.SGD(0.05, momentum=0.9, loss_scale_factor=8.0),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.05, momentum=0.9)),
    "Adam": lambda: optimizers.Adam(0.01),
    "AMSGrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "centered RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
    "Lion": lambda: optimizers.Lion(0.001),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Muon": lambda: optimizers.Muon(0.01),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.01),
}
NOT_SPARSE = {"centered RMSprop"}
"""Those whose update of an `Embedding` stock Keras 3.15 computes wrong or not at all (keras/src/backend/tensorflow/sparse.py)."""

NEWER = {"Muon", "ScheduleFreeAdamW"}
NORMAL = {"LossScaleOptimizer"}
"""Those of the normal run; all of them are a campaign."""


def dense(x, penalty=None):
    return layers.ReLU()(layers.BatchNormalization()(layers.Dense(16, kernel_regularizer=penalty)(x)))


def convolution(x, penalty=None):
    x = layers.Conv2D(8, 3, activation="relu", kernel_regularizer=penalty)(x)
    return layers.Flatten()(layers.MaxPooling2D()(layers.BatchNormalization()(x)))


def recurrent(x, penalty=None):
    x = layers.LayerNormalization()(layers.GRU(6, return_sequences=True)(layers.LSTM(8, return_sequences=True)(x)))
    return layers.SimpleRNN(6, kernel_regularizer=penalty)(x)


def attention(x, penalty=None):
    x = layers.Embedding(30, 16)(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    x = layers.PReLU()(layers.GroupNormalization(4)(x + layers.Dense(16, "gelu", kernel_regularizer=penalty)(x)))
    return layers.GlobalAveragePooling1D()(x)


NETWORKS = {"Dense": (dense, VECTORS), "Conv": (convolution, IMAGES), "recurrent": (recurrent, SERIES), "attention": (attention, TOKENS)}


def trained(networks, optimizer, callbacks, penalty=None):
    """Return the weights after each step of a fit, the history, and the optimizer's variables at the end."""
    keras.utils.set_random_seed(1)
    inputs = [keras.Input(data.shape[1:], dtype=data.dtype.name) for _, data in networks]
    parts = [make(x, penalty) for (make, _), x in zip(networks, inputs)]
    model = keras.Model(inputs, layers.Dense(10)(layers.Concatenate()(parts) if len(parts) > 1 else parts[0]))
    model.compile(OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append([v.tobytes() for v in model.get_weights()]))
    x, callbacks = [data for _, data in networks], [*callbacks, note]
    history = model.fit(x, CLASSES, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return seen, history.history, [np.asarray(v).tobytes() for v in model.optimizer.variables], [v.path for v in model.weights]


def check(networks, optimizer, penalty=None):
    if not hasattr(optimizers, optimizer) and optimizer in NEWER:
        pytest.skip("this version of Keras has no such optimizer")
    if optimizer in NOT_SPARSE:
        networks = [network for network in networks if network is not NETWORKS["attention"]]
    if not networks:
        pytest.skip("stock Keras cannot train an Embedding with this optimizer")
    guard = NanGuard(verbose=0)
    plain, history, slots, paths = trained(networks, optimizer, [], penalty)
    guarded, guarded_history, guarded_slots, _ = trained(networks, optimizer, [guard], penalty)
    assert len(plain) == len(guarded) == EPOCHS * ROWS // BATCH >= 200
    for step, (one, other) in enumerate(zip(plain, guarded)):
        assert [path for path, a, b in zip(paths, one, other) if a != b] == [], f"in step {step}"
    assert slots == guarded_slots and history == zoo.plain_logs(guarded_history)
    assert guard.incidents == []


@pytest.mark.parametrize("optimizer", [pytest.param(name, marks=() if name in NORMAL else pytest.mark.slow) for name in OPTIMIZERS])
def test_every_kind_of_layer_at_once(optimizer):
    """One network of all kinds of layers; not one bit of one weight differs after any step."""
    check(list(NETWORKS.values()), optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [None, 1e-3], ids=["plain", "L2"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_kind_of_layer(optimizer, network, penalty):
    """Each kind of layers by itself, where other operations stand beside each other, with and without a regularizer."""
    check([NETWORKS[network]], optimizer, keras.regularizers.L2(penalty) if penalty else None)
