"""One trace of a step as a transaction on JAX.

The body is traced into a program with one more argument, `may_commit`, which selects the old or the
new value at each write of an optimizer. Equations that do not depend on it give the verdict; the
others run once it is known (`StepTrace._in_two_parts`).

If the verdict itself depends on an update, as in a GAN whose generator step uses the updated
discriminator, or if no optimizer makes an update, the updates run at once. The verdict then
includes their results, and old or new is selected at the end. An eager step does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.intercept import Intercept
from keras_nanguard._backends.shared import rules
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import optimizers as keras_optimizers

Counts = dict[tuple[str, str, int], Any]
"""Counts of NaN and of infinite entries, an int32 array `(2,)`, under `(site, path, size)`.

A compiled program returns the keys, too: they belong to the structure of its result.
"""


class StepTrace:
    """One trace (or one eager run) of the transaction.

    Args:
        owner: the `Transaction`. Its `keeps_undo` becomes true if the updates have to run at once.
        state: the state.
        args: the other arguments of the body.
        halt: whether the step is refused regardless of its batch.

    Attributes:
        seen: the calls of optimizers and loss.
        outputs: the outputs of the body.
        changed: places of the state that the step writes.
        selected: those at which the new value is the old one if the step is refused.
    """

    seen: Intercept
    outputs: Any
    changed: list[int]
    selected: set[int]

    def __init__(self, owner: Any, state: Any, args: Sequence[Any], halt: Any):
        self.owner, self.args, self.halt = owner, args, halt
        self.old, self.tree = jax.tree_util.tree_flatten(state)
        self.train_state = train_state = owner.train_state()
        self.dtype = reductions.kind(self.old)
        self.variables = list(owner.variables())
        self.place = {id(v): i for i, v in enumerate(self.variables) if v is not None}
        updated = (*train_state.trainable, *train_state.slots)
        self.weights_and_slots = {self.place[id(v)] for v in updated if id(v) in self.place}
        metrics = {id(v) for v in train_state.metrics}
        self.metrics = {i for i, v in enumerate(self.variables) if id(v) in metrics}

    def complete(self) -> tuple[Any, ...]:
        """Return the first five fields of `step.StepResult`."""
        new = self._run()
        sums = self._update_sums(new)
        if self.owner.keeps_undo:
            sums = [reductions.of_all(number, self.owner.mesh) for number in sums]
            self.may_commit &= reductions.all_finite(sums)
        else:
            zero = jnp.zeros((), self.dtype)
            sums = [jnp.where(self.may_commit, number, zero) for number in sums]
        if not self.owner.refuse:
            return self._result(new, jnp.zeros((), bool), sums)
        return self._result(self._chosen(new), ~self.may_commit, sums)

    def counts(self) -> list[Counts]:
        """Return the counts of bad entries of each place."""
        new, seen = self._run(), self.seen
        places = [("outputs", name, array) for name, array in seen.outputs]
        for record in seen.records:
            places += [("gradients", v.path, g) for g, v in record.pairs if g is not None]
        places += [("statistics", self._path(i), new[i]) for i in self.written]
        slots = {id(v) for v in self.train_state.slots}
        for i in sorted(self.weights_and_slots) if self.owner.keeps_undo else ():
            if reductions.can_be_bad(new[i]):
                site = "slots" if id(self.variables[i]) in slots else "weights"
                places.append((site, self._path(i), new[i]))
        return [{(site, path, array.size): reductions.count(array)} for site, path, array in places]

    # Running the body

    def _run(self) -> list[Any]:
        """Run the body and compute the verdict; return the flat new state."""
        new = None if self.owner.keeps_undo else self._in_two_parts()
        if new is None:
            self.owner.keeps_undo = True
            new = self._call(self.old, self.args, None)
            self.changed = [i for i, (a, b) in enumerate(zip(new, self.old)) if a is not b]
            self.selected, self.written = set(), self._statistics()
            self._judge(self.seen.losses, self.seen.gradients, [new[i] for i in self.written])
        return new

    def _call(self, leaves: Any, args: Any, may_commit: Any) -> list[Any]:
        """Run the body, with `seen` and `outputs`; return the flat new state."""
        state = jax.tree_util.tree_unflatten(self.tree, leaves)
        kind, optimizers = self.owner.outputs, self.train_state.optimizers
        arrays = (*leaves, *jax.tree_util.tree_leaves(args))
        running = next((a._trace for a in arrays if isinstance(a, jax.core.Tracer)), None)
        self.seen = Intercept(self.owner.model, optimizers, running, may_commit)
        with kind.watched(), self.seen:
            self.outputs, new = kind.split_outputs(self.owner.body(state, *args))
            kind.note(self.outputs)
        flat, tree = jax.tree_util.tree_flatten(new)
        kind.check(tree, self.tree)
        self.seen.losses = self.seen.losses or kind.losses(self.outputs)
        return list(flat)

    def _in_two_parts(self) -> list[Any] | None:
        """Run first the part of the body that gives the verdict, then the rest, which depends on
        it.

        Returns:
            The flat new state, or `None` if the verdict depends on an update, or if something else
            than an optimizer has the last word on weights or slots.
        """
        given, tree = jax.tree_util.tree_flatten(tuple(self.args))
        size, structure = len(self.old), None

        def body(may_commit: Any, *arrays: Any) -> Any:
            nonlocal structure
            args = jax.tree_util.tree_unflatten(tree, arrays[size:])
            new, seen = self._call(arrays[:size], args, may_commit), self.seen
            self.selected = {i for i, array in enumerate(new) if id(array) in seen.selected}
            self.updated = {i for i, array in enumerate(new) if id(array) in seen.updated}
            grads, outputs = [r.grads for r in seen.records], [array for _, array in seen.outputs]
            noted = seen.losses, grads, outputs, self.outputs
            flat, structure = jax.tree_util.tree_flatten(noted)
            return [*flat, *new]

        unknown = jnp.zeros((), bool)
        program = jax.make_jaxpr(body)(unknown, *self.old, *given)
        jaxpr = program.jaxpr
        end = len(jaxpr.outvars) - size
        new, old = jaxpr.outvars[end:], jaxpr.invars[1 : 1 + size]
        self.changed = [i for i in range(size) if new[i] is not old[i]]
        self.written = self._statistics()
        judged = len(self.seen.losses) + len(self.seen.gradients)
        verdict = [*jaxpr.outvars[:judged], *(new[i] for i in self.written)]
        early, late, dependent = _split(jaxpr)
        others = self.weights_and_slots & set(self.changed) - self.updated
        if others or any(id(var) in dependent for var in verdict):
            return None
        read = (*(var for equation in late for var in equation.invars), *jaxpr.outvars)
        known = {id(v): v for v in read if id(v) not in dependent and not isinstance(v, Literal)}
        between = list(known.values())
        first = ClosedJaxpr(jaxpr.replace(eqns=early, outvars=between), program.consts)
        values = jaxpr_as_fun(first)(unknown, *self.old, *given)
        value = dict(zip(known, values))
        numbers = [v.val if isinstance(v, Literal) else value[id(v)] for v in verdict]
        losses = len(self.seen.losses)
        self._judge(numbers[:losses], numbers[losses:judged], numbers[judged:])
        # Only the update shows whether such gradients make an optimizer's state overflow.
        self.may_commit &= self.gradients <= rules.BOUND
        invars = [jaxpr.invars[0], *between]
        second = jaxpr.replace(eqns=late, constvars=[], invars=invars, outvars=jaxpr.outvars)
        flat = jaxpr_as_fun(ClosedJaxpr(second, ()))(self.may_commit, *values)
        noted = jax.tree_util.tree_unflatten(structure, flat[:end])
        self.seen.losses, grads, outputs, self.outputs = noted
        for record, gradients in zip(self.seen.records, grads):
            record.grads = gradients
        self.seen.outputs = [(name, a) for (name, _), a in zip(self.seen.outputs, outputs)]
        return list(flat[end:])

    # The verdict

    def _judge(self, losses: Any, gradients: Any, statistics: Any) -> None:
        """Compute the sums of the verdict, and the decision."""
        self.loss = reductions.add(losses, self.dtype)
        self.gradients = reductions.squares(gradients, self.dtype)
        self.statistics = reductions.total(statistics, self.dtype)
        if statistics:
            self.statistics = reductions.of_all(self.statistics, self.owner.mesh)
        pairs = self.train_state.scales
        self.scales = [self.old[self.place[id(s)]] for s, _ in pairs if id(s) in self.place]
        self.scale = jnp.ones((), self.dtype)
        if self.scales:
            self.scale = jnp.min(jnp.stack(self.scales)).astype(self.dtype)
        sums = (self.loss, self.gradients, self.statistics)
        self.may_commit = ~self.halt & rules.scale_is_valid(reductions.OPERATIONS, self.scale)
        self.may_commit &= reductions.all_finite(sums)

    def _statistics(self) -> list[int]:
        """Return the places of written statistics that must be finite."""
        apart = self.weights_and_slots | self.metrics
        return [i for i in self.changed if i not in apart and self._watched(i)]

    def _watched(self, index: int) -> bool:
        variable, scales = self.variables[index], self.train_state.scales
        ours = {id(v) for v in (*self.train_state.rates, *(v for pair in scales for v in pair))}
        excluded = id(variable) in ours | self.owner.tolerated
        return not excluded and reductions.can_be_bad(self.old[index])

    def _update_sums(self, new: Sequence[Any]) -> list[Any]:
        """Return the sums over weights and slots; both in the first if the slots are small."""
        tolerated = self.owner.tolerated
        rest = {i for i in self.weights_and_slots if id(self.variables[i]) not in tolerated}
        listed = {id(v) for v in self.train_state.slots} - tolerated
        sums = [jnp.zeros((), self.dtype)] * 2
        for optimizer in self.train_state.optimizers:
            trained = [i for i in self._known(keras_optimizers.trained_by(optimizer)) if i in rest]
            own = self._known(optimizer.variables)
            slots = [new[i] for i in own if id(self.variables[i]) in listed]
            one = reductions.update_sums(
                optimizer,
                [new[i] for i in trained],
                [array for array in slots if reductions.can_be_bad(array)],
                next((new[i] for i in own if self.variables[i].name == "iteration"), None),
                self.gradients,
                self.dtype,
            )
            sums = [a + b for a, b in zip(sums, one)]
            rest -= {*trained, *own}
        others = reductions.total([new[i] for i in sorted(rest)], self.dtype)
        return [sums[0] + others, sums[1]]

    def _known(self, variables: Iterable[Any]) -> list[int]:
        return [self.place[id(v)] for v in variables if id(v) in self.place]

    def _learned(self) -> dict[int, Any]:
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
                self.loss,
                self.gradients,
                old,
                steps,
                jnp.asarray(optimizer.initial_scale, old.dtype),
            )
        # A halted step has no verdict on its own batch.
        return {i: jnp.where(self.halt, self.old[i], value) for i, value in learned.items()}

    def _path(self, index: int) -> str:
        return str(getattr(self.variables[index], "path", "") or f"state/{index}")

    def _chosen(self, new: list[Any]) -> list[Any]:
        """Return the new state if the step commits, else the old one."""
        learned, chosen = self._learned(), list(new)
        for i in sorted({*self.changed, *learned} - self.selected):
            old = _like(learned.get(i, self.old[i]), new[i])
            chosen[i] = reductions.select(self.may_commit, new[i], old)
        return chosen

    def _result(self, new: list[Any], refused: Any, sums: Any) -> tuple[Any, ...]:
        outputs = self.outputs
        if self.owner.refuse:
            known = [v for v in self.train_state.metrics if id(v) in self.place]
            metrics = [(v, new[self.place[id(v)]]) for v in known]
            outputs = self.owner.outputs.results(outputs, metrics)
        weights, slots = sums
        seen = self.loss, self.gradients, self.statistics, weights, slots, self.scale
        verdict = Verdict(refused, *seen, halted=self.halt)
        vector = jnp.stack([jnp.asarray(number).astype(self.dtype) for number in verdict])
        shown = seen if jax.process_count() == 1 else seen[:3]  # to all processes
        bad = refused | ~reductions.all_finite(shown) | (self.scale <= 0)
        state = jax.tree_util.tree_unflatten(self.tree, new)
        return state, outputs, vector, bad, self.scales


def _like(old: Any, new: Any) -> Any:
    """Return the old value of an array in the dtype of the new one."""
    same = getattr(old, "dtype", None) == getattr(new, "dtype", None)
    return old if same else jnp.asarray(old).astype(new.dtype)


def _split(jaxpr: Any) -> tuple[list[Any], list[Any], set[int]]:
    """Return the equations that do not depend on the first argument of a program, those that do,
    and the `id` of each variable that does.
    """
    dependent, early, late = {id(jaxpr.invars[0])}, [], []
    for equation in jaxpr.eqns:
        if any(id(var) in dependent for var in equation.invars):
            dependent |= {id(var) for var in equation.outvars}
            late.append(equation)
        else:
            early.append(equation)
    return early, late, dependent
