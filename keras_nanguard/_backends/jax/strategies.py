"""The ways to run a guarded step on JAX. `step.choose` says which one runs which step."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_nanguard._backends.jax.execution import DeferredUpdates, ImmediateUpdates
from keras_nanguard._backends.jax.packed import packed, unpacked
from keras_nanguard._backends.shared.batch_memory import owned
from keras_nanguard._core.verdict import FIELDS, Verdict

__all__ = [
    "AlternatingBuffers",
    "Conditional",
    "HostSelects",
    "LooksAhead",
    "PackedState",
    "SelectedAtTheEnd",
    "Started",
    "Strategy",
    "buffers",
]

MAX_POLLS = 400 if (os.cpu_count() or 1) > 1 else 0
"""How often the host looks whether a tiny step has ended (some 0.1 ms) before it sleeps: to be woken takes it longer than that step."""


class Strategy:
    """One way to run guarded steps.

    Args:
        owner: the transaction.

    Attributes:
        max_polls: how often the host looks whether the step has ended before it sleeps.
    """

    max_polls = 0

    def __init__(self, owner: Any):
        self.owner = owner

    def run(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> tuple[Any, Any, Verdict]:
        """Run one step; returns the state to go on with, the outputs, and the verdict.

        Raises:
            Retrace: where the updates have to be deferred and cannot be; nothing has happened then.
        """
        raise NotImplementedError

    def release_run(self) -> None:
        """Release what belongs to the run that is over."""


class HostSelects(Strategy):
    """The host reads the verdict, and goes on with the new state or with the old one.

    Nothing but the verdict is added to the step, which is not given its state to write over. So memory holds both states.
    """

    def __init__(self, owner: Any):
        super().__init__(owner)
        self.program = owner.program(self.trace, **self.options())

    def options(self) -> dict[str, Any]:
        """Return how the step is compiled."""
        return {}

    def trace(self, state: Any, *args: Any) -> Any:
        """Return what the step computes: the new state whatever the verdict, the outputs, the vector, what a refusal learns."""
        return ImmediateUpdates(self.owner, unpacked(state), args).both()

    def taken(self, state: Any) -> Any:
        """Return a state as the program takes it."""
        return state

    def compute(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> Any:
        """Start the program."""
        return self.program(factors, self.taken(state), *args)

    def results(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> Any:
        """Return what the program gives for the step that is due, which may not be computed yet."""
        return self.compute(state, factors, args)

    def release(self, unused: Any, used: Any) -> None:
        """Take the state that was not selected."""

    def run(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> tuple[Any, Any, Verdict]:
        owner = self.owner
        new, outputs, vector, learned = self.results(state, factors, args)
        owner.hold(state, jax.tree_util.tree_map(owned, args))
        verdict, outputs, _ = owner.read(vector, outputs)
        owner.report_queue.put(verdict, lambda: owner.count(factors, unpacked(state), *args), args)
        if verdict.refused:
            self.release(new, state)
            return owner.with_learned(state, learned), outputs, verdict
        self.release(state, new)
        return new, outputs, verdict

    def judge(self, state: Any, args: Sequence[Any]) -> Verdict:
        """Run one step and forget it; returns its verdict."""
        new, _, vector, _ = self.compute(state, {}, args)
        self.release(new, state)
        return Verdict.of(np.asarray(vector)[: len(FIELDS)].tolist())


class LooksAhead(HostSelects):
    """The same for a step that takes no longer than the host's work around it, or than waking the host at its end.

    In `fit` the next step is started before the verdict on this one is read; its results are used if it is then called with the new
    state and that batch. A step is a function, so nobody can tell. This takes memory for one more state.
    """

    max_polls = MAX_POLLS
    _started: tuple[Any, Sequence[Any], Any] | None = None
    _asks_host: bool | None = None

    def results(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> Any:
        results = self._started_for(state, args) if not factors else None
        self._started = None
        if results is None:
            results = self.compute(state, factors, args)
        following = None if factors else self.owner.following()
        if following is not None and not self.asks_host(state, args):
            with contextlib.suppress(Exception):  # the step will raise it in its turn
                self._started = results[0], following, self.compute(results[0], {}, following)
        return results

    def _started_for(self, state: Any, args: Sequence[Any]) -> Any:
        """Return the results of the step that was started if it was with these arguments, `None` if not."""
        if self._started is None:
            return None
        own, own_args, results = self._started
        return results if own is state and all(a is b for a, b in zip(own_args, args, strict=True)) else None

    def asks_host(self, state: Any, args: Sequence[Any]) -> bool:
        """Whether a step calls back to the host (`jax.debug.print`, `jax.pure_callback`), which would notice one that is run in vain."""
        if self._asks_host is None:
            traced = self.program.trace({}, self.taken(state), *args) if hasattr(self.program, "trace") else None
            self._asks_host = traced is None or _has_callback(traced.jaxpr.jaxpr)
        return self._asks_host

    def release_run(self) -> None:
        self._started = None


class PackedState(LooksAhead):
    """The same with the state packed, for a step that computes less long than its arrays take to go in and come out."""

    def trace(self, state: Any, *args: Any) -> Any:
        new, *others = super().trace(state, *args)
        return state.repacked(new), *others

    def taken(self, state: Any) -> Any:
        return packed(state)


class AlternatingBuffers(HostSelects):
    """The same for a large state: the step writes over the weights and slots of the step before last, so that two sets alternate.

    New memory for each new state is dear: the system hands it out page by page.
    """

    def __init__(self, owner: Any):
        super().__init__(owner)
        self.spare: list[Any] = []

    def options(self) -> dict[str, Any]:
        return {"donate_argnums": 2, "keep_unused": True}

    @functools.cached_property
    def places(self) -> list[int]:
        """Places of the weights and slots in the flat state."""
        large = {id(v) for v in (*self.owner.train_state().trainable, *self.owner.train_state().slots)}
        return [i for i, variable in enumerate(self.owner.variables()) if id(variable) in large]

    def trace(self, state: Any, *args: Any) -> Any:
        """Return the same; the first argument is spare memory, of which nothing is computed."""
        return super().trace(state, *args[1:])

    def compute(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> Any:
        spare, self.spare = self.spare, []
        if not spare:
            spare = [jnp.zeros_like(array) for array in self._large(state)]
        return self.program(factors, state, spare, *args)

    def release(self, unused: Any, used: Any) -> None:
        taken = set(buffers(jax.tree_util.tree_leaves(used)))
        large = self._large(unused)
        self.spare = [jnp.zeros_like(a) if place in taken else a for a, place in zip(large, buffers(large))]

    def release_run(self) -> None:
        self.spare = []

    def _large(self, state: Any) -> list[Any]:
        leaves = jax.tree_util.tree_leaves(state)
        return [leaves[i] for i in self.places]


@dataclass(slots=True)
class Started:
    """A step that was started, and whose verdict may not be there yet.

    Attributes:
        args: its arguments.
        outputs: what it returns beside the state.
        vector: all that the host reads of it.
        halt: whether the next step has to be refused because of it; on the accelerator.
        state: what it was given, whose arrays may be gone.
    """

    args: Any
    outputs: Any
    vector: Any
    halt: Any
    state: Any


class Conditional(Strategy):
    """The step refuses by itself: its updates stand in a conditional, and write over the state."""

    updates: type[DeferredUpdates] | type[ImmediateUpdates] = DeferredUpdates

    def __init__(self, owner: Any):
        super().__init__(owner)
        shardings = owner.shardings
        first = next(iter(jax.tree_util.tree_leaves(shardings)), None)
        everywhere = None if first is None else jax.sharding.NamedSharding(first.mesh, jax.sharding.PartitionSpec())
        placed = {} if first is None else {"out_shardings": (shardings, None, None, everywhere)}
        self.program = owner.program(self.trace, donate_argnums=1, **placed)
        self.go = _scalar(np.zeros((), bool), everywhere) if owner.deferred and owner.refuse else None

    def trace(self, state: Any, halt: Any, *args: Any) -> Any:
        """Return what the step computes: the state, the outputs, the vector, and `halt` for the next step.

        Where `halt` is set, the step is refused in any case; it is `None` where no step starts before the verdict on the last one.
        """
        return self.updates(self.owner, state, args, halt).complete()

    def start(self, state: Any, factors: dict[int, Any], args: Sequence[Any], after: Started | None = None) -> tuple[Any, Started]:
        """Start a step; it is refused if the step `after` which it comes has gone wrong."""
        new, outputs, vector, halt = self.program(factors, state, self.go if after is None else after.halt, *args)
        return new, Started(jax.tree_util.tree_map(owned, args), outputs, vector, halt, state)

    def finish(self, started: Started) -> Verdict:
        """Wait for the verdict on a step that was started."""
        owner = self.owner
        owner.hold(started.state, started.args)
        verdict: Verdict
        verdict, started.outputs, counts = owner.read(started.vector, started.outputs)
        owner.report_queue.put(verdict, counts, started.args)
        return verdict

    def run(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> tuple[Any, Any, Verdict]:
        new, started = self.start(state, factors, args)
        verdict = self.finish(started)
        return new, started.outputs, verdict


class SelectedAtTheEnd(Conditional):
    """The step refuses by itself: the updates run at once, and old or new is selected at its end."""

    updates = ImmediateUpdates


def buffers(arrays: Sequence[Any]) -> list[int]:
    """Return where in memory these arrays are."""
    return [array.unsafe_buffer_pointer() for array in arrays]


def _has_callback(jaxpr: Any) -> bool:
    """Return whether a program, or one within it, calls back to the host."""
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name:
            return True
        parts = [part for value in equation.params.values() for part in (value if isinstance(value, (list, tuple)) else (value,))]
        inner = [getattr(part, "jaxpr", part) for part in parts]  # of a closed one
        if any(_has_callback(part) for part in inner if hasattr(part, "eqns")):
            return True
    return False


def _scalar(value: Any, place: Any) -> Any:
    """Return a scalar as an array in this place."""
    return jnp.asarray(value) if place is None else jax.make_array_from_callback((), place, lambda _: value)
