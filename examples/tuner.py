"""KerasTuner: a search over learning rates on data with a broken row. Every trial of stock Keras ends in NaN.

    pip install keras-tuner
    python examples/tuner.py
"""

from __future__ import annotations

import tempfile

import keras
import keras_tuner
import numpy as np
from sklearn.datasets import load_digits

from keras_nanguard import NanGuard

digits = load_digits()
x, y = (digits.data / 16.0).astype("float32"), digits.target
x[123, 20] = np.nan


class Digits(keras_tuner.HyperModel):
    """A network with the learning rate of a trial. With `guards` each trial has a guard, stored by its rate.

    `tuner.search(..., callbacks=[NanGuard()])` guards, too. But KerasTuner copies callbacks for each trial, so the guard that you
    hold has no incidents then.
    """

    def __init__(self, guards=None):
        super().__init__()
        self.guards = guards

    def build(self, choice):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
        rate = choice.Choice("rate", [1e-3, 3e-3, 1e-2])
        model.compile(keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    def fit(self, choice, model, *data, callbacks, **settings):
        if self.guards is not None:
            guard = self.guards[choice.get("rate")] = NanGuard(verbose=0)
            callbacks = [*callbacks, guard]
        return model.fit(*data, callbacks=callbacks, **settings)


def search(folder, guards=None):
    """Try each rate; return the best validation accuracy of each."""
    objective = keras_tuner.Objective("val_accuracy", "max")
    tuner = keras_tuner.GridSearch(Digits(guards), objective=objective, directory=folder, seed=0)
    tuner.search(x[:1440], y[:1440], validation_data=(x[1440:], y[1440:]), epochs=3, verbose=0)
    return {trial.hyperparameters.get("rate"): trial.score for trial in tuner.oracle.trials.values()}


guards = {}
with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
    stock, guarded = search(one), search(other, guards)

for rate, guard in sorted(guards.items()):
    left_out = f"{sum(i.refused for i in guard.incidents)} of 135 steps skipped"
    print(f"rate {rate}: accuracy {stock[rate]:.2f} with stock Keras, {guarded[rate]:.2f} with NanGuard(), {left_out}")
if max(stock.values()) > 0.5 or min(guarded.values()) < 0.5:
    raise SystemExit("The guard did not help here.")
