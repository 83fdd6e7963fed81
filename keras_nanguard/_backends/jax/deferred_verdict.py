"""A step that was started, whose verdict may not be there yet; and where scalars lie that go from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Started", "everywhere", "on_accelerator", "put"]


@dataclass(slots=True)
class Started:
    """A step that was started, and whose verdict may not be there yet.

    Attributes:
        args: its arguments.
        outputs: what it returns beside the state.
        vector: all that it tells the host.
        halt: whether the next step has to be refused because of it; on the accelerator.
        state: what it was given, whose arrays may be gone.
    """

    args: Any
    outputs: Any
    vector: Any
    halt: Any
    state: Any


def on_accelerator() -> bool:
    """Whether steps run elsewhere than on the processor that the host needs for itself."""
    return bool(jax.default_backend() != "cpu")


def everywhere(shardings: Any) -> Any:
    """Return the place of a scalar beside arrays that lie in these places, `None` where they are on one device."""
    first = next(iter(jax.tree_util.tree_leaves(shardings)), None)
    return None if first is None else jax.sharding.NamedSharding(first.mesh, jax.sharding.PartitionSpec())


def put(scalar: Any, place: Any) -> Any:
    """Return a scalar as an array in this place."""
    return jnp.asarray(scalar) if place is None else jax.make_array_from_callback((), place, lambda _: scalar)
