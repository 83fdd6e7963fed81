"""A step in two programs, for a large state on a CPU: everything up to the verdict, and then the updates.

The host reads the verdict in between, and starts the second program only where the step is to commit. So the updates write over the
state in place, as in an unguarded step, and nothing stands in a conditional, within which XLA on a CPU computes more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_nanguard._backends.jax.execution import DeferredUpdates
from keras_nanguard._core.verdict import FIELDS, Verdict

__all__ = ["TwoPrograms"]

_GRADIENTS = FIELDS.index("gradients")


class Split(DeferredUpdates):
    """One trace of both programs.

    Attributes:
        changed, wanted: places in the state of what the first program writes, if the step commits, and of what the second one does.
        others: places of what it only reads.
    """

    def first(self) -> tuple[list[Any], list[Any], Any, Any, dict[int, Any]]:
        """Return what the body writes itself, what the updates need beside the state, the outputs, the vector for the host, and
        what a refusal writes."""
        outputs, new = self.run()
        zero = jnp.zeros((), self.kind)
        learned = self._learned()
        outputs, vector = self._joined(outputs, self._row(~self.may_commit, (zero, zero)), None)
        flat, self.arguments = jax.tree_util.tree_flatten([(r.slots, r.grads, r.weights) for r in self.records])
        known = {id(leaf): i for i, leaf in enumerate(self.old)}
        self.known = [known.get(id(value)) for value in flat]
        self.others = sorted({i for i in self.known if i is not None} - set(self.wanted))
        carried = [value for value, i in zip(flat, self.known) if i is None]
        told = [new[i] for i in self.changed], carried, outputs, vector, learned
        self._let_go()
        return told

    def _let_go(self) -> None:
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


class TwoPrograms:
    """Runs the steps of one `Transaction` in two programs.

    Args:
        owner: the transaction.
    """

    def __init__(self, owner: Any):
        self.owner = owner
        self._first, self._second = jax.jit(self._traced_first), jax.jit(self._traced_second, donate_argnums=0)

    def __call__(self, state: Any, factors: dict[int, Any], *args: Any) -> tuple[Any, Any, Verdict]:
        """Run one step; arguments and results are those of the transaction.

        Raises:
            Retrace: where the updates cannot be put off; nothing has happened then.
        """
        owner = self.owner
        new, carried, outputs, vector, learned = self._first(state, factors, *args)
        verdict, outputs = owner.split_outputs(owner.read(vector, state, args), outputs)
        if verdict.refused:
            owner.report_queue.put(verdict, lambda: owner.count(state, factors, *args), args)
            return owner.given_back(state, learned), outputs, verdict
        leaves, tree = jax.tree_util.tree_flatten(state)
        held, others = ([leaves[i] for i in chosen] for chosen in (self.split.wanted, self.split.others))
        updated, update_sums = self._second(held, others, carried, vector, factors)
        for chosen, values in ((self.split.changed, new), (self.split.wanted, updated)):
            for i, value in zip(chosen, values):
                leaves[i] = value
        weights, slots = np.asarray(update_sums).tolist()
        verdict = verdict._replace(weights=weights, slots=slots)
        _free(carried)
        owner.report_queue.put(verdict, lambda: np.zeros((len(owner.report_queue.rows), 2)), args)  # the state it was given is gone
        return tree.unflatten(leaves), outputs, verdict

    def _traced_first(self, state: Any, factors: dict[int, Any], *args: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(state)
        with self.owner.scaling(factors):
            self.split = Split(self.owner, leaves, tree, args)
            return self.split.first()

    def _traced_second(self, held: Any, others: Any, carried: Any, vector: Any, factors: dict[int, Any]) -> Any:
        with self.owner.scaling(factors):
            return self.split.second(held, others, carried, vector)


def _free(arrays: Sequence[Any]) -> None:
    """Give up the memory of these results of a program at once, for the next step to use.

    They would wait for Python otherwise, and the large MLP of `benchmarks/overhead_backends.py` took 1.04 to 1.13 of a plain step
    with that, 0.98 to 1.00 without. Each result is an array of its own to JAX, so nobody else holds one of these.
    """
    for array in arrays:
        array.delete()
