"""The transaction on JAX.

In outline::

    body      the user's step; what its optimizers would write is deferred, placeholders stand for it
    verdict   loss, gradients and written statistics finite, loss scale valid
    commit:   the updates run; weights and slots are read once
    refuse:   weights and slots stay, the loss scale learns, bad entries are counted
    both:     the small state (statistics, seeds, metrics) is selected, new or old

A step is a function from state to state, so refusing it is returning the state it was given. There are several ways to do that,
each a class: `strategies` and `two_programs` hold them, `execution` holds what is traced, `choose` is the table that says which of
them runs a step. It is asked when the first state is known, and once more where the trace shows that the updates cannot be
deferred (`Retrace`): the step uses what it has updated, like a GAN whose generator step uses the updated discriminator.

On an accelerator the step refuses by itself, whatever its size. Where it is asked for (`defers`), the next one may be started there
before the verdict is read (`start`, `finish`). A flag on the accelerator says whether something is wrong (`Started.halt`). The next
step then refuses, too, whatever its batch is like. So the host finds the state that the bad step left, and runs the next one again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_nanguard._backends.jax.execution import ImmediateUpdates
from keras_nanguard._backends.jax.intercept import Retrace
from keras_nanguard._backends.jax.packed import can_pack, unpacked
from keras_nanguard._backends.jax.reports import ReportQueue
from keras_nanguard._backends.jax.strategies import (
    AlternatingBuffers,
    Conditional,
    HostSelects,
    LooksAhead,
    PackedState,
    SelectedAtTheEnd,
    Started,
    Strategy,
)
from keras_nanguard._backends.jax.two_programs import JudgesFirst, TwoPrograms
from keras_nanguard._core import memory
from keras_nanguard._core.verdict import FIELDS, Verdict
from keras_nanguard._keras.train_state import TrainState

__all__ = ["DEFER", "Conditions", "Transaction", "choose", "defers", "on_accelerator", "pinned"]

DEFER = "KERAS_NANGUARD_DEFERRED_VERDICT"
"""The variable of the environment that asks for deferred verdicts with `1`."""

TINY = 1 << 18
"""Bytes of state up to which a compiled step takes no longer than the work of the host around it."""

SMALL = 1 << 22
"""Bytes of state up to which a compiled step is not given its state to write over."""

ANY = math.inf

_pinned: Any = None
_accelerator = _deferred = False


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What the choice of a strategy depends on.

    Attributes:
        owns_state: whether nobody else holds the state, so that it may be written over or packed.
        jit: whether the step is compiled.
        accelerator: whether it runs elsewhere than on the processor that the host needs for itself.
        distributed: whether the arrays are placed on several devices.
        refuse: whether the policy refuses bad steps.
        deferrable: whether the updates can be deferred until the verdict.
        size: bytes of state.
        packable: whether the state is made of few plain arrays, in one place.
        short: whether there is no room for the gradients beside the state.
    """

    owns_state: bool
    jit: bool
    accelerator: bool
    distributed: bool
    refuse: bool
    deferrable: bool = True
    size: float = 0
    packable: bool = False
    short: bool = False


def choose(c: Conditions) -> type[Strategy]:
    """Return the strategy for a step: the first row that fits."""
    may_defer, in_place = c.refuse and c.deferrable, c.owns_state and (c.distributed or (c.jit and c.accelerator))
    may_pin = _pinned is not None and (may_defer or _pinned not in (TwoPrograms, JudgesFirst, Conditional))
    rows: tuple[tuple[type[Strategy], float, bool], ...] = (
        # strategy           bytes   where
        (LooksAhead,         TINY,   not c.owns_state and c.jit and not c.accelerator),  # a loop may go on from any of its states
        (HostSelects,        ANY,    not c.owns_state),
        (Conditional,        ANY,    in_place and may_defer),  # nobody waits for the host, and arrays stay where they lie
        (SelectedAtTheEnd,   ANY,    in_place),
        (HostSelects,        ANY,    not c.jit),
        (_pinned,            ANY,    may_pin),  # from here on one CPU, compiled
        (PackedState,        TINY,   c.packable),
        (LooksAhead,         TINY,   True),
        (HostSelects,        SMALL,  True),
        (JudgesFirst,        ANY,    may_defer and c.short),
        (TwoPrograms,        ANY,    may_defer),
        (AlternatingBuffers, ANY,    True),
    )  # fmt: skip
    return next(strategy for strategy, largest, fits in rows if fits and c.size <= largest)


@contextlib.contextmanager
def pinned(strategy: Any = None, *, accelerator: bool = False, deferred: bool = False) -> Iterator[None]:
    """Run steps on one device by this strategy, whatever the size of their state; for tests and benchmarks.

    Args:
        strategy: the class; `None` leaves the choice as it is.
        accelerator: take the processor for an accelerator.
        deferred: take it for one, and defer verdicts.
    """
    global _pinned, _accelerator, _deferred
    before = _pinned, _accelerator, _deferred
    _pinned, _accelerator, _deferred = strategy, accelerator or deferred, deferred
    try:
        yield
    finally:
        _pinned, _accelerator, _deferred = before


def on_accelerator() -> bool:
    """Whether steps run elsewhere than on the processor that the host needs for itself."""
    return _accelerator or bool(jax.default_backend() != "cpu")


def defers() -> bool:
    """Whether a step may be started before the verdict on the one before is read: on an accelerator, where that is asked for."""
    return on_accelerator() and (_deferred or os.environ.get(DEFER) == "1")


class Transaction:
    """Wraps the body of one train step: `body(state, *args) -> (outputs, new_state)`.

    Args:
        body: the step.
        train_state: callable that returns the `TrainState` at the time of tracing.
        variables: callable that returns the Keras variable of each array of the flattened state (`None` for one that
            has none).
        outputs: what the outputs say of the loss, and what takes their place on a refusal.
        model: the model whose `compute_loss` returns the loss, or `None`.
        refuse: refuse bad steps; without it the step runs as it is, and its verdict and batch are reported all the same.
        jit: compile the step.
        owns_state: whether nobody else holds the state. So it may be written over, and may come back packed.
        shardings: where the arrays of the state lie; `None` where they are on one device.
        scaling: context in which learning rates are scaled by `factors`.
        say: prints a line.

    Attributes:
        strategy: what runs the steps; `None` before the first state is known.
        deferred: whether a step may be started before the verdict on the one before is read.
        given: the arguments of the last step.
    """

    counted = False
    """The host reads the verdict of each step, so none has to count for itself."""

    reused = False
    """Whether it was traced for an earlier run."""

    untracked: dict[int, Any] = {}
    """A pure step writes nothing but what it returns."""

    strategy: Any = None

    following: Callable[[], tuple[Any, ...] | None] = staticmethod(lambda: None)
    """Returns the arguments that the next step will have, if nothing comes between; `None` where they are not known."""

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
        owns_state: bool = False,
        shardings: Any = None,
        scaling: Callable[[dict[int, Any]], Any] = lambda factors: contextlib.nullcontext(),
        say: Callable[[str], None] = lambda line: None,
    ):
        self.body, self.train_state, self.variables, self.model = body, train_state, variables, model
        self.outputs, self.refuse, self.jit, self.shardings, self.scaling = outputs, refuse, jit, shardings, scaling
        self.conditions = Conditions(owns_state, jit, on_accelerator(), shardings is not None, refuse)
        self.deferred = outputs.apart = owns_state and jit and defers()
        self.say = say
        self.tolerated: set[int] = set()
        self.report_queue = ReportQueue()
        self.vector_head = len(FIELDS)
        self._last: Any = None
        self.given: Any = None
        self._counts = self.program(self._count)

    @property
    def keeps_undo(self) -> bool:
        """Whether the updates cannot be deferred."""
        return not self.conditions.deferrable

    def __call__(self, state: Any, factors: dict[int, Any], *args: Any) -> tuple[Any, Any, Verdict]:
        """Run the step, and wait for its verdict.

        Args:
            state: a pytree of arrays.
            factors: the numbers that the guard changes and a step reads, and that are no variables; see `Session.adjustments`.
            *args: what else the body takes.

        Returns:
            the state to go on with, the outputs, and the verdict.
        """
        self.adopt(state)
        done: tuple[Any, Any, Verdict] = self._attempt(lambda strategy: strategy.run(state, factors, args))
        return done

    def start(self, state: Any, factors: dict[int, Any], *args: Any, after: Started | None = None) -> tuple[Any, Started]:
        """Start a step that refuses by itself, and does so if the step `after` which it comes has gone wrong.

        The other arguments are as above. Returns the state to go on with, and what `finish` needs.
        """
        self.adopt(state)
        started: tuple[Any, Started] = self._attempt(lambda strategy: strategy.start(state, factors, args, after))
        return started

    def finish(self, started: Started) -> Verdict:
        """Wait for the verdict on a step that was started, and return it."""
        verdict: Verdict = self.strategy.finish(started)
        return verdict

    def adopt(self, state: Any) -> None:
        """Choose the strategy, if that was not done yet, and have a state to replay."""
        if self._last is None:
            self._last = state
        if self.strategy is None:
            size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree_util.tree_leaves(state))
            self._switch(size=size, packable=can_pack(state), short=not self._fits_gradients())
            if isinstance(self.strategy, JudgesFirst):
                self.say(memory.gradients_twice(self.train_state().gradient_bytes))

    def _attempt(self, run: Callable[[Any], Any]) -> Any:
        """Run the strategy; another one where its trace shows that the updates cannot be deferred, before anything has happened."""
        try:
            return run(self.strategy)
        except Retrace:
            self._switch(deferrable=False)
        return run(self.strategy)

    def _switch(self, **conditions: Any) -> None:
        """Choose the strategy anew, under other conditions."""
        self.conditions = dataclasses.replace(self.conditions, **conditions)
        self.strategy = choose(self.conditions)(self)

    # What the strategies have in common

    def program(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return a function of a step as a program, with one more argument before all others: the factors of the learning rates."""

        @functools.wraps(function)
        def scaled(factors: dict[int, Any], *args: Any) -> Any:
            with self.scaling(factors):
                return function(*args)

        return jax.jit(scaled, **options) if self.jit else scaled

    def hold(self, state: Any, args: tuple[Any, ...]) -> None:
        """Keep what the step that computes was given, and release the one before it."""
        self._last = state
        self.report_queue.forget()
        self.given = args

    def read(self, vector: Any, outputs: Any) -> tuple[Verdict, Any, Any]:
        """Wait for the vector of a step; returns the verdict, the outputs, some of which are in the vector, and what else is in it."""
        polls = self.strategy.max_polls
        while polls and not vector.is_ready():
            polls -= 1
        array = np.asarray(vector)
        numbers = array[: self.vector_head].tolist()
        return Verdict.of(numbers[: len(FIELDS)]), self.outputs.split(outputs, numbers[len(FIELDS) :]), array[self.vector_head :]

    def with_learned(self, state: Any, learned: dict[int, Any]) -> Any:
        """Return the old state with the learned loss scale."""
        leaves, tree = jax.tree_util.tree_flatten(unpacked(state))
        for place, value in learned.items():
            leaves[place] = value
        return jax.tree_util.tree_unflatten(tree, leaves)

    def count(self, factors: dict[int, Any], state: Any, *args: Any) -> Any:
        """Return the counts of bad entries of a step, `None` where there is no room for its gradients once more."""
        return self._counts(factors, state, *args) if self._fits_gradients() else None

    def _fits_gradients(self) -> bool:
        """Whether there is room in the memory of the host for the gradients of a step; on an accelerator they need none there."""
        return on_accelerator() or memory.room_for(self.train_state().gradient_bytes)

    def _count(self, state: Any, *args: Any) -> Any:
        """Count bad entries: the step once more, from the same state, so with the same numbers."""
        return ImmediateUpdates(self, state, args).counted()

    # What a diagnosis asks of it

    def _of_variables(self) -> tuple[Any, list[Any]]:
        """Return the state of this moment as the variables hold it, and the variables."""
        leaves, tree = jax.tree_util.tree_flatten(unpacked(self._last))
        owners = list(self.variables())
        return tree.unflatten([leaf if variable is None else variable.value for variable, leaf in zip(owners, leaves)]), owners

    def replayed(self, *args: Any) -> Any:
        """Run the body as a step that reads and writes the variables; returns its outputs."""
        state, owners = self._of_variables()
        outputs, new = self.outputs.split_outputs(self.body(state, *args))
        for variable, value in zip(owners, jax.tree_util.tree_leaves(new)):
            if variable is not None:
                variable.assign(value)
        return outputs

    def judged(self, *args: Any) -> Verdict:
        """Run the step as it is compiled, from what the variables hold, and forget it; returns the verdict."""
        state, _ = self._of_variables()
        return self._judge.judge(state, args)

    @functools.cached_property
    def _judge(self) -> HostSelects:
        return self.strategy if isinstance(self.strategy, HostSelects) else HostSelects(self)

    # What the session asks of it

    def batch(self, step: int, given: Any) -> Any:
        """Return the arguments of an earlier step, which nobody can have changed."""
        return given

    def release_run(self) -> None:
        """Release the run that is over, its state and its last batch."""
        self.train_state, self.scaling = (lambda: TrainState.of(self.model)), (lambda factors: contextlib.nullcontext())
        self._last = self.given = None
        self.following = Transaction.following
        self.report_queue.forget()
        if self.strategy is not None:
            self.strategy.release_run()

    def rebind(self, train_state: Callable[[], TrainState], scaling: Callable[[dict[int, Any]], Any]) -> None:
        """Go to work for another run on the same model, as if made for it; the arguments are as above."""
        self.train_state, self.scaling, self.reused = train_state, scaling, True

    def inherit(self, other: Transaction) -> None:
        """Start with what another transaction around the same body has found out."""
        self.conditions = dataclasses.replace(self.conditions, deferrable=other.conditions.deferrable)
        self.tolerated = other.tolerated

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Let these variables be infinite."""
        self.tolerated |= {id(v) for v in variables}

    def resume(self) -> None:
        """Go on after the host has healed the state; here no step runs on a bad one."""

    def recount(self, step: int) -> None:
        """Let the next step be this number; here none is counted."""
