"""The transaction on PyTorch.

In outline::

    keep      torch's generators and buffers; other small state is copied when the step writes it
    run       the user's step; its optimizer updates are deferred
    verdict   are loss, gradients and written statistics finite, is the loss scale valid? one read
    commit    the updates run; weights and slots are read once
    refuse    all writes are undone, the loss scale is updated, batch and counts are reported

In Keras' own train step everything that can make it bad is known when it calls its update, so the
verdict is computed there and nothing large is copied. Any other step may continue after an update.
Its updates are deferred to the end of the step, or until an operation accesses something that they
read or write. In that case the update runs at once and is undone on a refusal, which costs one copy
of the written tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared.outputs import losses_in_logs, scalars
from keras_nanguard._backends.torch.arguments import Given, as_tensors
from keras_nanguard._backends.torch.execution import StepRun
from keras_nanguard._backends.torch.intercept import Compiled, Intercept
from keras_nanguard._backends.torch.judging import NO_VERDICT
from keras_nanguard._backends.torch.parts import Parts
from keras_nanguard._core.verdict import Report
from keras_nanguard._keras.train_state import TrainState

FRESH = 2
"""Number of first steps in which the train state is read each time and everything is kept, to find
the tensors that a step writes.

The second step shows whether the loop adds to existing gradients, as one that accumulates over
steps does.
"""

REFRESH = 100
"""Steps between two later readings of the train state."""


class Transaction(interface.Transaction):
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        train_state: callable that returns the current `TrainState`.
        model: the model whose `compute_loss` returns the loss, or `None`.
        logs: whether the body returns Keras logs.
        stock: whether the body is Keras' own train step, in which nothing can fail after the
            update.
        jit: whether to compile the body, once its writes are known.
        compiled: the compiled body of an earlier run.
        note_created: called with each variable that is created inside the step, and its first
            value.
        refuse: whether bad steps are refused; otherwise only verdict and batch are reported.
        agreement: the agreement of processes that train together; `None` for one process.

    Attributes:
        verdict: the verdict of the last step.
        parts: the train state, as it was read last.
        stale: whether the train state has to be read again before the next step.
        adds_to_gradients: whether the body adds to the gradients of an earlier step, which are then
            kept before each step.
        slot_versions: those of `Parts` after the last step.
        unread: `StepResult.unread` of the last step.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        train_state: Callable[[], TrainState],
        *,
        model: Any = None,
        logs: bool = False,
        stock: bool = False,
        jit: bool = False,
        compiled: Compiled | None = None,
        note_created: Callable[[Any, Any], None] = lambda variable, value: None,
        refuse: bool = True,
        agreement: interface.Agreement | None = None,
    ):
        self.body = self.replayed = body
        self.read_train_state, self.model = train_state, model
        self.stock, self.note_created = stock, note_created
        self.refuse, self.agreement = refuse, agreement
        self.jit, self.compiled = jit, compiled
        self._reports: list[Report] = []
        self.losses = losses_in_logs if logs else scalars
        self.tolerated: set[int] = set()
        self.untracked: dict[int, Any] = {}
        self.keeps_undo = self.adds_to_gradients = False
        self.steps = 0
        self.verdict = NO_VERDICT
        self.given: Any = None
        self.slot_versions: Mapping[int, Sequence[int]] = {}
        self.unread: Mapping[str, Sequence[Any]] = {}
        self.stale = True
        self._intercept: Intercept | None = None

    def __call__(self, *args: Any) -> Any:
        if self.stale or self.is_fresh or self.steps % REFRESH == 0:
            self.read_parts()
            self.stale = False
        self.given = Given(args)
        run = StepRun(self, args)
        try:
            result = run.complete()
        finally:
            self.stale |= run.has_created
            self.steps += 1
            run.close()
        self.verdict, self.unread = result.verdict, result.unread
        self.slot_versions = result.slot_versions
        self.untracked.update({id(tensor): tensor for tensor in result.untracked})
        self.tolerated |= result.constants
        self.adds_to_gradients |= result.adds_to_gradients
        self.keeps_undo |= result.needed_undo
        if result.report is not None:
            self._reports.append(result.report)
        return result.outputs

    def read_parts(self) -> None:
        """Read the train state."""
        self.parts = Parts(self.read_train_state())

    @property
    def is_fresh(self) -> bool:
        """Whether it is not known yet what the body writes."""
        return self.steps < FRESH

    def intercept(self) -> Intercept:
        """Return what records the calls of a step, that of the last step if possible."""
        optimizers = self.parts.train_state.optimizers
        if self.jit and not self.is_fresh:
            self.compiled = self.compiled or Compiled(self.body, self.model, optimizers)
            return self.compiled
        if self._intercept is None or self._intercept.optimizers != list(optimizers):
            self._intercept = Intercept(self.model, optimizers)
        return self._intercept

    def inherit(self, other: Transaction) -> None:
        """Start with the findings of another transaction for the same body."""
        self.untracked, self.tolerated = other.untracked, other.tolerated
        self.keeps_undo, self.adds_to_gradients = other.keeps_undo, other.adds_to_gradients
        self.steps = min(other.steps, 1)

    def batch(self, given: Given) -> Any:
        return None if given.args is None else as_tensors(given.args)

    def take_reports(self) -> list[Report]:
        reports, self._reports = self._reports, []
        return reports

    def tolerate(self, variables: Sequence[Any]) -> None:
        self.tolerated |= {id(v.value) for v in variables}

    def release_run(self) -> None:
        self.given = None
