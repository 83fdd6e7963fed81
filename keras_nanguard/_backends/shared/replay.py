"""Replays a step eagerly and records its operations, without side effects.

At the end of `preserved` every variable that the step can reach, the seeds of Keras and TensorFlow,
and the generators of Python and NumPy are restored.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.outputs import losses_in_logs
from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import COMPILE_LOSS, LayerRow, Origin
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

OVERFLOW = 3.4028235e38
"""Sum of squares of the gradients at which the float32 sum of the transaction is infinite."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of one replay.

    Attributes:
        error: the exception that ended it, or `""`.
        first: first bad site in causal order, `""` if everything is finite.
        first_path: the variable there.
        origin: the origin of the first bad value.
        loss: the loss.
        rows: the table of layers.
        outputs: the model's outputs, by name.
        sample_losses: the result of each loss before its reduction, by name.
    """

    error: str = ""
    first: str = ""
    first_path: str = ""
    origin: Origin | None = None
    loss: float = math.nan
    rows: tuple[LayerRow, ...] = ()
    outputs: tuple[tuple[str, Any], ...] = ()
    sample_losses: tuple[tuple[str, Any], ...] = ()

    @property
    def finite(self) -> bool:
        """Whether the result of the step is finite."""
        return not self.error and not self.first

    @property
    def word(self) -> str:
        """`"finite"`, `"bad"` or `"failed"`."""
        return "failed" if self.error else "bad" if self.first else "finite"


_ONE_REPLAY = threading.RLock()
"""Held during a replay, because the random generators belong to the process."""


@contextlib.contextmanager
def preserved(variables: Sequence[Any], model: Any = None) -> Iterator[None]:
    """Restore all of these variables, and every random generator, at the end.

    Replays of several threads run one after the other.

    Args:
        variables: the variables.
        model: it and its layers may keep tensors and numbers in attributes, which a call replaces.
    """
    with _ONE_REPLAY:
        python, numpy = random.getstate(), np.random.get_state()
        layers = [] if model is None else keras_layers.layers_of(model)
        restore_attributes = keras_layers.attributes_restorer(layers)
        try:
            with current.replay().preserved((*variables, *keras_variables.global_seed_variables())):
                yield
        finally:
            restore_attributes()
            random.setstate(python)
            np.random.set_state(numpy)


class ReplayableStep:
    """One train step that can be replayed.

    Args:
        body: the step, `body(*args) -> outputs`.
        model: the model.
        optimizers: the optimizers of the step.
        keeps_undo: whether the step needs its updates at once (it reads its weights after an
            update).
        losses: returns the losses among the outputs of a step that never calls `compute_loss`.
        untracked: variables that the step writes and Keras does not track.
        tolerated: variables that may be infinite or NaN.
        judged: runs the compiled step, `judged(*args) -> verdict`, if that needs no new trace.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        model: Any,
        optimizers: Sequence[Any],
        keeps_undo: bool = False,
        losses: Callable[[Any], list[Any]] = lambda outputs: [],
        untracked: Sequence[Any] = (),
        tolerated: Sequence[Any] = (),
        judged: Callable[..., Verdict] | None = None,
    ):
        self.body, self.model, self.optimizers = body, model, list(optimizers)
        self.keeps_undo, self.losses, self.untracked = keeps_undo, losses, list(untracked)
        self.tolerated, self.judged = {id(v) for v in tolerated}, judged

    @classmethod
    def of(cls, model: Any, optimizers: Sequence[Any], keeps_undo: bool = False) -> ReplayableStep:
        """Return the train step of a model."""
        body = current.replay().body_of(model)
        return cls(body, model, optimizers, keeps_undo, losses_in_logs)

    def variables(self) -> list[Any]:
        """Return every variable that the step may write."""
        state = TrainState.of(self.model, self.optimizers)
        return [*state.everything, *state.metrics, *state.unlisted, *self.untracked]

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """Restore at the end everything that the step may change."""
        return preserved(self.variables(), self.model)

    def run(
        self, args: Sequence[Any], *, observe: bool = False, update: bool = False
    ) -> ReplayResult:
        """Run the step once without side effects; return its result.

        Args:
            args: its arguments.
            observe: whether to record layers and operations, which takes several times as long.
            update: whether to run the updates, and to check the resulting weights and slots.
        """
        with self.preserved():
            return _Pass(self, observe, update).run(args)

    def rerun(self, args: Sequence[Any]) -> ReplayResult:
        """Run the step without updates and observation, in its compiled form if there is one."""
        if self.judged is None:
            return self.run(args)
        try:
            verdict = self.judged(*args)
        except Exception:  # noqa: BLE001  the eager replay shows any exception of the user's step
            return self.run(args)
        sums = {name: getattr(verdict, name) for name in ("loss", "statistics", "gradients")}
        first = next((site for site, number in sums.items() if not math.isfinite(number)), "")
        return ReplayResult(first=first, loss=verdict.loss)

    def train(self, args: Sequence[Any]) -> float:
        """Run the step with its updates and keep them (inside of `preserved`); return its loss."""
        with current.replay().intercepted(self.model, self.optimizers, True) as seen:
            outputs = self.body(*args)
        return total(seen.losses or self.losses(outputs))


class _Pass:
    """One replay."""

    def __init__(self, step: ReplayableStep, observe: bool, update: bool):
        self.step, self.observe, self.update = step, observe, update
        self.train_state = TrainState.of(step.model, step.optimizers)

    def run(self, args: Sequence[Any]) -> ReplayResult:
        origins = self._origins(args) if self.observe else None
        instrument = current.replay().Instrument(self.step.model, origins) if self.observe else None
        try:
            with contextlib.ExitStack() as stack:
                if origins is not None and instrument is not None:
                    stack.enter_context(instrument)
                    stack.enter_context(origins)
                self.seen = stack.enter_context(
                    current.replay().intercepted(
                        self.step.model, self.step.optimizers, self.step.keeps_undo
                    )
                )
                outputs = self.step.body(*args)
                losses = self.seen.losses or self.step.losses(outputs)
                first, path, origin = self._first(losses, origins)
        except Exception as error:  # noqa: BLE001  an exception of the user's step is evidence
            return ReplayResult(
                error=f"{type(error).__name__}: {error}",
                rows=tuple(instrument.rows if instrument else ()),
            )
        if origin is not None and origin.culprit == COMPILE_LOSS and instrument is not None:
            origin = _with_part(origin, instrument)
        return ReplayResult(
            first=first,
            first_path=path,
            origin=origin,
            loss=total(losses),
            rows=tuple(instrument.rows if instrument else ()),
            outputs=tuple((name, keras_variables.dense(t)) for name, t in self.seen.outputs),
            sample_losses=tuple(instrument.sample_losses if instrument else ()),
        )

    def _origins(self, args: Sequence[Any]) -> Any:
        tolerated = [v for v in self.train_state.everything if id(v) in self.step.tolerated]
        # The culprit is the place at which NaN enters the loss.
        infinite = {id(v) for v in tolerated if not finiteness.counts(keras_variables.view(v))[0]}
        return origins_of(args, self.train_state.everything, infinite)

    def _first(self, losses: Sequence[Any], origins: Any) -> tuple[str, str, Origin | None]:
        """Return the first bad site in causal order, its path and its origin."""
        pairs = [(g, v.path) for r in self.seen.records for g, v in r.pairs if g is not None]
        checked = [v for v in self.train_state.statistics if id(v) not in self.step.tolerated]
        statistics = ((v, keras_variables.view(v)) for v in checked)
        found = first_bad(losses, pairs, statistics, origins)
        if found[0] or not (self.update or self.step.keeps_undo):
            return found
        if not self.step.keeps_undo:
            if origins is not None:
                origins.phase, origins.frames = "update", []
            for record in self.seen.records:
                record.run()
        sites = {"slots": self.train_state.slots, "weights": self.train_state.trainable}
        for site, variables in sites.items():
            for variable in variables:
                if not finiteness.is_finite(keras_variables.view(variable)):
                    return site, variable.path, origins.written(variable) if origins else None
        return "", "", None


def first_bad(
    losses: Sequence[Any],
    gradients: Sequence[tuple[Any, str]],
    statistics: Iterable[tuple[Any, Any]],
    origins: Any,
) -> tuple[str, str, Origin | None]:
    """Return the first bad site of a step without its updates, its path and its origin.

    Args:
        losses: the losses.
        gradients: each gradient with the path of its variable.
        statistics: each variable with its value.
        origins: an `OriginTracker`, or `None`.
    """
    for loss in losses:
        if not finiteness.is_finite(keras_variables.dense(loss)):
            return "loss", "", origins.of(loss) if origins else None
    for variable, value in statistics:
        if not finiteness.is_finite(keras_variables.dense(value)):
            return "statistics", variable.path, origins.written(variable) if origins else None
    arrays = [(keras_variables.dense(gradient), path) for gradient, path in gradients]
    bad = [n for n, (array, _) in enumerate(arrays) if not finiteness.is_finite(array)]
    if bad:
        known = {n: origins.of_gradient(gradients[n][0]) if origins else None for n in bad}
        earliest = min(bad, key=lambda n: getattr(known[n], "order", 1 << 60))
        return "gradients", arrays[earliest][1], known[earliest]
    squares = [(_squares(array), path) for array, path in arrays]
    if sum(square for square, _ in squares) >= OVERFLOW:
        return "gradients", max(squares)[1], None
    return "", "", None


def _squares(array: np.ndarray[Any, Any]) -> float:
    """Return the sum of the squares of all entries, in the dtype of the entries if that is
    finite.
    """
    flat = finiteness.widen(array).ravel()
    with np.errstate(all="ignore"):  # an overflow is expected
        own = float(np.dot(flat, flat))
        return own if math.isfinite(own) else float(np.dot(*[flat.astype(np.float64)] * 2))


def origins_of(
    args: Sequence[Any], variables: Sequence[Any], tolerated: Container[int] = ()
) -> Any:
    """Return a tracker of the bad values of one run, with the names of its batch and variables."""
    named = [(part.path, part.value) for part in batches.parts(args)]
    kind = current.replay().Origins
    known = [(kind.number_of(v), v) for v in variables]
    paths = {number: v.path for number, v in known if number is not None}
    infinite = [number for number, v in known if number is not None and id(v) in tolerated]
    return kind(named, paths, infinite, batches.row_count(args))


def _with_part(origin: Origin, instrument: Any) -> Origin:
    """Blame the loss that was added when the sum of the losses became bad: the one that ran
    last.
    """
    names = [name for name, _ in instrument.sample_losses]
    if not names:
        return origin
    bad = [name for name, values in instrument.sample_losses if not finiteness.is_finite(values)]
    return replace(origin, culprit=(bad or names[-1:])[0])


def total(losses: Sequence[Any]) -> float:
    """Return the sum of all losses of a step, NaN if there are none."""
    sums = [keras_variables.dense(loss).astype(np.float64).sum() for loss in losses]
    return float(sum(sums)) if sums else math.nan
