"""One run of the transaction on PyTorch: its body, and its commit or refusal.

The verdict is computed when the body calls its update, so a refused step is never updated. If the
body continues after its update, the update runs at once, with the old values kept, and the verdict
is computed at the end of the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.calls import Calls, Recorder
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.judging import Judged, Ruling, judge, places, read_update
from keras_nanguard._backends.torch.late_writes import LateWrites
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.seen import Seen
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.step_context import Learned, StepContext
from keras_nanguard._backends.torch.undo_log import is_undone_as_a_whole
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


class BeforeUpdate(NamedTuple):
    """What the body of a step has done before its first update.

    Attributes:
        loss_count: the number of its losses.
        written: the tensors of the train state that it has written past Keras.
        uncounted: those whose writes torch has not counted.
    """

    loss_count: int = 0
    written: Sequence[Any] = ()
    uncounted: Sequence[Any] = ()


class Ran(NamedTuple):
    """What the body of a step has done.

    Attributes:
        updated: those of its updates that have run.
        created: the tensors that they have created, each with its first value.
        versions_after: `StepContext.versions_now` after the last one.
        judged: the verdict, if it was computed before an update.
        continues: as in `LateWrites`.
        outputs: its outputs, `None` if it has raised.
        raised: whether torch has raised about a bad number.
    """

    before_update: BeforeUpdate = BeforeUpdate()
    updated: tuple[Update, ...] = ()
    created: tuple[tuple[Any, Any], ...] = ()
    versions_after: Mapping[int, tuple[Any, int]] = MappingProxyType({})
    judged: Judged | None = None
    continues: bool = False
    calls: Calls = Calls()
    outputs: Any = None
    raised: bool = False


class UpdateGate:
    """Runs each update when the body calls it, unless the verdict refuses it.

    The hooks of a step write here, and in its undo log, only; `ended` returns what they have seen.
    """

    def __init__(self, context: StepContext):
        self._context, self._late_writes = context, LateWrites(context.state.updated)
        self._updates_first, self._ran = context.updates_first, Ran()

    @property
    def can_be_undone(self) -> bool:
        """Whether everything that the body has done so far can be undone."""
        return self._context.definition.run.refuses and (
            self._updates_first or not self._ran.updated
        )

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Record what an eager body writes until the stack ends."""
        stack.enter_context(self._context.log)
        if self._context.definition.may_undo_update:
            self._late_writes.wait(stack)

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward pass, which may add to the gradients that it finds."""
        self._context.log.gradients.note_writes()
        self._context.log.keep_gradients()
        return self._late_writes.around_backward()

    def on_update(self, calls: Calls, update: Update) -> Any:
        """Run an update, unless the verdict refuses it; return its result."""
        update.build()  # as Keras would, so that its variables are noted
        self._note_state_before(calls, update)
        self._judge(calls, update)
        if self._ran.judged is not None and self._ran.judged.ruling is Ruling.REFUSE:
            self._late_writes.begin()  # the body may continue
            return None
        return self._run(update)

    def _note_state_before(self, calls: Calls, update: Update) -> None:
        """Keep the gradients that the update uses, and note what the body has done before its first
        one.
        """
        context, log = self._context, self._context.log
        log.gradients.note_writes()
        if not update.evaluates:
            log.keep_gradients()
        if not (self._ran.updated or context.definition.stock):
            written, uncounted = context.written(), context.written_uncounted()
            before = BeforeUpdate(calls.loss_count, written, uncounted)
            self._ran = self._ran._replace(before_update=before)

    def _judge(self, calls: Calls, update: Update) -> None:
        """Compute the verdict before the first update that must wait for it. One that evaluates the
        loss cannot wait.
        """
        definition = self._context.definition
        if self._ran.judged is not None:
            return
        self._updates_first = self._updates_first or (
            update.evaluates and definition.may_undo_update
        )
        if definition.run.refuses and not self._updates_first:
            judged = judge(self._context, calls)
            self._updates_first = judged.ruling is Ruling.CHECK
            self._ran = self._ran._replace(judged=judged)

    def _run(self, update: Update) -> Any:
        context = self._context
        if self._updates_first:
            context.log.keep_updated(update.optimizer, update.written())
        if self._updates_first or is_undone_as_a_whole():
            self._late_writes.begin()
        self._ran = self._ran._replace(updated=(*self._ran.updated, update))
        with self._late_writes.during(update):
            result, created = update.run()
        self._ran = self._ran._replace(created=(*self._ran.created, *created))
        if not (context.definition.stock or context.learned.continues is Seen.YES):
            self._ran = self._ran._replace(versions_after=context.versions_now())
        return result

    def ended(self, calls: Calls, outputs: Any, raised: bool = False) -> Ran:
        """Return what the body has done, with its calls and outputs."""
        continues = self._late_writes.continues
        return self._ran._replace(continues=continues, calls=calls, outputs=outputs, raised=raised)

    def release(self) -> None:
        """Release the tensors, which an exception in an update would keep."""
        self._ran = Ran()


def run(context: StepContext, intercept: Intercept, args: Sequence[Any]) -> Ran:
    """Run the body of a step. Its updates run, unless the verdict in the body refuses them.

    An exception that is not about a bad number, or an interrupt, is raised again. Before, the state
    is restored if it can be.
    """
    definition, log, gate = context.definition, context.log, UpdateGate(context)
    recorder = Recorder(definition.model, gate.on_update, gate.around_backward)
    restore_modes = context.state.modes.held()
    try:
        with contextlib.ExitStack() as stack:
            if not context.is_compiled:
                gate.watch(stack)
            stack.enter_context(intercept.recording(recorder))
            outputs = (intercept.compiled or definition.body)(*args)
        return gate.ended(recorder.calls, outputs)
    except BaseException as error:
        if gate.can_be_undone and isinstance(error, Exception) and is_numeric(error):
            restore_modes()
            return gate.ended(recorder.calls, None, raised=True)
        with contextlib.ExitStack() as ending:  # the last one first, even if it raises
            ending.callback(recorder.release)
            ending.callback(gate.release)
            if definition.run.agreement.count > 1 and isinstance(error, Exception):
                ending.callback(host.leave, error)
            if gate.can_be_undone:
                ending.callback(log.give_back)
                ending.callback(restore_modes)
        raise
    finally:
        for pair in log.created:
            definition.run.note_created(*pair)


def commit(
    context: StepContext, ran: Ran, judged: Judged, learned: Learned
) -> tuple[Verdict, Learned]:
    """Read the updated state, unless the verdict has, now or with the next step. Return the verdict
    and what the steps have shown.
    """
    run, state, verdict = context.definition.run, judged.checked.state, judged.agreed.verdict
    for created in ran.created:
        run.note_created(*created)
    if ran.created:
        learned, state = replace(learned, stale=True), context.definition.read_state()
    if not (run.refuses and _update_is_unread(context, ran, judged, learned, state)):
        return verdict, learned
    verdict, unread = read_update(state, verdict, run.agreement)
    return verdict, replace(learned, unread=unread)


def _update_is_unread(
    context: StepContext,
    ran: Ran,
    judged: Judged,
    learned: Learned,
    state: StateTensors,
) -> bool:
    """Whether the verdict has not seen all weights and slots as they are now: it was computed
    before the update, the update has created some, or the body has written some past Keras for the
    first time.
    """
    is_before_update = bool(ran.created) or not judged.checked.has_updated
    if ran.calls.updates and is_before_update:
        return True
    unseen = learned.untracked.keys() - context.log.kept.keys()
    unseen |= learned.uncounted.keys() - context.learned.uncounted.keys()
    return not state.updated.isdisjoint(unseen)


def refuse(context: StepContext, calls: Calls, judged: Judged) -> Verdict:
    """Undo a step; update each loss scale that it is about. Return the verdict."""
    verdict = judged.agreed.verdict._replace(refused=True)
    overflowed = _overflowed(context, calls) if verdict.only_gradients else []
    known = judged.checked.state.train_state.optimizers
    blamed = [update.optimizer for update in overflowed] if verdict.only_gradients else known
    context.log.give_back()
    for update in overflowed:
        # The loop begins its next sum, as after an update that Keras skips.
        for _, variable in update.pairs:
            keras_variables.stored(variable).grad = None
    for optimizer in filter(keras_optimizers.scales_of, keras_variables.unique(blamed)):
        scale, counter = keras_optimizers.scales_of(optimizer)
        before = float(scale.value), int(counter.value), optimizer.initial_scale
        after = rules.learned_scale(rules.NUMBERS, verdict.loss, verdict.gradients, *before)
        scale.assign(after[0])
        counter.assign(after[1])
    return verdict


def _overflowed(context: StepContext, calls: Calls) -> list[Update]:
    """Return the updates with bad gradients by optimizers that scale the loss: those of another one
    keep their sums and their scale. All of them if processes train together.
    """
    scaled = [u for u in calls.updates if keras_optimizers.scales_of(u.optimizer)]
    if context.definition.run.agreement.count > 1:
        return scaled
    return [u for u in scaled if not reductions.are_finite([g for g, _ in u.pairs])]


def report(context: StepContext, calls: Calls, judged: Judged, args: Sequence[Any]) -> Report:
    """Return the report of a bad step of this process. No argument is copied."""
    found = places(context, calls, judged.checked)
    return Report(
        judged.own._replace(refused=context.definition.run.refuses),
        tuple((site, path) for site, path, _ in found),
        reductions.counts([tensor for _, _, tensor in found]),
        tuple(args),
        left_by_previous=judged.left_by_previous,
    )
