"""The transaction on JAX.

In outline::

    body      the user's step, without what depends on the verdict
    verdict   loss, gradients and written statistics finite, loss scale valid
    update    the updates and what follows; each assignment selects new or old by the verdict
    the rest  small state (statistics, seeds, metrics) is selected, new or old; a loss scale is set
    sums      weights and slots are read once

A step is a function from state to state. It refuses without the host, which therefore need not wait
for the verdict before it starts the next step. A flag on the device halts that step, regardless of
its batch, if the previous one was bad. Then the host handles the bad step, and runs the halted one
again.

The two parts of the body are made of one trace of it (`trace.StepTrace`). An eager step, and
one whose verdict depends on an update, runs in one part; old or new is selected at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.trace import Computed, Facts, StepTrace, TracedStep, split
from keras_nanguard._backends.shared.batches import held, losses_in_logs, scalars
from keras_nanguard._core.verdict import Report, Verdict


@dataclass(slots=True)
class StartedStep:
    """A guarded step that was started.

    Attributes:
        args: the arguments of the step besides its state.
    """

    computed: Computed
    args: tuple[Any, ...]


class Transaction(TracedStep):
    """Wraps the body of one train step: `body(state, *args) -> (outputs, new_state)`.

    Args:
        run: the run that it belongs to. Whether its policy refuses bad steps is built in.
        variables: callable that returns the Keras variable of each array of the flattened state (or
            `None`).
        stored: callable that returns the state with the current values of the variables.
        of_trainer: whether a Keras trainer runs the step. Then its outputs are logs, and no other
            code uses the state, so that it may be overwritten.
        shardings: shardings of the arrays of the state; `None` if they are on one device.

    Attributes:
        facts: the facts that the last trace has found; `None` before the first step.
        unpublished: what the program has computed, until the caller has the new state. A signal
            handler that raises finds it here.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        run: interface.Run,
        variables: Callable[[], Sequence[Any]],
        stored: Callable[[], Any],
        *,
        of_trainer: bool,
        jit: bool,
        shardings: Any = None,
    ):
        model = run.model
        self.body, self.run, self.model = body, run, model
        self.variables, self.stored = variables, stored
        self.metrics = (lambda: model.metrics) if of_trainer else tuple
        self.losses = losses_in_logs if of_trainer else scalars
        self.refuse, self.jit, self.shardings = run.refuses, jit, shardings
        self.donates = of_trainer and jit and self.refuse and not _loads_broken_programs()
        at_once = not (jit and self.refuse)
        self.learned = interface.Learned(updates_first=at_once, has_hidden_state=jit)
        self.unpublished: list[Computed] = []
        self.facts: Facts | None = None
        self._bad: tuple[StartedStep, Verdict] | None = None
        self._compile()

    def _compile(self) -> None:
        """Create the program, which is compiled when it is first called."""
        first = next(iter(jax.tree_util.tree_leaves(self.shardings)), None)
        options: dict[str, Any] = {"donate_argnums": 1} if self.donates else {}
        everywhere = None
        if first is not None:
            whole = jax.sharding.PartitionSpec()
            everywhere = jax.sharding.NamedSharding(first.mesh, whole)
            options["out_shardings"] = Computed(self.shardings, None, *[everywhere] * 3)
        self._go = _go(everywhere)

        def complete(factors: dict[int, Any], state: Any, halt: Any, *args: Any) -> Computed:
            with self.run.recovery.with_adjustments(factors):
                return StepTrace(self, state, args, halt).complete()

        self._program = jax.jit(complete, **options) if self.jit else complete

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may be started before the verdict of the previous one is read.

        Not if its logs are those of a refused step, and not if it calls the host, because a halted
        step would then have a visible effect.
        """
        facts = self.facts
        if facts is None or not self.donates:
            return False
        return facts.restores_logs and not facts.calls_host

    # Running a step

    def __call__(self, state: Any, *args: Any) -> tuple[Any, interface.Executed]:
        """Run the step, and wait for its verdict; the arguments are those of `start`. Return the
        state to continue with, and the result.
        """
        started = self.start(state, *args)
        executed = self.finish(started)
        if executed is None:
            return self(started.computed.state, *args)
        return started.computed.state, executed

    def start(self, state: Any, *args: Any, after: StartedStep | None = None) -> StartedStep:
        """Start the step.

        Args:
            state: a pytree of arrays.
            after: the previous step, whose verdict has not been read yet.
        """
        self.mesh = reductions.mesh_of(state)
        halt = self._go if after is None else after.computed.halt
        return StartedStep(self._run(state, halt, *args), held(args))

    def finish(self, started: StartedStep) -> interface.Executed | None:
        """Wait for the verdict of a started step.

        Returns:
            What it has returned. `None` if it has no verdict: its numbers are finite, but so large
                that only its update can show the result. Then run it again; from then on steps read
                their updates before they commit.
        """
        verdict = Verdict.of(np.asarray(started.computed.vector).tolist())
        (facts,) = started.computed.counts
        undecided = verdict.refused and verdict.finite and not verdict.halted
        if undecided and not facts.updates_first:
            self.learned = replace(self.learned, updates_first=True)
            self._compile()
            return None
        if facts is not self.facts:
            at_once = facts.updates_first or self.learned.updates_first
            hidden, self.facts = self.jit and facts.calls_host, facts
            self.learned = replace(self.learned, updates_first=at_once, has_hidden_state=hidden)
        self._bad = None if verdict.finite and not verdict.refused else (started, verdict)
        return interface.Executed(started.computed.outputs, verdict, started.args)

    def published(self) -> None:
        """Record that the caller has the new state."""
        self.unpublished.clear()

    def _run(self, *args: Any) -> Computed:
        """Call the program.

        No byte code runs between the program, which donates the state, and the list that receives
        the new one, so a signal handler that raises cannot run in between.
        """
        each = [[argument] for argument in (self.run.recovery.adjustments(), *args)]
        self.unpublished.clear()
        self.unpublished.extend(map(self._program, *each))
        return self.unpublished[0]

    def take_reports(self, arguments: Any = None) -> list[Report]:
        if self._bad is None:
            return []
        (step, verdict), self._bad = self._bad, None
        ((facts, counts),) = step.computed.counts.items()
        # Weights of a step that commits before they are read are not counted.
        places = facts.places if verdict.refused or facts.updates_first else ()
        rows = [(*pair, size) for pair, (*_, size) in zip(np.asarray(counts).tolist(), places)]
        numbers = np.array(rows, np.int64).reshape(-1, 3)
        named = tuple((site, path) for site, path, _ in places)
        return [Report(verdict, named, numbers, step.args)]

    # For a diagnosis

    def replayed(self, *args: Any) -> Any:
        """Run the body as a step that reads and writes the variables; returns its outputs."""
        outputs, new_state = split(self.body(self.stored(), *args))
        for variable, value in zip(self.variables(), jax.tree_util.tree_leaves(new_state)):
            if variable is not None:
                variable.assign(value)
        return outputs

    def judged(self, *args: Any) -> Verdict:
        """Run the compiled step from the values of the variables, without side effects.

        Returns:
            The verdict.
        """
        state = self.stored()
        if self.donates:
            state = jax.tree_util.tree_map(jnp.copy, state)
        computed = self._run(state, self._go, *args)
        self.unpublished.clear()
        return Verdict.of(np.asarray(computed.vector).tolist())

    # For the session

    def release_run(self) -> None:
        del self.run
        self._bad = None
        self.unpublished.clear()

    def inherit(self, other: interface.Transaction) -> None:
        own, others = self.learned, other.learned
        at_once, hidden = own.updates_first or others.updates_first, own.has_hidden_state
        self.learned = replace(others, updates_first=at_once, has_hidden_state=hidden)
        if at_once and not own.updates_first:
            self._compile()


def _go(place: Any) -> Any:
    """Return the flag that halts no step, in this place."""
    if place is None:
        return jnp.zeros((), bool)
    return jax.make_array_from_callback((), place, lambda _: np.zeros((), bool))


def _loads_broken_programs() -> bool:
    """Whether JAX may load compiled programs from a cache that corrupt the memory that they are
    given: seen with JAX 0.4.38, not with 0.6.0.
    """
    return jax.__version_info__ < (0, 6) and bool(jax.config.jax_compilation_cache_dir)
