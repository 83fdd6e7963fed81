"""The debugging modes of JAX."""

from __future__ import annotations

import jax
import pytest
from support import zoo

from keras_nanguard import NanGuard

MODES = ["jax_check_tracer_leaks", "jax_debug_nans", pytest.param("jax_debug_infs", marks=pytest.mark.slow)]


@pytest.mark.parametrize("mode", MODES)
def test_a_healthy_fit(mode, request):
    """The guard computes nothing that these modes reject."""
    data, guard = zoo.regression(batches=4), NanGuard(verbose=0)
    request.addfinalizer(lambda: jax.config.update(mode, False))
    jax.config.update(mode, True)
    run = zoo.run(zoo.plain, data, guard=guard, epochs=2)
    assert guard.incidents == [] and zoo.bad_entries(run.model) == []
