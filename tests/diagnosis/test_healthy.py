"""Healthy training has no incident, with any initializer, optimizer, precision and architecture."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(3e-3),
    "adamw": lambda: keras.optimizers.AdamW(3e-3, weight_decay=1e-2),
    "rmsprop": lambda: keras.optimizers.RMSprop(2e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.02),
    "lion": lambda: keras.optimizers.Lion(3e-4),
    "nadam": lambda: keras.optimizers.Nadam(3e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-4, 60, warmup_target=5e-3)),
}
INITIALISERS = ("glorot_uniform", "he_normal", "lecun_uniform", "orthogonal", "random_normal")
POLICIES = ("float32", "float32", "mixed_float16", "mixed_bfloat16", "float64")


def dense(start):
    x = keras.Input((16,))
    h = layers.Dense(32, activation="relu", kernel_initializer=start)(x)
    h = layers.BatchNormalization()(h)
    h = layers.Dropout(0.2)(h)
    return keras.Model(x, layers.Dense(4, activation="softmax", dtype="float32", kernel_initializer=start)(h))


def convolution(start):
    x = keras.Input((16,))
    h = layers.Reshape((4, 4, 1))(x)
    h = layers.Conv2D(8, 3, padding="same", kernel_initializer=start)(h)
    h = layers.BatchNormalization()(h)
    h = layers.Activation("relu")(h)
    h = layers.GlobalAveragePooling2D()(h)
    return keras.Model(x, layers.Dense(4, activation="softmax", dtype="float32")(h))


def recurrent(start):
    x = keras.Input((16,))
    h = layers.LSTM(8, kernel_initializer=start)(layers.Reshape((8, 2))(x))
    return keras.Model(x, layers.Dense(4, activation="softmax", dtype="float32")(h))


def attention(start):
    x = keras.Input((16,))
    h = layers.Dense(8, kernel_initializer=start)(layers.Reshape((4, 4))(x))
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
    return keras.Model(x, layers.Dense(4, activation="softmax", dtype="float32")(layers.Flatten()(h)))


MODELS = {"dense": dense, "convolution": convolution, "recurrent": recurrent, "attention": attention}


def combinations(count):
    every = [(m, o, i, p) for m in MODELS for o in OPTIMIZERS for i in INITIALISERS for p in POLICIES]
    return random.Random(0).sample(every, count)


def incidents(model_name, optimizer, start, policy):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    model = MODELS[model_name](start)
    model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 1600)
    x = rng.standard_normal((1600, 16)).astype("float32")
    x[np.arange(1600), y] += 2.0
    guard = NanGuard(verbose=0)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_split=0.1, callbacks=[guard])
    return guard.incidents


@pytest.mark.parametrize(("model", "optimizer", "start", "policy"), combinations(6))
def test_a_healthy_run_is_quiet(model, optimizer, start, policy):
    assert incidents(model, optimizer, start, policy) == []


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer", "start", "policy"), combinations(56)[6:])
def test_fifty_more_healthy_runs_are_quiet(model, optimizer, start, policy):
    assert incidents(model, optimizer, start, policy) == []
