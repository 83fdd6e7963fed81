"""The learning rates of a run, and how the guard lowers them.

A plain learning rate is lowered in its own variable, where every other callback reads it. A
schedule or callable does not change, and neither does the saved config. Its value is multiplied, on
the instance, by a factor that the compiled step reads from a variable. In both cases

    rate of the next step = factor * rate without the guard
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import keras
from pydantic import Field

from keras_nanguard._core.json_records import Whole
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._policy.records import Record

DISTINCT = 1.0 + 2.0**-22
"""Factor of a lowered rate by which it differs from the same rate set by other code, which rounds
it to float32.
"""

Factor = Annotated[float, Field(ge=sys.float_info.min)]


class RateChange(Record):
    """The changes of the learning rate of one optimizer.

    Attributes:
        factor: the current factor of the guard.
        rate: a plain rate as the guard has left it; `None` for a schedule or a callable.
        absolute: whether another callback computes a plain rate itself, and does not scale it.
    """

    factor: Factor
    rate: Annotated[float, Field(ge=0)] | None
    absolute: bool


class Rate:
    """The learning rate of one optimizer.

    Attributes:
        factor: the current factor of the guard.
        given: replaces the factor of a schedule while a pure step function is traced; `None` does
            not.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = keras_optimizers.inner(optimizer)
        self.factor = 1.0
        self._own = math.nan  # the plain rate as the user has set it
        self._left: float | None = None  # the same as the guard has left it
        self._absolute = False  # whether another callback computes the plain rate itself
        self._scale: Any = None
        self.given: Any = None
        self._overrides = Overrides()

    @property
    def plain(self) -> bool:
        """Whether the rate is a number in a variable, not a schedule or a callable."""
        return keras_optimizers.rate_variable(self.optimizer) is not None

    @property
    def unchanged(self) -> bool:
        """Whether neither the rate nor the compiled step was ever changed."""
        return self._left is None and self._scale is None and self.factor == 1.0

    @property
    def adjustable(self) -> bool:
        """Whether the compiled step reads the factor."""
        return self._scale is not None

    @property
    def is_held(self) -> bool:
        """Whether it is a plain rate that is lowered now, which another callback may set."""
        return self.factor < 1 and self.plain

    @property
    def value(self) -> float:
        """The rate of the next step."""
        return keras_optimizers.learning_rate(self.optimizer)

    def make_adjustable(self) -> bool:
        """Make the compiled step read the factor; return whether it has to be compiled again."""
        if self.plain or self.adjustable:
            return False
        name = "nanguard_rate_factor"
        scale = self._scale = keras.Variable(1.0, trainable=False, dtype="float32", name=name)

        def scaled(real: Callable[[], Any]) -> Any:
            rate = keras.ops.convert_to_tensor(real())
            return rate * keras.ops.cast(scale if self.given is None else self.given, rate.dtype)

        keras_optimizers.set_rate(self.optimizer, scaled, self._overrides)
        return True

    def restore(self, factor: float) -> None:
        """Set the factor to an earlier value; 1 is the rate of a run without the guard."""
        self.hold()
        self._set(factor)

    @contextmanager
    def tried(self, factor: float) -> Iterator[None]:
        """Multiply the rate inside the context."""
        before, variable = self.factor, keras_optimizers.rate_variable(self.optimizer)
        restore = keras_variables.restorer(self._scale if variable is None else variable)
        if variable is not None:
            variable.assign(self.value * factor)
        else:
            self.factor *= factor
            self._scale.assign(self.factor)
        try:
            yield
        finally:
            self.factor = before
            restore()

    def lower(self, factor: float, min_lr: float, failed: float) -> tuple[float, float, bool]:
        """Multiply the rate; return `(before, after, retrace)`. `retrace`: whether the step has to
        be compiled again.

        Args:
            failed: the rate of the step that failed. After a rollback a schedule may give a lower
                one, such as 0 at the start of a warmup.
        """
        self.hold()
        before = self.value
        if not self.plain and math.isfinite(failed) and not before >= failed:  # it may be NaN
            before = failed
        after = max(before * factor, min_lr)
        if after > before * (1 - 1e-6):  # the rate is a float32, min_lr is not
            after = before
        retrace = after < before and self._set(self.factor * after / before)
        return before, after, retrace

    def _set(self, factor: float) -> bool:
        if self.plain and self.factor >= 1:
            self._own = self.value
        self.factor = factor
        if self.plain:
            self._assign(self._own * (1.0 if factor >= 1 else factor * DISTINCT))
            return False
        retrace = self.make_adjustable()
        self._scale.assign(factor)
        return retrace

    def _assign(self, value: float | None) -> None:
        keras_optimizers.rate_variable(self.optimizer).assign(value)
        self._left = self.value

    def hold(self) -> None:
        """Follow another callback that has set a plain rate since.

        A callback that computes the rate (LearningRateScheduler) sets the old level again, and its
        rates are lowered from then on. A lower rate may be scaled from the lowered one
        (ReduceLROnPlateau) or computed. It is the user's new choice: it stays, and the factor is
        forgotten, because the return of the old rate would end above it. The limit between both is
        the geometric mean of the lowered and the old level.
        """
        if self._left is None or not self.is_held:
            return
        found = self.value
        if found == self._left:
            return
        self._absolute |= found > self._left / math.sqrt(self.factor)
        if self._absolute:
            self._own = found
            self._assign(found * self.factor * DISTINCT)
        else:
            self.factor = 1.0

    def release(self) -> None:
        """Remove the scaling from the optimizer; a plain rate does not change."""
        if self._scale is not None:
            self._overrides.give_back()
            self._scale = None
            self.factor = 1.0

    def change(self) -> RateChange:
        """Return the changes of the rate."""
        return RateChange.model_construct(
            factor=self.factor,
            rate=self.value if self.plain else None,
            absolute=self._absolute,
        )

    def resume(self, done: RateChange, write: bool) -> bool:
        """Restore the changes that `change` returned; return whether they are restored.

        Args:
            write: whether to write a plain rate. If not, a rate that someone has changed since
                counts as a new choice, and the earlier changes are forgotten.
        """
        if self.plain != (done.rate is not None):
            return False
        if self.plain and write:
            self._assign(done.rate)
        elif self.plain and not math.isclose(self.value, done.rate or 0.0, rel_tol=1e-6):
            return False
        self._left, self._absolute = done.rate, done.absolute
        lowered = done.factor * DISTINCT if done.factor < 1 else 1.0
        self._own = math.nan if done.rate is None else done.rate / lowered
        self.factor = done.factor if self.plain else 1.0
        if done.factor < 1 and not self.plain:
            self._set(done.factor)
        return True


class Lowering(Record):
    """Why and since when the learning rates of a run are lowered.

    Attributes:
        diverged: whether a rate was lowered because training diverged.
        at: number of committed steps of this fit when the rate was last lowered, negative in an
            earlier fit; `None` if it never was.
        recover_after: good steps after which a lowered rate returns; 0 is never.
    """

    diverged: bool = False
    at: Whole | None = None
    recover_after: Whole = 0
