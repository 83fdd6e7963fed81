"""Fault injection on PyTorch: `keras_nanguard.testing.inject` around an eager step.

The hook wraps the train function, including the transaction. So a refusal restores neither the step
counter of the hook nor its writes to the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_nanguard._backends.shared.faults import FaultHook

__all__ = ["Hook", "repeated"]


_installed: list[Hook] = []


def repeated(model: Any) -> Callable[[], None]:
    """Return what sets the step counters of installed faults to one step before now."""
    counted = [(hook, hook.seen) for hook in _installed if hook.model is model]

    def again() -> None:
        for hook, seen in counted:
            hook.seen = seen - 1

    return again


class Hook(FaultHook):
    """One fault, injected into every train step of one model."""

    seen = 0
    """Steps so far."""

    def install(self) -> None:
        """Install the fault, on the instance only."""
        self._override("make_train_function", self._making(self.model.make_train_function))
        if self.fault.site in ("loss", "gradients"):
            self._override("compute_loss", self._computing(self.model.compute_loss))
        self.model.train_function = None
        _installed.append(self)

    def remove(self) -> None:
        if self in _installed:
            _installed.remove(self)
        super().remove()

    def _making(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(force: bool = False) -> Any:
            if self.model.train_function is None or force:
                real(force=force)
                self.model.train_function = self._around(self.model.train_function)
            return self.model.train_function

        return make

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def train_function(data: Any) -> Any:
            self.seen += 1
            if self.fault.site in ("inputs", "targets"):
                data = [self._spoiled(data[0]), *data[1:]]
            elif self.fault.site not in ("loss", "gradients"):
                self._write()
            self._inside += 1
            try:
                return function(data)
            finally:
                self._inside -= 1

        return train_function

    @property
    def _now(self) -> bool:
        """Whether the fault is due in the running step."""
        return self.seen - 1 in self.fault.steps

    # The batch

    def _spoiled(self, data: Any) -> Any:
        def bad(value: Any) -> Any:
            tensor = keras.ops.convert_to_tensor(value)
            return (
                self._bad(tensor, _some(tensor, self.fault.rows, self.fault.entries))
                if self._now
                else value
            )

        return self._in_batch(data, _is_float, bad)

    def _bad(self, value: Any, mask: Any) -> Any:
        wanted = self.fault.value(_name(value))
        if wanted is None:
            bad = torch.where(
                value == 0,
                torch.full_like(value, self.fault.magnitude),
                value * self.fault.magnitude,
            )
        else:
            bad = torch.full_like(value, wanted)
        return torch.where(mask, bad, value)

    # The state

    def _write(self) -> None:
        """Write to the state before the step."""
        chosen = self._in_state()
        if self._now:
            with torch.no_grad():
                for variable in chosen:
                    old = variable.value.detach()
                    variable.assign(self._bad(old, _first(old, self.fault.entries)))

    # Loss and gradients

    def _factor(self, loss: Any) -> float | None:
        return float(self.fault.factor(_name(loss))) if self._now else None

    def _with_gradient(self, loss: Any, factor: float) -> Any:
        loss = loss * 1.0  # a tensor of its own: the hook is for this step's backward pass alone
        loss.register_hook(lambda gradient: gradient * factor)
        return loss

    def _with_some(self, loss: Any, factor: float) -> Any:
        for variable in self._trained():
            mask = _first(variable.value, self.fault.entries)
            loss = loss + _Zero.apply(variable.value, factor, mask).to(loss.dtype)
        return loss


class _Zero(torch.autograd.Function):  # type: ignore[misc]
    """0 with a gradient by the masked entries of a value: `factor`, else 0."""

    @staticmethod
    def forward(ctx: Any, value: Any, factor: float, mask: Any) -> Any:
        ctx.factor, ctx.dtype = factor, value.dtype
        ctx.save_for_backward(mask)
        return torch.zeros((), dtype=value.dtype, device=value.device)

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        (mask,) = ctx.saved_tensors
        bad = (upstream * ctx.factor).to(ctx.dtype)
        return torch.where(mask, bad, torch.zeros_like(bad)), None, None


def _is_float(value: Any) -> bool:
    return hasattr(value, "shape") and bool(keras.ops.convert_to_tensor(value).is_floating_point())


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(value: Any, rows: tuple[int, ...] | None, entries: int | None) -> Any:
    """Return a mask of the first entries of the chosen rows of a batch."""
    mask = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
    if not value.ndim:
        return torch.ones_like(mask) if rows is None or 0 in rows else mask
    of_row = mask.reshape(value.shape[0], -1)
    for row in range(len(of_row)) if rows is None else [r for r in rows if r < len(of_row)]:
        of_row[row, :entries] = True
    return mask


def _first(value: Any, entries: int | None) -> Any:
    """Return a mask of the first entries of a variable."""
    mask = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
    mask.reshape(-1)[:entries] = True
    return mask
