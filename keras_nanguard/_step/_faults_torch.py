"""Faults on order, on PyTorch: what `keras_nanguard.testing.inject` does around an eager step.

The hook stands around the train function, so around the transaction where there is one: the count of steps and what is
written to the state belong to no step, and no refusal gives them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_nanguard import _probes, _state
from keras_nanguard._errors import GuardError, expected

__all__ = ["Hook"]


class Hook:
    """One fault, put around every train step of one model.

    Args:
        model: a compiled model.
        fault: a `keras_nanguard.testing.Fault`.

    Attributes:
        reached: whether a step that ran has a place for the fault.
        seen: steps so far.
    """

    def __init__(self, model: Any, fault: Any):
        self.model, self.fault = model, fault
        self.reached = False
        self.seen = 0
        self._inside = 0
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        """Put it in place, on the instance only."""
        self._override("make_train_function", self._making(self.model.make_train_function))
        if self.fault.site in ("loss", "gradients"):
            self._override("compute_loss", self._computing(self.model.compute_loss))
        self.model.train_function = None

    def remove(self) -> None:
        """Leave the model as it was."""
        for name, before in self._before.items():
            _state.unset_instance(self.model, name)
            if before is not None:
                _state.set_instance(self.model, name, before)
        self.model.train_function = None

    def _override(self, name: str, value: Any) -> None:
        self._before[name] = vars(self.model).get(name)
        _state.set_instance(self.model, name, value)

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
        """Whether the step that runs is one of the fault's."""
        return self.seen - 1 in self.fault.steps

    # The batch

    def _spoiled(self, data: Any) -> Any:
        parts = data if isinstance(data, tuple) else (data,)
        inputs = self.fault.site == "inputs"
        chosen, found = (parts[:1] if inputs else parts[1:]), []

        def spoil(path: str, value: Any) -> Any:
            if isinstance(value, dict):
                return type(value)((k, spoil(f"{path}/{k}", v)) for k, v in value.items())
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                return type(value)(spoil(f"{path}/{k}", v) for k, v in enumerate(value))
            if value is None or not hasattr(value, "shape"):
                return value
            tensor = keras.ops.convert_to_tensor(value)
            if not tensor.is_floating_point() or not self.fault.matches(path):
                return value
            found.append(path)
            return self._bad(tensor, _some(tensor, self.fault.rows, self.fault.entries)) if self._now else value

        spoiled = tuple(spoil(str(i), part) for i, part in enumerate(chosen))
        if not found:
            what = f"float {self.fault.site} that match path={self.fault.path!r}"
            types = [str(getattr(t, "dtype", type(t))) for t in keras.tree.flatten(chosen)]
            raise GuardError(expected(what, types, "Cast the data to float32, or choose another path."))
        self.reached = True
        if not isinstance(data, tuple):
            return spoiled[0]
        return (*spoiled, *parts[1:]) if inputs else (*parts[:1], *spoiled)

    def _bad(self, value: Any, mask: Any) -> Any:
        wanted = self.fault.value(_name(value))
        if wanted is None:
            bad = torch.where(value == 0, torch.full_like(value, self.fault.magnitude), value * self.fault.magnitude)
        else:
            bad = torch.full_like(value, wanted)
        return torch.where(mask, bad, value)

    # The state

    def _write(self) -> None:
        """Write to the state ahead of the step."""
        chosen = [v for v in self._variables() if self.fault.matches(v.path)]
        if not chosen:
            what = f"{self.fault.site} that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in self._variables()) or "none"
            raise GuardError(expected(what, paths, "Choose another path, or a model that has such variables."))
        self.reached = True
        if self._now:
            with torch.no_grad():
                for variable in chosen:
                    old = variable.value.detach()
                    variable.assign(self._bad(old, _first(old, self.fault.entries)))

    def _variables(self) -> list[Any]:
        anatomy = _state.Anatomy.of(self.model)
        groups: dict[str, tuple[Any, ...]] = {
            "weights": anatomy.trainable,
            "statistics": anatomy.statistics,
            "slots": anatomy.slots,
            "loss_scale": tuple(scale for scale, _ in anatomy.scales),
        }
        return [v for v in groups[self.fault.site] if _probes.is_float(v.dtype)]

    # Loss and gradients

    def _computing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            if not self._inside or loss is None:
                return loss
            self.reached = True
            loss = keras.ops.convert_to_tensor(loss)
            if not self._now:
                return loss
            factor = self.fault.factor(_name(loss))
            if self.fault.site == "loss":
                return loss * factor
            if self.fault.path == "*":
                loss = loss * 1.0  # a tensor of its own: the hook is for this step's backward pass alone
                loss.register_hook(lambda gradient: gradient * factor)
                return loss
            return self._with_some(loss, factor)

        return compute_loss

    def _with_some(self, loss: Any, factor: float) -> Any:
        """Add zeros to the loss whose gradients, by the chosen variables alone, are what the fault wants."""
        chosen = [v for v in self.model.trainable_variables if self.fault.matches(v.path)]
        if not chosen:
            what = f"trainable variables that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in self.model.trainable_variables)
            raise GuardError(expected(what, paths, "Choose another path."))
        for variable in chosen:
            mask = _first(variable.value, self.fault.entries)
            loss = loss + _Zero.apply(variable.value, factor, mask).to(loss.dtype)
        return loss


class _Zero(torch.autograd.Function):  # type: ignore[misc]
    """0, whose gradient by the masked entries of a value is `factor`, else 0."""

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
