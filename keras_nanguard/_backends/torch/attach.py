"""Attaches the transaction to a train step of a Keras trainer or of a loop on PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import torch

from keras_nanguard._backends.interface import Executed, Session
from keras_nanguard._backends.shared import attach
from keras_nanguard._backends.shared.attach import Use
from keras_nanguard._backends.torch import step
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.optimizers import TorchOptimizer
from keras_nanguard._backends.torch.state import TorchModule
from keras_nanguard._backends.torch.watching import RECORDED_WRITES
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras.overrides import Overrides


class ModelAttachment(attach.Attachment):
    """Replaces the train function of a Keras trainer."""

    transaction: step.Transaction

    def __init__(self, model: Any, session: Session):
        super().__init__(model, session)
        self._held = contextlib.ExitStack()

    def attach(self, use: Callable[[], Use]) -> None:
        """Replace the train function, and make evaluation report a bad number, not raise."""
        real = self.model.test_step
        with RECORDED_WRITES.held() as held:
            super().attach(use)
            self._held = held.pop_all()

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
        self._held.close()
        super().detach()

    def _build(self) -> None:
        model, run = self.model, self.run
        if model.jit_compile:
            self.trace_key = ("compiled",)
        transaction = step.Transaction(
            self.body,
            run,
            of_trainer=True,
            stock=self._stock,
            jit=bool(model.jit_compile),
            compiled=self._take_kept() if model.jit_compile else None,
        )
        transaction.inherit(self.transaction)
        self.transaction = transaction
        with self._guarded_step():
            self._function = self._made_by_keras(jit_compile=False)
        model.train_function = self.run_execution

    def _made(self) -> Any:
        return self.transaction.compiled

    def _guarded_step(self) -> Overrides:
        """Override the `train_step` of the model. Keras reads it when it creates its train
        function, before Keras 3.16 at each execution.
        """
        overrides = Overrides()
        overrides.set(self.model, "train_step", self.transaction)
        return overrides

    can_run_again = True

    def run_again(self, args: Sequence[Any]) -> Executed:
        return self._run(list(args))

    def _execute(self, data: Any) -> Executed:
        # Reading an iterator, which a custom train function may be given, would end it.
        self._running = tuple(data) if isinstance(data, (list, tuple)) else None
        return self._run(data)

    def _run(self, data: Any) -> Executed:
        with self._guarded_step():
            executed = self.transaction.run_through(lambda: self._function(data))
        if executed is None:
            remedy = "Train without NanGuard, or with a Keras that docs/compatibility.md lists."
            found = f"Keras {keras.__version__}, which ran a different step"
            raise GuardError(expected("Keras to run the guarded step", found, remedy))
        if executed.outputs is None:  # it has ended in an exception
            logs = self.session.logs.known or self.model.get_metrics_result()
            return executed._replace(outputs=logs)
        return executed


class LoopStep(attach.LoopStep):
    """One hand-written step with its transaction."""

    transaction: step.Transaction

    watching = staticmethod(RECORDED_WRITES.held)

    @staticmethod
    def adapted(model: Any, optimizers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if isinstance(model, torch.nn.Module) and not isinstance(model, keras.layers.Layer):
            model = TorchModule(model)
        paths = {id(v.value): v.path for v in model.variables}
        kind = torch.optim.Optimizer
        made = [TorchOptimizer(o, paths) if isinstance(o, kind) else o for o in optimizers]
        return model, tuple(made)

    def _transaction(self) -> step.Transaction:
        # A compiled function cannot be inspected while it runs, so it is compiled again.
        function = getattr(self.function, "_torchdynamo_orig_callable", self.function)
        jit = function is not self.function
        return step.Transaction(lambda args, kwargs: function(*args, **kwargs), self.run, jit=jit)

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Executed:
        return self.transaction.run_step(args, kwargs)
