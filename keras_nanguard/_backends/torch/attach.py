"""The transaction around a train step on PyTorch: of a Keras trainer, and of a loop that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_nanguard._backends.interface import GuardedSession, StateAccess
from keras_nanguard._backends.shared.attach import Attachment
from keras_nanguard._backends.torch import step
from keras_nanguard._backends.torch.compiled_step import uncompiled
from keras_nanguard._backends.torch.modules import adapted
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.spread_arrays import waiting_for

__all__ = ["LoopStep", "ModelAttachment", "adapted"]


class ModelAttachment(Attachment):
    """Stands in for the train function of a Keras trainer."""

    def __init__(self, model: Any, session: GuardedSession):
        super().__init__(model, session)
        self._overrides = Overrides()

    @staticmethod
    def waits() -> bool:
        """Whether there is no accelerator."""
        return not (torch.cuda.is_available() or torch.backends.mps.is_available())

    def attach(self) -> None:
        """Stand in for the train function, and see to it that evaluation tells of a bad number instead of raising."""
        real = self.model.test_step
        super().attach()

        def test_step(data: Any) -> Any:
            try:
                return real(data)
            except Exception as error:
                if not is_numeric(error):
                    raise
                for metric in self.model.metrics:
                    if metric.name == "loss":
                        metric.update_state(float("nan"))
                return {**self.model.get_metrics_result(), "loss": float("nan")}

        self._overrides.set(self.model, "test_step", test_step)

    def detach(self) -> None:
        """Give the model its own methods back; may be called any number of times."""
        self._overrides.give_back()
        super().detach()

    def _build(self) -> None:
        model, session = self.model, self.session
        old = session.transaction
        transaction = step.Transaction(
            self.body,
            session.read_train_state,
            model=model,
            logs=True,
            stock=self._stock,
            jit=bool(model.jit_compile),
            compiled=self._cached_step("compiled") if model.jit_compile else None,
            note_created=session.note_created,
            refuse=session.policy.refuse,
        )
        if old is not None:
            transaction.inherit(old)
        session.attach(self, transaction)
        compile_with = model.jit_compile
        model.jit_compile = False
        try:
            self._make(force=True)
        finally:
            model.jit_compile = compile_with
        self._function = model.train_function
        model.train_function = self.run

    def _made(self) -> Any:
        """Return what the next fit needs of the step that was made for this one."""
        return self.session.transaction.compiled

    def inner(self, data: Any) -> Any:
        """Run Keras' own train function, which looks for `train_step` on the model each time."""
        with Overrides() as overrides:
            overrides.set(self.model, "train_step", self.session.transaction)
            return self._function(data)

    def run(self, data: Any) -> Any:
        """Stand in for the train function: one step, then the host's look at its verdict."""
        session = self.session
        try:
            session.before()
            if session.skips_batches(iter(data), 1):
                return session.logs.shown or session.logs_for_callbacks(self.model.get_metrics_result())
            if session.stopped:
                return session.logs_for_callbacks(self._without_effect(data))
            logs, verdict = self._execute(data)
            session.after(verdict)
            logs = session.logs_for_callbacks(logs, verdict.loss, verdict.refused)
        except BaseException as error:
            session.raised(error)
            self.detach()
            raise
        return logs

    def _execute(self, data: Any) -> tuple[Any, Any]:
        logs = self.inner(data)
        if logs is None:  # it has ended in an exception
            logs = self.session.logs.known or self.model.get_metrics_result()
        return logs, self.session.transaction.verdict


def _agree(may_commit: bool) -> bool:
    """Return whether a step is fine for every process: one number is exchanged, and all decide the same.

    Raises:
        GuardError: if another process is gone, or did not answer within the limit of the process group.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return may_commit
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    with waiting_for("their verdict on a step"):
        flag = torch.tensor(float(may_commit), device=device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
        return bool(flag.item() > 0)


class LoopStep(StateAccess):
    """One hand-written step with its transaction."""

    def __init__(self, function: Callable[..., Any], session: GuardedSession):
        self.function, self.session = function, session
        self.rebuild()

    def rebuild(self) -> None:
        """Make the step anew."""
        old = self.session.transaction
        function = uncompiled(self.function)
        transaction = step.Transaction(
            lambda args, kwargs: function(*args, **kwargs),
            self.session.read_train_state,
            jit=function is not self.function,
            note_created=self.session.note_created,
            refuse=self.session.policy.refuse,
            agree=_agree,
        )
        if old is not None:
            transaction.inherit(old)
        self.session.attach(self, transaction)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.session.before()
        outputs = self.session.transaction(args, kwargs)
        self.session.after(self.session.transaction.verdict)
        return outputs
