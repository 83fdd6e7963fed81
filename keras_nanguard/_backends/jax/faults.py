"""Fault injection on JAX: around the compiled step, which is a function of state and batch.

The host counts the steps. Inside the step a callback to the host returns whether the fault is due
in loss and gradients. The host waits for each step, so the answer is about the running step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from keras_nanguard._backends.shared.faults import FaultHook
from keras_nanguard._keras import compiled as keras_compiled
from keras_nanguard._keras.jax_trainer import over_lists, variables


class Hook(FaultHook):
    """One fault, injected into every train step of one model."""

    counts_replays = False

    def _wrap(self) -> None:
        keras_compiled.on_making(
            self.model, self._making, self, default=over_lists
        )  # on Keras 3.6 in guarded steps only

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return real(self._around(step), *args, **kwargs)

        return make

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def with_fault(state: Any, data: Any) -> Any:
            if len(state) < 4:  # of `evaluate` and `predict`, without that of the optimizer
                return step(state, data)
            self.seen += 1
            data = self._spoiled(data, self._now)
            state = self._written(state)
            with self._inside():
                return jax.block_until_ready(step(state, data))

        return with_fault

    def _bad(self, value: Any, chosen: Any, now: Any) -> Any:
        bad = super()._bad(value, chosen, now)
        on_device = isinstance(value, jax.Array)
        return jax.device_put(bad, value.sharding) if on_device else np.asarray(bad)

    def _written(self, state: Any) -> Any:
        """Return the state with the fault, as if other code had written it."""
        wanted = {id(v) for v in self._in_state()}
        if not wanted or not self._now:
            return state
        leaves, tree = jax.tree_util.tree_flatten(state)
        for i, variable in enumerate(variables(self.model)):
            if id(variable) in wanted:
                leaves[i] = self._bad(leaves[i], self._mask(variable), True)
        return jax.tree_util.tree_unflatten(tree, leaves)

    @property
    def _now_inside(self) -> Any:
        def asked() -> Any:
            return np.asarray(self._running > 0 and self._now)

        return jax.pure_callback(asked, jax.ShapeDtypeStruct((), bool))
