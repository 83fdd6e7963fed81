"""The transaction on JAX.

In outline::

    body      the user's step, without what depends on the verdict
    verdict   loss, gradients and written statistics finite, loss scale valid
    update    the updates and what follows; each assignment selects new or old by the verdict
    the rest  small state (statistics, seeds, metrics) is selected, new or old; a loss scale learns
    sums      weights and slots are read once

A step is a function from state to state. It refuses by itself, so the host need not wait for its
verdict before it starts the next step. A flag on the device halts that step, whatever its batch,
if something was wrong with the one before. Then the host handles the bad step, and runs the halted
one again.

The two parts of the body are made of one trace of it (`execution.StepTrace`). An eager step, and
one whose verdict depends on an update, runs in one part; old or new is selected at the end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.execution import StepTrace
from keras_nanguard._backends.jax.intercept import calls_host
from keras_nanguard._backends.shared.batch_memory import owned
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras.train_state import TrainState


@dataclass(slots=True)
class StepResult:
    """The result of a guarded step. Its arrays may not be computed yet.

    Attributes:
        state: the state to continue with.
        outputs: the other outputs of the body.
        vector: the numbers of the verdict, in the order of `core.verdict.FIELDS`.
        halt: whether the next step has to be refused because of this one, on the device.
        scales: the loss scales of the step.
        given: its initial state; `None` if that was donated.
        factors: its factors.
        args: its other arguments.
        verdict: its verdict, once the host has read it.
    """

    state: Any
    outputs: Any
    vector: Any
    halt: Any
    scales: Any
    given: Any
    factors: Any
    args: tuple[Any, ...]
    verdict: Any = None


class Transaction(interface.Transaction):
    """Wraps the body of one train step: `body(state, *args) -> (outputs, new_state)`.

    Args:
        body: the step.
        train_state: callable that returns the `TrainState` at the time of tracing.
        variables: callable that returns the Keras variable of each array of the flattened state (or
            `None`).
        outputs: finds the loss in the outputs, and replaces them on a refusal.
        model: the model whose `compute_loss` returns the loss, or `None`.
        refuse: whether bad steps are refused; otherwise only verdict and batch are reported.
        jit: whether to compile the step.
        owns_state: whether no other code uses the state, so that it may be overwritten.
        shardings: shardings of the arrays of the state; `None` if they are on one device.
        factors: returns the changed numbers that a step reads and that are not variables; see
            `Recovery.adjustments`.
        scaling: context in which learning rates are scaled by such factors.

    Attributes:
        given: the arguments of the last step whose verdict was read.
        keeps_undo: whether updates run before the verdict, which includes their results.
        mesh: the devices of all processes that train together; `None` for one process.
        unpublished: the result of the program, until the caller has the new state. A signal handler
            that raises finds it here.
    """

    untracked: dict[int, Any] = {}
    """Empty: a pure step writes nothing."""

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
        factors: Callable[[], dict[int, Any]] = dict,
        scaling: Callable[[dict[int, Any]], Any] = lambda factors: contextlib.nullcontext(),
    ):
        self.body, self.train_state, self.variables = body, train_state, variables
        self.outputs, self.model = outputs, model
        self.factors, self.scaling = factors, scaling
        self.losses = outputs.losses
        self.refuse, self.jit, self.shardings = refuse, jit, shardings
        self.donates = owns_state and jit and refuse
        self.tolerated: set[int] = set()
        self._bad: tuple[StepResult, Any] | None = None
        self.unpublished: list[Any] = []
        self.given: Any = None
        self.mesh: Any = None
        self._last: Any = None
        self._compile(not (jit and refuse))

    def _compile(self, keeps_undo: bool) -> None:
        """Create the programs, which are compiled when they are first called."""
        first = next(iter(jax.tree_util.tree_leaves(self.shardings)), None)
        options: dict[str, Any] = {"donate_argnums": 1} if self.donates else {}
        everywhere = None
        if first is not None:
            whole = jax.sharding.PartitionSpec()
            everywhere = jax.sharding.NamedSharding(first.mesh, whole)
            options["out_shardings"] = (self.shardings, None, *[everywhere] * 3)
        self.keeps_undo = keeps_undo
        self._go = _scalar(False, everywhere)
        self._calls_host: bool | None = None
        self._program = self._program_of(self._complete, **options)
        self._counts = self._program_of(self._count)

    def _program_of(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return a function as a program with one more argument: the factors of learning rates."""

        @functools.wraps(function)
        def scaled(factors: dict[int, Any], *args: Any) -> Any:
            with self.scaling(factors):
                return function(*args)

        return jax.jit(scaled, **options) if self.jit else scaled

    def _complete(self, state: Any, halt: Any, *args: Any) -> tuple[Any, ...]:
        return StepTrace(self, state, args, halt).complete()

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may be started before the verdict of the previous one is read.

        Not if its logs are those of a refused step, and not if it calls the host, because a halted
        step would then have a visible effect.
        """
        return self.donates and self.outputs.lasting and self._calls_host is False

    # Running a step

    def __call__(self, state: Any, *args: Any) -> StepResult:
        """Run the step, and wait for its verdict; the arguments are those of `start`."""
        result = self.start(state, *args)
        if self.finish(result, result.state):
            return result
        return self(result.state, *args)

    def start(self, state: Any, *args: Any, after: StepResult | None = None) -> StepResult:
        """Start the step.

        Args:
            state: a pytree of arrays.
            *args: the other arguments of the body.
            after: the previous step, whose verdict has not been read yet.
        """
        self.adopt(state)
        halt, factors = self._go if after is None else after.halt, self.factors()
        new, outputs, vector, halt, scales = self._run(factors, state, halt, *args)
        given = None if self.donates else state
        own = jax.tree_util.tree_map(owned, args)
        return StepResult(new, outputs, vector, halt, scales, given, factors, own)

    def finish(self, result: StepResult, state: Any) -> bool:
        """Wait for the verdict of a started step.

        Args:
            result: the step.
            state: the present state: that of the step, or the same state after a halted step.

        Returns:
            Whether it has a verdict now. If not, run it again from the present state: its numbers
                are finite, but so large that only its update can show the result. From then on
                steps read their updates before they commit.
        """
        verdict = Verdict.of(np.asarray(result.vector).tolist())
        undecided = verdict.refused and verdict.finite and not verdict.halted
        if undecided and not self.keeps_undo:
            self._compile(keeps_undo=True)
            return False
        result.verdict = verdict
        self.given, self._last = result.args, state if result.given is None else result.given
        healthy = verdict.finite and not verdict.refused
        self._bad = None if healthy else (result, state)
        return True

    def adopt(self, state: Any) -> None:
        """Use this state for a replay, if there was no step yet."""
        if self._last is None:
            self._last, self.mesh = state, reductions.mesh_of(state)

    def published(self) -> None:
        """Record that the caller has the new state."""
        self.unpublished.clear()

    def _run(self, *args: Any) -> Any:
        """Call the program.

        No byte code runs between the program, which donates the state, and the list that receives
        the new one, so a signal handler that raises cannot run in between.
        """
        self.unpublished.clear()
        each = [[argument] for argument in args]
        if self._calls_host is None and self.donates:
            traced = getattr(self._program, "trace", None)  # JAX keeps the trace for the call
            self._calls_host = traced is None or calls_host(traced(*args).jaxpr.jaxpr)
        self.unpublished.extend(map(self._program, *each))
        return self.unpublished[0]

    # What is bad in a refused step

    def _count(self, state: Any, *args: Any) -> Any:
        return StepTrace(self, state, args, jnp.zeros((), bool)).counts()

    def take_reports(self) -> list[Report]:
        """Return and remove the report of the last step, if it was bad."""
        if self._bad is None:
            return []
        (result, state), self._bad = self._bad, None
        found = self._rows(result, state)
        places = tuple((site, path) for site, path, *_ in found)
        numbers = np.array([row[2:] for row in found], np.int64).reshape(-1, 3)
        return [Report(result.verdict, places, numbers, result.args)]

    def _rows(self, result: StepResult, state: Any) -> list[tuple[Any, ...]]:
        """Return `(site, path, nan, inf, size)` of everything that a bad step has checked.

        The step runs again from its initial state, without side effects. A step that has committed
        is not run again if its state was donated.
        """
        if result.given is None and not result.verdict.refused:
            return []
        leaves, tree = jax.tree_util.tree_flatten(state if result.given is None else result.given)
        place = {id(v): i for i, v in enumerate(self.variables()) if v is not None}
        scales = [place[id(s)] for s, _ in self.train_state().scales if id(s) in place]
        for i, scale in zip(scales, result.scales):
            leaves[i] = scale
        counts = self._counts(result.factors, tree.unflatten(leaves), *result.args)
        places = [place for one in counts for place in one.items()]
        return [(site, path, *np.asarray(n).tolist(), size) for (site, path, size), n in places]

    # For a diagnosis

    def _of_variables(self) -> tuple[Any, list[Any]]:
        """Return the present state from the variables, and the variables."""
        leaves, tree = jax.tree_util.tree_flatten(self._last)
        owners = list(self.variables())
        pairs = zip(owners, leaves)
        return tree.unflatten([a if v is None else v.value for v, a in pairs]), owners

    def replayed(self, *args: Any) -> Any:
        """Run the body as a step that reads and writes the variables; returns its outputs."""
        state, owners = self._of_variables()
        outputs, new = self.outputs.split_outputs(self.body(state, *args))
        for variable, value in zip(owners, jax.tree_util.tree_leaves(new)):
            if variable is not None:
                variable.assign(value)
        return outputs

    def judged(self, *args: Any) -> Verdict:
        """Run the compiled step from the values of the variables, without side effects.

        Returns:
            The verdict.
        """
        state, _ = self._of_variables()
        if self.donates:
            state = jax.tree_util.tree_map(jnp.copy, state)
        vector = self._run(self.factors(), state, self._go, *args)[2]
        self.unpublished.clear()
        return Verdict.of(np.asarray(vector).tolist())

    # For the session

    def release_run(self) -> None:
        """Release everything of the finished run, its state and its last batch."""
        self.train_state = lambda: TrainState.of(self.model)
        self.factors, self.scaling = dict, lambda factors: contextlib.nullcontext()
        self._last = self.given = None
        self.unpublished.clear()
        self._bad = None

    def rebind(
        self,
        train_state: Callable[[], TrainState],
        factors: Callable[[], dict[int, Any]],
        scaling: Callable[[dict[int, Any]], Any],
    ) -> None:
        """Use the transaction for another run on the same model."""
        self.train_state, self.factors, self.scaling = train_state, factors, scaling
        self.reused = True

    def inherit(self, other: Transaction) -> None:
        """Start with the findings of another transaction for the same body."""
        self.tolerated = other.tolerated
        if other.keeps_undo and not self.keeps_undo:
            self._compile(keeps_undo=True)

    def tolerate(self, variables: Sequence[Any]) -> None:
        """Allow these variables to be infinite."""
        self.tolerated |= {id(v) for v in variables}


def _scalar(value: bool, place: Any) -> Any:
    """Return a truth value as an array in this place."""
    array = np.asarray(value)
    if place is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback((), place, lambda _: array)
