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
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.intercept import Intercept, calls_host, with_metrics
from keras_nanguard._backends.shared import rules
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import optimizers as keras_optimizers


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts that a trace has found. They hold for every run of the compiled program.

    It is a key of the result of that program, so its hash must take no time.

    Attributes:
        places: `(site, path, size)` of each array whose bad entries are counted.
        keeps_undo: whether the updates run at once, so that the verdict includes their results.
        lasting: whether every log of a refused step is that of the restored metrics.
        calls_host: whether the step calls the host, as `jax.debug.print` does.
    """

    places: tuple[tuple[str, str, int], ...]
    keeps_undo: bool
    lasting: bool
    calls_host: bool


class Values(NamedTuple):
    """The arrays that a run of the body gives.

    Attributes:
        losses: the losses.
        checked: the gradients, and the other arrays that are checked.
        outputs: the outputs of the body.
        new: the flat new state.
    """

    losses: list[Any]
    checked: list[Any]
    outputs: Any
    new: list[Any]


@dataclass(frozen=True)
class Found:
    """The facts that a run of the body has shown besides its arrays.

    Attributes:
        names: `(site, path)` of each checked array.
        changed: places of the state that the body writes.
        updated: places that have the results of optimizers.
        selected: places at which the new value is the old one if the step is refused.
        sources: of each output, the metric whose result it is, and the number of that result.
        calls_host: whether it calls the host, as `jax.debug.print` does. An eager step may.
    """

    names: list[tuple[str, str]]
    changed: set[int]
    updated: set[int]
    selected: set[int]
    sources: list[tuple[Any, int] | None]
    calls_host: bool = True


class Computed(NamedTuple):
    """What one run of the transaction computes, as a pytree. Its arrays may not be computed yet.

    Attributes:
        state: the state to continue with.
        outputs: the other outputs of the body.
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


class StepTrace:
    """One trace (or one eager run) of the transaction.

    Args:
        owner: the `Transaction`.
        state: the state.
        args: the other arguments of the body.
        halt: whether the step is refused regardless of its batch.
    """

    def __init__(self, owner: Any, state: Any, args: Sequence[Any], halt: Any):
        self.owner, self.args, self.halt = owner, args, halt
        self.old, self.tree = jax.tree_util.tree_flatten(state)
        self.train_state = train_state = owner.run.read_train_state()
        self.dtype = reductions.kind(self.old)
        self.variables = list(owner.variables())
        self.place = {id(v): i for i, v in enumerate(self.variables) if v is not None}
        self.sites = dict.fromkeys(self._known(train_state.trainable), "weights")
        self.sites |= dict.fromkeys(self._known(train_state.slots), "slots")
        scales = self._known(scale for scale, _ in train_state.scales)
        self.scale = jnp.ones((), self.dtype)
        if scales:
            self.scale = jnp.min(jnp.stack([self.old[i] for i in scales])).astype(self.dtype)

    def complete(self) -> Computed:
        """Run the transaction."""
        if not self.owner.jit:
            return self._at_once(*self._call(True, self.old, self.args))
        program, structure, found = self._traced()
        given = (*self.old, *jax.tree_util.tree_leaves(tuple(self.args)))
        losses, checked, *_ = (part.num_leaves for part in structure.children())
        parts = None if self.owner.learned.keeps_undo else two_parts(program, losses + checked)
        if parts is None or self.sites.keys() & found.changed - found.updated:
            flat = jaxpr_as_fun(program)(jnp.ones((), bool), *given)
            return self._at_once(jax.tree_util.tree_unflatten(structure, flat), found)
        first, second = parts
        known = first(jnp.zeros((), bool), *given)
        early, between = known[: losses + checked], known[losses + checked :]
        verdict, counts = self._judged(found, early[:losses], early[losses:])
        # Only the update shows whether such gradients make an optimizer's state overflow.
        may_commit: Any = ~verdict.refused & (verdict.gradients < rules.SUM_LIMIT)
        late = second(may_commit, *between)
        values = jax.tree_util.tree_unflatten(structure, [*early, *late])
        updated = self._update_sums(values.new)
        weights, slots = [jnp.where(may_commit, number, 0) for number in updated]
        verdict = Verdict(~may_commit, *verdict[1:4], weights, slots, self.scale, 0, self.halt)
        return self._result(values, found, verdict, counts, keeps_undo=False)

    def _at_once(self, values: Values, found: Found) -> Computed:
        """Return the result of a run whose updates have taken effect."""
        new = values.new
        places = [i for i in sorted(self.sites) if reductions.is_inexact(new[i])]
        names = [*found.names, *((self.sites[i], self._path(i)) for i in places)]
        values = values._replace(checked=[*values.checked, *(new[i] for i in places)])
        found = replace(found, names=names, selected=set())
        verdict, counts = self._judged(found, values.losses, values.checked, new)
        return self._result(values, found, verdict, counts, keeps_undo=True)

    # Running the body

    def _traced(self) -> tuple[ClosedJaxpr, Any, Found]:
        """Return the program of the body, the structure of the `Values` that it returns, and what
        else it shows.

        The arguments of the program are `may_commit`, the flat state, and the flat other arguments.
        """
        leaves, tree = jax.tree_util.tree_flatten(tuple(self.args))
        size, kept = len(self.old), []

        def body(may_commit: Any, *arrays: Any) -> Values:
            args = jax.tree_util.tree_unflatten(tree, arrays[size:])
            known = True if self.owner.learned.keeps_undo else may_commit
            values, found = self._call(known, arrays[:size], args)
            kept.append((jax.tree_util.tree_structure(values), found))
            return values

        program = jax.make_jaxpr(body)(jnp.zeros((), bool), *self.old, *leaves)
        ((structure, found),) = kept
        return program, structure, replace(found, calls_host=calls_host(program.jaxpr))

    def _call(self, may_commit: Any, leaves: Any, args: Any) -> tuple[Values, Found]:
        """Run the body on this flat state; for `may_commit` see `Intercept`.

        Raises:
            GuardError: if the new state has not the structure of the old one.
        """
        state = jax.tree_util.tree_unflatten(self.tree, leaves)
        owner, optimizers = self.owner, self.train_state.optimizers
        with Intercept(owner.model, optimizers, may_commit, owner.metrics()) as seen:
            found, new = split(owner.body(state, *args))
        flat, tree = jax.tree_util.tree_flatten(new)
        if tree != self.tree:
            remedy = "Return the new state in the structure of the state that the step is given."
            what = f"a step that returns a state of the structure {self.tree}"
            raise GuardError(expected(what, f"{tree}", remedy))
        changed = {i for i, (a, b) in enumerate(zip(flat, leaves)) if a is not b}
        statistics = [(self._path(i), flat[i]) for i in self._statistics(changed)]
        pairs = [pair for record in seen.records for pair in record.pairs]
        gradients = [(v.path, g) for g, v in pairs if reductions.is_inexact(g)]
        sites = {"outputs": seen.outputs, "gradients": gradients, "statistics": statistics}
        checked = [(site, *pair) for site, pairs in sites.items() for pair in pairs]
        losses = seen.losses or owner.losses(found)
        values = Values(losses, [array for *_, array in checked], found, list(flat))
        return values, Found(
            names=[(site, path) for site, path, _ in checked],
            changed=changed,
            updated={i for i, array in enumerate(flat) if id(array) in seen.updated},
            selected={i for i, array in enumerate(flat) if id(array) in seen.selected},
            sources=seen.sources(found),
        )

    # The verdict

    def _judged(
        self, found: Found, losses: Sequence[Any], checked: Sequence[Any], new: Any = None
    ) -> tuple[Verdict, Any]:
        """Return the verdict and the counts of bad entries, an int32 array `(places, 2)`.

        Args:
            found: what the body shows.
            losses: its losses.
            checked: its checked arrays.
            new: the flat state after its updates; `None` if they have not run yet.
        """
        of_site: dict[str, list[Any]] = {}
        for (site, _), array in zip(found.names, checked):
            of_site.setdefault(site, []).append(array)
        statistics = of_site.get("statistics", [])
        loss = reductions.add(losses, self.dtype)
        gradients = reductions.squares(of_site.get("gradients", []), self.dtype)
        written = reductions.total(statistics, self.dtype)
        if statistics:
            written = reductions.of_all(written, self.owner.mesh)
        weights = slots = jnp.zeros((), self.dtype)
        if new is not None:
            updated = self._update_sums(new)
            weights, slots = [reductions.of_all(number, self.owner.mesh) for number in updated]
        finite = reductions.all_finite((loss, gradients, written, weights, slots))
        counts = reductions.cond(
            finite,
            lambda: jnp.zeros((len(checked), 2), jnp.int32),
            lambda: reductions.counts(checked),
        )
        places = [n for n, (site, _) in enumerate(found.names) if site == "gradients"]
        if places:  # the square of 1e20 overflows in float32, although 1e20 does not
            bad = jnp.any(counts[places[0] : places[-1] + 1] > 0)
            gradients = jnp.where(bad, gradients, jnp.minimum(gradients, rules.SUM_LIMIT))
        finite = reductions.all_finite((loss, gradients, written, weights, slots))
        may_commit = rules.may_commit(reductions.OPERATIONS, finite, [self.scale], self.halt)
        verdict = Verdict(
            ~may_commit, loss, gradients, written, weights, slots, self.scale, 0, self.halt
        )
        return verdict, counts

    def _statistics(self, changed: set[int]) -> list[int]:
        """Return the places of written statistics that must be finite."""
        state = self.train_state
        scales = (v for pair in state.scales for v in pair)
        apart = {id(v) for v in (*state.metrics, *state.rates, *scales)}
        apart |= self.owner.learned.tolerated
        return [
            i
            for i in sorted(changed - self.sites.keys())
            if id(self.variables[i]) not in apart and reductions.is_inexact(self.old[i])
        ]

    def _update_sums(self, new: Sequence[Any]) -> list[Any]:
        """Return the sums over the weights and over the slots of a flat new state."""
        tolerated = self.owner.learned.tolerated
        read = [i for i in sorted(self.sites) if id(self.variables[i]) not in tolerated]
        return [
            reductions.total([new[i] for i in read if self.sites[i] == site], self.dtype)
            for site in ("weights", "slots")
        ]

    def _known(self, variables: Iterable[Any]) -> list[int]:
        return [self.place[id(v)] for v in variables if id(v) in self.place]

    def _path(self, index: int) -> str:
        return str(getattr(self.variables[index], "path", "") or f"state/{index}")

    # The result

    def _result(
        self, values: Values, found: Found, verdict: Verdict, counts: Any, keeps_undo: bool
    ) -> Computed:
        """Return the result of the step: the new state if it commits, else the old one."""
        pairs = zip(found.names, values.checked)
        places = tuple((site, path, array.size) for (site, path), array in pairs)
        facts = Facts(places, keeps_undo, None not in found.sources, found.calls_host)
        results, new = values.outputs, list(values.new)
        if self.owner.refuse:
            learned = self._learned(verdict)
            for i in sorted({*found.changed, *learned} - found.selected):
                old = _like(learned.get(i, self.old[i]), new[i])
                new[i] = reductions.select(~verdict.refused, new[i], old)
            known = [v for v in self.train_state.metrics if id(v) in self.place]
            metrics = [(v, new[self.place[id(v)]]) for v in known]
            results = with_metrics(results, found.sources, metrics)
        else:
            verdict = Verdict(jnp.zeros((), bool), *verdict[1:])
        vector = jnp.stack([jnp.asarray(number).astype(self.dtype) for number in verdict])
        seen = verdict[1:7] if jax.process_count() == 1 else verdict[1:4]  # to all processes
        bad = verdict.refused | ~reductions.all_finite(seen) | (verdict.scale <= 0)
        state = jax.tree_util.tree_unflatten(self.tree, new)
        return Computed(state, results, vector, bad, {facts: counts})

    def _learned(self, verdict: Verdict) -> dict[int, Any]:
        """Return the values that a refusal writes to loss scales, by place."""
        learned = {}
        for optimizer in filter(keras_optimizers.scales_of, self.train_state.optimizers):
            found = (self.place.get(id(v)) for v in keras_optimizers.scales_of(optimizer))
            scale, counter = found
            if scale is None or counter is None:
                continue
            old, steps = self.old[scale], self.old[counter]
            learned[scale], learned[counter] = rules.learned_scale(
                reductions.OPERATIONS,
                verdict.loss,
                verdict.gradients,
                old,
                steps,
                jnp.asarray(optimizer.initial_scale, old.dtype),
                self.halt,
            )
        return learned


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


def two_parts(
    program: ClosedJaxpr, judged: int
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Split a program into what does not depend on its first argument, and the rest.

    Args:
        program: the program.
        judged: how many of its results the first part must give.

    Returns:
        The first part, which takes all arguments and returns those results, and then all that the
        second part reads. The second part takes the first argument and that; it returns the other
        results. `None` if a result of the first part depends on the first argument.
    """
    jaxpr = program.jaxpr
    dependent, early, late = {id(jaxpr.invars[0])}, [], []
    for equation in jaxpr.eqns:
        if any(id(var) in dependent for var in equation.invars):
            dependent |= {id(var) for var in equation.outvars}
            late.append(equation)
        else:
            early.append(equation)
    seen, others = jaxpr.outvars[:judged], jaxpr.outvars[judged:]
    if any(id(var) in dependent for var in seen):
        return None
    read = (*(var for equation in late for var in equation.invars), *others)
    known = {id(v): v for v in read if id(v) not in dependent and not isinstance(v, Literal)}
    between = list(known.values())
    first = jaxpr.replace(eqns=early, outvars=[*seen, *between])
    invars = [jaxpr.invars[0], *between]
    second = jaxpr.replace(eqns=late, constvars=[], invars=invars, outvars=others)
    return jaxpr_as_fun(ClosedJaxpr(first, program.consts)), jaxpr_as_fun(ClosedJaxpr(second, ()))
