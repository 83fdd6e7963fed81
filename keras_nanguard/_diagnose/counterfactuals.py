"""Counterfactuals: the steps up to a bad one, run again as they were and with one thing changed each time.

What cures it tells the cause apart from what was merely there: a divergence that a tenth of the rate cures is a rate too
high, one that only float32 cures is a dtype too small, one that goes when three rows go is three rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep, preserved
from keras_nanguard._core import finiteness
from keras_nanguard._diagnose.precision import in_float32, lowest
from keras_nanguard._diagnose.trials import standardised
from keras_nanguard._diagnose.words import at_rows
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

__all__ = ["Anew", "tried"]

ALONE = 10
"""Steps on the bad batch alone, where no batches before it are known."""

GROWN = 10.0
"""How many times larger the last loss has to be than the first to be told as growing."""


@dataclass(frozen=True)
class Anew:
    """From where, and over which data, the steps are run again.

    Attributes:
        start: puts the model into the state to begin with.
        before: the arguments of the steps before the bad one; none where they are not known.
        batch: those of the bad step.
        rows: rows of its batch that are blamed.
        since: number of the first step after the state to begin with.
        exact: whether no step between that state and the bad one is missing.
    """

    start: Callable[[], None]
    before: Sequence[Any]
    batch: Any
    rows: tuple[int, ...] = ()
    since: int = 0
    exact: bool = False

    def course(self) -> str:
        """Return in words which steps are run."""
        if not self.before:
            return f"{ALONE} steps on the batch"
        missing = "" if self.exact else ", others left out that are not known any more"
        start = f"before step {self.since + 1}" if self.since else "before the first step"
        return f"the {len(self.before) + 1} steps from the state {start}{missing}"


def tried(step: ReplayableStep, anew: Anew) -> Iterator[tuple[str, str]]:
    """Yield `(what was changed, what came of it)`, and at the end which of the changes cure it."""
    cures: list[str] = []
    yield "as it was", f"{anew.course()}: {_outcome(step, anew)[1]}"
    for change, (cured, told) in _changes(step, anew):
        cures += [change] * cured
        yield change, told
    yield "what cures it", "; ".join(cures) or "nothing of this"


Outcome = tuple[bool, str]
"""Whether all came out well, and what came of it in words."""


def _changes(step: ReplayableStep, anew: Anew) -> Iterator[tuple[str, Outcome]]:
    with _rates(step, 0.1):
        yield "with a tenth of the learning rate", _outcome(step, anew)
    with _clipped(step):
        yield "with gradients clipped to a global norm of 1", _outcome(step, anew)
    if lowest(step.model):
        with in_float32(step.model, step.variables(), step.optimizers):
            yield "in float32", _outcome(step, anew)
    if anew.rows and len(anew.rows) < batches.row_count(anew.batch):
        yield f"without {at_rows(anew.rows)}", _outcome(step, anew, last=lambda batch: batches.without(batch, anew.rows))
    scaled = "with inputs and targets scaled to unit deviation"
    yield scaled, _outcome(step, anew, each=lambda batch: batches.mapped(batch, standardised))


def _outcome(
    step: ReplayableStep,
    anew: Anew,
    each: Callable[[Any], Any] = lambda batch: batch,
    last: Callable[[Any], Any] = lambda batch: batch,
) -> Outcome:
    """Run the steps, with every batch and the last one changed like this."""
    whole = [*anew.before, anew.batch] if anew.before else [anew.batch] * ALONE
    losses: list[float] = []
    with preserved(step.variables()):
        anew.start()
        for number, batch in enumerate(whole, 1):
            batch = each(batch)
            losses.append(step.train(last(batch) if number == len(whole) or not anew.before else batch))
            if not math.isfinite(losses[-1]):
                return False, f"the loss goes bad at step {number} of {len(whole)}"
        bad = _bad_weight(step)
    if bad:
        return False, f"the loss stays finite, and {bad} goes bad"
    grown = abs(losses[-1]) > GROWN * abs(losses[0]) + 1e-12
    return not grown, f"the loss {'grows' if grown else 'stays finite, and goes'} from {losses[0]:.3g} to {losses[-1]:.3g}"


def _bad_weight(step: ReplayableStep) -> str:
    """Return the path of the first weight that is not finite, `""` where all are."""
    weights = TrainState.of(step.model, step.optimizers).trainable
    return next((str(v.path) for v in weights if not finiteness.is_finite(keras_variables.view(v))), "")


@contextlib.contextmanager
def _rates(step: ReplayableStep, factor: float) -> Iterator[None]:
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, step.optimizers):
            keras_optimizers.set_rate(optimizer, lambda rate: rate() * factor, overrides)
        yield


@contextlib.contextmanager
def _clipped(step: ReplayableStep) -> Iterator[None]:
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, step.optimizers):
            for name, value in (("clipnorm", None), ("clipvalue", None), ("global_clipnorm", 1.0)):
                overrides.set(optimizer, name, value)
        yield
