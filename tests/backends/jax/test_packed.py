"""A state packed into one array for each dtype, and what Keras and the host see of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
from hypothesis import given, settings, strategies as st
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._backends.jax import strategies
from keras_nanguard._backends.jax.packed import MANY, Packed, can_pack, packed, unpacked, values
from keras_nanguard._backends.jax.step import pinned

DTYPES = ("float32", "float16", "bfloat16", "int32", "uint32", "bool")
ARRAY = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))


def state_of(parts):
    """Return a state as Keras hands it out: lists of arrays, each entry another number."""
    rng = np.random.default_rng(0)

    def array(dtype, shape):
        return jnp.asarray(rng.integers(0, 100, shape), dtype)

    return tuple([array(*one) for one in part] for part in parts)


def same(one, other):
    leaves, tree = jax.tree_util.tree_flatten(one)
    others, other_tree = jax.tree_util.tree_flatten(other)
    assert tree == other_tree
    for a, b in zip(leaves, others):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@settings(max_examples=25)  # each layout is compiled
@given(st.lists(st.lists(ARRAY, max_size=4), min_size=1, max_size=4))
def test_nothing_is_lost(parts):
    """Whatever a state is made of, it comes out as it went in: as a whole, by its parts, and as numbers on the host."""
    state = state_of(parts)
    whole = packed(state)
    assert packed(whole) is whole
    same(unpacked(whole), state)
    same(tuple(list(part) for part in whole), state)
    same(values(whole), jax.tree_util.tree_leaves(state))
    assert [len(part) for part in whole] == [len(part) for part in state]
    assert len(whole.arrays) == len({dtype for part in parts for dtype, _ in part})


def test_inside_of_a_step():
    """A compiled step takes it apart and puts it together; one that comes out laid out differently stays as it is."""
    state = state_of([[("float32", (2, 3)), ("int32", ())], [("float32", (4,))]])

    @jax.jit
    def step(whole):
        (a, b), (c,) = unpacked(whole)
        return whole.repacked(([a + 1, b + 1], [c * 2]))

    @jax.jit
    def other(whole):
        (a, b), (c,) = unpacked(whole)
        return whole.repacked(([a + 1, b.astype("float32")], [c]))

    (a, b), (c,) = state
    assert isinstance(step(packed(state)), Packed)
    same(unpacked(step(packed(state))), ([a + 1, b + 1], [c * 2]))
    same(other(packed(state)), ([a + 1, b.astype("float32")], [c]))


def test_layouts_are_told_apart():
    """Two states of as many entries that are cut differently are no business of one trace."""
    traces = []

    @jax.jit
    def step(whole):
        traces.append(1)
        return whole

    for shapes in ((2, 3), (3, 2), (2, 3)):
        step(packed(state_of([[("float32", (n,)) for n in shapes]])))
    assert len(traces) == 2


def test_random_keys_are_not_packed():
    """A typed random key is no plain array."""
    assert can_pack(([jnp.zeros(3)],))
    assert not can_pack(([jnp.zeros(3), jax.random.key(0)],))
    assert not can_pack(([1.0],))


def test_many_arrays_are_not_packed():
    """XLA compiles each array that it takes apart, and a deep network would wait a minute for its first step."""
    arrays = [jnp.zeros(3)] * MANY
    assert can_pack((arrays,))
    assert not can_pack(([*arrays, jnp.zeros(3)],))


class Counted(NanGuard):
    """Notes the steps after which the state is put into the variables."""

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        model = self.model
        self.synced, real = [], model.jax_state_sync

        def sync():
            if not model._jax_state_synced:
                self.synced.append(self.session.step)
            real()

        model.jax_state_sync = sync


def test_looks_leave_the_state_where_it_is():
    """Looks and snapshots read the state of a healthy run without putting it into the variables."""
    keras.utils.set_random_seed(0)  # some runs of so small batches look as if they diverged, and a lower rate is tried
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(260 * 4, 4)).astype("float32")
    guard = Counted(verbose=0)
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=[guard])
    assert sorted(set(guard.synced)) == [0, 260]
    assert [snapshot.step for snapshot in guard.session.ring.snapshots] == [0, 100, 200]


def test_looks_see_the_state_of_their_step():
    """A snapshot holds what the variables would have held."""
    data, kept = zoo.regression(batches=110), []
    for strategy in (strategies.PackedState, strategies.HostSelects):
        with pinned(strategy):
            run = zoo.run(zoo.plain, data, guard=True, epochs=1)
        assert type(run.guard.session.transaction.strategy) is strategy
        kept.append(run.guard.session.ring.snapshots[-1])
    assert [s.step for s in kept] == [100, 100]
    for one, other in zip(*(s.arrays.values() for s in kept)):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
