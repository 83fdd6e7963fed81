"""What a diagnosis is decided from: measured facts as plain values. Pure; imports no backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = [
    "BACKWARD",
    "COMPILE_LOSS",
    "Constant",
    "Evidence",
    "Growth",
    "LayerRow",
    "Operand",
    "OptimizerFacts",
    "Origin",
    "Spread",
    "TargetFault",
]


COMPILE_LOSS = "compile_loss"
"""Frame of Keras' sum over the losses given to `compile`."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One float input of an operation.

    Attributes:
        max_abs: its largest finite magnitude, 0.0 where it holds no finite number.
        zero: whether it holds a zero.
        negative: whether it holds a finite number below zero.
        dtype: its dtype.
        tiny: whether it holds numbers so small that dividing by them overflows.
        infinite: whether it holds NaN or Inf.
        holds: which of NaN, Inf and -Inf it holds, in words.
        whole: whether it holds nothing else.
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
    """The operation that made the first NaN or Inf that reached a bad result.

    Attributes:
        order: number of the operation within the step.
        source: `"operation"`; `"batch"`, `"variable"` or `"constant"` where it was there before the step computed.
        op: type of the operation in the backend's words (`"Exp"`), or the name of what it came from.
        phase: `"forward"`, `"loss"`, `"backward"`, `"update"` or `"other"`; `"slope"` where forward and backward pass cannot be
            told apart.
        frames: what was running, outermost first: paths of layers, names of losses.
        culprit: path of the layer or name of the loss to blame, `""` where none was running.
        layer_class: class of that layer or loss.
        nan: NaN entries of its result.
        inf: infinite entries of its result.
        size: all entries of its result.
        operands: its float inputs.
        dtype: dtype of its result.
        rows: rows of the batch with a bad entry; empty where the result has no rows or all of them are bad.
        all_rows: whether every row is bad.
        variables: paths of the variables that it takes in as they are.
        line: source line of the user's own code, `""` where there is none.
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


@dataclass(frozen=True, slots=True)
class Spread:
    """Magnitudes of one array of the batch, its finite entries only.

    Attributes:
        name: path within the batch.
        max_abs: largest magnitude.
        mean: mean.
        std: standard deviation.
        constant: number of features that have one value in all rows.
        features: number of features.
        outliers: rows whose largest magnitude is far above that of the others.
        integer: whether its dtype is an integer one.
    """

    name: str
    max_abs: float
    mean: float
    std: float
    constant: int = 0
    features: int = 1
    outliers: tuple[int, ...] = ()
    integer: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """Rows of one array of the batch that hold NaN or Inf."""

    name: str
    rows: tuple[int, ...]
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class TargetFault:
    """Targets that a loss does not accept.

    Attributes:
        loss: name of the loss.
        output: name of the output, `""` where there is one only.
        rows: rows of the batch.
        words: what is wrong, as a clause: `"class index 12 with 10 classes"`.
        fatal: whether the loss must come out wrong or non-finite by it, not only mean something else.
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
    """How loss, gradient norm and weights went before the step.

    Attributes:
        steps: good steps that are remembered, and so judged.
        loss: last loss over the first ones; 1.0 where that cannot be said.
        norm: last gradient norm over the first ones.
        weights: norm of all trainable weights over what it was at the start, 1.0 where that is not known.
        largest_weight: largest magnitude among them now.
        largest_weight_before: what it was at the start.
        losses: the last few losses.
        norms: the last few gradient norms.
        jump: the largest factor between the loss of two steps that follow each other, and the step of it.
    """

    steps: int = 0
    loss: float = 1.0
    norm: float = 1.0
    weights: float = 1.0
    largest_weight: float = 0.0
    largest_weight_before: float = 0.0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    jump: tuple[float, int] = (1.0, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; numbers are strings, as JSON has no infinity."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: [str(v) for v in value] if isinstance(value, tuple) else str(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Growth:
        """Return what `to_dict` was given.

        Raises:
            KeyError, TypeError, ValueError: if it is not of that form.
        """
        factor, step = given["jump"]
        lists = {name: tuple(float(v) for v in given[name]) for name in ("losses", "norms")}
        single = ("loss", "norm", "weights", "largest_weight", "largest_weight_before")
        numbers = {name: float(given[name]) for name in single}
        return cls(steps=int(given["steps"]), jump=(float(factor), int(step)), **lists, **numbers)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The hyper-parameters that can go wrong.

    Attributes:
        name: name of its class.
        learning_rate: its rate now.
        epsilon: as set, `None` where it has none.
        epsilon_in_dtype: what remains of it in the dtype of the weights.
        dtype: lowest dtype of the weights.
        clips: whether it clips gradients.
        momentum: its momentum, 0.0 where it has none.
        scaled: whether a `LossScaleOptimizer` is around it.
        settings: name and value of each other hyper-parameter that is in use, by Keras' names.
    """

    name: str
    learning_rate: float
    epsilon: float | None = None
    epsilon_in_dtype: float | None = None
    dtype: str = "float32"
    clips: bool = False
    momentum: float = 0.0
    scaled: bool = False
    settings: tuple[tuple[str, float], ...] = ()

    @property
    def shrinks(self) -> float:
        """By what weight decay alone multiplies the weights in one step; beyond -1 they grow by it."""
        return 1.0 - self.learning_rate * dict(self.settings).get("weight_decay", 0.0)


BACKWARD = ("backward", "slope")
"""Phases of a `Origin` in which a gradient is computed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was measured about one incident; what was not measured is `None` or empty.

    Attributes:
        step: number of the step.
        refused: whether it was refused.
        sites: sites and kinds of the findings, in causal order, as `"loss:nonfinite"`.
        value: the number that the first finding tells, such as the loss of a spike.
        state: paths of variables that were bad before the step, with their roles.
        state_fresh: whether they were bad before training began.
        inputs_bad: bad arrays among the inputs.
        targets_bad: bad arrays among targets and sample weights.
        inputs: spreads of the inputs.
        targets: spreads of the targets.
        outputs: spreads of the model's outputs in the replay.
        target_fault: targets that the loss does not accept.
        replay: `"bad"`, `"finite"`, `"failed"`, or `""` where there was none.
        replay_error: the exception of a failed replay.
        mode: how the step was compiled: `"eager"`, `"graph"`, `"xla"`.
        same_mode: what came of a replay in that mode.
        first: first bad site of the replay: `"loss"`, `"statistics"`, `"gradients"`, `"weights"`, `"slots"`.
        first_path: the variable there, where it has one.
        birth: where the first bad value was born.
        loss_parts: name and value of each part of the loss.
        float32: what came of a replay in float32: `"finite"`, `"bad"` or `""`.
        rescaled: what came of a replay with inputs and targets scaled to unit size.
        at_start: what came of a replay with the first state in place of this one.
        without_rows: what came of a replay without `rows`.
        unscaled: what came of a replay with a loss scale of 1.
        inference: whether outputs in inference mode are finite.
        training: the same in training mode, where both were looked at.
        rows: rows to blame.
        count: number of rows of the batch.
        low_precision: lowest float dtype that a layer computes in.
        growth: the history.
        optimizers: the optimizers.
        objective: words and value of each loss weight and regularizer that is far from the usual.
        gradient_norm: global gradient norm of the step, NaN where it is not known.
        written: whether the bad weights or slots cannot have been made by the update, whose numbers are all moderate.
        loss_scale: the loss scale, `None` where there is none.
        loss_scale_start: the loss scale that the optimizer begins with.
        table: one row for each call of a layer.
        notes: what else was seen, as sentences.
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
    outputs: tuple[Spread, ...] = ()
    target_fault: TargetFault | None = None
    replay: str = ""
    replay_error: str = ""
    mode: str = ""
    same_mode: str = ""
    first: str = ""
    first_path: str = ""
    origin: Origin | None = None
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
    gradient_norm: float = math.nan
    written: bool = False
    loss_scale: float | None = None
    loss_scale_start: float | None = None
    table: tuple[LayerRow, ...] = ()
    notes: tuple[str, ...] = ()
