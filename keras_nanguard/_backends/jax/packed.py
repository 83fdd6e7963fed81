"""A state of many small arrays as a few, one for each dtype.

On a CPU every array that goes into a compiled step or comes out of it costs about a microsecond, and a tiny step with its
optimizer has dozens of them: more than it takes to compute. So the state goes from step to step in one piece, and is taken
apart where the step computes. XLA compiles each array that is taken apart for 20 to 40 ms, so only a state of few arrays is packed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Packed", "can_pack", "packed", "unpacked", "values"]

MANY = 64
"""Arrays up to which a state is packed: it takes some 12,000 steps to save what compiling takes longer, however many there are."""


class Layout:
    """Where in the packed arrays each array of a state lies.

    Args:
        tree: the structure of the state.
        arrays: shape and dtype of each of its arrays.
    """

    def __init__(self, tree: Any, arrays: tuple[tuple[tuple[int, ...], Any], ...]):
        self.tree, self.arrays = tree, arrays
        self.dtypes = tuple(dict.fromkeys(dtype for _, dtype in arrays))
        self.parts = len(tree.children())
        self._hash = hash((tree, arrays))

    @classmethod
    def of(cls, state: Any) -> Layout:
        """Return the layout of a state."""
        leaves, tree = jax.tree_util.tree_flatten(state)
        return cls(tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and (self.tree, self.arrays) == (other.tree, other.arrays))

    def __hash__(self) -> int:
        return self._hash

    def join(self, leaves: Any) -> tuple[Any, ...]:
        """Return the packed arrays of a flat state."""
        return tuple(
            jnp.concatenate([jnp.ravel(leaf) for leaf, (_, own) in zip(leaves, self.arrays) if own == dtype]) for dtype in self.dtypes
        )

    def part(self, joined: tuple[Any, ...]) -> list[Any]:
        """Return the flat state of packed arrays."""
        ends = dict.fromkeys(self.dtypes, 0)
        whole = dict(zip(self.dtypes, joined))
        leaves = []
        for shape, dtype in self.arrays:
            start, ends[dtype] = ends[dtype], ends[dtype] + math.prod(shape)
            leaves.append(whole[dtype][start : ends[dtype]].reshape(shape))
        return leaves


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["layout"])
@dataclass(eq=False)
class Packed:
    """A packed state. Iterating over it gives what iterating over the state itself would give."""

    arrays: tuple[Any, ...]
    layout: Layout

    def __iter__(self) -> Iterator[Any]:
        return iter([_Part(self, number) for number in range(self.layout.parts)])

    @functools.cached_property
    def state(self) -> Any:
        """The state itself."""
        return self.layout.tree.unflatten(_unpacked(self.layout, self.arrays))

    def repacked(self, state: Any) -> Any:
        """Return a new state packed, inside of a compiled step; as it is, where it is laid out differently."""
        if Layout.of(state) != self.layout:
            return state
        return Packed(self.layout.join(jax.tree_util.tree_leaves(state)), self.layout)


class _Part:
    """One part of a packed state, taken apart when somebody looks into it."""

    __slots__ = ("_number", "_whole")

    def __init__(self, whole: Packed, number: int):
        self._whole, self._number = whole, number

    def _list(self) -> Any:
        return self._whole.state[self._number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list())

    def __len__(self) -> int:
        return len(self._list())

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]


def values(state: Any) -> list[Any]:
    """Return the flat state, on the host: arrays to look at, in the memory of the state."""
    if isinstance(state, Packed):
        return state.layout.part(tuple(map(np.asarray, state.arrays)))
    leaves: list[Any] = jax.tree_util.tree_leaves(state)
    return leaves


def can_pack(state: Any) -> bool:
    """Whether a state is made of plain arrays, all in one place, and not of so many that compiling takes longer than it saves."""
    leaves = jax.tree_util.tree_leaves(state)
    if len(leaves) > MANY:
        return False
    plain = all(isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves)
    return plain and len(frozenset().union(*(leaf.devices() for leaf in leaves))) == 1


def packed(state: Any) -> Packed:
    """Return a state packed; one that is packed already as it is."""
    if isinstance(state, Packed):
        return state
    layout = Layout.of(state)
    return Packed(_joined(layout, tuple(jax.tree_util.tree_leaves(state))), layout)


def unpacked(state: Any) -> Any:
    """Return a state that may be packed as a pytree of its arrays."""
    return state.state if isinstance(state, Packed) else state


@functools.partial(jax.jit, static_argnums=0)
def _joined(layout: Layout, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    return layout.join(leaves)


@functools.partial(jax.jit, static_argnums=0)
def _unpacked(layout: Layout, arrays: tuple[Any, ...]) -> list[Any]:
    return layout.part(arrays)
