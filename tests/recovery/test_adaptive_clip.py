"""Clipping by what is usual in the run itself: against NumPy, in the compiled step, on every backend."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from keras import layers, optimizers

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard._fit.adaptive_clip import CHANGE, LEAST_DEVIATION, USUAL, AdaptiveClip

LIMIT = {"limit": {"times": 1, "per_steps": 1000}, "otherwise": "warn"}
CLIP = {"name": "clip-spikes", "kind": "spike", "do": [{"clip": {"deviations": 2.0, "smoothing": 0.9}}], **LIMIT}
POLICY = {"preset": "recover", "version": 1, "rules": [CLIP], "checks": {"divergence": False, "trend": {"spike_factor": 20.0}}}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((320, 4)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5], [0.0]], "float32") + 0.1).astype("float32")


def linear(optimizer=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(optimizer or optimizers.SGD(0.01), "mse")
    return model


def spiked(*steps, by=1e3, size=4):
    y = Y.copy()
    for step in steps:
        y[step * size : (step + 1) * size] *= by
    return y


def train(model, y, guard, **options):
    model.fit(X, y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=[guard], **options)
    return [keras.ops.convert_to_numpy(w) for w in model.weights]


def by_hand(model, y, spike, deviations=2.0, smoothing=0.9):
    """The same fit in NumPy: plain SGD, and from the spike on gradients clipped by reciprocal ZClip."""
    kernel, bias = (keras.ops.convert_to_numpy(w).astype("float64") for w in model.weights)
    norms, mean, variance, clips = [], 0.0, 0.0, False
    for step in range(len(X) // 4):
        x, target = X[step * 4 : step * 4 + 4].astype("float64"), y[step * 4 : step * 4 + 4]
        error = 2 * (x @ kernel + bias - target) / 4
        gradients = x.T @ error, error.sum(0)
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        width = deviations * max(np.sqrt(variance), LEAST_DEVIATION * mean)
        clipped = mean + width**2 / (norm - mean) if clips and norm > mean + width else norm
        factor = clipped / norm
        kernel, bias = kernel - 0.01 * factor * gradients[0], bias - 0.01 * factor * gradients[1]
        if clips:
            mean += (1 - smoothing) * (clipped - mean)
            variance += (1 - smoothing) * ((clipped - mean) ** 2 - variance)
        norms.append(norm)
        if step == spike:
            known, clips = norms[:spike], True
            mean = np.median(known)
            variance = (1.4826 * np.median(np.abs(known - mean))) ** 2
    return kernel, bias


def test_as_by_hand():
    """Two spikes: the first starts the clipping, the second is clipped."""
    y, guard = spiked(40, 60), NanGuard(POLICY, verbose=0)
    kernel, bias = by_hand(linear(), y, 40)
    got = train(linear(), y, guard)
    np.testing.assert_allclose(got[0], kernel, rtol=0.05, atol=0.02)
    np.testing.assert_allclose(got[1], bias, rtol=0.05, atol=0.02)
    (outcome, *_) = [o for i in guard.incidents for o in i.outcomes if o.action == "clip"]
    assert outcome.status == "done" and "gradients are clipped at a global norm of" in outcome.detail
    unclipped = train(linear(), y, NanGuard({**POLICY, "rules": []}, verbose=0))
    assert np.abs(unclipped[0] - kernel).max() > 1.0, "without it the second spike throws the weights"


def test_nothing_stands_out_nothing_changes():
    """The bits of the run without clipping, where no gradient reaches the limit."""
    always = {**POLICY, "rules": [{**CLIP, "do": [{"clip": {"deviations": 1e6}}]}]}
    y = spiked(40)
    clipped, plain = train(linear(), y, guard := NanGuard(always, verbose=0)), train(linear(), y, NanGuard("observe", verbose=0))
    assert any(o.action == "clip" and o.status == "done" for i in guard.incidents for o in i.outcomes)
    for one, other in zip(clipped, plain):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: optimizers.Adam(0.01, clipnorm=1.0), id="clipnorm"),
        pytest.param(lambda: optimizers.SGD(0.01, global_clipnorm=5.0), id="global_clipnorm"),
        pytest.param(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.01), initial_scale=1024.0), id="loss scale"),
        pytest.param(lambda: optimizers.SGD(optimizers.schedules.CosineDecay(0.01, 100)), id="schedule"),
    ],
)
def test_beside_what_the_optimizer_does(optimizer):
    guard, model = NanGuard(POLICY, verbose=0), linear(optimizer())
    y = spiked(40, by=30.0)
    y[60 * 4 : 61 * 4] *= 1e5
    weights = train(model, y, guard)
    assert any(o.action == "clip" and o.status == "done" for i in guard.incidents for o in i.outcomes)
    assert all(np.abs(w).max() < 30 for w in weights), "a target of 1e5 hardly moves them"
    assert "_clip_gradients" not in vars(getattr(model.optimizer, "inner_optimizer", model.optimizer)), "taken off at the end"


def test_rows_of_an_embedding():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(20, 4), layers.Flatten(), layers.Dense(1)])
    model.compile(optimizers.SGD(0.01), "mse")
    x, y = RNG.integers(0, 20, (320, 3)).astype("int32"), spiked(40, 60)
    guard = NanGuard(POLICY, verbose=0)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[guard])
    assert any(o.action == "clip" and o.status == "done" for i in guard.incidents for o in i.outcomes)
    assert all(np.abs(keras.ops.convert_to_numpy(w)).max() < 50 for w in model.weights)


def test_several_optimizers_are_left_alone():
    """The norm of a step is that of all of them together."""
    guard = NanGuard(POLICY, verbose=0)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(optimizers.SGD(0.01), "mse")
    model.another = optimizers.SGD(0.01)
    train(model, spiked(40), guard)
    outcomes = [o for i in guard.incidents for o in i.outcomes if o.action == "clip"]
    assert outcomes and all(o.status == "skipped" and "clipping needs one optimizer" in o.detail for o in outcomes)


def test_statistics():
    clip = AdaptiveClip(optimizers.SGD(0.1))
    clip.deviations, clip.smoothing = 3.0, 0.9
    clip.learn([1.0] * 10 + [1e6])
    assert clip.mean == 1.0 and clip.limit == pytest.approx(1.3), "the median, and at least a tenth of it as deviation"
    clip.push(1e9)
    assert clip.mean == pytest.approx(1.0), "the more it stands out, the less it counts"
    clip.push(1.6)
    assert clip.mean == pytest.approx(1.0 + 0.1 * 0.3**2 / 0.6, rel=1e-3)
    before = clip.to_dict()
    clip.push(float("nan"))
    assert clip.to_dict() == before and CHANGE < 0.1
    found = json.loads(json.dumps(clip.to_dict()))
    other = AdaptiveClip(optimizers.SGD(0.1))
    other.resume(found)
    assert other.to_dict() == clip.to_dict() and other.limit == clip.limit
    clip.release()
    other.release()


def test_a_norm_of_zero_clips_nothing():
    """Where gradients were exactly zero there is nothing usual, and nothing to divide by."""
    clip = AdaptiveClip(optimizers.SGD(0.1))
    clip.deviations = 3.0
    clip.given = np.zeros(2, "float32")
    gradient = keras.ops.ones((3,))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(clip._clipped([gradient], [gradient])[0]), np.ones(3))


def test_an_optimizer_that_accumulates_is_left_alone():
    guard = NanGuard(POLICY, verbose=0)
    train(linear(optimizers.SGD(0.01, gradient_accumulation_steps=2)), spiked(40), guard)
    outcomes = [o for i in guard.incidents for o in i.outcomes if o.action == "clip"]
    assert outcomes and all(o.status == "skipped" for o in outcomes)


def test_the_next_fit_does_not_clip(tmp_path):
    """A step that clips from its trace on, as that of a run that goes on from a snapshot, is not kept for the next fit."""
    y, ends = spiked(60), []
    for clipped in (False, True):
        model = linear()
        start = model.get_weights()
        if clipped:
            for epochs in (1, 2):
                policy = {**POLICY, "snapshot": {"every": 10, "good_after": 1}}
                guard = NanGuard(policy, verbose=0, directory=tmp_path, resume=epochs == 2)
                model.fit(X, spiked(40), batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[guard])
            assert guard.session.adjustments() and not any(o.action == "clip" for i in guard.incidents[1:] for o in i.outcomes)
            model.set_weights(start)
            model.optimizer.iterations.assign(0)
        ends.append(train(model, y, NanGuard(POLICY, verbose=0)))
    for one, other in zip(*ends):
        np.testing.assert_array_equal(one, other)


def test_another_level_is_learned():
    """Fifty norms in a row that stand out are what is usual now: it does not clip all of them for good."""
    clip = AdaptiveClip(optimizers.SGD(0.1))
    clip.deviations, clip.smoothing = 3.0, 0.97
    clip.learn([1.0] * 20)
    for _ in range(USUAL):
        clip.push(1000.0)
    assert clip.mean == pytest.approx(1000.0) and clip.limit > 1000.0


def test_a_model_that_guards_itself_goes_on_clipping():
    """The limit follows the norms in the next fit as well, and there is one override, not two."""

    class Guarded(NanGuardModel):
        nanguard_policy, nanguard_verbose = POLICY, 0

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    keras.utils.set_random_seed(0)
    model = Guarded()
    model.compile(optimizers.SGD(0.01), "mse")
    means = []
    for y in (spiked(40), Y, Y):
        model.fit(X, y, batch_size=4, shuffle=False, verbose=0)
        (clip,) = model.nanguard.session.recovery.clips.values()
        means.append(clip.mean)
    assert means[0] != means[1] != means[2]
