"""Replays a step without side effects, and finds the first bad value.

An eager replay can record every operation. One in the compiled mode of the step returns the tensors
of all layers, for faults that an eager one does not show (a square root at 0 under XLA).

At the end of `preserved` every variable that the step can reach, the seeds of Keras and TensorFlow,
and the generators of Python and NumPy are restored.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.instrument import LAYER, Call, CallOrigins, LayerTable
from keras_nanguard._backends.shared.origins import OriginTracker
from keras_nanguard._core import finiteness
from keras_nanguard._core.observations import COMPILE_LOSS, Origin
from keras_nanguard._core.verdict import LayerRow, Verdict
from keras_nanguard._keras import (
    arrays as keras_arrays,
    attributes as keras_attributes,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState


@dataclass(frozen=True)
class ReplayResult:
    """The result of one replay.

    Attributes:
        error: the exception that ended it, or `""`.
        first: first bad site in causal order, `""` if everything is finite.
        first_path: the variable there.
        origin: the origin of the first bad value.
        rows: the table of layers.
        outputs: the model's outputs, by name.
        sample_losses: the result of each loss before its reduction, by name.
    """

    error: str = ""
    first: str = ""
    first_path: str = ""
    origin: Origin | None = None
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
def preserved(
    variables: Sequence[Any], model: Any = None, optimizers: Sequence[Any] = ()
) -> Iterator[None]:
    """Restore all of these variables, and every random generator, at the end.

    Replays of several threads run one after the other.

    Args:
        model: it and its layers may keep tensors and numbers in attributes, which a call replaces.
        optimizers: those that may update them.

    Raises:
        StateLostError: if a variable could not be restored; all others are.
    """
    replay, seeds = current.replay(), keras_variables.global_seed_variables()
    with _ONE_REPLAY:
        called = [] if model is None else keras_attributes.called_by_step(model)
        others = keras_attributes.python_state_restored(called)
        with others, replay.preserved((*variables, *seeds), model, optimizers):
            yield


def rate_if_known(read: Callable[..., float], optimizer: Any, *args: Any) -> float | None:
    """Return the learning rate that `read(optimizer, *args)` returns; `None` if it raises.

    A custom schedule may raise anything outside of a step, and what it writes or draws is undone.
    """
    with contextlib.ExitStack() as ending:
        if schedules := keras_optimizers.custom_schedules([optimizer]):
            ending.enter_context(preserved(keras_attributes.variables_of(schedules)))
            ending.enter_context(keras_attributes.python_state_restored(schedules))
        try:
            return read(optimizer, *args)
        except Exception:  # noqa: BLE001
            return None


@dataclass(frozen=True, eq=False)
class ReplayableStep:
    """One train step that can be replayed.

    Attributes:
        body: the step, `body(*args) -> outputs`.
        updates_first: whether the step needs its updates at once (it reads its weights after an
            update).
        losses: returns the losses among the outputs of a step that never calls `compute_loss`.
        untracked: variables that the step writes and Keras does not track.
        tolerated: the `id` of each variable that may be infinite or NaN.
        judged: runs the compiled step, `judged(*args) -> verdict`, if that needs no new trace.
    """

    body: Callable[..., Any]
    model: Any
    optimizers: Sequence[Any]
    updates_first: bool = False
    losses: Callable[[Any], list[Any]] = batches.losses_in_logs
    untracked: Sequence[Any] = ()
    tolerated: Container[int] = ()
    judged: Callable[..., Verdict] | None = None

    @classmethod
    def of(
        cls, model: Any, optimizers: Sequence[Any], updates_first: bool = False
    ) -> ReplayableStep:
        """Return the train step of a model."""
        return cls(current.replay().body_of(model), model, optimizers, updates_first)

    def variables(self) -> list[Any]:
        """Return every variable that the step may write."""
        state = TrainState.of(self.model, self.optimizers)
        return [*state.written_by_calls, *self.untracked]

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """Restore at the end everything that the step may change."""
        return preserved(self.variables(), self.model, self.optimizers)

    def run(
        self, args: Sequence[Any], *, observe: bool = False, update: bool = False
    ) -> ReplayResult:
        """Run the step once without side effects; return its result.

        Args:
            observe: whether to record layers and operations, which takes several times as long.
            update: whether to run the updates, and to check the resulting weights and slots.
        """
        with self.preserved():
            return _eager(self, args, observe, update)

    def run_compiled(self, args: Sequence[Any], jit: bool) -> ReplayResult:
        """Run the step once in its compiled mode, without side effects; return its result.

        The program that returns the tensors of all layers may be finite although the one of
        training is not. The result is then that of the latter, without layers.

        Args:
            jit: whether to compile with XLA.
        """
        with self.preserved():
            try:
                run = _compiled(self, args, jit)
            except Exception as error:  # noqa: BLE001  an exception of the user's step is evidence
                return ReplayResult(error=f"{type(error).__name__}: {error}")
        return self.rerun(args) if run.finite and self.judged is not None else run

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
        return ReplayResult(first=first)

    def train(self, args: Sequence[Any]) -> float:
        """Run the step with its updates and keep them (inside of `preserved`); return its loss."""
        with self.recorded(args, immediate=True) as found:
            return total(found.losses)

    @contextlib.contextmanager
    def recorded(self, args: Sequence[Any], immediate: bool) -> Iterator[Recorded]:
        """Run the step inside of a context that records its losses and updates.

        Args:
            immediate: whether the updates run at once.
        """
        with current.replay().intercepted(self.model, self.optimizers, immediate) as seen:
            outputs = self.body(*args)
            losses = seen.losses or self.losses(outputs)
            pairs = [(g, v.path) for r in seen.records for g, v in r.pairs if g is not None]
            yield Recorded(losses, pairs, seen.records, seen.outputs)

    def checked_statistics(self) -> list[Any]:
        """Return the statistics that must be finite."""
        statistics = TrainState.of(self.model, self.optimizers).statistics
        return [v for v in statistics if id(v) not in self.tolerated]


class Recorded(NamedTuple):
    """What one run of a step has shown: its losses, each gradient with the path of its variable,
    its updates (`update.run()` runs one that was deferred), and the model's outputs, by name.
    """

    losses: Sequence[Any]
    gradients: Sequence[tuple[Any, str]]
    updates: Sequence[Any]
    outputs: Sequence[tuple[str, Any]]


class FirstBad(NamedTuple):
    """The first bad value of a step in causal order: its site, `""` if everything is finite, the
    path of its variable, `""` if it is in none, and its origin, if known.
    """

    site: str = ""
    path: str = ""
    origin: Origin | None = None


def _eager(step: ReplayableStep, args: Sequence[Any], observe: bool, update: bool) -> ReplayResult:
    """Run a step once eagerly; see `ReplayableStep.run`."""
    train_state = TrainState.of(step.model, step.optimizers)
    origins: Any = _origins(step, args, train_state) if observe else OriginTracker()
    table = LayerTable()
    try:
        with (
            current.replay().Instrument(step.model if observe else None, table.ended, origins),
            origins if observe else contextlib.nullcontext(),
            step.recorded(args, step.updates_first) as found,
        ):
            statistics = ((v, keras_variables.view(v)) for v in step.checked_statistics())
            first = first_bad(found.losses, found.gradients, statistics, origins)
            if not first.site and step.updates_first:
                first = _first_written(train_state, origins)
            elif not first.site and update:
                first = _updated(found.updates, train_state, origins)
            elif not first.site:  # the updates would show what such gradients do
                first = _exploded(found.gradients)
    except Exception as error:  # noqa: BLE001  an exception of the user's step is evidence
        message = f"{type(error).__name__}: {error}"
        return ReplayResult(error=message, rows=tuple(table.rows))
    origin = first.origin
    if origin is not None and origin.culprit == COMPILE_LOSS:
        origin = _with_part(origin, table.sample_losses)
    return ReplayResult(
        first=first.site,
        first_path=first.path,
        origin=origin,
        rows=tuple(table.rows),
        outputs=tuple((name, keras_arrays.dense(t)) for name, t in found.outputs),
        sample_losses=tuple(table.sample_losses),
    )


def _origins(step: ReplayableStep, args: Sequence[Any], train_state: TrainState) -> Any:
    """Return a tracker of the bad values of one run, with the names of its batch and variables."""
    kind, paths, infinite = current.replay().Origins, {}, []
    for variable in train_state.everything:
        number = kind.number_of(variable)
        if number is None:
            continue
        paths[number] = variable.path
        # The culprit is the place at which NaN enters the loss.
        if id(variable) in step.tolerated:
            nan, _, _ = finiteness.counts(keras_variables.view(variable))
            infinite += [] if nan else [number]
    named = [(part.path, part.value) for part in batches.parts(args)]
    return kind(named, paths, infinite, batches.row_count(args))


def _updated(updates: Sequence[Any], train_state: TrainState, origins: OriginTracker) -> FirstBad:
    """Run the deferred updates of a step; return the first bad value that they have written."""
    with origins.in_phase("update"):
        for record in updates:
            record.run()
        return _first_written(train_state, origins)


def _first_written(train_state: TrainState, origins: OriginTracker) -> FirstBad:
    """Return the first bad value of the state after the updates."""
    for site, variables in (("slots", train_state.slots), ("weights", train_state.trainable)):
        for variable in variables:
            if not keras_variables.is_finite(variable):
                return FirstBad(site, variable.path, origins.written(variable))
    return FirstBad()


def _compiled(step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
    """Run a step once as its trace is compiled; the origin of a bad value is a layer."""
    statistics = step.checked_statistics()
    traced: list[Any] = []

    def body(args: Sequence[Any]) -> Any:
        calls: list[Call] = []
        with (
            current.replay().Instrument(step.model, calls.append) as layers,
            step.recorded(args, step.updates_first) as found,
        ):
            pass  # `recorded` runs the step when it is entered
        pairs = [(g, path) for one, path in found.gradients for g in layers.returned((one,))]
        traced[:] = calls, [path for _, path in pairs]
        groups = ((c.inputs, c.outputs, c.gradients_out, c.gradients_in) for c in calls)
        tensors = [tuple(map(layers.returned, group)) for group in groups]
        gradients = [gradient for gradient, _ in pairs]
        return found.losses, gradients, list(map(layers.tensor_of, statistics)), tensors

    losses, gradients, written, tensors = current.replay().compiled(body, step, args, jit)
    calls, paths = traced
    for call, found in zip(calls, tensors):
        call.inputs, call.outputs, call.gradients_out, call.gradients_in = found
    pairs = list(zip(gradients, paths))
    origins = CallOrigins(calls, args, pairs)
    first = first_bad(losses, pairs, zip(statistics, written), origins)
    site, path, origin = first if first.site else _exploded(pairs)
    rows = tuple(row for call in calls if call.role == LAYER for row in call.rows())
    return ReplayResult(first=site, first_path=path, origin=origin, rows=rows)


def first_bad(
    losses: Sequence[Any],
    gradients: Sequence[tuple[Any, str]],
    statistics: Iterable[tuple[Any, Any]],
    origins: OriginTracker | CallOrigins,
) -> FirstBad:
    """Return the first bad value of a step without its updates.

    Args:
        gradients: each gradient with the path of its variable.
        statistics: each variable with its value.
    """
    for loss in losses:
        if not finiteness.is_finite(keras_arrays.dense(loss)):
            return FirstBad("loss", "", origins.of(loss))
    for variable, value in statistics:
        if not finiteness.is_finite(keras_arrays.dense(value)):
            return FirstBad("statistics", variable.path, origins.written(variable))
    arrays = [(keras_arrays.dense(gradient), path) for gradient, path in gradients]
    bad = [n for n, (array, _) in enumerate(arrays) if not finiteness.is_finite(array)]
    if bad:
        known = {n: origins.of_gradient(gradients[n][0]) for n in bad}
        earliest = min(bad, key=lambda n: getattr(known[n], "order", 1 << 60))
        return FirstBad("gradients", arrays[earliest][1], known[earliest])
    return FirstBad()


def _exploded(gradients: Iterable[tuple[Any, str]]) -> FirstBad:
    """Return the largest of finite gradients as a bad value if the sum of their squares overflows,
    in float32 unless one has a larger dtype.

    If the optimizer squares them, too, its slots are bad, and are reported instead.
    """
    arrays = [(finiteness.widen(keras_arrays.dense(g)), path) for g, path in gradients]
    squares = [(_squares(array), path) for array, path in arrays]
    largest = max((np.finfo(array.dtype).max for array, _ in arrays), default=np.inf)
    if sum(square for square, _ in squares) >= largest:
        return FirstBad("gradients", max(squares)[1])
    return FirstBad()


def _squares(array: np.ndarray[Any, Any]) -> float:
    """Return the sum of the squares of all entries, in their own dtype if that is finite."""
    flat = array.ravel()
    with np.errstate(all="ignore"):  # an overflow is expected
        own = float(np.vdot(flat, flat).real)
        wide = flat.astype(np.result_type(flat, np.float64), copy=False)
        return own if math.isfinite(own) else float(np.vdot(wide, wide).real)


def _with_part(origin: Origin, sample_losses: Sequence[tuple[str, Any]]) -> Origin:
    """Blame the bad loss, else the one that was added last, for the sum of the losses."""
    bad = [name for name, values in sample_losses if not finiteness.is_finite(values)]
    last = [name for name, _ in sample_losses[-1:]]
    return replace(origin, culprit=(bad or last or [origin.culprit])[0])


def total(losses: Sequence[Any]) -> float:
    """Return the sum of all losses of a step, NaN if there are none."""
    sums = [keras_arrays.dense(loss).astype(np.float64).sum() for loss in losses]
    return float(sum(sums)) if sums else math.nan
