"""Adapters of `torch.optim.Optimizer` to the interface of a Keras optimizer, and functions that
restore the state of optimizers, schedulers and gradient scalers of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from keras_nanguard._keras.torch_tensors import TensorVariable, Variables, local


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among these values and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def settings_of(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rate and the other settings of each group of parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def settings_restorer(groups: Iterable[dict[str, Any]]) -> Callable[[], None]:
    """Return a function that restores the current settings of these groups of parameters."""
    groups = list(groups)
    kept = settings_of(groups)
    values = [value for settings in kept for value in settings.values()]
    tensors = [(v, v.clone()) for v in values if isinstance(v, torch.Tensor)]

    def restore() -> None:
        for group, settings in zip(groups, kept):
            group.update(settings)
        for tensor, value in tensors:
            tensor.copy_(value)

    return restore


def scheduler_restorer(scheduler: Any) -> Callable[[], None]:
    """Return a function that restores a scheduler, and its optimizer's settings."""
    attributes = dict(vars(scheduler))
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    restore_settings = settings_restorer(groups)

    def restore() -> None:
        vars(scheduler).clear()
        vars(scheduler).update(attributes)
        restore_settings()

    return restore


def scaler_restorers(scaler: Any, is_replay: bool) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield what a gradient scaler writes, each with a function that restores it: itself, since it
    knows which optimizers it has unscaled, and its tensors.

    Its scale, and where it has found Inf, are restored only for a replay: a refused step is to
    lower the scale, perhaps after its end.
    """
    stages = {key: dict(stage) for key, stage in scaler._per_optimizer_states.items()}

    def restore_stages() -> None:
        states, found_inf = scaler._per_optimizer_states, "found_inf_per_device"
        found = {} if is_replay else {k: s[found_inf] for k, s in states.items()}
        states.clear()
        states.update(stages)
        for key, value in found.items():
            states[key][found_inf] = value

    yield scaler, restore_stages
    for tensor in (getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")):
        if isinstance(tensor, torch.Tensor):
            yield tensor, partial(tensor.copy_, tensor.clone() if is_replay else tensor)


class Rate:
    """The learning rate of an optimizer: the largest of its groups, which keep their ratios."""

    def __init__(self, optimizer: Any):
        self.of = optimizer

    @property
    def value(self) -> float:
        return max(float(group["lr"]) for group in self.of.param_groups)

    def restorer(self) -> Callable[[], None]:
        return settings_restorer(self.of.param_groups)

    def assign(self, value: float) -> None:
        before = self.value
        for group in self.of.param_groups:
            new = value if not before else float(group["lr"]) * value / before
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(new)
            else:
                group["lr"] = new


class TorchOptimizer:
    """Adapts a `torch.optim.Optimizer` to the interface of a Keras optimizer.

    Attributes:
        epsilon, momentum: those that it was created with.
        global_clipnorm: norm at which gradients are clipped before each update, or `None`.
    """

    built = True
    clipnorm = clipvalue = global_clipnorm = None

    def __init__(self, optimizer: Any, paths: dict[int, str]):
        self.of, self.name, self._paths = optimizer, type(optimizer).__name__, paths
        self.epsilon = optimizer.defaults.get("eps")
        self.momentum = optimizer.defaults.get("momentum", 0.0)
        self._learning_rate = Rate(optimizer)
        self._parameters, self._slots = Variables(), Variables()

    @property
    def variables(self) -> list[TensorVariable]:
        """The tensors in its state, without those that an update has replaced, and its parameters
        that the model does not have, such as copies of the weights in float32.
        """
        found = [
            self._slots.of(tensor, f"{self.name}/{self._path_of(p)}/{key}")
            for p, slots in slots_of(self.of)
            for key, tensor in slots.items()
            if isinstance(tensor, torch.Tensor)
        ]
        self._slots = Variables((id(variable.of), variable) for variable in found)
        numbered = enumerate(self.parameters)
        own = [(p, number) for number, p in numbered if id(local(p)) not in self._paths]
        return [*found, *(self._parameters.of(p, f"{self.name}/parameter {n}") for p, n in own)]

    @property
    def slots(self) -> list[Any]:
        """The tensors in its state, or the shards of them that this process has, without a variable
        for each. Variables of replaced ones are dropped.
        """
        found = [slot for _, slots in slots_of(self.of) for slot in slots.values()]
        for key in self._slots.keys() - set(map(id, found)):
            del self._slots[key]
        return [local(slot) for slot in found if isinstance(slot, torch.Tensor)]

    @property
    def parameters(self) -> list[Any]:
        """The parameters of all groups."""
        return [p for group in self.of.param_groups for p in group["params"]]

    def variable_of(self, parameter: Any) -> TensorVariable:
        """Return the variable of one of its parameters."""
        return self._parameters.of(parameter, self._path_of(parameter))

    def _path_of(self, parameter: Any) -> str:
        return self._paths.get(id(local(parameter)), "a parameter")

    def restorer(self, copies: bool = True) -> Callable[[], None]:
        """Return a function that restores the current state, including plain numbers and missing
        entries, the settings of groups, and numbers and tensors in attributes; `copies`: also the
        values of the tensors in the state.
        """
        state, restore_settings = self.of.state, settings_restorer(self.of.param_groups)
        before = _copied(state)
        values = [slots for slots in before.values() if not isinstance(slots, dict)]
        if copies:
            values += [slot for _, slots in slots_of(self.of) for slot in slots.values()]
        values = [value for value in values if isinstance(value, torch.Tensor)]
        own = {k: v for k, v in vars(self.of).items() if k not in ("state", "param_groups")}
        numbers = {k: v for k, v in own.items() if type(v) in (int, float)}
        tensors = [(t, t.detach().clone()) for t in tensors_in((*values, *own.values()))]

        def restore() -> None:
            vars(self.of).update(numbers)
            state.clear()
            state.update(_copied(before))
            restore_settings()
            with torch.no_grad():
                for tensor, value in tensors:
                    tensor.copy_(value)

        return restore

    def create_state(self) -> None:
        """Create the slots that the first update would, unless it needs a closure, at rate 0."""
        if self.of.state:
            return
        params = [p for p in self.parameters if p.requires_grad]
        grads, restore_rates = [p.grad for p in params], self._learning_rate.restorer()
        try:
            self._learning_rate.assign(0.0)
            for p in params:
                p.grad = torch.zeros_like(p)
            with contextlib.suppress(TypeError):
                self.of.step()
        finally:
            restore_rates()
            for p, grad in zip(params, grads):
                p.grad = grad

    def created_since(
        self, before: Mapping[Any, set[str]], settings: Iterable[Mapping[str, Any]]
    ) -> list[tuple[Any, Any]]:
        """Return the slots that an update has created, each with its initial value: 1 for two slots
        of torch's optimizers, the learning rate for two others (of Rprop and ASGD), else 0.

        Args:
            before: the names of the slots of each parameter before the update.
            settings: the rate and the other settings of each group in the update.
        """
        found = []
        for p, slots in slots_of(self.of):
            known = before.get(p, ())
            if len(slots) == len(known):
                continue
            groups = zip(self.of.param_groups, settings)
            rates = (s.get("lr", 0.0) for g, s in groups if any(q is p for q in g["params"]))
            rate = float(next(rates, 0.0))
            starts = {"mu_product": 1.0, "mu": 1.0, "step_size": rate, "eta": rate}
            for name, tensor in slots.items():
                if isinstance(tensor, torch.Tensor) and name not in known:
                    own, start = local(tensor), starts.get(name, 0.0)
                    found.append((own, np.full(tuple(own.shape), start, np.float32)))
        return found

    def _get_current_learning_rate(self) -> float:
        return self._learning_rate.value


def slots_of(optimizer: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return each parameter of an optimizer of torch that has slots, with these by name. The state
    may also have numbers under other keys.
    """
    return [(p, slots) for p, slots in optimizer.state.items() if isinstance(slots, dict)]


def _copied(state: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the slots of each parameter, with a copy of each list (the history of LBFGS)."""
    return {
        p: {k: list(v) if isinstance(v, list) else v for k, v in slots.items()}
        if isinstance(slots, dict)
        else slots
        for p, slots in state.items()
    }


def unlisted_optimizers(layers: Iterable[Any], known: Iterable[Any]) -> list[TorchOptimizer]:
    """Return adapters of further optimizers of torch in attributes of these layers, and of known
    optimizers, which may wrap them; without those whose state a known one shows.
    """
    adapted = [optimizer.of for optimizer in known if isinstance(optimizer, TorchOptimizer)]
    found = [value for owner in (*layers, *adapted) for value in vars(owner).values()]
    optimizers = [value for value in found if isinstance(value, torch.optim.Optimizer)]
    states = {id(optimizer.state) for optimizer in adapted}
    return [TorchOptimizer(o, {}) for o in optimizers if id(o.state) not in states]
