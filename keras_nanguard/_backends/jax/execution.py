"""One trace of a step as a transaction on JAX: with deferred updates, or with immediate ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.intercept import Intercept, Retrace, Update
from keras_nanguard._backends.shared import rules
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["DeferredUpdates", "ImmediateUpdates"]


class StepTrace:
    """One trace (or one eager run) of the transaction.

    Args:
        owner: the `Transaction`.
        state: the state.
        args: what else the body takes.
        halt: whether the step has to be refused in any case; `None` where none ever has.
    """

    def __init__(self, owner: Any, state: Any, args: Sequence[Any], halt: Any = None):
        self.owner, self.args, self.halt = owner, args, halt
        self.old, self.tree = jax.tree_util.tree_flatten(state)
        self.train_state = train_state = owner.train_state()
        self.kind = reductions.kind(self.old)
        self.variables = list(owner.variables())
        self.place = {id(v): i for i, v in enumerate(self.variables) if v is not None}
        self.weights_and_slots = {self.place[id(v)] for v in (*train_state.trainable, *train_state.slots) if id(v) in self.place}
        metrics = {id(v) for v in train_state.metrics}
        self.metrics = {i for i, v in enumerate(self.variables) if id(v) in metrics}

    def _call(self, leaves: Sequence[Any], args: Sequence[Any], holders: Any, trace: Any) -> tuple[Any, Any, Any, Any]:
        """Run the body; returns what was seen, its outputs, the flat new state and its tree."""
        state = jax.tree_util.tree_unflatten(self.tree, leaves)
        kind = self.owner.outputs
        with kind.watched(), Intercept(self.owner.model, self.train_state.optimizers, holders, trace) as seen:
            outputs, new = kind.split_outputs(self.owner.body(state, *args))
            kind.note(outputs)
        flat, tree = jax.tree_util.tree_flatten(new)
        kind.check(tree, self.tree)
        return seen, outputs, flat, tree

    # What the body computed

    def _note(self, outputs: Any, losses: Any, gradients: Any, changed: Sequence[int], new: Sequence[Any]) -> None:
        """Compute the verdict."""
        owner, kind = self.owner, self.kind
        self.written = [i for i in changed if i not in self.weights_and_slots | self.metrics and self._watched(i)]
        self.loss = reductions.add(losses or owner.outputs.losses(outputs), kind)
        self.gradients = reductions.squares(gradients, kind)
        self.statistics = reductions.total([new[i] for i in self.written], kind)
        scales = [self.old[self.place[id(s)]] for s, _ in self.train_state.scales if id(s) in self.place]
        self.scale = jnp.min(jnp.stack(scales)).astype(kind) if scales else jnp.ones((), kind)
        sums = [self.loss, self.gradients, self.statistics]
        self.may_commit = rules.may_commit(reductions.OPERATIONS, sums, self.scale if scales else None)
        if self.halt is not None:
            self.may_commit &= ~self.halt

    def _watched(self, index: int) -> bool:
        variable = self.variables[index]
        ours = {id(v) for v in (*self.train_state.rates, *(v for pair in self.train_state.scales for v in pair))}
        return id(variable) not in ours | self.owner.tolerated and reductions.can_be_bad(self.old[index])

    def _verdict(self, refused: Any, update_sums: Sequence[Any]) -> Verdict:
        weights, slots = update_sums
        halted = False if self.halt is None else self.halt
        return Verdict(refused, self.loss, self.gradients, self.statistics, weights, slots, self.scale, halted=halted)

    def _one(self, optimizer: Any, weights: Sequence[Any], variables: Iterable[tuple[Any, Any]], total: Any) -> tuple[Any, Any]:
        """Return the sums over what one optimizer has updated: weights, and its variables with their new values."""
        updated = list(variables)
        watched = {id(v) for v in self.train_state.slots} - self.owner.tolerated
        slots = [array for v, array in updated if id(v) in watched and reductions.can_be_bad(array)]
        turn = next((array for v, array in updated if v.name == "iteration"), None)
        return reductions.update_sums(optimizer, weights, slots, turn, self.gradients, self.kind, total)

    def _learned(self) -> dict[int, Any]:
        """Return what a refusal writes to loss scales, by place."""
        learned = {}
        scaled = [o for o in self.train_state.optimizers if keras_optimizers.scales_of(o)]
        for optimizer in scaled:
            scale, counter = (self.place.get(id(v)) for v in keras_optimizers.scales_of(optimizer))
            if scale is None or counter is None:
                continue
            old, steps = self.old[scale], self.old[counter]
            initial = jnp.asarray(optimizer.initial_scale, old.dtype)
            learned[scale], learned[counter] = rules.learned_scale(reductions.OPERATIONS, self.loss, self.gradients, old, steps, initial)
        if self.halt is not None:  # it has nothing to say of its own batch
            learned = {i: jnp.where(self.halt, self.old[i], value) for i, value in learned.items()}
        return learned

    def _file(self, places: Sequence[tuple[str, str, Any]]) -> Any:
        """Note what the counts of this trace are about; returns the counts of a step in which nothing is bad."""
        self.owner.report_queue.places = tuple((site, path, array.size) for site, path, array in places)
        return jnp.zeros((len(places), 2), self.kind)

    def _places(self, outputs: Any, records: Sequence[Update], new: Sequence[Any]) -> list[tuple[str, str, Any]]:
        places = [("outputs", name, array) for name, array in outputs]
        for record in records:
            places += [("gradients", path, g) for path, g in zip(record.paths, record.grads) if g is not None]
        return places + [("statistics", self._path(i), new[i]) for i in self.written]

    def _path(self, index: int) -> str:
        return str(getattr(self.variables[index], "path", "") or f"state/{index}")

    def _finish(self, outputs: Any, new: list[Any], verdict: Verdict, counts: Any) -> tuple[Any, Any, Any, Any]:
        if self.owner.refuse:
            metrics = [(v, new[self.place[id(v)]]) for v in self.train_state.metrics if id(v) in self.place]
            outputs = self.owner.outputs.results(outputs, metrics)
        outputs, vector = self._joined(outputs, verdict, counts)
        return jax.tree_util.tree_unflatten(self.tree, new), outputs, vector, None if self.halt is None else _is_bad(verdict)

    def _joined(self, outputs: Any, verdict: Verdict, counts: Any) -> tuple[Any, Any]:
        """Return the outputs that leave the step by themselves, and one vector: the verdict, the other outputs, the counts."""
        outputs, logs = self.owner.outputs.join(outputs, self.kind)
        numbers = jnp.stack([jnp.asarray(number).astype(self.kind) for number in (*verdict, *logs)])
        self.owner.vector_head = numbers.size
        return outputs, numbers if counts is None else jnp.concatenate([numbers, jnp.ravel(counts)])


class DeferredUpdates(StepTrace):
    """The updates run after the verdict, in a conditional or in a program of their own."""

    def complete(self) -> tuple[Any, Any, Any, Any]:
        outputs, new = self.run()
        self._decide(new, self._places(self.named, self.records, new))
        return self._finish(outputs, self.new, self.verdict, self.counts)

    def run(self) -> tuple[Any, list[Any]]:
        """Run the body and compute the verdict; returns the outputs and the flat new state without the updates."""
        self._trace()
        values = jax.extend.core.jaxpr_as_fun(self.program)(*self.old, *self.given, *self._dummies())
        seen, outputs, new = jax.tree_util.tree_unflatten(self.results, values)
        for record, arguments in zip(self.records, seen["records"]):
            record.slots, record.grads, record.weights = arguments
        self.named = list(zip(self.names, seen["outputs"]))
        self.wanted = sorted(self.holding)
        self.dtypes = [self.old[i].dtype for i in self.wanted]
        self.changed = sorted(self.moved - set(self.holding))
        self._note(outputs, seen["losses"], [g for r in self.records for g in r.grads if g is not None], self.changed, new)
        return outputs, new

    def _trace(self) -> None:
        """Trace the body, and check in the trace that its updates can be deferred."""
        self.given, args_tree = jax.tree_util.tree_flatten(tuple(self.args))
        self.held = [
            (o, [_shape(v) for v in keras_optimizers.trained_by(o)], [_shape(v) for v in o.variables])
            for o in self.train_state.optimizers
            if o.built
        ]
        flat_held, held_tree = jax.tree_util.tree_flatten([(w, s) for _, w, s in self.held])
        counts = (len(self.old), len(self.given))

        def probe(*arrays: Any) -> Any:
            leaves, rest = arrays[: counts[0]], arrays[counts[0] :]
            args = jax.tree_util.tree_unflatten(args_tree, rest[: counts[1]])
            holders = jax.tree_util.tree_unflatten(held_tree, rest[counts[1] :])
            by_id = {id(o): pair for (o, _, _), pair in zip(self.held, holders)}
            trace = next((a._trace for a in arrays if isinstance(a, jax.core.Tracer)), None)
            seen, outputs, new, _ = self._call(leaves, args, by_id, trace)
            self.records, self.names = seen.records, [name for name, _ in seen.outputs]
            noted = {
                "records": [(r.slots, r.grads, r.weights) for r in seen.records],
                "losses": seen.losses,
                "outputs": [array for _, array in seen.outputs],
            }
            flat, self.results = jax.tree_util.tree_flatten((noted, outputs, new))
            self.output_count = len(flat) - len(new)
            return flat

        self.flat_held = flat_held
        self.program = jax.make_jaxpr(probe)(*self.old, *self.given, *flat_held)
        self._inspect(sum(counts))

    def _inspect(self, first: int) -> None:
        """Find which arrays of the new state an update will give; they must not be used before."""
        jaxpr = self.program.jaxpr
        number = {id(var): i for i, var in enumerate(jaxpr.invars[first:])}
        used = {id(var) for equation in jaxpr.eqns for var in equation.invars}
        if used & set(number) or any(id(var) in number for var in jaxpr.outvars[: self.output_count]):
            raise Retrace
        after = jaxpr.outvars[self.output_count :]
        self.holding = {i: number[id(var)] for i, var in enumerate(after) if id(var) in number}
        self.moved = {i for i, var in enumerate(after) if var is not jaxpr.invars[i]}
        if self.weights_and_slots & self.moved - set(self.holding):
            raise Retrace

    def _dummies(self) -> list[Any]:
        """Return placeholders of the results of the updates; nothing reads them."""
        return [jnp.zeros(s.shape, s.dtype) for s in self.flat_held]

    def _decide(self, new: list[Any], places: list[tuple[str, str, Any]]) -> None:
        nothing = self._file(places)
        learned = self._learned()

        def commit() -> Any:
            return *self._update(), nothing

        def refuse() -> Any:
            zero = jnp.zeros((), self.kind)
            kept = [learned.get(i, self.old[i]) for i in self.wanted]
            return kept, (zero, zero), reductions.counts([array for _, _, array in places], self.kind)

        large, update_sums, self.counts = jax.lax.cond(self.may_commit, commit, refuse)
        self.new = list(new)
        for i, value in zip(self.wanted, large):
            self.new[i] = value
        for i in self.changed:
            self.new[i] = jnp.where(self.may_commit, new[i], learned.get(i, self.old[i]))
        self.verdict = self._verdict(~self.may_commit, update_sums)

    def _update(self) -> tuple[list[Any], Any]:
        """Run the updates; returns what they give for the `wanted` places, and the sums over it."""
        results: dict[int, Any] = {}
        update_sums = [jnp.zeros((), self.kind)] * 2
        for record in self.records:
            weights, slots = record.real(record.slots, record.grads, record.weights)
            results[id(record.optimizer)] = weights, slots
            one = self._one(record.optimizer, weights, zip(record.optimizer.variables, slots), reductions.total)
            update_sums = [a + b for a, b in zip(update_sums, one)]
        flat = [results.get(id(o), (w, s)) for o, w, s in self.held]
        leaves: list[Any] = jax.tree_util.tree_leaves([(list(w), list(s)) for w, s in flat])
        return [leaves[self.holding[i]].astype(dtype) for i, dtype in zip(self.wanted, self.dtypes)], tuple(update_sums)


class ImmediateUpdates(StepTrace):
    """The updates run at once, and old or new is selected at the end, or by the host.

    Attributes:
        learned: what a refusal writes to loss scales, by place.
        places: `(site, path, array)` of whatever can be counted.
    """

    def run(self) -> list[Any]:
        """Run the body and compute the verdict; returns the flat new state."""
        trace = next((a._trace for a in self.old if isinstance(a, jax.core.Tracer)), None)
        new: list[Any]
        seen, self.outputs, new, _ = self._call(self.old, self.args, None, trace)
        self.changed = [i for i in range(len(new)) if new[i] is not self.old[i]]
        self._note(self.outputs, seen.losses, seen.gradients, self.changed, new)
        self.update_sums = self._update_sums(new)
        self.may_commit &= rules.may_commit(reductions.OPERATIONS, self.update_sums)
        self.places = self._places(seen.outputs, seen.records, new)
        self.places += [(self._site(i), self._path(i), new[i]) for i in sorted(self.weights_and_slots) if reductions.can_be_bad(new[i])]
        self.learned = self._learned()
        self.refused = ~self.may_commit if self.owner.refuse else jnp.zeros((), bool)
        return new

    def complete(self) -> tuple[Any, Any, Any, Any]:
        """Return the chosen state, the outputs, and the vector for the host."""
        new = self.run()
        nothing = self._file(self.places)
        ours = sorted({*self.changed, *self.learned})

        def commit() -> Any:
            return [new[i] for i in ours], nothing

        def refuse() -> Any:
            kept = [self.learned.get(i, self.old[i]).astype(new[i].dtype) for i in ours]
            return kept if self.owner.refuse else commit()[0], self.count()

        chosen, counts = jax.lax.cond(self.may_commit, commit, refuse)
        for i, value in zip(ours, chosen):
            new[i] = value
        return self._finish(self.outputs, new, self._verdict(self.refused, self.update_sums), counts)

    def both(self) -> tuple[Any, Any, Any, dict[int, Any]]:
        """Return the new state whatever the verdict, the outputs, the vector, and what a refusal writes beside the old."""
        new = self.run()
        outputs, vector = self._joined(self.outputs, self._verdict(self.refused, self.update_sums), None)
        return jax.tree_util.tree_unflatten(self.tree, new), outputs, vector, self.learned

    def count(self) -> Any:
        """Return how many entries of each place are bad."""
        return reductions.counts([array for _, _, array in self.places], self.kind)

    def counted(self) -> Any:
        """Run the body for nothing but that."""
        self.run()
        self._file(self.places)
        return self.count()

    def _site(self, index: int) -> str:
        slots = {id(v) for v in self.train_state.slots}
        return "slots" if id(self.variables[index]) in slots else "weights"

    def _update_sums(self, new: Sequence[Any]) -> tuple[Any, Any]:
        """Return the sums over weights and slots; both in the first where the slots are small."""
        watched = {i: new[i] for i in sorted(self.weights_and_slots) if id(self.variables[i]) not in self.owner.tolerated}
        sums = [jnp.zeros((), self.kind)] * 2
        for optimizer in self.train_state.optimizers:
            weights = [watched.pop(i) for i in self._known(keras_optimizers.trained_by(optimizer)) if i in watched]
            slots = self._known(optimizer.variables)
            one = self._one(optimizer, weights, [(self.variables[i], new[i]) for i in slots], reductions.exact)
            sums = [a + b for a, b in zip(sums, one)]
            watched = {i: array for i, array in watched.items() if i not in slots}
        return sums[0] + reductions.exact(watched.values(), self.kind), sums[1]

    def _known(self, variables: Iterable[Any]) -> list[int]:
        return [self.place[id(v)] for v in variables if id(v) in self.place]


def _is_bad(verdict: Verdict) -> Any:
    """Return whether the host will have something to do about the step; `Session.after` asks the same."""
    sums = jnp.stack([verdict.loss, verdict.gradients, verdict.statistics, verdict.weights, verdict.slots, verdict.scale])
    return verdict.refused | ~jnp.all(jnp.isfinite(sums)) | (verdict.scale <= 0)


def _shape(variable: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(variable.dtype))
