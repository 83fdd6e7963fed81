"""The transaction on JAX.

In words::

    run       the user's step; what its optimizers would write is put off, arrays stand for it
    verdict   loss, gradients and written statistics finite, loss scale sound
    if so:    the updates run; weights and slots are read once
    if not:   weights and slots stay, the loss scale learns, bad entries are counted
    either:   the small state (statistics, seeds, metrics) is selected, new or old

A step is a function from state to state, so refusing it is handing back what it was given. The ways to do that:

- A small state, and any state in eager execution, is not given up to the step: the host, which reads the verdict anyway,
  goes on with the new state or with the old one. Nothing but the verdict is added to the step.
- With a large state on a CPU the host reads the verdict before it starts the updates, which write over the state (`_jax_parted`).
  Where the updates cannot be put off, the host chooses as above, but memory for the new state is dear: the system hands it out page by
  page. So the step is given the weights and slots of the step before last to write over, and two of each take turns.
- A large state elsewhere is given up to the step, which writes over it. Selecting old or new for every array would cost a pass
  over all of them and a second copy in memory, so the update itself stands in a conditional. The body is traced once, by
  itself, with one more input for each array that an update will give: the trace says exactly what the body writes, and
  whether it does anything with these arrays but hand them back.
- Where it does (a GAN whose generator step uses the updated discriminator, a sharpness-aware step), the updates run at
  once and old or new is chosen at the end.

An accelerator must not wait for the host. There the step refuses by itself, whatever its size, and the next one may be started
before the verdict is read. It is told on the accelerator whether something is wrong (`Started.halt`), and then it
refuses, too, whatever its batch is like: so the host finds the state that the bad step left, and runs the next one again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_nanguard._backends.jax.deferred_verdict import Started, everywhere, on_accelerator, put
from keras_nanguard._backends.jax.execution import DeferredUpdates, ImmediateUpdates
from keras_nanguard._backends.jax.intercept import Retrace
from keras_nanguard._backends.jax.packed import Packed, can_pack, packed, unpacked
from keras_nanguard._backends.jax.reports import ReportQueue
from keras_nanguard._backends.jax.two_programs import TwoPrograms
from keras_nanguard._backends.shared.batch_memory import owned
from keras_nanguard._core.verdict import FIELDS, Verdict
from keras_nanguard._keras.train_state import TrainState

__all__ = ["Transaction"]

SMALL = 1 << 22
"""Bytes of state up to which a compiled step is not given its state to write over."""

TWO_PROGRAMS = SMALL
"""Bytes of state from which the updates of a compiled step on a CPU are a program of their own."""

LARGE = 1 << 16
"""Bytes from which one array is worth writing over."""

LARGEST = 512 << 20
"""Bytes of state up to which a compiled step on a CPU is given a second one to write over."""

TINY = 1 << 18
"""Bytes of state up to which a compiled step counts as one that takes less time than handing its parts to threads."""

MAX_POLLS = 400 if (os.cpu_count() or 1) > 1 else 0
"""How often to look whether a tiny step is through (some 0.1 ms) before the host sleeps: to be woken takes it longer than that
step."""

_SEQUENTIAL_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""Lets XLA on a CPU order the parts of a program by memory instead of by what could run at the same time.

By default more than a few parts that are ready at once are handed to other threads (`xla/backends/cpu/runtime/
thunk_executor.cc`, `SplitReadyQueue`). The sums over gradients and over the new state make a tiny step that wide, and
it takes three times as long for it. The numbers are the same.
"""


class Transaction:
    """Wraps the body of one train step: `body(state, *args) -> (outputs, new_state)`.

    Args:
        body: the step.
        anatomy: callable that returns the `TrainState` at the time of tracing.
        variables: callable that returns the Keras variable of each array of the flattened state (`None` for one that
            has none).
        outputs: what the outputs say of the loss, and what takes their place on a refusal.
        model: the model whose `compute_loss` tells the loss, or `None`.
        refuse: refuse bad steps; without it the step runs as it is, and its verdict and batch are told all the same.
        jit: compile the step.
        donate: whether a large state may be written over.
        pack: whether a tiny state may come back packed; only whoever knows `_jax_packed` can look into it.
        shardings: where the arrays of the state lie; `None` where they are on one device.
        scaling: context in which learning rates are scaled by `factors`.
        late: whether a step may be started before the verdict on the one before it is read.

    Attributes:
        saving: whether the updates run at once, and old or new is chosen at the end.
        light: whether the host chooses between old and new.
        in_two: what runs the updates as a program of their own; `None` where they are not.
        turns: whether the step then writes over the weights and slots of the step before last.
        packs: whether the state comes back packed.
        meanwhile: called while a step computes.
        given: the arguments of the last step.
    """

    counted = False
    """The host reads the row of each step, so none has to count for itself."""

    reused = False
    """Whether it was traced for an earlier run."""

    untracked: dict[int, Any] = {}
    """A pure step writes nothing but what it returns."""

    def __init__(
        self,
        body: Callable[..., Any],
        train_state: Callable[[], TrainState],
        variables: Callable[[], Sequence[Any]],
        *,
        outputs: Any,
        model: Any = None,
        refuse: bool = True,
        jit: bool = False,
        donate: bool = True,
        pack: bool = False,
        shardings: Any = None,
        scaling: Callable[[dict[int, Any]], Any] = lambda factors: contextlib.nullcontext(),
        deferred: bool = False,
    ):
        self.body, self.train_state, self.variables, self.model = body, train_state, variables, model
        self.outputs, self.refuse, self.jit, self.scaling = outputs, refuse, jit, scaling
        self.keeps_undo, self.packs, self.tiny, self.alternates = False, pack, False, donate and shardings is None
        self.deferred = deferred
        self.host_selects: bool | None = None if shardings is None and not deferred else False  # the step keeps its arrays where they lie
        self.tolerated: set[int] = set()
        self.report_queue = ReportQueue()
        self.row_size = len(FIELDS)
        self._last: Any = None
        self._spare: Any = ()
        self.two_programs: TwoPrograms | None = None
        self._places: list[int] = []
        self.meanwhile: Callable[[], None] = _nothing
        self.given: Any = None
        anywhere = everywhere(shardings)
        self._go = put(np.zeros((), bool), anywhere) if deferred and refuse else None
        if deferred:
            self.outputs.apart = True
        place = {} if shardings is None else {"out_shardings": (shardings, None, None, anywhere)}
        self._self_refusing = jax.jit(self._gated, donate_argnums=0 if donate else (), **place) if jit else self._gated
        self._host_selected: Any = None
        self.count = jax.jit(self._counted) if jit else self._counted

    def __call__(self, state: Any, factors: dict[int, Any], *args: Any) -> tuple[Any, Any, Verdict]:
        """Run the step, and wait for its verdict.

        Args:
            state: a pytree of arrays.
            factors: what the guard multiplies learning rates by that are no variables, by `id` of the optimizer.
            *args: what else the body takes.

        Returns:
            the state to go on with, the outputs, and the verdict.
        """
        if self._last is None:
            self.adopt(state)
        if self.two_programs is not None:
            if _is_spread(state):
                try:
                    return self.two_programs(state, factors, *args)
                except Retrace:
                    self.keeps_undo = True
            self.two_programs = None
        if not self.host_selects:
            new, started = self.start(state, factors, *args)
            verdict = self.finish(started)
            return new, started.outputs, verdict
        if self.packs:
            state = packed(state)
        spare = self._room(state) if self.alternates else ()
        new, outputs, vector, learned = self._host_selected(state, spare, factors, *args)
        verdict, outputs = self.split_outputs(self.read(vector, state, args), outputs)
        self.report_queue.put(verdict, lambda: self.count(state, factors, *args), args)
        if self.alternates:
            self._alternate(state, new, verdict.refused)
        if verdict.refused:
            new = self.given_back(state, learned)
        return new, outputs, verdict

    def start(self, state: Any, factors: dict[int, Any], *args: Any, after: Started | None = None) -> tuple[Any, Started]:
        """Start a step that refuses by itself, and does so if the step `after` which it comes has gone wrong.

        The other arguments are as above. Returns the state to go on with, and what `finish` needs.
        """
        if self._last is None:
            self.adopt(state)
        halt = self._go if after is None else after.halt
        new, outputs, vector, halt = self._self_refusing(state, halt, factors, *args)
        return new, Started(jax.tree_util.tree_map(owned, args), outputs, vector, halt, state)

    def finish(self, started: Started) -> Verdict:
        """Wait for the verdict on a step that was started, and return it."""
        self._last, self.given = started.state, started.args
        self.report_queue.forget()
        array = self._wait(started.vector)
        verdict, started.outputs = self.split_outputs(array, started.outputs)
        self.report_queue.put(verdict, array[self.row_size :], started.args)
        return verdict

    def read(self, vector: Any, state: Any, args: tuple[Any, ...]) -> Any:
        """Wait for what a step has to tell; meanwhile, let go of the step before it, then keep its arguments, and look ahead."""
        self._last = state
        self.report_queue.forget()
        self.given = jax.tree_util.tree_map(owned, args)
        return self._wait(vector)

    def _wait(self, vector: Any) -> Any:
        self.meanwhile()
        polls = MAX_POLLS if self.tiny else 0
        while polls and not vector.is_ready():
            polls -= 1
        return np.asarray(vector)

    def _choose(self, state: Any) -> None:
        """Choose how to run steps on a state of this size."""
        size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(state))
        on_cpu = self.jit and not on_accelerator()
        if self.alternates and on_cpu and self.host_selects is None and size > TWO_PROGRAMS and self.refuse and not self.keeps_undo:
            self.two_programs = TwoPrograms(self)
        self.alternates = self.alternates and on_cpu and self.host_selects is None and SMALL < size <= LARGEST
        if self.host_selects is None:
            self.host_selects = not self.jit or size <= SMALL or self.alternates
        self.tiny = self.host_selects and on_cpu and size <= TINY
        self.packs = self.packs and self.tiny and can_pack(state)
        options: dict[str, Any] = {"donate_argnums": 1, "keep_unused": True} if self.alternates else {}
        options["compiler_options"] = _sequential_scheduler() if self.tiny else None
        self._host_selected = jax.jit(self._both, **options) if self.jit else self._both

    def _room(self, state: Any) -> list[Any]:
        """Return arrays that the step may write over, of the sizes of weights and slots."""
        spare: list[Any] = list(self._spare)
        self._spare = ()
        if not spare:
            large = {id(v) for v in (*self.train_state().trainable, *self.train_state().slots)}
            leaves = enumerate(zip(self.variables(), jax.tree_util.tree_leaves(state)))
            self._places = [i for i, (variable, leaf) in leaves if id(variable) in large and leaf.nbytes >= LARGE]
            spare = list(map(jnp.zeros_like, self._large(state)))
        return spare

    def _large(self, state: Any) -> list[Any]:
        leaves: list[Any] = jax.tree_util.tree_leaves(state)
        return [leaves[i] for i in self._places]

    def _alternate(self, old: Any, new: Any, refused: bool) -> None:
        """Keep for the next step what nobody needs any more; where old and new share an array, give it up to take turns."""
        left, taken = (new, old) if refused else (old, new)
        spare = self._large(left)
        if _places_of(spare) & _places_of(jax.tree_util.tree_leaves(taken)):
            self.alternates = self.host_selects = False
        else:
            self._spare = spare

    def split_outputs(self, array: Any, outputs: Any) -> tuple[Verdict, Any]:
        """Return the verdict on a step and its outputs, some of which have left the step in one array with it."""
        numbers = array[: self.row_size].tolist()
        return Verdict.of(numbers[: len(FIELDS)]), self.outputs.split(outputs, numbers[len(FIELDS) :])

    def given_back(self, state: Any, learned: dict[int, Any]) -> Any:
        """Return the old state with the learned loss scale."""
        leaves, tree = jax.tree_util.tree_flatten(unpacked(state))
        for place, value in learned.items():
            leaves[place] = value
        return jax.tree_util.tree_unflatten(tree, leaves)

    # What is compiled

    def _gated(self, state: Any, halt: Any, factors: dict[int, Any], *args: Any) -> tuple[Any, Any, Any, Any]:
        """Choose within the step; `halt` says that it is to be refused in any case, and is `None` where none ever is."""
        leaves, tree = jax.tree_util.tree_flatten(state)
        with self.scaling(factors):
            if self.refuse and not self.keeps_undo:
                try:
                    return DeferredUpdates(self, leaves, tree, args, halt).complete()
                except Retrace:
                    self.keeps_undo = True
            return ImmediateUpdates(self, leaves, tree, args, halt).complete()

    def _both(self, state: Any, spare: Any, factors: dict[int, Any], *args: Any) -> tuple[Any, Any, Any, dict[int, Any]]:
        """Leave the choice to the host; nothing is computed of what is spare."""
        leaves, tree = jax.tree_util.tree_flatten(unpacked(state))
        with self.scaling(factors):
            new, *told = ImmediateUpdates(self, leaves, tree, args).both()
        return state.repacked(new) if isinstance(state, Packed) else new, *told

    def _counted(self, state: Any, factors: dict[int, Any], *args: Any) -> Any:
        """Count bad entries: the step once more, from the same state, so with the same numbers."""
        leaves, tree = jax.tree_util.tree_flatten(unpacked(state))
        with self.scaling(factors):
            return ImmediateUpdates(self, leaves, tree, args).counted()

    def replayed(self, *args: Any) -> Any:
        """Run the body as a step that reads and writes the variables; returns its outputs."""
        leaves, tree = jax.tree_util.tree_flatten(unpacked(self._last))
        owners = self.variables()
        held = [leaf if variable is None else variable.value for variable, leaf in zip(owners, leaves)]
        outputs, new = self.outputs.split_outputs(self.body(tree.unflatten(held), *args))
        for variable, value in zip(owners, jax.tree_util.tree_leaves(new)):
            if variable is not None:
                variable.assign(value)
        return outputs

    def adopt(self, state: Any) -> None:
        """Take a state for that of the last step."""
        self._last = state
        if self._host_selected is None:
            self._choose(state)

    def judged(self, *args: Any) -> Verdict:
        """Run the step as it is compiled, from what the variables hold, and forget it; returns the verdict."""
        leaves, tree = jax.tree_util.tree_flatten(unpacked(self._last))
        owners = self.variables()
        held = [leaf if variable is None else variable.value for variable, leaf in zip(owners, leaves)]
        state = tree.unflatten(held)
        spare = self._room(state) if self.alternates else ()
        new, _, vector, _ = self._host_selected(packed(state) if self.packs else state, spare, {}, *args)
        if self.alternates:
            self._alternate(state, new, True)
        return Verdict.of(np.asarray(vector)[: len(FIELDS)].tolist())

    # What the session asks of it

    def batch(self, step: int, given: Any) -> Any:
        """Return the arguments of an earlier step, which nobody can have changed."""
        return given

    def release_run(self) -> None:
        """Let go of the run that is over, of its state and of its last batch."""
        self.train_state, self.scaling = (lambda: TrainState.of(self.model)), (lambda factors: contextlib.nullcontext())
        self._last = self.given = None
        self._spare, self.meanwhile = (), _nothing
        self.report_queue.forget()

    def rebind(self, train_state: Callable[[], TrainState], scaling: Callable[[dict[int, Any]], Any]) -> None:
        """Go to work for another run on the same model, as if made for it; the arguments are as above."""
        self.train_state, self.scaling, self.reused = train_state, scaling, True

    def inherit(self, other: Transaction) -> None:
        """Start with what another transaction around the same body has found out."""
        self.keeps_undo, self.tolerated = other.keeps_undo, other.tolerated

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Let these variables be infinite."""
        self.tolerated |= {id(v) for v in variables}

    def resume(self) -> None:
        """Tell the step that the host has healed the state; here none runs on a bad one."""

    def recount(self, step: int) -> None:
        """Let the next step be this number; here none is counted."""


def _nothing() -> None:
    pass


def _places_of(arrays: Sequence[Any]) -> set[int]:
    """Return where in memory these arrays are."""
    return {array.unsafe_buffer_pointer() for array in arrays}


def _is_spread(state: Any) -> bool:
    """Whether no two arrays of a state share their memory, so that each can be written over."""
    leaves: list[Any] = jax.tree_util.tree_leaves(state)
    return len(_places_of(leaves)) == len(leaves)


@functools.cache
def _sequential_scheduler() -> dict[str, str] | None:
    """Return `_SEQUENTIAL_SCHEDULER` where this version of XLA knows it."""
    try:
        jax.jit(lambda: 0, compiler_options=_SEQUENTIAL_SCHEDULER)()
    except jax.errors.JaxRuntimeError:
        return None
    return _SEQUENTIAL_SCHEDULER
