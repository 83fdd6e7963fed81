"""A healthy run has the bits of the unguarded one, for all optimizers and layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo
from support.programs import OPTIMIZERS as ALL, SETTINGS

from keras_nanguard import NanGuard

ROWS, BATCH = 192, 32
EPOCHS, FEW = 34, 5
RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((ROWS, 6, 6, 3)).astype("float32")
VECTORS = RNG.standard_normal((ROWS, 12)).astype("float32")
SERIES = RNG.standard_normal((ROWS, 5, 4)).astype("float32")
TOKENS = RNG.integers(0, 30, (ROWS, 8))
CLASSES = RNG.integers(0, 10, ROWS)

SCALED = "loss-scale-by-hand"
OPTIMIZERS = {
    **ALL,
    **SETTINGS,
    # It does not grow in these steps: a scale above 2^20 is lowered by the guard.
    SCALED: lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),
}
NOT_SPARSE = {"weight-decay"}
"""Those whose update of an `Embedding` stock Keras 3.15 computes wrong or not at all.

Source: keras/src/backend/tensorflow/sparse.py.
"""


def dense(x, penalty=None):
    return layers.ReLU()(layers.BatchNormalization()(layers.Dense(16, kernel_regularizer=penalty)(x)))


def convolution(x, penalty=None):
    x = layers.Conv2D(8, 3, activation="relu", kernel_regularizer=penalty)(x)
    return layers.Flatten()(layers.MaxPooling2D()(layers.BatchNormalization()(x)))


def recurrent(x, penalty=None):
    x = layers.LayerNormalization()(layers.LSTM(8, return_sequences=True)(x))
    return layers.SimpleRNN(6, kernel_regularizer=penalty)(x)


def attention(x, penalty=None):
    x = layers.Embedding(30, 16)(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    x = layers.PReLU()(layers.GroupNormalization(4)(x + layers.Dense(16, "gelu", kernel_regularizer=penalty)(x)))
    return layers.GlobalAveragePooling1D()(x)


NETWORKS = {"Dense": (dense, VECTORS), "Conv": (convolution, IMAGES), "recurrent": (recurrent, SERIES), "attention": (attention, TOKENS)}


def trained(networks, optimizer, callbacks, penalty=None, epochs=EPOCHS):
    """Return the weights after each step of a fit, the history, and the optimizer's variables at the end."""
    keras.utils.set_random_seed(1)
    inputs = [keras.Input(data.shape[1:], dtype=data.dtype.name) for _, data in networks]
    parts = [make(x, penalty) for (make, _), x in zip(networks, inputs)]
    model = keras.Model(inputs, layers.Dense(10)(layers.Concatenate()(parts) if len(parts) > 1 else parts[0]))
    model.compile(OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append([v.tobytes() for v in model.get_weights()]))
    x, callbacks = [data for _, data in networks], [*callbacks, note]
    history = model.fit(x, CLASSES, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return seen, history.history, [np.asarray(v).tobytes() for v in model.optimizer.variables], [v.path for v in model.weights]


def check(networks, optimizer, penalty=None, epochs=EPOCHS):
    if optimizer in NOT_SPARSE:
        networks = [network for network in networks if network is not NETWORKS["attention"]]
    if not networks:
        pytest.skip("stock Keras cannot train an Embedding with this optimizer")
    guard = NanGuard(verbose=0)
    plain, history, slots, paths = trained(networks, optimizer, [], penalty, epochs)
    guarded, guarded_history, guarded_slots, _ = trained(networks, optimizer, [guard], penalty, epochs)
    assert len(plain) == len(guarded) == epochs * ROWS // BATCH
    for step, (one, other) in enumerate(zip(plain, guarded)):
        assert [path for path, a, b in zip(paths, one, other) if a != b] == [], f"in step {step}"
    assert slots == guarded_slots and history == zoo.plain_logs(guarded_history)
    assert guard.incidents == []


@pytest.mark.parametrize(
    ("optimizer", "epochs"),
    [(SCALED, FEW), *(pytest.param(name, EPOCHS, marks=pytest.mark.slow) for name in OPTIMIZERS)],
)
def test_every_kind_of_layer_at_once(optimizer, epochs):
    """One network of all kinds of layers; no bit of any weight differs after any step."""
    check(list(NETWORKS.values()), optimizer, epochs=epochs)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [None, 1e-3], ids=["plain", "L2"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_kind_of_layer(optimizer, network, penalty):
    """Other operations are adjacent, with and without a regularizer."""
    check([NETWORKS[network]], optimizer, keras.regularizers.L2(penalty) if penalty else None)
