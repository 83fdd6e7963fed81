"""Random numbers that ruin a step are redrawn; an isolated bad batch advances no generator."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard

X = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
Y = X.sum(1, keepdims=True)


class SometimesEmpty(layers.Layer):
    """Divides by a random mask's sum, which is 0 in one step of sixteen, for any batch."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        kept = keras.ops.cast(keras.random.uniform((4,), seed=self.seed_generator) > 0.5, x.dtype)
        return x * (2.0 / keras.ops.sum(kept))


def build(*noise):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), *noise, layers.Dense(8, "relu"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_bad_noise_is_redrawn():
    """Stock Keras ends with NaN. Steps with an empty mask are skipped, with no rollback."""
    plain = build(SometimesEmpty())
    plain.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert not np.isfinite(plain.get_weights()[-1]).all()
    guard, model = NanGuard(verbose=0), build(SometimesEmpty())
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[guard]).history
    assert not any(i.changes for i in guard.incidents) and not model.stop_training
    assert 4 <= guard.session.run.counts.refused < 40 and guard.session.run.step == 128
    steps = {incident.step for incident in guard.incidents}
    again = [step for step in steps if step + 1 in steps]
    assert len(again) < 0.5 * len(steps), "the same noise was drawn once more"
    assert history["loss"][-1] < 0.5 * history["loss"][0]


@pytest.mark.parametrize("bad, moved", [((5,), 0), ((5, 6), 1)])
def test_generators_move_after_the_second_refusal_in_a_row(bad, moved):
    """After one bad step the seeds are as without it. After two the next draw differs."""
    x = X.copy()
    for batch in bad:
        x[batch * 8] = 3e38  # finite, and its square is not
    seeds = []
    for rows in (x, np.delete(X, [row for batch in bad for row in range(batch * 8, batch * 8 + 8)], axis=0)):
        model = build(layers.Dropout(0.1, seed=1))
        targets = Y[: len(rows)]
        guard = NanGuard(verbose=0)
        model.fit(rows, targets, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
        assert len(guard.incidents) == (len(bad) if rows is x else 0)
        seeds.append([keras.ops.convert_to_numpy(v) for v in model.variables if "seed" in v.path])
    same = all(np.array_equal(*pair) for pair in zip(*seeds, strict=True))
    assert same == (not moved)
