"""One trace of a step as a transaction on JAX.

In a compiled step, the body is traced into a program with one more argument, `may_commit`, which
selects the old or the new value at each write of an optimizer. Equations that do not depend on it
give the verdict; the others run once it is known.

If the verdict itself depends on an update, as in a GAN whose generator step uses the updated
discriminator, or if no optimizer makes an update, the updates run at once. The verdict then
includes their results, and old or new is selected at the end. An eager step does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from keras_nanguard._backends import interface
from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.intercept import Intercept, with_metrics
from keras_nanguard._backends.jax.programs import calls_host, two_parts
from keras_nanguard._backends.shared import rules
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.finiteness import is_inexact
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import optimizers as keras_optimizers


@dataclass(frozen=True, eq=False, repr=False)
class Facts:
    """The facts that a trace of the body, or an eager run of it, has found. They hold for every run
    of the compiled program.

    It is a key of the result of that program, so its hash must take no time, and its `repr`, which
    is in the text of the program, must be the same in each process.

    Attributes:
        places: `(site, path, size)` of each array whose bad entries are counted.
        changed: indices of the state that the body writes.
        updated: indices that have the results of optimizers.
        selected: indices at which the new value is the old one if the step is refused.
        sources: of each output, the metric whose result it is, and the number of that result; empty
            in the key, because JAX may keep that for longer than the model lives.
        owners: of each gradient, the `id` of its optimizer.
        restores_logs: whether every log of a refused step is that of the restored metrics.
        calls_host: whether it calls the host, as `jax.debug.print` does. An eager step may.
        updates_first: whether the updates run at once, so that the verdict includes their results.
    """

    places: tuple[tuple[str, str, int], ...]
    changed: set[int]
    updated: set[int]
    selected: set[int]
    sources: list[tuple[Any, int] | None]
    restores_logs: bool
    owners: list[int]
    calls_host: bool = True
    updates_first: bool = False

    def __repr__(self) -> str:
        return "Facts"


class Values(NamedTuple):
    """The arrays that a run of the body gives.

    Attributes:
        checked: the gradients, and the other arrays that are checked.
        new: the flat new state.
    """

    losses: list[Any]
    checked: list[Any]
    outputs: Any
    new: list[Any]


class Computed(NamedTuple):
    """What one run of the transaction computes, as a pytree. Its arrays may not be computed yet.

    Attributes:
        state: the state to continue with.
        vector: the numbers of the verdict, in the order of `_core.verdict.FIELDS`.
        halt: a flag on the device: the next step has to be refused because of this one.
        counts: the counts of bad entries of each checked array, an int32 array `(places, 2)`, under
            the `Facts` of the program, which belong to the structure of its result.
    """

    state: Any
    outputs: Any
    vector: Any
    halt: Any
    counts: dict[Facts, Any]


class TracedStep(interface.Transaction):
    """The facts about a step that its traces use and do not change."""

    body: Callable[..., Any]
    """The step as the user wrote it: `body(state, *args) -> (outputs, new_state)`."""

    model: Any
    """The model whose losses are recorded."""

    variables: Callable[[], Sequence[Any]]
    """Returns the Keras variable of each array of the flat state, or `None`."""

    metrics: Callable[[], Iterable[Any]]
    """Returns the metrics whose results may be outputs."""

    refuse: bool
    """Whether bad steps are refused."""

    mesh: Any = None
    """The devices of all processes that train together; `None` for one process."""


class StepTrace:
    """One trace (or one eager run) of the transaction.

    Args:
        args: the other arguments of the body.
        halt: whether the step is refused regardless of its batch.

    Attributes:
        old: the flat state.
        index: the index of each variable in it, by `id`.
        sites: `"weights"` or `"slots"` for each index that has one.
        scale: the smallest loss scale, one that is not finite if there is any, 1 if there is none.
    """

    def __init__(self, transaction: TracedStep, state: Any, args: Sequence[Any], halt: Any):
        self.transaction, self.args, self.halt = transaction, args, halt
        self.old, self.tree = jax.tree_util.tree_flatten(state)
        self.train_state = train_state = transaction.run.read_train_state()
        self.dtype = reductions.sum_dtype(self.old)
        self.variables = list(transaction.variables())
        self.index = {id(v): i for i, v in enumerate(self.variables) if v is not None}
        self.sites = dict.fromkeys(self._indices(train_state.trainable), "weights")
        self.sites |= dict.fromkeys(self._indices(train_state.slots), "slots")
        indices = self._indices(scale for scale, _ in train_state.scales)
        scales = [jnp.asarray(self.old[i]).astype(self.dtype) for i in indices]
        one = jnp.ones((), self.dtype)
        self.scale = rules.common_scale(reductions.OPERATIONS, scales, one)

    def complete(self) -> Computed:
        """Run the transaction."""
        if not self.transaction.jit:
            return self._updated_first(*self._call(True, self.old, self.args))
        program, structure, facts = self._trace_body()
        arrays = [*self.old, *jax.tree_util.tree_leaves(tuple(self.args))]
        losses, checked, *_ = (part.num_leaves for part in structure.children())
        written_elsewhere = self.sites.keys() & facts.changed - facts.updated  # by no optimizer
        parts = None
        if not (self.transaction.learned.updates_first or written_elsewhere):
            parts = two_parts(program, losses + checked)
        if parts is None:
            flat = jaxpr_as_fun(program)(jnp.ones((), bool), *arrays)
            return self._updated_first(jax.tree_util.tree_unflatten(structure, flat), facts)
        first, second = parts
        early, between = first(arrays)
        verdict, counts = self._judged(facts, early[:losses], early[losses:])
        # Only the update shows whether such gradients make an optimizer's state overflow. A step
        # that is refused although it is finite is decided by another run (`Transaction.finish`).
        may_commit: Any = ~verdict.refused & (verdict.gradients < reductions.SUM_LIMIT)
        late = second(may_commit, between)
        values = jax.tree_util.tree_unflatten(structure, [*early, *late])
        after = self._update_sums(values.new)
        after = {site: jnp.where(may_commit, number, 0) for site, number in after.items()}
        return self._result(values, facts, verdict._replace(refused=~may_commit, **after), counts)

    def _updated_first(self, values: Values, facts: Facts) -> Computed:
        """Return the result of a run whose updates have taken effect."""
        new = values.new
        read = [i for i in sorted(self.sites) if is_inexact(new[i])]
        places = (*facts.places, *((self.sites[i], self._path(i), new[i].size) for i in read))
        values = values._replace(checked=[*values.checked, *(new[i] for i in read)])
        facts = replace(facts, places=places, selected=set(), updates_first=True)
        verdict, counts = self._judged(facts, values.losses, values.checked, new)
        return self._result(values, facts, verdict, counts)

    # Running the body

    def _trace_body(self) -> tuple[ClosedJaxpr, Any, Facts]:
        """Return the program of the body, the structure of the `Values` that it returns, and what
        else it shows.

        The arguments of the program are `may_commit`, the flat state, and the flat other arguments.
        """
        leaves, tree = jax.tree_util.tree_flatten(tuple(self.args))
        size, runs = len(self.old), []

        def body(may_commit: Any, *arrays: Any) -> Values:
            args = jax.tree_util.tree_unflatten(tree, arrays[size:])
            at_once = self.transaction.learned.updates_first
            values, facts = self._call(True if at_once else may_commit, arrays[:size], args)
            runs.append((jax.tree_util.tree_structure(values), facts))
            return values

        program = jax.make_jaxpr(body)(jnp.zeros((), bool), *self.old, *leaves)
        ((structure, facts),) = runs
        return program, structure, replace(facts, calls_host=calls_host(program.jaxpr))

    def _call(self, may_commit: Any, leaves: Any, args: Any) -> tuple[Values, Facts]:
        """Run the body on this flat state; for `may_commit` see `Intercept`.

        Raises:
            GuardError: if the new state has not the structure of the old one.
        """
        state = jax.tree_util.tree_unflatten(self.tree, leaves)
        transaction, optimizers = self.transaction, self.train_state.optimizers
        metrics = transaction.metrics()
        with Intercept(transaction.model, optimizers, may_commit, metrics) as calls:
            outputs, new_state = split(transaction.body(state, *args))
        new, tree = jax.tree_util.tree_flatten(new_state)
        if tree != self.tree:
            remedy = "Return the new state in the structure of the state that the step is given."
            what = f"a step that returns a state of the structure {self.tree}"
            raise GuardError(expected(what, f"{tree}", remedy))
        changed = {i for i, (a, b) in enumerate(zip(new, leaves)) if a is not b}
        statistics = [(self._path(i), new[i]) for i in self._statistics(changed)]
        of_each = [(id(one.optimizer), *pair) for one in calls.records for pair in one.pairs]
        of_each = [entry for entry in of_each if is_inexact(entry[1])]
        gradients = [(v.path, g) for _, g, v in of_each]
        sites = {"outputs": calls.outputs, "gradients": gradients, "statistics": statistics}
        checked = [(site, *pair) for site, pairs in sites.items() for pair in pairs]
        losses, sources = calls.losses or transaction.losses(outputs), calls.sources(outputs)
        values = Values(losses, [array for *_, array in checked], outputs, list(new))
        return values, Facts(
            places=tuple((site, path, array.size) for site, path, array in checked),
            changed=changed,
            updated={i for i, array in enumerate(new) if id(array) in calls.updated},
            selected={i for i, array in enumerate(new) if id(array) in calls.selected},
            sources=sources,
            restores_logs=None not in sources,
            owners=[owner for owner, *_ in of_each],
        )

    # The verdict

    def _judged(
        self, facts: Facts, losses: Sequence[Any], checked: Sequence[Any], new: Any = None
    ) -> tuple[Verdict, Any]:
        """Return the verdict and the counts of bad entries, an int32 array `(places, 2)`.

        Args:
            new: the flat state after its updates; `None` if they have not run yet.
        """
        sums = self._sums(facts, losses, checked, new)
        counts = reductions.cond(
            reductions.all_finite(sums.values()),
            lambda: jnp.zeros((len(checked), 2), jnp.int32),
            lambda: reductions.counts(checked),
        )
        rows = [n for n, (site, *_) in enumerate(facts.places) if site == "gradients"]
        if rows:  # the square of 1e20 overflows in float32, although 1e20 does not
            bad = jnp.any(counts[rows[0] : rows[-1] + 1] > 0)
            bounded = jnp.minimum(sums["gradients"], reductions.SUM_LIMIT)
            sums["gradients"] = jnp.where(bad, sums["gradients"], bounded)
        finite = reductions.all_finite(sums.values())
        may_commit = rules.may_commit(reductions.OPERATIONS, finite, [self.scale], self.halt)
        return Verdict(refused=~may_commit, **sums, scale=self.scale, halted=self.halt), counts

    def _sums(
        self, facts: Facts, losses: Sequence[Any], checked: Sequence[Any], new: Any
    ) -> dict[str, Any]:
        """Return the sums of a verdict, from `loss` to `slots`; the arguments are those of
        `_judged`.
        """
        gradients, statistics = (
            [array for (of, *_), array in zip(facts.places, checked) if of == site]
            for site in ("gradients", "statistics")
        )
        sums = {
            "loss": reductions.add(losses, self.dtype),
            "gradients": reductions.squares(gradients, self.dtype),
            "statistics": reductions.total(statistics, self.dtype),
        }
        mesh = self.transaction.mesh
        if statistics:
            sums["statistics"] = reductions.of_all(sums["statistics"], mesh)
        if new is None:
            return sums | dict.fromkeys(("weights", "slots"), jnp.zeros((), self.dtype))
        after = self._update_sums(new)
        return sums | {site: reductions.of_all(number, mesh) for site, number in after.items()}

    def _statistics(self, changed: set[int]) -> list[int]:
        """Return the indices of written statistics that must be finite."""
        apart = set(map(id, self.train_state.unjudged)) | self.transaction.learned.tolerated
        return [
            i
            for i in sorted(changed - self.sites.keys())
            if id(self.variables[i]) not in apart and is_inexact(self.old[i])
        ]

    def _update_sums(self, new: Sequence[Any]) -> dict[str, Any]:
        """Return the sums over the weights and over the slots of a flat new state."""
        pairs = sorted(self.sites.items())
        return {
            site: reductions.total([new[i] for i, of in pairs if of == site], self.dtype)
            for site in ("weights", "slots")
        }

    def _indices(self, variables: Iterable[Any]) -> list[int]:
        """Return the indices of those of these variables that the state has."""
        return [self.index[id(v)] for v in variables if id(v) in self.index]

    def _path(self, index: int) -> str:
        return str(getattr(self.variables[index], "path", "") or f"state/{index}")

    # The result

    def _result(self, values: Values, facts: Facts, verdict: Verdict, counts: Any) -> Computed:
        """Return the result of the step: the new state if it commits, else the old one."""
        outputs, new = values.outputs, list(values.new)
        if self.transaction.refuse:
            scales = self._scales_after(verdict, facts, counts)
            for i in sorted({*facts.changed, *scales} - facts.selected):
                old = _like(scales.get(i, self.old[i]), new[i])
                new[i] = reductions.select(~verdict.refused, new[i], old)
            metrics = [v for v in self.train_state.metrics if id(v) in self.index]
            restored = [(v, new[self.index[id(v)]]) for v in metrics]
            outputs = with_metrics(outputs, facts.sources, restored)
        else:
            verdict = verdict._replace(refused=jnp.zeros((), bool))
        vector = jnp.stack([jnp.asarray(number).astype(self.dtype) for number in verdict])
        state = jax.tree_util.tree_unflatten(self.tree, new)
        key = replace(facts, sources=[])
        return Computed(state, outputs, vector, self._halts_next(verdict), {key: counts})

    def _halts_next(self, verdict: Verdict) -> Any:
        """Return whether the next step has to be refused: the same truth value in all processes."""
        sums = [verdict.loss, verdict.gradients, verdict.statistics]
        if jax.process_count() == 1:  # of several, each has its own copy of these
            sums += [verdict.weights, verdict.slots, verdict.scale]
        return verdict.refused | ~reductions.all_finite(sums) | (verdict.scale <= 0)

    def _scales_after(self, verdict: Verdict, facts: Facts, counts: Any) -> dict[int, Any]:
        """Return the values that a refusal writes to loss scales and counters, by index: each by
        the gradients of its own optimizer.
        """
        rows, after = [n for n, (of, *_) in enumerate(facts.places) if of == "gradients"], {}
        for optimizer in filter(keras_optimizers.scales_of, self.train_state.optimizers):
            scale, counter = (self.index.get(id(v)) for v in keras_optimizers.scales_of(optimizer))
            if scale is None or counter is None:
                continue
            old, steps, gradients = self.old[scale], self.old[counter], verdict.gradients
            own = [row for row, owner in zip(rows, facts.owners) if owner == id(optimizer)]
            if own != rows:  # those of another one may be bad
                bad = jnp.any(counts[jnp.array(own, int)] > 0)
                gradients = jnp.where(bad, gradients, 0)
            after[scale], after[counter] = rules.scale_after_refusal(
                reductions.OPERATIONS,
                verdict.loss,
                gradients,
                old,
                steps,
                jnp.asarray(optimizer.initial_scale, old.dtype),
                self.halt,
            )
        return after


def split(result: Any) -> tuple[Any, Any]:
    """Return outputs and state from the result of a step.

    Raises:
        GuardError: if it is not a pair.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        remedy = "Write a step as `def step(state, *batch): ...; return loss, state`."
        found = type(result).__name__
        raise GuardError(expected("a step that returns (outputs, state)", found, remedy))
    return result


def _like(old: Any, new: Any) -> Any:
    """Return the old value of an array in the dtype of the new one."""
    same = getattr(old, "dtype", None) == getattr(new, "dtype", None)
    return old if same else jnp.asarray(old).astype(new.dtype)
