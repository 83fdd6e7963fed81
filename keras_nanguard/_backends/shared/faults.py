"""Common code for fault injection: the place of a fault, and how it is installed and removed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import keras

from keras_nanguard._backends.shared import step_cache
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

__all__ = ["FaultHook", "without_faults"]


class FaultHook:
    """One fault, injected into every train step of one model.

    Args:
        model: a compiled model.
        fault: a `keras_nanguard.testing.Fault`.

    Attributes:
        reached: whether a step that was traced (or run) has a place for the fault.
        run_again: the models of which a step is being replayed.
    """

    run_again: ClassVar[dict[object, Any]] = {}

    def __init__(self, model: Any, fault: Any):
        self.model, self.fault = model, fault
        self.reached = False
        self._inside = 0
        self._overrides = Overrides()
        step_cache.forget(model)

    @property
    def paused(self) -> bool:
        """Whether a step of the model is being replayed, without the fault."""
        return any(model is self.model for model in list(self.run_again.values()))

    def remove(self) -> None:
        """Remove the fault; the next fit creates its train function without it."""
        self._overrides.give_back()
        self.model.train_function = None
        step_cache.forget(self.model)

    def _override(self, name: str, value: Any) -> None:
        self._overrides.set(self.model, name, value)

    @property
    def _applies(self) -> bool:
        """Whether the loss that is being computed belongs to a step with the fault."""
        return self._inside > 0

    def _computing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Model.compute_loss` with the fault in the loss, or in its gradients."""

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            if loss is None or not self._applies:
                return loss
            self.reached = True
            loss = keras.ops.convert_to_tensor(loss)
            factor = self._factor(loss)
            if factor is None:
                return loss
            if self.fault.site == "loss":
                return loss * factor
            return (
                self._with_gradient(loss, factor)
                if self.fault.path == "*"
                else self._with_some(loss, factor)
            )

        return compute_loss

    def _factor(self, loss: Any) -> Any:
        """Return the factor for the loss or its gradients, or `None`."""
        raise NotImplementedError

    def _with_gradient(self, loss: Any, factor: Any) -> Any:
        """Return the loss, with all gradients multiplied."""
        raise NotImplementedError

    def _with_some(self, loss: Any, factor: Any) -> Any:
        """Add zeros to the loss whose gradients, for the chosen variables only, are the fault."""
        raise NotImplementedError

    def _in_batch(
        self, data: Any, is_float: Callable[[Any], bool], bad: Callable[[Any], Any]
    ) -> Any:
        """Return a batch with `bad` applied to each chosen float tensor."""
        parts = data if isinstance(data, tuple) else (data,)
        inputs = self.fault.site == "inputs"
        chosen, found = (parts[:1] if inputs else parts[1:]), []

        def spoil(path: str, value: Any) -> Any:
            if isinstance(value, dict):
                return type(value)((k, spoil(f"{path}/{k}", v)) for k, v in value.items())
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                return type(value)(spoil(f"{path}/{k}", v) for k, v in enumerate(value))
            if not is_float(value) or not self.fault.matches(path):
                return value
            found.append(path)
            return bad(value)

        spoiled = tuple(spoil(str(i), part) for i, part in enumerate(chosen))
        if not found:
            what = f"float {self.fault.site} that match path={self.fault.path!r}"
            types = [getattr(t, "dtype", type(t)) for t in keras.tree.flatten(chosen)]
            raise GuardError(
                expected(what, types, "Cast the data to float32, or choose another path.")
            )
        self.reached = True
        if not isinstance(data, tuple):
            return spoiled[0]
        return (*spoiled, *parts[1:]) if inputs else (*parts[:1], *spoiled)

    def _in_state(self) -> list[Any]:
        """Return the chosen variables at the site of the fault."""
        train_state = TrainState.of(self.model)
        groups: dict[str, tuple[Any, ...]] = {
            "weights": train_state.trainable,
            "statistics": train_state.statistics,
            "slots": train_state.slots,
            "loss_scale": tuple(scale for scale, _ in train_state.scales),
        }
        variables = [v for v in groups[self.fault.site] if finiteness.is_float(v.dtype)]
        chosen = [v for v in variables if self.fault.matches(v.path)]
        if not chosen:
            what = f"{self.fault.site} that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in variables) or "none"
            raise GuardError(
                expected(what, paths, "Choose another path, or a model that has such variables.")
            )
        self.reached = True
        return chosen

    def _trained(self) -> list[Any]:
        """Return the chosen trainable variables, for faults in gradients."""
        chosen = [v for v in self.model.trainable_variables if self.fault.matches(v.path)]
        if not chosen:
            what = f"trainable variables that match path={self.fault.path!r}"
            paths = ", ".join(v.path for v in self.model.trainable_variables)
            raise GuardError(expected(what, paths, "Choose another path."))
        return chosen


@contextlib.contextmanager
def without_faults(model: Any) -> Iterator[None]:
    """Replay steps of a model without their injected faults."""
    entered = object()
    FaultHook.run_again[entered] = model
    try:
        yield
    finally:
        del FaultHook.run_again[entered]
