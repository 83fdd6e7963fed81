"""The ways to run a guarded step on JAX. `step.choose` says which one runs which step."""

from __future__ import annotations

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
    "PackedState",
    "SelectedAtTheEnd",
    "SingleThread",
    "Started",
    "Strategy",
    "buffers",
]

_SEQUENTIAL_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""Lets XLA on a CPU order the parts of a program by memory instead of by what could run at the same time.

By default more than a few parts that are ready at once are handed to other threads (`xla/backends/cpu/runtime/
thunk_executor.cc`, `SplitReadyQueue`). The sums over gradients and over the new state make a tiny step that wide. The
numbers are the same.
"""


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

    def compute(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> Any:
        """Start the program."""
        return self.program(factors, state, *args)

    def release(self, unused: Any, used: Any) -> None:
        """Take the state that was not selected."""

    def run(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> tuple[Any, Any, Verdict]:
        owner = self.owner
        new, outputs, vector, learned = self.compute(state, factors, args)
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


class SingleThread(HostSelects):
    """The same for a step that takes less time than handing its parts to other threads, or than waking the host at its end."""

    max_polls = MAX_POLLS

    def options(self) -> dict[str, Any]:
        return _sequential_scheduler()


class PackedState(SingleThread):
    """The same with the state packed, for a step that computes less long than its arrays take to go in and come out."""

    def trace(self, state: Any, *args: Any) -> Any:
        new, *others = super().trace(state, *args)
        return state.repacked(new), *others

    def compute(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> Any:
        return super().compute(packed(state), factors, args)


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


def _scalar(value: Any, place: Any) -> Any:
    """Return a scalar as an array in this place."""
    return jnp.asarray(value) if place is None else jax.make_array_from_callback((), place, lambda _: value)


@functools.cache
def _sequential_scheduler() -> dict[str, Any]:
    """Return `_SEQUENTIAL_SCHEDULER` as an argument of `jax.jit`; nothing where this version of XLA or of JAX takes none such."""
    options = {"compiler_options": _SEQUENTIAL_SCHEDULER}
    try:
        jax.jit(lambda: 0, **options)()
    except (TypeError, jax.errors.JaxRuntimeError):
        return {}
    return options
