"""Every warning of NumPy comes from the user's code, also with NaN, Inf and huge numbers."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_nanguard
from keras_nanguard import NanGuard, replay
from keras_nanguard.testing import inject

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 4)).astype("float32")
Y = X[:, :1]


def model(optimizer=None, wide=False, dtype="float32", **compiled):
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(80 if wide else 4), layers.BatchNormalization(), layers.Dense(80 if wide else 4)]
    built = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
    built.compile(optimizer or keras.optimizers.SGD(0.01), **{"loss": "mse", **compiled})
    return built


def large(part, value, wide=False):
    """Return data that is bad or whose squares and sums overflow, with a model for it."""
    x, y = X.copy(), Y.copy()
    (x if part == "x" else y)[12] = value
    return model(wide=wide), x, y


PROGRAMS = {
    "NaN in x": lambda: large("x", np.nan),
    "Inf in x": lambda: large("x", [np.inf, -np.inf, 0, 1]),
    "Inf and NaN in a wide model": lambda: large("x", [np.inf, np.nan, 0, 1], wide=True),
    "huge x": lambda: large("x", 3e38),
    "huge y": lambda: large("y", -3e38),
    "a rate that diverges": lambda: (model(keras.optimizers.SGD(1e30), wide=True), X, Y),
    "squares that overflow in float32": lambda: (model(loss_weights=1e30), X, Y),
    "finite losses whose sum overflows": lambda: (model(), X, Y * 0 + 1.5e19),
    "a rate of Inf": lambda: (model(keras.optimizers.SGD(float("inf"))), X, Y),
}


def silent(work):
    """Run a function, raise at each unexpected floating-point error; return NumPy's warnings."""
    with warnings.catch_warnings(record=True) as seen, np.errstate(all="warn"):
        warnings.simplefilter("always")
        work()
    return [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]


def lines(guard):
    return [line for incident in guard.incidents for line in incident.diagnosis.evidence]


@pytest.mark.daily(
    "Inf and NaN in a wide model", "huge x", "a rate that diverges", "finite losses whose sum overflows"
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fit_with_incidents(name, tmp_path):
    """Refusing, diagnosing, rolling back, validating and replaying."""
    built, x, y = PROGRAMS[name]()
    guard = NanGuard(verbose=0, directory=tmp_path)

    def work():
        built.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, validation_data=(x, y), callbacks=[guard])
        bundles = [incident.bundle for incident in guard.incidents if incident.bundle]
        for bundle in bundles[:1]:
            replay(bundle, built)

    assert silent(work) == []
    assert guard.incidents and not any("itself failed" in line for line in lines(guard))


def test_a_refusal_with_warnings_as_errors():
    """Handling a bad step emits no warning of any category, deprecations included."""
    built, x, y = PROGRAMS["NaN in x"]()
    guard = NanGuard(verbose=0)
    built.fit(X, Y, batch_size=8, verbose=0)  # Keras itself warns while it traces
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[guard])
    assert len(guard.incidents) == 2


@pytest.mark.daily("overflow-weights", "overflow-slots")
@pytest.mark.parametrize("site", ["gradients", "weights", "statistics", "slots"])
@pytest.mark.parametrize("kind", [pytest.param("nan", marks=pytest.mark.slow), "overflow"])
def test_injected(site, kind):
    """Faults in the state: detected, reported and repaired."""
    built = model(keras.optimizers.Adam(1e-3), wide=True)
    guard = NanGuard(verbose=0)

    def work():
        with inject(built, site=site, kind=kind, step=20):
            built.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[guard])

    assert silent(work) == []
    assert guard.incidents and not any("itself failed" in line for line in lines(guard))


def test_functions():
    """`diagnose`, `scan`, `lint`, `repair` and `recalibrate` of a model with bad values."""
    built = model(wide=True)
    built.layers[0].kernel.assign(np.full((4, 80), 3e38))
    built.layers[1].moving_variance.assign(np.full(80, np.inf))
    built.layers[2].bias.assign(np.full(80, np.nan))

    def work():
        keras_nanguard.diagnose(built, X, Y)
        keras_nanguard.scan(built)
        keras_nanguard.lint(built)
        keras_nanguard.repair(built)
        with pytest.raises(keras_nanguard.GuardError, match="finite inputs"):
            keras_nanguard.recalibrate(built, X)
        built.evaluate(X, Y, verbose=0, callbacks=[NanGuard(verbose=0)])
        built.predict(X, verbose=0, callbacks=[NanGuard(verbose=0)])

    assert silent(work) == []
