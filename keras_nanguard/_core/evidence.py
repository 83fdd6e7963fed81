"""The evidence of a diagnosis: measured facts as plain values. Imports no backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keras_nanguard._core.incident import STORED

COMPILE_LOSS = "compile_loss"
"""Name of the frame in which Keras sums the losses given to `compile`."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One float input of an operation.

    Attributes:
        max_abs: its largest finite magnitude, 0.0 if no entry is finite.
        zero: whether it contains a zero.
        negative: whether it contains a finite negative number.
        dtype: its dtype.
        tiny: whether it contains numbers so small that division by them overflows.
        infinite: whether it contains NaN or Inf.
        holds: which of NaN, Inf and -Inf it contains, in words.
        whole: whether every entry is NaN or Inf.
    """

    max_abs: float
    zero: bool
    negative: bool
    dtype: str
    tiny: bool = False
    infinite: bool = False
    holds: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """The operation that produced the first NaN or Inf that reached a bad result.

    Attributes:
        order: index of the operation within the step.
        source: `"operation"`; `"batch"`, `"variable"` or `"constant"` if the value existed before
            the step.
        op: type of the operation as the backend names it (`"Exp"`), or the name of the source.
        phase: `"forward"`, `"loss"`, `"regularizer"`, `"backward"`, `"update"` or `"other"`;
            `"slope"` if forward and backward pass cannot be distinguished.
        frames: what was running, outermost first: paths of layers, names of losses.
        culprit: path of the layer or name of the loss to blame, `""` if none was running.
        layer_class: class of that layer or loss.
        nan: NaN entries of its result.
        inf: infinite entries of its result.
        size: number of entries of its result.
        operands: its float inputs.
        dtype: dtype of its result.
        rows: rows of the batch with a bad entry; empty if the result has no rows or every row is
            bad.
        all_rows: whether every row is bad.
        variables: paths of the variables that it reads directly.
        line: source line in the user's code, `""` if there is none.
        steep: the last operation of the same layer or loss whose derivative is infinite at one of
            its operands, `""` if there is none.
    """

    order: int
    source: str
    op: str
    phase: str
    frames: tuple[str, ...] = ()
    culprit: str = ""
    layer_class: str = ""
    nan: int = 0
    inf: int = 0
    size: int = 0
    operands: tuple[Operand, ...] = ()
    dtype: str = ""
    rows: tuple[int, ...] = ()
    all_rows: bool = False
    variables: tuple[str, ...] = ()
    line: str = ""
    steep: str = ""


NOWHERE = Origin(order=1 << 60, source="", op="", phase="")
"""The origin if no operation and no value is known to be it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Magnitudes of one array of the batch, its finite entries only.

    Attributes:
        name: path within the batch.
        max_abs: largest magnitude.
        mean: mean.
        std: standard deviation.
        constant: number of features with the same value in all rows.
        outliers: rows whose largest magnitude is far above that of the others.
        integer: whether its dtype is an integer dtype.
        counts: whether all entries are whole numbers and none is negative.
    """

    name: str
    max_abs: float
    mean: float
    std: float
    constant: int = 0
    outliers: tuple[int, ...] = ()
    integer: bool = False
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """Rows of one array of the batch that hold NaN or Inf.

    Attributes:
        name: path within the batch.
        rows: the rows, empty if they are unknown.
        nan: number of NaN.
        inf: number of Inf and -Inf.
        column: the only column of a matrix in which several rows have them, `None` if there are
            several.
    """

    name: str
    rows: tuple[int, ...]
    nan: int
    inf: int
    column: int | None = None


@dataclass(frozen=True, slots=True)
class TargetFault:
    """Targets that a loss does not accept.

    Attributes:
        loss: name of the loss.
        output: name of the output, `""` if there is only one.
        rows: rows of the batch.
        words: what is wrong, as a clause: `"class index 12 with 10 classes"`.
        fatal: whether it makes the loss wrong or non-finite, rather than only changing its meaning.
    """

    loss: str
    output: str
    rows: tuple[int, ...]
    words: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One call of one layer in the table of a replay."""

    path: str
    layer_class: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    zeros: int
    nan: int
    plus_inf: int
    minus_inf: int
    size: int
    share_of_range: float
    inputs_finite: bool = True

    @property
    def finite(self) -> bool:
        """Whether no entry is NaN or Inf."""
        return not (self.nan or self.plus_inf or self.minus_inf)


@dataclass(frozen=True, slots=True)
class Growth:
    """The history of loss, gradient norm and weights before the step.

    Attributes:
        steps: number of good steps in the history.
        loss: ratio of the last loss to the first ones; 1.0 if it is not defined.
        norm: ratio of the last gradient norm to the first ones.
        weights: ratio of the norm of all trainable weights to their norm at the start, 1.0 if
            unknown.
        largest_weight: largest magnitude of these weights now.
        largest_weight_before: largest magnitude of these weights at the start.
        losses: the last few losses.
        norms: the last few gradient norms.
        jump: the largest rise of the loss over its lowest value before, as a factor, and the step
            of it.
    """

    __pydantic_config__ = STORED

    steps: int = 0
    loss: float = 1.0
    norm: float = 1.0
    weights: float = 1.0
    largest_weight: float = 0.0
    largest_weight_before: float = 0.0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    jump: tuple[float, int] = (1.0, 0)


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The hyperparameters of an optimizer.

    Attributes:
        name: name of its class.
        learning_rate: its current learning rate.
        epsilon: as configured, `None` if it has none.
        epsilon_in_dtype: its value after rounding to the dtype of the weights.
        dtype: lowest dtype of the weights.
        clips: whether it clips gradients.
        scaled: whether a `LossScaleOptimizer` wraps it.
        scheduled: whether its learning rate comes from a schedule.
        settings: name and value of each other hyperparameter that is in use, by Keras' names.
        iteration: the iteration at which the schedule gives this learning rate, `None` without one.
        own: whether its class is of no library that is known, so the user can change it.
    """

    name: str
    learning_rate: float
    epsilon: float | None = None
    epsilon_in_dtype: float | None = None
    dtype: str = "float32"
    clips: bool = False
    scaled: bool = False
    scheduled: bool = False
    settings: tuple[tuple[str, float], ...] = ()
    iteration: int | None = None
    own: bool = False

    @property
    def shrinks(self) -> float:
        """Factor by which weight decay alone multiplies the weights in one step; below -1 it makes
        them grow."""
        return 1.0 - self.learning_rate * dict(self.settings).get("weight_decay", 0.0)


BACKWARD = ("backward", "slope")
"""Phases of an `Origin` in which a gradient is computed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was measured about one incident; what was not measured is `None` or empty.

    Attributes:
        step: number of the step.
        refused: whether it was refused.
        sites: sites and kinds of the findings, in causal order, as `"loss:nonfinite"`.
        value: the value of the first finding, such as the loss of a spike.
        state: paths of variables that were bad before the step, with their roles.
        state_fresh: whether they were bad before training began.
        inputs_bad: bad arrays among the inputs.
        targets_bad: bad arrays among targets and sample weights.
        inputs: spreads of the inputs.
        targets: spreads of the targets.
        target_fault: targets that the loss does not accept.
        replay: `"bad"`, `"finite"`, `"failed"`, or `""` if there was none.
        replay_error: the exception of a failed replay.
        mode: how the step was compiled: `"eager"`, `"graph"`, `"xla"`.
        same_mode: result of a replay in that mode.
        first: first bad site of the replay: `"loss"`, `"statistics"`, `"gradients"`, `"weights"`,
            `"slots"`.
        first_path: path of the variable there, if any.
        origin: the operation that produced the first bad value, `NOWHERE` if unknown.
        loss_parts: name and value of each part of the loss.
        float32: result of a replay in float32: `"finite"`, `"bad"` or `""`.
        rescaled: result of a replay with inputs and targets scaled to unit magnitude.
        at_start: result of a replay with the initial state in place of the current one.
        without_rows: result of a replay without `rows`.
        unscaled: result of a replay with a loss scale of 1.
        inference: whether outputs in inference mode are finite.
        training: the same in training mode, if both were measured.
        rows: rows to blame.
        count: number of rows of the batch.
        low_precision: lowest float dtype that a layer computes in.
        growth: the history before the step.
        optimizers: the optimizers.
        objective: name and value of each loss weight and regularizer of unusual size.
        exponents: loss, parameter and value of each exponent among the parameters of a compiled
            loss.
        gradient_norm: global gradient norm of the step, NaN if unknown.
        written: whether the update cannot have produced the bad weights or slots, because all of
            its numbers are moderate, or because they were finite after the step before.
        constraint: class of the constraint of the bad weight, which is applied after its update;
            `""` if it has none.
        loss_scale: the loss scale, `None` if there is none.
        table: one row for each call of a layer.
        notes: further observations, as sentences.
    """

    step: int = 0
    refused: bool = True
    sites: tuple[str, ...] = ()
    value: float | None = None
    state: tuple[tuple[str, str], ...] = ()
    state_fresh: bool = False
    inputs_bad: tuple[Constant, ...] = ()
    targets_bad: tuple[Constant, ...] = ()
    inputs: tuple[Spread, ...] = ()
    targets: tuple[Spread, ...] = ()
    target_fault: TargetFault | None = None
    replay: str = ""
    replay_error: str = ""
    mode: str = ""
    same_mode: str = ""
    first: str = ""
    first_path: str = ""
    origin: Origin = NOWHERE
    loss_parts: tuple[tuple[str, float], ...] = ()
    float32: str = ""
    rescaled: str = ""
    at_start: str = ""
    without_rows: str = ""
    unscaled: str = ""
    inference: str = ""
    training: str = ""
    rows: tuple[int, ...] = ()
    count: int = 0
    low_precision: str = ""
    growth: Growth = Growth()
    optimizers: tuple[OptimizerFacts, ...] = ()
    objective: tuple[tuple[str, float], ...] = ()
    exponents: tuple[tuple[str, str, float], ...] = ()
    gradient_norm: float = math.nan
    written: bool = False
    constraint: str = ""
    loss_scale: float | None = None
    table: tuple[LayerRow, ...] = ()
    notes: tuple[str, ...] = ()
