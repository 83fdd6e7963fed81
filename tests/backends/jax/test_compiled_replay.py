"""A step that is bad only when compiled is replayed layer by layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard


def hot(x):
    """Whether there is a large number in a compiled step. There is none in an eager one."""
    compiled = isinstance(jnp.zeros(()), jax.core.Tracer)
    return (jnp.max(x) > 50) & compiled


@jax.custom_vjp
def spoils_gradient(x):
    return x


def spoil(x, gradient):
    return (jnp.where(hot(x), jnp.nan, gradient),)


spoils_gradient.defvjp(lambda x: (x, x), spoil)

FUNCTIONS = {
    "forward_domain": lambda x: x + jnp.sqrt(jnp.where(hot(x), -1.0, 1.0)),
    "gradient_domain": spoils_gradient,
}


@pytest.mark.parametrize("cause", FUNCTIONS)
def test_the_layer_is_found(cause):
    """The eager replay is finite; the compiled one names the layer, forward and backward."""
    data = zoo.regression()
    data.x[3 * zoo.BATCH] = 200.0

    def build():
        first = layers.Dense(4, kernel_initializer="ones", name="first")
        lines = [keras.Input((6,)), first, layers.Lambda(FUNCTIONS[cause], name="spoils")]
        model = keras.Sequential([*lines, layers.Dense(1, name="last")])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
        return model

    run = zoo.run(build, data, guard=NanGuard(verbose=0), epochs=1)
    (incident,) = run.guard.incidents
    assert incident.step == 3 and zoo.bad_entries(run.model) == []
    assert incident.diagnosis.cause == cause
    assert str(incident.diagnosis.culprit).endswith("spoils")
    assert any("eager replay of the step is finite" in line for line in incident.diagnosis.evidence)
    assert np.isfinite(run.history["loss"]).all()
