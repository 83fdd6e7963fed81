"""Paired trials: steps on remembered batches from a chosen state, which are undone afterwards.

A trial compares states on the *same* batches, so the difficulty of other batches, epochs or tasks
has no influence. It uses the compiled train step. At the end everything that it has written is
restored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean, median, stdev
from typing import Any, TypeVar

import keras
import numpy as np

from keras_nanguard._backends.shared.faults import without_faults
from keras_nanguard._backends.shared.undone import undone
from keras_nanguard._core import memory
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot, size_of
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables

T = TypeVar("T")

State = Mapping[int, np.ndarray[Any, Any]]
"""The values of the train state, by `id` of the variable."""

STANDARD_ERRORS = 3.0
"""Standard errors by which the mean of paired differences must exceed 0. By chance this happens
once in a thousand for a normal distribution.
"""

SIGNIFICANCE = 0.001
"""Probability of the sign test, by which a lower mean is enough if the loss of enough batches is
lower: the test of the mean fails if a few of the losses are huge.
"""


class Trial:
    """Runs steps whose effects are undone at the end of the `trial` context.

    Args:
        again: called before each step, for faults that are injected into it.

    Attributes:
        present: the current state of the run.
    """

    def __init__(self, run: Run, again: Callable[[], None]):
        self._run, self._again = run, again
        self._variables = run.train_state().kept
        self._seeds = keras_variables.seeds(self._variables)
        self._seconds: list[float] = []
        self.present: State = {id(v): keras_variables.read(v) for v in self._variables}

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return len(self._seconds)

    @property
    def seconds(self) -> float:
        """Median time of a step: the first one may include compilation."""
        return median(self._seconds)

    def settings(self, after: State | None) -> State:
        """Return the current values of the variables that are neither weights nor slots and that
        training does not change, such as the weight of a loss that a callback sets.

        Args:
            after: the state after training from the current one.
        """
        if after is None:
            return {}
        others = {id(v) for v in self._run.train_state().other}
        same = [key for key in others if np.array_equal(after[key], self.present[key])]
        return {key: self.present[key] for key in same}

    def state_of(self, snapshot: Snapshot, settings: State) -> State:
        """Return the state of a snapshot, with the current settings: states are compared by the
        current objective. Variables without a value in it keep their current one.
        """
        stored = {id(v): snapshot.value(v) for v in self._variables}
        available = {key: value for key, value in stored.items() if value is not None}
        return {**self.present, **available, **settings}

    def losses(self, state: State | None, batches: Sequence[Any]) -> list[float]:
        """Return the loss of each batch in a state, infinity if it is not finite or there is no
        state.

        The random numbers are the same for all states: those of the current one.
        """
        if state is None:
            return [math.inf] * len(batches)
        losses = []
        for args in batches:
            self._load(state)
            for seed in self._seeds:
                keras_variables.write(seed, self.present[id(seed)])
            loss = self._step(args)
            losses.append(loss if math.isfinite(loss) else math.inf)
        return losses

    def trained(self, state: State, batches: Sequence[Any], factor: float = 1.0) -> State | None:
        """Return the state after training on batches from a state, `None` if a step was refused.

        Args:
            batches: the arguments of each step.
            factor: multiplies every learning rate.
        """
        self._load(state)
        with ExitStack() as rates:
            for optimizer in self._run.train_state().optimizers if factor != 1.0 else ():
                rates.enter_context(self._run.recovery.rate(optimizer).tried(factor))
            if not all(math.isfinite(self._step(args)) for args in batches):
                return None
        return {id(v): keras_variables.read(v) for v in self._variables}

    def is_finite(self, args: Sequence[Any], others: State | None = None) -> bool:
        """Return whether a step from the current state, with some `others` of its values, is
        finite.
        """
        self._load({**self.present, **(others or {})})
        return math.isfinite(self._step(args))

    def _load(self, state: State) -> None:
        self._run.access.sync_variables()
        for variable in self._variables:
            keras_variables.write(variable, state[id(variable)])

    def _step(self, args: Any) -> float:
        """Run one step; return its loss, infinity if it was refused."""
        access, began = self._run.access, time.monotonic()
        self._again()
        verdict = access.run_again(args).verdict
        access.sync_variables()
        self._seconds.append(time.monotonic() - began)
        return verdict.loss if verdict.finite and not verdict.refused else math.inf


def with_inputs_of(args: Sequence[Any], other: Sequence[Any]) -> Sequence[Any] | None:
    """Return the arguments of a step on one batch with the inputs of another.

    `None` unless both are batches of inputs and targets whose inputs have the same shapes.
    """
    data, inputs = args[0], other[0]
    if not isinstance(data, (tuple, list)) or len(data) < 2 or len(args) != 1 or data[1] is None:
        return None
    shapes = [[tuple(x.shape) for x in keras.tree.flatten(batch[0])] for batch in (data, inputs)]
    return (type(data)([inputs[0], *data[1:]]),) if shapes[0] == shapes[1] else None


@contextmanager
def trial(run: Run, rates: bool = True) -> Iterator[Trial | None]:
    """Return a context with a `Trial`. At its end everything is restored, also after an exception.

    The value is `None` if steps cannot be replayed or would leave a trace, or if there is no memory
    for a copy of the state.

    Args:
        rates: whether learning rates change in it; a schedule then has to be compiled again.
    """
    access, train_state = run.access, run.read_train_state()  # a callback may have compiled it anew
    is_pure = all(map(keras_optimizers.rate_is_readable, train_state.optimizers))
    can_be_undone = is_pure and not run.access.transaction.learned.has_hidden_state
    if not (run.can_run_again and run.refuses and can_be_undone and _room(run, rates)):
        yield None
        return
    access.sync_variables()
    with run.recovery.all_or_nothing():
        for optimizer in train_state.optimizers if rates else ():
            if run.recovery.rate(optimizer).make_adjustable():
                run.rebuild()
    with without_faults(run.model) as again, undone(run):
        yield Trial(run, again)


def tried(run: Run, ask: Callable[[Trial], T], unknown: T) -> T:
    """Return what a trial finds; `unknown` if there can be none, or if it raises.

    Raises:
        StateLostError: if the state could not be restored after the trial.
    """
    with run.optional(), trial(run, rates=False) as trying:
        return unknown if trying is None else ask(trying)
    return unknown


def clearly_lower(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether losses are lower than others of the same batches: in their mean, and by a paired test
    of the means or by a sign test.
    """
    if math.inf in losses:
        return False
    if math.inf in others:
        return True
    differences = [b - a for a, b in zip(losses, others, strict=True)]
    pairs, mean, lower = len(differences), fmean(differences), sum(d > 0.0 for d in differences)
    ways = sum(math.comb(pairs, count) for count in range(lower, pairs + 1))
    if mean > 0.0 and ways <= SIGNIFICANCE * 2**pairs:
        return True
    error = stdev(differences) / math.sqrt(pairs) if pairs > 1 else 0.0
    return mean > STANDARD_ERRORS * error


def _room(run: Run, rates: bool) -> bool:
    """Whether there is memory for two copies of the state, and for a second set of gradients, as
    PyTorch keeps the first one. If not, print a line once.
    """
    train_state = run.train_state()
    everything = 2 * [*train_state.everything, *train_state.metrics]
    size = size_of(filter(keras_variables.on_host, (*everything, *train_state.trainable)))
    if memory.room_for(size):
        return True
    if rates:
        run.say_lacks_memory("cannot test other learning rates", size)
    return False
