"""One trace of a step as a transaction on JAX: with deferred updates, or with immediate ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.intercept import Gate, Intercept, Retrace, Update
from keras_nanguard._backends.shared import rules
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["DeferredUpdates", "ImmediateUpdates"]

Place = tuple[str, str, Any]
"""Site, path and array of something that is counted."""

Counts = dict[tuple[str, str, int], Any]
"""Counts of NaN and of infinite entries, an int32 array `(2,)`, under `(site, path, size)`.

A compiled program returns the keys, too: they belong to the structure of its result.
"""


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
        raise NotImplementedError

    def counts(self) -> list[Counts]:
        """Return the counts of bad entries of each place."""
        raise NotImplementedError

    def _call(self, leaves: Any, args: Any, holders: Any, trace: Any) -> tuple[Any, Any, Any]:
        """Run the body; return its records, its outputs, and the flat new state."""
        state = jax.tree_util.tree_unflatten(self.tree, leaves)
        kind = self.owner.outputs
        optimizers = self.train_state.optimizers
        with kind.watched(), Intercept(self.owner.model, optimizers, holders, trace) as seen:
            outputs, new = kind.split_outputs(self.owner.body(state, *args))
            kind.note(outputs)
        flat, tree = jax.tree_util.tree_flatten(new)
        kind.check(tree, self.tree)
        return seen, outputs, flat

    # What the body computed

    def _note(self, outputs: Any, seen: Any, gradients: Any, changed: Any, new: Any) -> None:
        """Compute the sums of the verdict, and the decision."""
        apart = self.weights_and_slots | self.metrics
        self.written = [i for i in changed if i not in apart and self._watched(i)]
        self.loss = reductions.add(seen or self.owner.outputs.losses(outputs), self.dtype)
        self.gradients = reductions.squares(gradients, self.dtype)
        self.statistics = reductions.total([new[i] for i in self.written], self.dtype)
        if self.written:
            self.statistics = reductions.of_all(self.statistics, self.owner.mesh)
        pairs = self.train_state.scales
        self.scales = [self.old[self.place[id(s)]] for s, _ in pairs if id(s) in self.place]
        self.scale = jnp.ones((), self.dtype)
        if self.scales:
            self.scale = jnp.min(jnp.stack(self.scales)).astype(self.dtype)
        sums = (self.loss, self.gradients, self.statistics)
        self.may_commit = ~self.halt & rules.scale_is_valid(reductions.OPERATIONS, self.scale)
        self.may_commit &= reductions.all_finite(sums)

    def _watched(self, index: int) -> bool:
        variable, scales = self.variables[index], self.train_state.scales
        ours = {id(v) for v in (*self.train_state.rates, *(v for pair in scales for v in pair))}
        excluded = id(variable) in ours | self.owner.tolerated
        return not excluded and reductions.can_be_bad(self.old[index])

    def _one(self, optimizer: Any, weights: Any, pairs: Iterable[tuple[Any, Any]]) -> Any:
        """Return the sums over the updates of one optimizer.

        Args:
            optimizer: the optimizer.
            weights: the weights after its update.
            pairs: each of its variables with its value after the update.
        """
        updated = list(pairs)
        watched = {id(v) for v in self.train_state.slots} - self.owner.tolerated
        slots = [a for v, a in updated if id(v) in watched and reductions.can_be_bad(a)]
        iteration = next((array for v, array in updated if v.name == "iteration"), None)
        return reductions.update_sums(
            optimizer, weights, slots, iteration, self.gradients, self.dtype
        )

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

    def _places(self, outputs: Any, records: Sequence[Update], new: Any) -> list[Place]:
        places = [("outputs", name, array) for name, array in outputs]
        for record in records:
            pairs = zip(record.paths, record.grads)
            places += [("gradients", path, g) for path, g in pairs if g is not None]
        return places + [("statistics", self._path(i), new[i]) for i in self.written]

    def _path(self, index: int) -> str:
        return str(getattr(self.variables[index], "path", "") or f"state/{index}")

    def _chosen(self, new: list[Any], changed: Iterable[int], done: Any = ()) -> list[Any]:
        """Return the new state if the step commits, else the old one.

        Args:
            new: the new state.
            changed: places that the step writes.
            done: places at which `new` already has the right value.
        """
        learned, chosen = self._learned(), list(new)
        for i in sorted({*changed, *learned} - set(done)):
            old = _like(learned.get(i, self.old[i]), new[i])
            chosen[i] = reductions.select(self.may_commit, new[i], old)
        return chosen

    def _result(self, outputs: Any, new: list[Any], refused: Any, sums: Any) -> tuple[Any, ...]:
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


class DeferredUpdates(StepTrace):
    """The updates run after the verdict, and their writes take effect only if it is good.

    The body runs with placeholders for the results of its optimizers.
    """

    def complete(self) -> tuple[Any, ...]:
        outputs, new = self._run()
        # Only the update shows whether such gradients make an optimizer's state overflow.
        self.may_commit &= self.gradients <= rules.BOUND
        done, sums = self._update(new)
        chosen = self._chosen(new, {*self.changed, *self.holding}, done)
        zero = jnp.zeros((), self.dtype)
        sums = [jnp.where(self.may_commit, number, zero) for number in sums]
        return self._result(outputs, chosen, ~self.may_commit, sums)

    def counts(self) -> list[Counts]:
        _, new = self._run()
        return _counted(self._places(self.named, self.records, new))

    def _run(self) -> tuple[Any, list[Any]]:
        """Run the body and compute the verdict; return the outputs, and the flat new state without
        updates.
        """
        self._trace()
        dummies = [jnp.zeros(s.shape, s.dtype) for s in self.flat_held]  # nothing reads them
        values = jax.extend.core.jaxpr_as_fun(self.program)(*self.old, *self.given, *dummies)
        seen, outputs, new = jax.tree_util.tree_unflatten(self.results, values)
        for record, arguments in zip(self.records, seen["records"]):
            record.slots, record.grads, record.weights = arguments
        self.named = list(zip(self.names, seen["outputs"]))
        self.changed = sorted(self.moved - set(self.holding))
        gradients = [g for r in self.records for g in r.grads if g is not None]
        self._note(outputs, seen["losses"], gradients, self.changed, new)
        return outputs, new

    def _trace(self) -> None:
        """Trace the body, and check in the trace that its updates can be deferred."""
        self.given, args_tree = jax.tree_util.tree_flatten(tuple(self.args))
        built = [o for o in self.train_state.optimizers if o.built]
        trained = [list(map(_shape, keras_optimizers.trained_by(o))) for o in built]
        self.held = [(o, w, list(map(_shape, o.variables))) for o, w in zip(built, trained)]
        shapes = [(w, s) for _, w, s in self.held]
        self.flat_held, held_tree = jax.tree_util.tree_flatten(shapes)
        state, known = len(self.old), len(self.old) + len(self.given)

        def probe(*arrays: Any) -> Any:
            args = jax.tree_util.tree_unflatten(args_tree, arrays[state:known])
            holders = jax.tree_util.tree_unflatten(held_tree, arrays[known:])
            by_id = {id(o): pair for o, pair in zip(built, holders)}
            seen, outputs, new = self._call(arrays[:state], args, by_id, _trace_of(arrays))
            self.records, self.names = seen.records, [name for name, _ in seen.outputs]
            noted = {
                "records": [(r.slots, r.grads, r.weights) for r in seen.records],
                "losses": seen.losses,
                "outputs": [array for _, array in seen.outputs],
            }
            flat, self.results = jax.tree_util.tree_flatten((noted, outputs, new))
            self.output_count = len(flat) - len(new)
            return flat

        self.program = jax.make_jaxpr(probe)(*self.old, *self.given, *self.flat_held)
        self._inspect(known)

    def _inspect(self, first: int) -> None:
        """Find the arrays of the new state that come from an update; they must not be used
        before.
        """
        jaxpr = self.program.jaxpr
        number = {id(var): i for i, var in enumerate(jaxpr.invars[first:])}
        used = {id(var) for equation in jaxpr.eqns for var in equation.invars}
        outputs, after = jaxpr.outvars[: self.output_count], jaxpr.outvars[self.output_count :]
        if used & set(number) or any(id(var) in number for var in outputs):
            raise Retrace
        self.holding = {i: number[id(v)] for i, v in enumerate(after) if id(v) in number}
        self.moved = {i for i, var in enumerate(after) if var is not jaxpr.invars[i]}
        if self.weights_and_slots & self.moved - set(self.holding):
            raise Retrace

    def _update(self, new: list[Any]) -> tuple[set[int], Any]:
        """Run the updates, and write their results into the state.

        Returns:
            The places of the arrays that are the old ones if the step is refused, and the sums over
            weights and slots.
        """
        results: dict[int, Any] = {}
        gated: set[int] = set()
        sums = [jnp.zeros((), self.dtype)] * 2
        for record in self.records:
            with Gate(record, self.may_commit) as gate:
                weights, slots = record.real(record.slots, record.grads, record.weights)
            results[id(record.optimizer)] = weights, slots
            gated |= gate.selected(weights, slots)
            variables = record.optimizer.variables
            one = self._one(record.optimizer, weights, zip(variables, slots))
            sums = [a + b for a, b in zip(sums, one)]
        flat = [results.get(id(o), (w, s)) for o, w, s in self.held]
        leaves = jax.tree_util.tree_leaves([(list(w), list(s)) for w, s in flat])
        for i, number in self.holding.items():
            new[i] = leaves[number].astype(self.old[i].dtype)
        return {i for i, number in self.holding.items() if id(leaves[number]) in gated}, sums


class ImmediateUpdates(StepTrace):
    """The updates run at once, and the old or the new state is selected at the end.

    The verdict includes their results.
    """

    def complete(self) -> tuple[Any, ...]:
        new = self._run()
        sums = [reductions.of_all(number, self.owner.mesh) for number in self._update_sums(new)]
        self.may_commit &= reductions.all_finite(sums)
        if not self.owner.refuse:
            return self._result(self.outputs, new, jnp.zeros((), bool), sums)
        chosen = self._chosen(new, self.changed)
        return self._result(self.outputs, chosen, ~self.may_commit, sums)

    def counts(self) -> list[Counts]:
        new = self._run()
        places = self._places(self.seen.outputs, self.seen.records, new)
        slots = {id(v) for v in self.train_state.slots}
        for i in sorted(self.weights_and_slots):
            if reductions.can_be_bad(new[i]):
                site = "slots" if id(self.variables[i]) in slots else "weights"
                places.append((site, self._path(i), new[i]))
        return _counted(places)

    def _run(self) -> list[Any]:
        """Run the body and compute the verdict; return the flat new state."""
        new: list[Any]
        self.seen, self.outputs, new = self._call(self.old, self.args, None, _trace_of(self.old))
        self.changed = [i for i in range(len(new)) if new[i] is not self.old[i]]
        self._note(self.outputs, self.seen.losses, self.seen.gradients, self.changed, new)
        return new

    def _update_sums(self, new: Sequence[Any]) -> tuple[Any, Any]:
        """Return the sums over weights and slots; both in the first if the slots are small."""
        indices, tolerated = sorted(self.weights_and_slots), self.owner.tolerated
        watched = {i: new[i] for i in indices if id(self.variables[i]) not in tolerated}
        sums = [jnp.zeros((), self.dtype)] * 2
        for optimizer in self.train_state.optimizers:
            trained = self._known(keras_optimizers.trained_by(optimizer))
            weights = [watched.pop(i) for i in trained if i in watched]
            slots = self._known(optimizer.variables)
            one = self._one(optimizer, weights, [(self.variables[i], new[i]) for i in slots])
            sums = [a + b for a, b in zip(sums, one)]
            watched = {i: array for i, array in watched.items() if i not in slots}
        return sums[0] + reductions.total(watched.values(), self.dtype), sums[1]

    def _known(self, variables: Iterable[Any]) -> list[int]:
        return [self.place[id(v)] for v in variables if id(v) in self.place]


def _counted(places: Sequence[Place]) -> list[Counts]:
    return [{(site, path, array.size): reductions.count(array)} for site, path, array in places]


def _trace_of(arrays: Sequence[Any]) -> Any:
    """Return the running trace, or `None` in an eager step."""
    return next((a._trace for a in arrays if isinstance(a, jax.core.Tracer)), None)


def _like(old: Any, new: Any) -> Any:
    """Return the old value of an array in the dtype of the new one."""
    same = getattr(old, "dtype", None) == getattr(new, "dtype", None)
    return old if same else jnp.asarray(old).astype(new.dtype)


def _shape(variable: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(variable.dtype))
