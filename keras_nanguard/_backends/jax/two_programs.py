"""A step in two programs, for a large state on a CPU: everything up to the verdict, and then the updates.

The host reads the verdict in between, and starts the second program only where the step is to commit. So the updates write over the
state in place, as in an unguarded step, and nothing stands in a conditional, within which XLA on a CPU computes more slowly.

The gradients pass from the one to the other, or, where there is no room for them, are computed by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_nanguard._backends.jax.execution import DeferredUpdates, ImmediateUpdates
from keras_nanguard._backends.jax.strategies import Strategy, buffers
from keras_nanguard._backends.shared.batch_memory import owned
from keras_nanguard._core.verdict import FIELDS, Verdict

__all__ = ["JudgesFirst", "TwoPrograms"]

_GRADIENTS = FIELDS.index("gradients")


class Split(DeferredUpdates):
    """One trace of both programs.

    Attributes:
        changed, wanted: places in the state of what the first program writes, if the step commits, and of what the second one does.
        others: places of what it only reads.
    """

    def first(self) -> tuple[list[Any], list[Any], Any, Any, dict[int, Any]]:
        """Return what the body writes itself, what the updates need beside the state, the outputs, the vector, and what a
        refusal learns."""
        outputs, new = self.run()
        zero = jnp.zeros((), self.kind)
        learned = self._learned()
        outputs, vector = self._joined(outputs, self._verdict(~self.may_commit, (zero, zero)), None)
        flat, self.arguments = jax.tree_util.tree_flatten([(r.slots, r.grads, r.weights) for r in self.records])
        known = {id(leaf): i for i, leaf in enumerate(self.old)}
        self.known = [known.get(id(value)) for value in flat]
        self.others = sorted({i for i in self.known if i is not None} - set(self.wanted))
        carried = [value for value, i in zip(flat, self.known) if i is None]
        results = [new[i] for i in self.changed], carried, outputs, vector, learned
        self._release()
        return results

    def _release(self) -> None:
        """Keep what the second trace needs, and no array of the first."""
        for record in self.records:
            record.slots, record.grads, record.weights, record.holders = [], [], [], None
        self.old, self.args, self.given = [], (), []
        del self.program, self.named, self.loss, self.gradients, self.statistics, self.scale, self.may_commit

    def second(self, held: Sequence[Any], others: Sequence[Any], carried: Sequence[Any], vector: Any) -> tuple[list[Any], Any]:
        """Run the updates; returns what they write, and the sums over weights and slots."""
        leaves = {**dict(zip(self.wanted, held)), **dict(zip(self.others, others))}
        rest = iter(carried)
        flat = [next(rest) if i is None else leaves[i] for i in self.known]
        for record, arguments in zip(self.records, jax.tree_util.tree_unflatten(self.arguments, flat)):
            record.slots, record.grads, record.weights = arguments
        self.gradients = vector[_GRADIENTS]
        updated, update_sums = self._update()
        return updated, jnp.stack(update_sums)


class TwoPrograms(Strategy):
    """The host reads the verdict between two programs, the second of which holds the updates."""

    def __init__(self, owner: Any):
        super().__init__(owner)
        self._first, self._second = owner.program(self._trace_first), owner.program(self._trace_second, donate_argnums=1)

    def run(self, state: Any, factors: dict[int, Any], args: Sequence[Any]) -> tuple[Any, Any, Verdict]:
        owner = self.owner
        results, outputs, vector, learned = self._first(factors, state, *args)
        owner.hold(state, jax.tree_util.tree_map(owned, args))
        verdict, outputs, _ = owner.read(vector, outputs)
        if verdict.refused:
            owner.report_queue.put(verdict, lambda: owner.count(factors, state, *args), args)
            return owner.with_learned(state, learned), outputs, verdict
        new, outputs, verdict = self._commit(state, factors, args, results, outputs, vector, verdict)
        owner.report_queue.put(verdict, lambda: np.zeros((len(owner.report_queue.places), 2)), args)  # the state it was given is gone
        return new, outputs, verdict

    def _commit(
        self, state: Any, factors: dict[int, Any], args: Sequence[Any], results: Any, outputs: Any, vector: Any, verdict: Verdict
    ) -> tuple[Any, Any, Verdict]:
        """Run the second program; returns what `run` does."""
        leaves, tree = _unshared(state)
        new, carried = results
        held, others = ([leaves[i] for i in places] for places in (self.split.wanted, self.split.others))
        updated, update_sums = self._second(factors, held, others, carried, vector)
        for places, values in ((self.split.changed, new), (self.split.wanted, updated)):
            for i, value in zip(places, values):
                leaves[i] = value
        weights, slots = np.asarray(update_sums).tolist()
        _free(carried)
        return tree.unflatten(leaves), outputs, verdict._replace(weights=weights, slots=slots)

    def _trace_first(self, state: Any, *args: Any) -> Any:
        self.split = Split(self.owner, state, args)
        new, carried, *others = self.split.first()
        return (new, carried), *others

    def _trace_second(self, held: Any, others: Any, carried: Any, vector: Any) -> Any:
        return self.split.second(held, others, carried, vector)


class JudgesFirst(TwoPrograms):
    """The first program keeps no gradient, and the second one is the whole step: for gradients that have no room beside the state.

    At its peak a step so takes what it takes without a guard, as XLA gives up each gradient after its update. It computes loss and
    gradients twice. What was updated is summed up by a third program, when no gradient is there any more.
    """

    def __init__(self, owner: Any):
        super().__init__(owner)
        self._third = owner.program(lambda state, gradients: Updated(owner, state, ()).sums(gradients))

    def _commit(
        self, state: Any, factors: dict[int, Any], args: Sequence[Any], results: Any, outputs: Any, vector: Any, verdict: Verdict
    ) -> tuple[Any, Any, Verdict]:
        leaves, tree = _unshared(state)
        known = vector[: len(FIELDS)]
        new, outputs, vector, _ = self._second(factors, tree.unflatten(leaves), known, *args)
        update_sums = self._third(factors, new, known[_GRADIENTS])
        verdict, outputs, _ = self.owner.read(vector, outputs)
        weights, slots = np.asarray(update_sums).tolist()
        return new, outputs, verdict._replace(refused=False, weights=weights, slots=slots)

    def _trace_first(self, state: Any, *args: Any) -> Any:
        return None, *Split(self.owner, state, args).first()[2:]

    def _trace_second(self, state: Any, known: Any, *args: Any) -> Any:
        return Judged(self.owner, state, args, known).both()


class Judged(ImmediateUpdates):
    """A step that is known to be good up to its updates.

    Args:
        known: the verdict on it, as a vector.
    """

    def __init__(self, owner: Any, state: Any, args: Sequence[Any], known: Any):
        super().__init__(owner, state, args)
        self.known = Verdict(*known)

    def _note(self, outputs: Any, losses: Any, gradients: Any, changed: Sequence[int], new: Sequence[Any]) -> None:
        """Take over the verdict: to compute it again would hold the gradients."""
        known, self.written = self.known, []
        self.loss, self.gradients, self.statistics, self.scale = known.loss, known.gradients, known.statistics, known.scale
        self.may_commit = jnp.ones((), bool)

    def _update_sums(self, new: Sequence[Any]) -> tuple[Any, Any]:
        """Leave them to `Updated`: within this program they hold one more array of the size of a weight."""
        return jnp.zeros((), self.kind), jnp.zeros((), self.kind)


class Updated(ImmediateUpdates):
    """A state after its updates."""

    def sums(self, gradients: Any) -> Any:
        """Return the sums over weights and slots, given the one over the gradients."""
        self.gradients = gradients
        return jnp.stack(self._update_sums(self.old))


def _unshared(state: Any) -> tuple[list[Any], Any]:
    """Return a state flat, and its structure. Of arrays that share memory all but one are copied, so that each can be written over."""
    leaves, tree = jax.tree_util.tree_flatten(state)
    first: dict[int, int] = {}
    for i, place in enumerate(buffers(leaves)):
        if first.setdefault(place, i) != i:
            leaves[i] = jnp.copy(leaves[i])
    return leaves, tree


def _free(arrays: Sequence[Any]) -> None:
    """Give up the memory of these results of a program at once, for the next step to use.

    They would wait for Python otherwise, and the large MLP of `benchmarks/overhead_backends.py` took 1.04 to 1.13 of a plain step
    with that, 0.98 to 1.00 without. Each result is an array of its own to JAX, so nobody else holds one of these.
    """
    for array in arrays:
        array.delete()
