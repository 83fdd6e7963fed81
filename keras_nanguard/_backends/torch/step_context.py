"""One step on PyTorch before its body runs: what earlier steps have shown, the values that decide
how it runs, and its undo log.

An eager body cannot be inspected before it runs. So each step shows which tensors it writes past
Keras, by the version that torch counts for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keras_nanguard._backends import interface
from keras_nanguard._backends.torch.seen import Seen
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._keras import attributes as keras_attributes

FIRST_STEPS = 2
"""Number of first steps in which the train state is read each time and everything is kept, to find
the tensors that a step writes.
"""


@dataclass(frozen=True)
class Learned(interface.Learned):
    """What the steps of one body have shown. Keys are the `id` of tensors; untracked ones are kept
    before each step.

    Attributes:
        steps: their number.
        stale: whether the train state has to be read again before the next one.
        unread: norms of the updated `weights` and `slots`, if they are still on a device. They are
            read with the verdict of the next step. If one is not finite, the tensors decide, which
            an action may have replaced until then.
        continues: whether the body may continue after its first update in a way that can make the
            step bad: with another update, loss or statistic, or because its loss is known at its
            end only; or in a way in which it must not wait for other processes before. Unknown
            until it has updated. A body with several optimizers may.
        uncounted: those of the untracked tensors whose writes torch does not count (`p.data.mul_`).
        adds_by_hand: whether the body adds to the gradients that it finds without a backward pass
            that is seen (`p.grad += new`, a compiled body), so that they are kept before each step.
            Unknown until it has found some.
    """

    updates_first: bool = True
    steps: int = 0
    stale: bool = True
    continues: Seen = Seen.UNKNOWN
    unread: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uncounted: Mapping[int, Any] = field(default_factory=dict)
    adds_by_hand: Seen = Seen.UNKNOWN

    @property
    def is_fresh(self) -> bool:
        """Whether it is not known yet what the body writes."""
        return self.steps < FIRST_STEPS


@dataclass(frozen=True, eq=False)
class StepDefinition:
    """The facts about a step that do not change from one run of it to the next.

    Attributes:
        body: the step as the user wrote it: `body(*args) -> outputs`.
        losses: returns the losses among its outputs, for one that never calls `compute_loss`.
        model: the model whose `compute_loss` it calls, or `None`.
        stock: whether it is Keras' own train step, in which nothing can fail after the update.
        jit: whether the body is compiled, once its writes are known.
    """

    run: interface.Run
    body: Callable[..., Any]
    losses: Callable[[Any], list[Any]]
    model: Any = None
    stock: bool = False
    jit: bool = False

    @property
    def may_undo_update(self) -> bool:
        """Whether a step may be updated before its verdict, because it continues."""
        return self.run.refuses and not self.stock

    def read_state(self) -> StateTensors:
        """Read the train state."""
        return StateTensors(self.run.read_train_state(), self.run.model)


@dataclass(frozen=True, eq=False)
class StepContext:
    """A step that is about to run.

    Attributes:
        learned: what earlier steps have shown.
        is_compiled: whether the body is compiled, so that its writes are not recorded.
        log: what a refusal restores.
        versions: the watched tensors of the train state by their `id`, with their versions.
    """

    definition: StepDefinition
    state: StateTensors
    learned: Learned
    is_compiled: bool
    log: UndoLog
    versions: Mapping[int, tuple[Any, int]]

    @classmethod
    def of(
        cls, definition: StepDefinition, state: StateTensors, learned: Learned, is_compiled: bool
    ) -> StepContext:
        """Return the step, with copies of what it may write unnoticed."""
        log = _undo_log(definition, state, learned, is_compiled)
        watched = state.small_state if definition.stock else state.all
        versions = {id(t): (t, t._version) for t in watched}
        return cls(definition, state, learned, is_compiled, log, versions)

    @property
    def updates_first(self) -> bool:
        """Whether it is updated at once, with the old values kept."""
        updates_first = self.is_compiled or self.learned.is_fresh or self.learned.updates_first
        return self.definition.may_undo_update and updates_first

    # What the body has written so far

    @property
    def has_written_weights(self) -> bool:
        """Whether a weight or slot was written."""
        updated, versions = self.state.updated, self.versions.items()
        return any(t._version != version for key, (t, version) in versions if key in updated)

    def written(self) -> list[Any]:
        """Return the tensors of the train state that were written past Keras."""
        changed = [t for t, version in self.versions.values() if t._version != version]
        if not changed:
            return []
        by_keras = self.log.kept if self.is_compiled else self.log.writers
        return [t for t in changed if id(t) not in by_keras]

    def written_uncounted(self) -> list[Any]:
        """Return those whose value differs although torch has counted no write of them. Only the
        first steps read this.
        """
        if not self.learned.is_fresh:
            return []
        kept = [self.log.kept.get(key) for key in self.versions]
        unwritten = [entry for entry in kept if entry is not None and not entry.is_written]
        return [entry.tensor for entry in unwritten if entry.differs]

    def versions_now(self) -> dict[int, tuple[Any, int]]:
        """Return the watched and the kept tensors by their `id`, with their current versions."""
        tensors = [tensor for tensor, _ in self.versions.values()]
        tensors += [kept.tensor for kept in self.log.kept.values()]
        return {id(t): (t, t._version) for t in tensors}


def _undo_log(
    definition: StepDefinition, state: StateTensors, learned: Learned, is_compiled: bool
) -> UndoLog:
    undoes_updates = definition.may_undo_update
    uncounted = [*state.unlisted, *learned.uncounted.values()]
    kept = list(learned.untracked.values())
    if learned.is_fresh:
        kept += state.other
        kept += state.weights_and_slots if undoes_updates else ()
    if is_compiled:
        uncounted, kept = [*uncounted, *state.small_state, *kept], []
    log = UndoLog(kept, uncounted, holders=state.gradient_holders if undoes_updates else ())
    if learned.adds_by_hand.is_possible:
        log.keep_gradients()
    attributes = state.attributes(every=learned.is_fresh)
    log.at_undo("attributes", partial(keras_attributes.give_back_tensors, attributes))
    log.at_undo("gradients", partial(log.give_back_gradients, state.gradient_holders))
    # `LateWrites` keeps those of an eager step when they update.
    for optimizer in state.unlisted_optimizers if undoes_updates and is_compiled else ():
        log.at_undo(id(optimizer), optimizer.held())
    return log
